"""The optimizers' mathematics in float64 NumPy, written for clarity and used only to judge.

Nothing here knows how either stack computes. Names follow Megatron's OptimizerConfig and
OptimizerParamScheduler. Coefficient sets are given by the caller, who reads them from
emerging-optimizers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, cycle, islice, repeat
from math import expm1, log, pi, sin, sqrt
from typing import Any

import ml_dtypes
import numpy as np

Coefficients = Sequence[tuple[float, float, float]]
Arrays = dict[str, np.ndarray]

# emerging-optimizers decides this inside its newton_schulz, where it cannot be read.
_REPEAT_LAST = ("polar_express", "cans", "deepseekv4")
_NORM_EPS = 1e-6  # Megatron's, in clip_grad_by_total_norm_fp32


def cycle_or_repeat(coefficients: Coefficients, steps: int, coefficient_type: str) -> Coefficients:
    """Returns one (a, b, c) per step: the set cycled, or its last repeated."""
    if coefficient_type in _REPEAT_LAST:
        return list(islice(chain(coefficients, repeat(coefficients[-1])), steps))
    return list(islice(cycle(coefficients), steps))


def newton_schulz(
    x: np.ndarray,
    steps: int,
    coefficient_type: str,
    coefficients: Coefficients,
    *,
    eps: float = 1e-7,
    rounded: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> np.ndarray:
    """Returns the Newton-Schulz iteration of ``x`` (m, n), float64.

    ``rounded`` is applied wherever an implementation in low precision would store a matrix.
    """
    x = np.asarray(x, np.float64)
    if x.shape[0] > x.shape[1]:
        kwargs = {"eps": eps, "rounded": rounded}
        return newton_schulz(x.T, steps, coefficient_type, coefficients, **kwargs).T
    x = rounded(x / max(np.linalg.norm(x), eps))
    for a, b, c in cycle_or_repeat(coefficients, steps, coefficient_type):
        gram = rounded(x @ x.T)
        polynomial = rounded(b * gram + c * gram @ gram)
        x = rounded(a * x + polynomial @ x)
    return x


def newton_schulz_bf16(
    x: np.ndarray,
    steps: int,
    coefficient_type: str,
    coefficients: Coefficients,
    *,
    eps: float = 1e-7,
) -> np.ndarray:
    """Returns `newton_schulz` as ``fp32_matmul_prec="medium"`` does it: every matrix in bf16."""
    return newton_schulz(
        x, steps, coefficient_type, coefficients, eps=eps, rounded=round_to_bfloat16
    )


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Returns ``x`` rounded to the nearest bfloat16, in its own dtype."""
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


def muon_scale(rows: int, columns: int, mode: str) -> float:
    """Returns the factor on an orthogonalized (rows, columns) update.

    Raises:
        ValueError: unknown mode.
    """
    if mode == "shape_scaling":
        return sqrt(max(1.0, rows / columns))
    if mode == "spectral":
        return sqrt(max(rows, columns))
    if mode == "unit_rms_norm":
        return sqrt(rows / columns)
    raise ValueError(
        f"muon_scale_mode = {mode!r}: must be shape_scaling, spectral or unit_rms_norm"
    )


def muon_step(
    p: np.ndarray,
    momentum_buffer: np.ndarray,
    grad: np.ndarray,
    *,
    lr: float,
    wd: float,
    momentum: float,
    nesterov: bool,
    orthogonalize: Callable[[np.ndarray], np.ndarray],
    weight_decay_method: str = "decoupled",
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (parameter, momentum_buffer) after one Muon step of a matrix (m, n).

    ``orthogonalize`` includes the scale factors.

    Raises:
        ValueError: unknown weight decay method.
    """
    if weight_decay_method == "decoupled":
        p = p - lr * wd * p
    elif weight_decay_method == "independent":
        p = p - wd * p
    elif weight_decay_method == "palm":
        p = p - lr**2 * wd * p
    elif weight_decay_method == "l2":
        grad = grad + wd * p
    else:
        raise ValueError(
            f"weight_decay_method = {weight_decay_method!r}: must be decoupled, independent, "
            "palm or l2"
        )
    momentum_buffer = _lerp(momentum_buffer, grad, 1 - momentum)
    update = _lerp(grad, momentum_buffer, momentum) if nesterov else momentum_buffer
    return p - lr * orthogonalize(update), momentum_buffer


def adam_step(
    p: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    clock: int,
    grad: np.ndarray,
    *,
    lr: float,
    wd: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Returns (parameter, exp_avg, exp_avg_sq, clock) after one AdamW step; any shape."""
    p = p - lr * wd * p
    clock = clock + 1
    exp_avg = _lerp(exp_avg, grad, 1 - beta1)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad**2
    denominator = np.sqrt(exp_avg_sq) / sqrt(_bias_correction(beta2, clock)) + eps
    update = exp_avg / _bias_correction(beta1, clock) / denominator
    return p - lr * update, exp_avg, exp_avg_sq, clock


def total_norm(grads: Iterable[np.ndarray]) -> float:
    """Returns one L2 norm over all the gradients."""
    return sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in grads))


