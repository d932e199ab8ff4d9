"""When two stacks agree: every tolerance of the harness, and where it comes from.

Newton–Schulz with these coefficients does not converge, so it amplifies rounding, by how much
depends on the matrix. A fixed relative tolerance is then either blind or flaky. So nothing is
compared with the other stack, but each stack with the float64 oracle on the same inputs:

    ratio = max(error of JAX, floor) / max(error of the reference, floor)

Two correct float32 programs that only round in another order have ratios scattered around 1; a
wrong formula is off by its own size, which is hundreds to millions of floors.
"""

import math
from collections.abc import Iterable

import numpy as np

EPS = float(np.finfo(np.float32).eps)

# Schedules are a handful of float32 operations on well-conditioned forms, half an ulp each.
SCHEDULE_ULP = 6.0

# Errors below this many eps are roundings of single operations (the mean over the batch, the clip
# factor, the moment) and of a learning rate that may itself be `SCHEDULE_ULP` off.
FLOOR_EPS = 4.0
STATE_FLOOR = FLOOR_EPS * EPS

# Data-parallel ranks add (S/2 + g0)/2 + (S/2 + g1)/2 to a sum S that they keep as its average, JAX
# S + (g0 + g1): two roundings each, for each of the few accumulations of one batch.
SUM_ERROR = 4.0 * EPS

# How far rounding alone takes a parameter that Newton-Schulz updates is measured, not guessed: the
# root mean square distance of this many shadows (see `parity.shadow`) from the truth. One program's
# error is one draw, and where a single direction carries all the amplification, the quotient of two
# draws has no mean: a reference that is close by luck says nothing about JAX. So this is a floor.
# Where they end up farther from the truth than the update is long (cans on rank one input in bf16:
# Megatron's own update was seen 1e12 times too long), no program's update can be judged by numbers.
SHADOWS = 4
SIGNIFICAND_BITS = {"highest": 24, "high": 24, "medium": 8}

# Root mean square of the ratios of one kind over a scenario. The Gram form is held to less: it
# rounds fewer large products than the reference's standard iteration. The reference is held to the
# inverse of the standard form's ratio: else a Megatron that disagrees with the oracle would only
# make JAX look good.
RMS_RATIO = {"standard": 2.0, "gram": 1.5, "free": 2.0, "reference": 2.0}

# Of fewer ratios the mean square is mostly its largest term, and is held to that term's limit. They
# are not independent, either: momentum keeps a matrix in its direction from step to step, and with
# it what its rounding is amplified by.
RMS_COUNT = 32

# One ratio alone: those of correct programs were seen to scatter up to 2.5.
SINGLE_RATIO = 8.0

# Lion's update is a sign. Where the moment and the gradient cancel to less than this share of them,
# rounding of either decides it, and the element is left out from then on.
SIGN_PRECISION = 64.0 * EPS

# Beyond this distance of the reference from the truth (bf16 iteration on nearly rank-one input)
# a ratio says nothing; an oracle that rounds to bf16 where the reference does judges instead.
REFERENCE_REACH = 0.1

# The floor under that oracle: a rounding to bf16 may fall the other way at any of its steps. What
# that does to the rest of the iteration its own shadows measure, which differ before the rounding
# by what another order of a float32 sum may.
ROUNDED_FLOOR = 4.0 * 2.0**-8


def update_floor(old: np.ndarray, change: np.ndarray, spread: float = 0.0) -> float:
    """The error of a parameter, relative to its change, that float32 explains.

    By storing the parameter, and by rounding on the way to it: ``spread``, its shadows' distance.
    """
    stored = 0.5 * EPS * float(np.linalg.norm(old + change))
    return relative_floor(change, stored + spread)


def relative_floor(scale: np.ndarray, spread: float) -> float:
    """The error, relative to ``scale``, of single roundings and of ``spread``."""
    size = float(np.linalg.norm(scale))
    return STATE_FLOOR + (spread / size if size else 0.0)


def flush_floor(scale: np.ndarray) -> float:
    """The error, relative to ``scale``, of flushing subnormal numbers to zero, as XLA does."""
    size = float(np.linalg.norm(scale))
    return float(np.finfo(np.float32).tiny) * math.sqrt(scale.size) / size if size else 0.0


def relative_error(value: np.ndarray, truth: np.ndarray, scale: np.ndarray) -> float:
    """|value - truth| / |scale| in the Frobenius norm; 0 or infinite where the scale is zero."""
    error = float(np.linalg.norm(np.asarray(value, np.float64) - truth))
    size = float(np.linalg.norm(scale))
    if size == 0 or not math.isfinite(error):
        return 0.0 if error == 0 else math.inf
    return error / size


def ratio(error: float, other: float, floor: float) -> float:
    """How much farther from the truth one stack is than the other; infinite if it is not finite."""
    error, other = max(error, floor), max(other, floor)
    return error / other if math.isfinite(error) else math.inf


def rms_limit(mode: str, count: int) -> float:
    """The limit of the root mean square of ``count`` ratios."""
    return RMS_RATIO[mode] if count >= RMS_COUNT else SINGLE_RATIO


def root_mean_square(values: Iterable[float]) -> float:
    """sqrt(mean(values²)), 0 for none."""
    squares = [value * value for value in values]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def ulps(value: float, truth: float) -> float:
    """Distance in units of the last place of float32 at the truth."""
    if value == truth:
        return 0.0
    return abs(value - truth) / float(np.spacing(np.float32(abs(truth))))
