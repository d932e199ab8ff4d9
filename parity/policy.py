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

# Root mean square of the ratios of one kind over a scenario. The Gram form is held to less: it
# rounds fewer large products than the reference's standard iteration. The reference is held to the
# inverse of the standard form's ratio: else a Megatron that disagrees with the oracle would only
# make JAX look good.
RMS_RATIO = {"standard": 2.0, "gram": 1.5, "free": 2.0, "reference": 2.0}

# One ratio alone: those of correct programs were seen to scatter up to 2.5.
SINGLE_RATIO = 8.0

# Beyond this distance of the reference from the truth (bf16 iteration on nearly rank-one input)
# a ratio says nothing; an oracle that rounds to bf16 where the reference does judges instead.
REFERENCE_REACH = 0.1

# The floor under that oracle: a rounding to bf16 may fall the other way at any of its steps.
ROUNDED_FLOOR = 4.0 * 2.0**-8


def update_floor(old: np.ndarray, change: np.ndarray) -> float:
    """The error of a parameter, relative to its change, that storing it in float32 explains."""
    size = float(np.linalg.norm(change))
    stored = 0.5 * EPS * float(np.linalg.norm(old + change)) / size if size else 0.0
    return STATE_FLOOR + stored


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


def root_mean_square(values: Iterable[float]) -> float:
    """sqrt(mean(values²)), 0 for none."""
    squares = [value * value for value in values]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def ulps(value: float, truth: float) -> float:
    """Distance in units of the last place of float32 at the truth."""
    if value == truth:
        return 0.0
    return abs(value - truth) / float(np.spacing(np.float32(abs(truth))))