def clip_factor(norm: float, clip_grad: float) -> float:
    """Returns what the gradients are multiplied by; 0 or less turns clipping off."""
    return min(1.0, clip_grad / (norm + _NORM_EPS)) if clip_grad > 0 else 1.0


def is_muon(p: np.ndarray, optimizer: Mapping[str, Any]) -> bool:
    """Tells whether Muon owns this parameter, rather than Adam."""
    return optimizer["optimizer"] == "muon" and p.ndim == 2


def init_state(params: Arrays, optimizer: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the state before a slot's first step: zeros, by parameter and state name."""
    state: dict[str, dict[str, Any]] = {}
    for name, p in params.items():
        names = ("momentum_buffer",) if is_muon(p, optimizer) else ("exp_avg", "exp_avg_sq")
        state[name] = {key: np.zeros(p.shape) for key in names}
        if not is_muon(p, optimizer):
            state[name]["step"] = 0
    return state


def step(
    params: Arrays,
    state: Mapping[str, Mapping[str, Any]],
    grad_sums: Arrays,
    *,
    batch_size: int,
    lr: float,
    wd: float,
    optimizer: Mapping[str, Any],
    coefficients: Coefficients = (),
    iterate: Callable[..., np.ndarray] = newton_schulz,
) -> tuple[Arrays, dict[str, dict[str, Any]], float]:
    """Steps one slot.

    Args:
        params: by slot-free name, in the pool's padded shapes, float64.
        state: as from `init_state`.
        grad_sums: gradient sums over ``batch_size`` samples, float64.
        batch_size: in samples.
        lr: from the slot's schedule before it advances.
        wd: likewise; `weight_decay_multiplier` is applied here.
        optimizer: all of Megatron's OptimizerConfig fields that the step reads, so that the
            defaults stay in one place: ``vars(OptimizerConfig(**scenario.optimizer))``.
        coefficients: the set that ``muon_coefficient_type`` names.
        iterate: `newton_schulz`, or `newton_schulz_bf16`.

    Returns:
        (params, state, norm of the mean gradient before clipping).
    """
    grads = {name: grad_sums[name] / batch_size for name in params}
    norm = total_norm(grads.values())
    factor = clip_factor(norm, optimizer["clip_grad"])
    new_params: Arrays = {}
    new_state: dict[str, dict[str, Any]] = {}
    for name, p in params.items():
        grad = factor * grads[name]
        rates = {"lr": lr, "wd": wd * weight_decay_multiplier(name, p)}
        if is_muon(p, optimizer):
            scale = muon_scale(*p.shape, optimizer["muon_scale_mode"])
            scale *= optimizer["muon_extra_scale_factor"]

            def orthogonalize(update: np.ndarray, scale: float = scale) -> np.ndarray:
                steps = optimizer["muon_num_ns_steps"]
                return scale * iterate(
                    update, steps, optimizer["muon_coefficient_type"], coefficients
                )

            new_params[name], momentum_buffer = muon_step(
                p,
                state[name]["momentum_buffer"],
                grad,
                **rates,
                momentum=optimizer["muon_momentum"],
                nesterov=optimizer["muon_nesterov"],
                orthogonalize=orthogonalize,
            )
            new_state[name] = {"momentum_buffer": momentum_buffer}
        else:
            new_params[name], exp_avg, exp_avg_sq, clock = adam_step(
                p,
                state[name]["exp_avg"],
                state[name]["exp_avg_sq"],
                state[name]["step"],
                grad,
                **rates,
                beta1=optimizer["adam_beta1"],
                beta2=optimizer["adam_beta2"],
                eps=optimizer["adam_eps"],
            )
            new_state[name] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": clock}
    return new_params, new_state, norm


def weight_decay_multiplier(name: str, p: np.ndarray) -> float:
    """Returns Megatron's standard wd_mult: no decay for vectors and biases."""
    return 0.0 if p.ndim == 1 or name.endswith(".bias") else 1.0


def schedule(
    samples: int,
    *,
    init_lr: float,
    max_lr: float,
    min_lr: float,
    lr_warmup_steps: float,
    lr_decay_steps: int,
    lr_decay_style: str,
    start_wd: float,
    end_wd: float,
    wd_incr_steps: int,
    wd_incr_style: str,
    wsd_decay_steps: int | None = None,
    lr_wsd_decay_style: str | None = None,
) -> tuple[float, float]:
    """Returns (lr, wd) after ``samples`` samples, as OptimizerParamScheduler defines them.

    Each decay is a function of the distance to the horizon, and never a difference of nearly
    equal numbers, so the result is right to a few float64 ulp all along, its end included.

    Raises:
        ValueError: unknown style.
    """
    wd = start_wd + (end_wd - start_wd) * _wd_rise(samples, wd_incr_steps, wd_incr_style)
    if lr_warmup_steps > 0 and samples <= lr_warmup_steps:
        return init_lr + (max_lr - init_lr) * (samples / lr_warmup_steps), wd
    if lr_decay_style == "constant":
        return max_lr, wd
    if samples > lr_decay_steps:
        return min_lr, wd
    if lr_decay_style == "inverse-square-root":
        lr = max_lr * sqrt(max(lr_warmup_steps, 1) / max(samples, 1))
        return max(min_lr, lr), wd
    distance = lr_decay_steps - samples
    if lr_decay_style == "WSD":
        rest = min(1.0, distance / wsd_decay_steps)
        share = _decay(rest, lr_wsd_decay_style)
    elif lr_decay_style in ("linear", "cosine"):
        share = _decay(distance / (lr_decay_steps - lr_warmup_steps), lr_decay_style)
    else:
        raise ValueError(
            f"lr_decay_style = {lr_decay_style!r}: must be constant, linear, cosine, "
            "inverse-square-root or WSD"
        )
    return min_lr + share * (max_lr - min_lr), wd


def _decay(rest: float, style: str | None) -> float:
    """Returns the share of the decay still to come, from 1 down to 0 with ``rest``."""
    if style == "linear":
        return rest
    if style == "cosine":
        return sin(pi / 2 * rest) ** 2  # (1 + cos(pi q)) / 2 with q = 1 - rest
    if style == "exponential":
        return expm1(rest * log(2.0))  # 2 * 0.5**q - 1
    if style == "minus_sqrt":
        return rest / (1 + sqrt(1 - rest))  # 1 - sqrt(q)
    raise ValueError(
        f"lr_wsd_decay_style = {style!r}: must be linear, cosine, exponential or minus_sqrt"
    )


def _wd_rise(samples: int, wd_incr_steps: int, style: str) -> float:
    """Returns how far weight decay has come from start to end, 0 to 1."""
    done = 1.0 if samples > wd_incr_steps else samples / wd_incr_steps
    if style in ("constant", "linear"):
        return done  # constant: start and end are equal
    if style == "cosine":
        return sin(pi / 2 * done) ** 2  # (1 + cos(pi (1 - done))) / 2
    raise ValueError(f"wd_incr_style = {style!r}: must be constant, linear or cosine")


def _lerp(start: np.ndarray, end: np.ndarray, weight: float) -> np.ndarray:
    return start + weight * (end - start)


def _bias_correction(beta: float, clock: int) -> float:
    """Returns 1 - beta**clock without cancellation."""
    return -expm1(clock * log(beta)) if beta > 0 else 1.0
