"""The optimizers' mathematics in float64 NumPy, written for clarity and used only to judge.

Nothing here knows how either stack computes. Names follow Megatron's OptimizerConfig and
OptimizerParamScheduler. Coefficient sets are given by the caller, who reads them from
emerging-optimizers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, cycle, islice, repeat
from math import expm1, isfinite, log, pi, sin, sqrt
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
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite stays so
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


def muon_scale(rows: float, columns: float, mode: str) -> float:
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
    state: Mapping[str, np.ndarray],
    grad: np.ndarray,
    *,
    lr: float,
    wd: float,
    momentum: float,
    nesterov: bool,
    orthogonalize: Callable[[np.ndarray], np.ndarray],
    scale: Callable[[np.ndarray], np.ndarray],
    weight_decay_method: str = "decoupled",
    adapt: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns (parameter, state) after one Muon step of a matrix (m, n).

    ``adapt``, of adaptive Muon, stands between ``orthogonalize`` and ``scale``:
    (orthogonal, moment2_buffer, grad, update) -> (adapted, moment2_buffer).

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
    buffer = _lerp(state["momentum_buffer"], grad, 1 - momentum)
    update = _lerp(grad, buffer, momentum) if nesterov else buffer
    orthogonal = orthogonalize(update)
    state = {**state, "momentum_buffer": buffer}
    if adapt is not None:
        orthogonal, moment2 = adapt(orthogonal, state["moment2_buffer"], grad, update)
        state["moment2_buffer"] = moment2
    return p - lr * scale(orthogonal), state


def init_moment2(shape: tuple[int, int], method: str) -> np.ndarray:
    """Returns adaptive Muon's second moment of a matrix before its first step.

    adamuon has one for each element, normuon for each row of a tall matrix and each column of a
    wide one, namo a single one.
    """
    if method == "normuon":
        return np.zeros((shape[0], 1) if shape[0] >= shape[1] else (1, shape[1]))
    return np.zeros(shape if method == "adamuon" else 1)


def adapt_muon(
    orthogonal: np.ndarray,
    moment2: np.ndarray,
    grad: np.ndarray,
    update: np.ndarray,
    *,
    method: str,
    beta2: float,
    eps: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (adapted, moment2): an orthogonalized (m, n) normalised by its second moment.

    Raises:
        ValueError: unknown method.
    """
    if method == "adamuon":
        moment2 = _lerp(moment2, orthogonal**2, 1 - beta2)
        return orthogonal / (np.sqrt(moment2) + eps), moment2
    if method == "normuon":
        axis = 1 if moment2.shape[1] == 1 else 0
        moment2 = _lerp(moment2, np.mean(orthogonal**2, axis=axis, keepdims=True), 1 - beta2)
        lines = orthogonal / np.sqrt(np.maximum(moment2, eps))
        norms = np.linalg.norm(orthogonal), max(np.linalg.norm(lines), eps)
        return lines * (norms[0] / norms[1]), moment2
    if method == "namo":
        moment2 = _lerp(moment2, np.sum(grad**2), 1 - beta2)
        return orthogonal * (np.linalg.norm(update) / (np.sqrt(moment2) + eps)), moment2
    raise ValueError(f"adaptive_muon_moment2_method = {method!r}: must be adamuon, normuon or namo")


