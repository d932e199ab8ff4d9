"""Adapter shapes, first weights and synthetic gradients: the numbers that both stacks are fed."""

import zlib
from math import sqrt

import ml_dtypes
import numpy as np

from parity.scenario import SYNTHETIC_GRADIENTS, Scenario, Stack

VOCAB_SIZE = 256  # the transformer reads and predicts bytes
_LOW_RANK = 2
_LOW_RANK_NOISE = 1e-3
_CONDITION = 1e4
_SCALES = {"zero": 0.0, "tiny": 1e-12, "huge": 1e12}
_SPIKE = 1e3


def adapter_shapes(scenario: Scenario, rank: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every adapter tensor at ``rank``, by slot-free name.

    ``<layer>.linear_in`` (rank, in), ``<layer>.linear_out`` (out, rank), ``<layer>.bias`` (out,).
    """
    model = scenario.model
    if isinstance(model, Stack):
        layers = [(x.name, x.in_features, x.out_features, x.bias) for x in model.layers]
    else:
        hidden, ffn = model.hidden_size, model.ffn_hidden_size
        layers = []
        for i in range(model.n_layers):
            layers += [
                (f"layers.{i}.attention.fused_qkv", hidden, 3 * hidden, True),
                (f"layers.{i}.attention.linear_proj", hidden, hidden, True),
                (f"layers.{i}.mlp.linear_fc1", hidden, ffn, True),
                (f"layers.{i}.mlp.linear_fc2", ffn, hidden, True),
            ]
        layers.append(("output", hidden, VOCAB_SIZE, True))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, in_features, out_features, bias in layers:
        shapes[f"{name}.linear_in"] = (rank, in_features)
        shapes[f"{name}.linear_out"] = (out_features, rank)
        if bias:
            shapes[f"{name}.bias"] = (out_features,)
    return shapes


def own_shape(name: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Returns the part of a pool tensor's ``shape`` that a tenant of ``rank`` uses."""
    if name.endswith(".linear_in"):
        return (rank, shape[1])
    if name.endswith(".linear_out"):
        return (shape[0], rank)
    return shape


def pad(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``array`` in the leading corner of zeros of ``shape``."""
    padded = np.zeros(shape, array.dtype)
    padded[tuple(map(slice, array.shape))] = array
    return padded


def initial_weights(scenario: Scenario, tenant: str) -> dict[str, np.ndarray]:
    """Returns a tenant's weights at install, at its own rank, by slot-free name; float32.

    ``lora``: linear_in random, the rest zero. ``random``: all random. In a bf16 scenario they are
    bf16 numbers, so that the model's parameters and the fp32 masters start equal.
    """
    settings = scenario.tenants[tenant]
    weights = {}
    for name, shape in adapter_shapes(scenario, settings.rank).items():
        if settings.init == "lora" and not name.endswith(".linear_in"):
            weights[name] = np.zeros(shape, np.float32)
            continue
        draw = _rng(scenario.seed, "weights", tenant, name).standard_normal(shape)
        weights[name] = (draw / sqrt(shape[-1])).astype(np.float32)
        if scenario.precision == "bf16":
            weights[name] = weights[name].astype(ml_dtypes.bfloat16).astype(np.float32)
    return weights


def gradient(
    scenario: Scenario,
    shape: tuple[int, ...],
    rank: int,
    name: str,
    index: int,
    kind: str,
    share: slice = slice(None),
) -> np.ndarray:
    """Returns the gradient sum that the accumulation at ``scenario.events[index]`` adds.

    Args:
        scenario: gives the seed, and the event's number of samples.
        shape: the tensor's shape in the pool, padded.
        rank: the tenant's own rank; what lies beyond it is zero.
        name: slot-free name of the tensor.
        index: of the event.
        kind: one of ``SYNTHETIC_GRADIENTS``; vectors know no spectrum and are gaussian.
        share: of the event's samples, the part that a data-parallel rank has.

    Returns:
        float32 of ``shape``, the sum of one draw per sample. The singular directions of low_rank
        and ill_conditioned depend on the tensor only: else sums and momentum would lose the
        spectrum.

    Raises:
        ValueError: ``kind`` is not synthetic.
    """
    if kind not in SYNTHETIC_GRADIENTS:
        raise ValueError(f"kind = {kind!r}: must be one of {', '.join(SYNTHETIC_GRADIENTS)}")
    own = own_shape(name, shape, rank)
    samples = scenario.events[index].samples
    # The event index alone tells tenants apart: no two accumulate in one event.
    rng = _rng(scenario.seed, "gradient", name, index)
    basis_rng = _rng(scenario.seed, "basis", name)
    if kind == "low_rank" and len(own) == 2:
        total = _low_rank(own, samples, share, rng, basis_rng)
    elif kind == "ill_conditioned" and len(own) == 2:
        total = _ill_conditioned(own, samples, share, rng, basis_rng)
    else:
        draws = rng.standard_normal((samples, *own))
        if kind == "non_finite" and is_outlier(scenario, index):
            draws.flat[0] = np.inf  # of the first sample
        scale = _SPIKE if kind == "spikes" and is_outlier(scenario, index) else 1.0
        total = _SCALES.get(kind, scale) * draws[share].sum(0)
    return pad(total.astype(np.float32), shape)


def is_outlier(scenario: Scenario, index: int) -> bool:
    """Tells whether this event's gradients are a spike, or not finite: about one in three."""
    return bool(_rng(scenario.seed, "outlier", index).random() < 1 / 3)


def _low_rank(shape, samples, share, rng, basis_rng) -> np.ndarray:
    """Two fixed directions on each side, mixed anew per sample, and noise of 1e-3 in norm."""
    left, right = _basis(shape, min(_LOW_RANK, *shape), basis_rng)
    mix = rng.standard_normal((samples, left.shape[1], right.shape[1]))[share].sum(0)
    noise = rng.standard_normal((samples, *shape))[share].sum(0)
    return left @ mix @ right.T + _LOW_RANK_NOISE / sqrt(noise.size) * noise


def _ill_conditioned(shape, samples, share, rng, basis_rng) -> np.ndarray:
    """Singular values log-spaced over 1e4, each scaled by its own factor in [0.5, 1.5]."""
    left, right = _basis(shape, min(shape), basis_rng)
    spectrum = np.geomspace(1.0, 1.0 / _CONDITION, min(shape))
    jitter = rng.uniform(0.5, 1.5, (samples, min(shape)))[share].sum(0)
    return (left * (spectrum * jitter)) @ right.T


def _basis(shape, rank: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Returns random orthonormal columns, (rows, rank) and (columns, rank)."""
    left, right = (np.linalg.qr(rng.standard_normal((size, rank)))[0] for size in shape)
    return left, right


def _rng(seed: int, *what: str | int) -> np.random.Generator:
    """Returns the generator that belongs to ``what``: hash() would differ from run to run."""
    return np.random.default_rng([seed, zlib.crc32("/".join(map(str, what)).encode())])
