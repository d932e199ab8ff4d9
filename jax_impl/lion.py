"""Lion, as emerging-optimizers does it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_impl.config import OptimizerConfig
from jax_impl.hyperparameters import hyperparameters, lerp, require_params, zeros_like_master
from jax_impl.weight_decay import decay_update


class LionState(NamedTuple):
    """The moment of every parameter, in float32 at least."""

    exp_avg: Any


def lion(
    learning_rate: float | jax.Array | None = None,
    *,
    b1: float | jax.Array = OptimizerConfig.lion_beta1,
    b2: float | jax.Array = OptimizerConfig.lion_beta2,
    weight_decay: float | jax.Array = OptimizerConfig.weight_decay,
) -> optax.GradientTransformationExtraArgs:
    """Lion (https://arxiv.org/abs/2302.06675) with decoupled weight decay.

    For each parameter p with gradient g:

        p <- p - lr * wd * p
        p <- p - lr * sign(lerp(m, g, 1 - b1))
        m <- lerp(m, g, 1 - b2)

    ``update`` takes every float anew as an extra argument of the same name.

    Args:
      learning_rate: lr, where the caller gives none with the update.
      b1, b2: what the sign, and what the moment, keeps of the moment.
      weight_decay: wd.

    Raises:
      ValueError: on ``update``, no parameters, or no learning rate from either side.
    """
    defaults = dict(learning_rate=learning_rate, weight_decay=weight_decay, b1=b1, b2=b2)

    def init_fn(params):
        return LionState(exp_avg=jax.tree.map(zeros_like_master, params))

    def update_fn(updates, state, params=None, **extra):
        lr, wd, b1, b2 = hyperparameters(defaults, extra)
        require_params(params)

        def new_update(p, m, g):
            step = decay_update(p, lr, wd, "decoupled") - lr * jnp.sign(lerp(m, g, 1 - b1))
            return step.astype(p.dtype)

        new_updates = jax.tree.map(new_update, params, state.exp_avg, updates)
        exp_avg = jax.tree.map(lambda m, g: lerp(m, g, 1 - b2), state.exp_avg, updates)
        return new_updates, LionState(exp_avg)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
