"""Clipping by the L2 norm over all gradients of one adapter."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_impl.config import OptimizerConfig
from jax_impl.hyperparameters import hyperparameters

# Megatron-Core's ``clip_grad_by_total_norm_fp32`` divides by the norm plus this.
NORM_EPS = 1e-6


class ClipState(NamedTuple):
    """The norm of the last gradients before clipping, ()."""

    norm: jax.Array


def clip_by_total_norm(
    max_norm: float | jax.Array = OptimizerConfig.clip_grad,
) -> optax.GradientTransformationExtraArgs:
    """Multiplies all gradients by ``max_norm / (norm + 1e-6)`` where that is below 1.

    The formula of Megatron-Core's ``clip_grad_by_total_norm_fp32``. The norm is in the state.

    Args:
      max_norm: the largest norm; 0 or less turns clipping off, the norm is kept all the same.
        ``update`` takes it anew as an extra argument of the same name, and ``total_norm``, the
        norm of these gradients, where the caller knows it.
    """

    def init_fn(params):
        del params
        return ClipState(norm=jnp.zeros((), jnp.result_type(float)))

    def update_fn(updates, state, params=None, *, total_norm=None, **extra):
        del params
        (limit,) = hyperparameters({"max_norm": max_norm}, extra)
        norm = total_l2_norm(updates) if total_norm is None else total_norm
        factor = clip_factor(norm, limit)
        clipped = jax.tree.map(lambda g: (g * factor).astype(g.dtype), updates)
        return clipped, ClipState(norm=norm.astype(state.norm.dtype))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def total_l2_norm(tree: Any) -> jax.Array:
    """Returns the L2 norm over all leaves of a tree, in float32 at least: ()."""
    # Row sums first: one running float32 sum over a large matrix would lose digits.
    squares = [
        jnp.sum(jnp.sum(jnp.square(g.astype(jnp.promote_types(g.dtype, jnp.float32))), axis=-1))
        for g in map(jnp.atleast_1d, jax.tree.leaves(tree))
    ]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.result_type(float))))


def clip_factor(norm: jax.Array, max_norm) -> jax.Array:
    """Returns what the gradients are multiplied by: at most 1, and 1 where the norm is NaN."""
    factor = max_norm / (norm + NORM_EPS)
    return jnp.where((max_norm > 0) & (factor < 1), factor, 1.0)
