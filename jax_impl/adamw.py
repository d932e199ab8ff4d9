"""Adam with decoupled weight decay, as ``torch.optim.AdamW`` does it."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_impl.config import OptimizerConfig
from jax_impl.hyperparameters import hyperparameters, lerp, require_params, zeros_like_master


class AdamState(NamedTuple):
    """The clock, int32 (), and both moments of every parameter, in float32 at least."""

    step: jax.Array
    exp_avg: Any
    exp_avg_sq: Any


def adamw(
    learning_rate: float | jax.Array | None = None,
    *,
    b1: float | jax.Array = OptimizerConfig.adam_beta1,
    b2: float | jax.Array = OptimizerConfig.adam_beta2,
    eps: float | jax.Array = OptimizerConfig.adam_eps,
    weight_decay: float | jax.Array = OptimizerConfig.weight_decay,
    decoupled_weight_decay: bool = OptimizerConfig.decoupled_weight_decay,
) -> optax.GradientTransformationExtraArgs:
    """AdamW (https://arxiv.org/abs/1711.05101) with PyTorch's place for eps.

    For each parameter p with gradient g at clock t = 1, 2, ...:

        p <- p - lr * wd * p
        m <- lerp(m, g, 1 - b1);  v <- b2 * v + (1 - b2) * g²
        p <- p - lr / (1 - b1ᵗ) * m / (sqrt(v) / sqrt(1 - b2ᵗ) + eps)

    ``update`` takes every float anew as an extra argument of the same name.

    Args:
      learning_rate: lr, where the caller gives none with the update.
      b1, b2: decay of the first and second moment.
      eps: keeps the quotient finite.
      weight_decay: wd.
      decoupled_weight_decay: off, wd * p is added to g instead (Adam with L2 regularisation).

    Raises:
      ValueError: on ``update``, no parameters, or no learning rate from either side.
    """
    defaults = dict(learning_rate=learning_rate, weight_decay=weight_decay, b1=b1, b2=b2, eps=eps)

    def init_fn(params):
        return AdamState(
            step=jnp.zeros((), jnp.int32),
            exp_avg=jax.tree.map(zeros_like_master, params),
            exp_avg_sq=jax.tree.map(zeros_like_master, params),
        )

    def update_fn(updates, state, params=None, **extra):
        lr, wd, b1, b2, eps = hyperparameters(defaults, extra)
        require_params(params)
        step = optax.safe_increment(state.step)
        grads = updates
        if not decoupled_weight_decay:
            grads = jax.tree.map(lambda g, p: g + wd * p, updates, params)
        exp_avg = jax.tree.map(lambda m, g: lerp(m, g, 1 - b1), state.exp_avg, grads)
        exp_avg_sq = jax.tree.map(
            lambda v, g: b2 * v + (1 - b2) * jnp.square(g.astype(v.dtype)), state.exp_avg_sq, grads
        )
        step_size = lr / bias_correction(b1, step)
        root_correction = jnp.sqrt(bias_correction(b2, step))

        def new_update(p, m, v):
            change = -step_size * (m / (jnp.sqrt(v) / root_correction + eps))
            return (change - lr * wd * p if decoupled_weight_decay else change).astype(p.dtype)

        new_updates = jax.tree.map(new_update, params, exp_avg, exp_avg_sq)
        return new_updates, AdamState(step, exp_avg, exp_avg_sq)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def bias_correction(decay, step: jax.Array) -> jax.Array:
    """Returns 1 - decayᵗ without cancellation, as -expm1(t log decay).

    The logarithm of a Python float is taken in float64: in float32 log(0.999) alone would cost
    3e-5 of the result.
    """
    if isinstance(decay, jax.Array):
        log_decay = jnp.log1p(decay - 1)
    else:
        log_decay = math.log(decay) if decay > 0 else -math.inf
    return -jnp.expm1(step * jnp.asarray(log_decay, dtype=jnp.result_type(float)))
