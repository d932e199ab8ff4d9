"""Muon for the matrices of one adapter, as Megatron-Core's ``TensorParallelMuon`` does it."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_impl import weight_decay as decay
from jax_impl.config import OptimizerConfig, one_of
from jax_impl.hyperparameters import (
    hyperparameters,
    lerp,
    parameter_name,
    require_params,
    zeros_like_master,
)
from jax_impl.newton_schulz import (
    MATMUL_PRECISIONS,
    METHODS,
    newton_schulz_all,
    step_coefficients,
)
from jax_impl.pieces import Split, join, split, whole
from jax_impl.sequence import TOGETHER, after

SCALE_MODES = ("shape_scaling", "spectral", "unit_rms_norm")


class MuonState(NamedTuple):
    """Momentum of every matrix, in its shape and in float32 at least.

    ``moment2_buffer`` is what an `Adaptation` keeps, None without one.
    """

    momentum_buffer: Any
    moment2_buffer: Any = None


class Adaptation(NamedTuple):
    """What becomes of orthogonalised momenta before they are scaled; by default nothing.

    Attributes:
      init: params -> buffer.
      apply: (orthogonal, buffer, grads, direction, extra) -> (adapted, buffer), all trees like
        the params but for ``extra``, the extra arguments of the update.
    """

    init: Callable[[Any], Any] = lambda params: None
    apply: Callable[..., tuple[Any, Any]] = lambda orthogonal, buffer, *_: (orthogonal, buffer)


UNADAPTED = Adaptation()


def muon(
    learning_rate: float | jax.Array | None = None,
    *,
    momentum: float | jax.Array = OptimizerConfig.muon_momentum,
    nesterov: bool = OptimizerConfig.muon_nesterov,
    weight_decay: float | jax.Array = OptimizerConfig.weight_decay,
    weight_decay_method: str = OptimizerConfig.weight_decay_method,
    coefficient_type: str = OptimizerConfig.muon_coefficient_type,
    custom_coefficients: Any = OptimizerConfig.custom_coefficients,
    num_ns_steps: int = OptimizerConfig.muon_num_ns_steps,
    scale_mode: str = OptimizerConfig.muon_scale_mode,
    extra_scale_factor: float = OptimizerConfig.muon_extra_scale_factor,
    fp32_matmul_prec: str = OptimizerConfig.muon_fp32_matmul_prec,
    ns_method: str = OptimizerConfig.ns_method,
    rank_aware: bool = OptimizerConfig.rank_aware,
    splits: Callable[[str, tuple[int, int]], Sequence[Split]] = whole,
    adaptation: Adaptation = UNADAPTED,
) -> optax.GradientTransformationExtraArgs:
    """Momentum orthogonalised by Newton–Schulz (https://kellerjordan.github.io/posts/muon/).

    For each matrix p (m, n) with gradient g, in this order:

        p <- p - lr * wd * p
        m <- lerp(m, g, 1 - momentum)
        u  = lerp(g, m, momentum) if nesterov else m
        p <- p - lr * scale * extra_scale_factor * newton_schulz(u)

    There is no clock and no bias correction. ``update`` takes ``learning_rate``,
    ``weight_decay`` and ``momentum`` anew as extra arguments, and ``rank``, the adapter's own
    rank, where ``rank_aware`` is set. Lift it with `per_slot` for a pool.

    Args:
      learning_rate: lr, where the caller gives none with the update.
      momentum: decay of the running mean of gradients.
      nesterov: look one step ahead.
      weight_decay: wd.
      weight_decay_method: "decoupled" as above, "independent", "l2" or "palm".
      coefficient_type, custom_coefficients, num_ns_steps, fp32_matmul_prec, ns_method: see
        `newton_schulz`.
      scale_mode: see `scale_factor`.
      extra_scale_factor: one more factor of the update; 0.2 matches AdamW's size
        (https://arxiv.org/abs/2502.16982).
      rank_aware: ``scale_mode`` reads the adapter's own rank in place of the padded one.
      splits: given a parameter's path, joined by dots, and its shape, how it is cut into the
        pieces that are orthogonalised, and scaled by their own sizes, each alone.
      adaptation: see `adaptive_muon`.

    Raises:
      ValueError: an unknown name; on ``init`` a leaf that is not a matrix; on ``update`` no
        parameters, or no learning rate from either side.
    """
    step_coefficients(num_ns_steps, coefficient_type, custom_coefficients)
    one_of("fp32_matmul_prec", fp32_matmul_prec, MATMUL_PRECISIONS)
    one_of("ns_method", ns_method, METHODS)
    one_of("scale_mode", scale_mode, SCALE_MODES)
    one_of("weight_decay_method", weight_decay_method, decay.METHODS)
    defaults = dict(learning_rate=learning_rate, weight_decay=weight_decay, momentum=momentum)

    def init_fn(params):
        for path, p in jax.tree_util.tree_leaves_with_path(params):
            if p.ndim != 2:
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} has shape {p.shape}; Muon owns matrices"
                )
        return MuonState(jax.tree.map(zeros_like_master, params), adaptation.init(params))

    def update_fn(updates, state, params=None, *, rank=None, **extra):
        lr, wd, momentum = hyperparameters(defaults, extra)
        require_params(params)

        def orthogonalize(paths, directions):
            cuts = [
                splits(parameter_name(p), u.shape) for p, u in zip(paths, directions, strict=True)
            ]
            pieces = [split(u, c) for u, c in zip(directions, cuts, strict=True)]
            orthogonal = iter(
                newton_schulz_all(
                    list(itertools.chain(*pieces)),
                    num_ns_steps,
                    coefficient_type,
                    custom_coefficients=custom_coefficients,
                    method=ns_method,
                    fp32_matmul_prec=fp32_matmul_prec,
                )
            )
            return [
                join([next(orthogonal) for _ in ps], c) for ps, c in zip(pieces, cuts, strict=True)
            ]

        def scale(path, u):
            cuts = splits(parameter_name(path), u.shape)

            def scale_piece(piece):
                shape = piece.shape[-2:]
                sizes = own_sizes(shape, rank, u.shape) if rank_aware else shape
                return piece * (scale_factor(*sizes, scale_mode) * extra_scale_factor)

            return join([scale_piece(piece) for piece in split(u, cuts)], cuts)

        def new_update(path, p, u):
            step = decay.decay_update(p, lr, wd, weight_decay_method) - lr * scale(path, u)
            return step.astype(p.dtype)

        leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
        paths = [path for path, _ in leaves]
        others = map(treedef.flatten_up_to, (updates, state.momentum_buffer))
        old = zip(leaves, *others, strict=True)
        grads, buffer, direction, orthogonal = [], [], [], []
        for group in itertools.batched(old, TOGETHER):
            done = len(orthogonal)
            weight = after(1 - momentum, orthogonal[-1]) if done else 1 - momentum
            for (_, p), g, m in group:
                grads.append(decay.decay_gradient(g, p, wd, weight_decay_method))
                buffer.append(lerp(m, grads[-1], weight))
                direction.append(lerp(grads[-1], buffer[-1], momentum) if nesterov else buffer[-1])
            orthogonal += orthogonalize(paths[done : len(direction)], direction[done:])
        grads, buffer, direction, orthogonal = map(
            treedef.unflatten, (grads, buffer, direction, orthogonal)
        )
        adapted, moment2_buffer = adaptation.apply(
            orthogonal, state.moment2_buffer, grads, direction, extra
        )
        updates = jax.tree_util.tree_map_with_path(new_update, params, adapted)
        return updates, MuonState(buffer, moment2_buffer)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def scale_factor(rows, columns, scale_mode: str):
    """Returns the factor that gives an orthogonal (rows, columns) update its size.

    "shape_scaling" sqrt(max(1, rows/columns)) (https://kellerjordan.github.io/posts/muon/),
    "spectral" sqrt(max(rows, columns)) (https://arxiv.org/abs/2502.16982),
    "unit_rms_norm" sqrt(rows/columns) (https://arxiv.org/abs/2502.07529).
    """
    maximum, root = (
        (jnp.maximum, jnp.sqrt)
        if any(isinstance(size, jax.Array) for size in (rows, columns))
        else (max, lambda x: x**0.5)
    )
    if scale_mode == "shape_scaling":
        return root(maximum(1.0, rows / columns))
    if scale_mode == "spectral":
        return root(maximum(rows, columns))
    return root(rows / columns)


def own_sizes(shape: tuple[int, int], rank, whole: tuple[int, int]):
    """Returns (rows, columns) of a piece of a matrix, with its adapter's own rank.

    The padded rank is the shorter side of the ``whole`` matrix; a piece has its share of it.
    """
    if rank is None:
        raise ValueError("rank_aware needs the adapter's own rank: update(..., rank=...)")
    (rows, columns), (all_rows, all_columns) = shape, whole
    if all_rows <= all_columns:
        return rank * (rows / all_rows), columns
    return rows, rank * (columns / all_columns)