def lion_step(
    p: np.ndarray,
    exp_avg: np.ndarray,
    grad: np.ndarray,
    *,
    lr: float,
    wd: float,
    beta1: float,
    beta2: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (parameter, exp_avg) after one Lion step; any shape."""
    p = p - lr * wd * p
    update = np.sign(_lerp(exp_avg, grad, 1 - beta1))
    return p - lr * update, _lerp(exp_avg, grad, 1 - beta2)


def lion_doubts(
    exp_avg: np.ndarray, grad: np.ndarray, beta1: float, precision: float
) -> np.ndarray:
    """Tells for each element whether inputs off by ``precision`` may decide Lion's sign."""
    kept, added = beta1 * exp_avg, (1 - beta1) * grad
    return np.abs(kept + added) < precision * (np.abs(kept) + np.abs(added))


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
    decoupled: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Returns (parameter, exp_avg, exp_avg_sq, clock) after one Adam step; any shape.

    AdamW's decay is ``decoupled``; else the decayed parameter is part of the gradient.
    """
    if decoupled:
        p = p - lr * wd * p
    else:
        grad = grad + wd * p
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
    """Returns what the gradients are multiplied by; 0 or less turns clipping off.

    Gradients that are not finite stay as they are: no slot steps on them.
    """
    if clip_grad <= 0 or not isfinite(norm):
        return 1.0
    return min(1.0, clip_grad / (norm + _NORM_EPS))


def clipped_gradients(
    grad_sums: Arrays, batch_size: int, optimizer: Mapping[str, Any]
) -> tuple[Arrays, float]:
    """Returns the mean gradients, clipped by one norm over all of them, and that norm."""
    grads = {name: x / batch_size for name, x in grad_sums.items()}
    norm = total_norm(grads.values())
    factor = clip_factor(norm, optimizer["clip_grad"])
    return {name: factor * grad for name, grad in grads.items()}, norm


def owner(name: str, p: np.ndarray, optimizer: Mapping[str, Any]) -> str:
    """Returns who updates a parameter: muon, adam or lion."""
    if optimizer["optimizer"] == "adam":
        return "adam"
    if p.ndim == 2 and not is_embedding_or_output(name, optimizer):
        return "muon"
    return optimizer["muon_scalar_optimizer"]


def is_embedding_or_output(name: str, optimizer: Mapping[str, Any]) -> bool:
    """Tells whether a parameter has Megatron's attribute of that name."""
    patterns = optimizer["embedding_or_output_parameters"]
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def init_state(params: Arrays, optimizer: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the state before a slot's first step: zeros, by parameter and state name."""
    return {name: _init_state(name, p, optimizer) for name, p in params.items()}


def _init_state(name: str, p: np.ndarray, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    by = owner(name, p, optimizer)
    if by == "adam":
        return {"exp_avg": np.zeros(p.shape), "exp_avg_sq": np.zeros(p.shape), "step": 0}
    if by == "lion":
        return {"exp_avg": np.zeros(p.shape)}
    state = {"momentum_buffer": np.zeros(p.shape)}
    if optimizer["optimizer"] == "adaptive_muon":
        method = optimizer["adaptive_muon_moment2_method"]
        state["moment2_buffer"] = init_moment2(p.shape, method)
    return state


def step(
    params: Arrays,
    state: Mapping[str, Mapping[str, Any]],
    grad_sums: Arrays,
    *,
    batch_size: int,
    rates: Callable[[str, np.ndarray], tuple[float, float]],
    optimizer: Mapping[str, Any],
    coefficients: Coefficients = (),
    iterate: Callable[..., np.ndarray] = newton_schulz,
    pieces: Callable[[str, tuple[int, ...]], Sequence[Any]] = lambda name, shape: [...],
    own_shape: Callable[[str, tuple[int, ...]], tuple[int, ...]] = lambda name, shape: shape,
) -> tuple[Arrays, dict[str, dict[str, Any]], float]:
    """Steps one slot.

    Args:
        params: by slot-free name, in the pool's padded shapes, float64.
        state: as from `init_state`.
        grad_sums: gradient sums over ``batch_size`` samples, float64.
        batch_size: in samples.
        rates: (name, parameter) -> (lr, wd) of this step, see `group_rates`.
        optimizer: all fields that the step reads, those of Megatron's OptimizerConfig under its
            names, so that the defaults stay in one place.
        coefficients: the set that ``muon_coefficient_type`` names.
        iterate: `newton_schulz`, or `newton_schulz_bf16`.
        pieces: of a matrix of this name and shape, the index of each part that Muon
            orthogonalizes, and scales by its own size, alone; by default the whole.
        own_shape: of a tensor's shape, the part that the adapter's own rank fills; read where
            ``rank_aware`` is set.

    Returns:
        (params, state, norm of the mean gradient before clipping).
    """
    grads, norm = clipped_gradients(grad_sums, batch_size, optimizer)
    new_params: Arrays = {}
    new_state: dict[str, dict[str, Any]] = {}
    for name, p in params.items():
        grad = grads[name]
        lr, wd = rates(name, p)
        by = owner(name, p, optimizer)
        if by == "muon":
            new_params[name], new_state[name] = muon_step(
                p,
                state[name],
                grad,
                lr=lr,
                wd=wd,
                momentum=optimizer["muon_momentum"],
                nesterov=optimizer["muon_nesterov"],
                weight_decay_method=optimizer["weight_decay_method"],
                orthogonalize=partial(
                    orthogonalize,
                    indices=pieces(name, p.shape),
                    optimizer=optimizer,
                    coefficients=coefficients,
                    iterate=iterate,
                ),
                scale=partial(
                    scale_pieces,
                    indices=pieces(name, p.shape),
                    own=own_shape(name, p.shape) if optimizer["rank_aware"] else p.shape,
                    optimizer=optimizer,
                ),
                adapt=_adaptation(optimizer),
            )
        elif by == "lion":
            new_params[name], exp_avg = lion_step(
                p,
                state[name]["exp_avg"],
                grad,
                lr=lr,
                wd=wd,
                beta1=optimizer["lion_beta1"],
                beta2=optimizer["lion_beta2"],
            )
            new_state[name] = {"exp_avg": exp_avg}
        else:
            new_params[name], exp_avg, exp_avg_sq, clock = adam_step(
                p,
                state[name]["exp_avg"],
                state[name]["exp_avg_sq"],
                state[name]["step"],
                grad,
                lr=lr,
                wd=wd,
                beta1=optimizer["adam_beta1"],
                beta2=optimizer["adam_beta2"],
                eps=optimizer["adam_eps"],
                decoupled=optimizer["decoupled_weight_decay"],
            )
            new_state[name] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": clock}
    return new_params, new_state, norm


def orthogonalize(
    update: np.ndarray,
    *,
    indices: Sequence[Any],
    optimizer: Mapping[str, Any],
    coefficients: Coefficients,
    iterate: Callable[..., np.ndarray],
) -> np.ndarray:
    """Returns the Newton-Schulz iteration of each piece of a matrix (m, n)."""
    steps, kind = optimizer["muon_num_ns_steps"], optimizer["muon_coefficient_type"]
    orthogonal = np.empty_like(update)
    for index in indices:
        orthogonal[index] = iterate(update[index], steps, kind, coefficients)
    return orthogonal


def scale_pieces(
    orthogonal: np.ndarray,
    *,
    indices: Sequence[Any],
    own: tuple[int, ...],
    optimizer: Mapping[str, Any],
) -> np.ndarray:
    """Returns each piece of a matrix (m, n) times its Muon scale.

    Of the ``own`` shape, every piece has the share that it has of the matrix.
    """
    scaled = np.empty_like(orthogonal)
    for index in indices:
        piece = orthogonal[index]
        sizes = [
            n * part / all_
            for n, part, all_ in zip(own, piece.shape, orthogonal.shape, strict=True)
        ]
        factor = muon_scale(*sizes, optimizer["muon_scale_mode"])
        scaled[index] = factor * optimizer["muon_extra_scale_factor"] * piece
    return scaled


def _adaptation(optimizer: Mapping[str, Any]) -> Callable[..., Any] | None:
    if optimizer["optimizer"] != "adaptive_muon":
        return None
    prefix = "adaptive_muon_"
    return partial(
        adapt_muon,
        method=optimizer[prefix + "moment2_method"],
        beta2=optimizer[prefix + "beta2"],
        eps=optimizer[prefix + "eps"],
    )


def is_skipped(norm: float, optimizer: Mapping[str, Any]) -> bool:
    """Tells whether a slot with gradients of this norm does not step."""
    return not (isfinite(norm) and norm <= optimizer["grad_norm_skip_threshold"])


def group_rates(
    name: str, p: np.ndarray, samples: int, plan: Mapping[str, Any], optimizer: Mapping[str, Any]
) -> tuple[float, float]:
    """Returns (lr, wd) of a parameter's group after ``samples`` samples of a `schedule`.

    Embedding and output parameters may have a learning rate of their own: the same schedule between
    other bounds.
    """
    if is_embedding_or_output(name, optimizer) and optimizer["decoupled_lr"] is not None:
        plan = {**plan, "max_lr": optimizer["decoupled_lr"]}
        if optimizer["decoupled_min_lr"] is not None:
            plan["min_lr"] = optimizer["decoupled_min_lr"]
    lr, wd = schedule(samples, **plan)
    return lr, wd * weight_decay_multiplier(name, p)


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
    # Not start + weight * (end - start): where the start is 1e22 times as large, and it has no
    # weight, it would take all digits of the end with it.
    return (1 - weight) * start + weight * end


def _bias_correction(beta: float, clock: int) -> float:
    """Returns 1 - beta**clock without cancellation."""
    return -expm1(clock * log(beta)) if beta > 0 else 1.0
