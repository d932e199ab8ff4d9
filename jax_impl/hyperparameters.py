"""What the optimizers of one adapter share: how they take hyperparameters and keep state."""

from typing import Any

import jax
import jax.numpy as jnp


def lerp(start: jax.Array, end: jax.Array, weight) -> jax.Array:
    """Returns ``start + weight * (end - start)``, rounded as if taken from the nearer end.

    PyTorch's ``lerp`` does the same: from the farther end, rounding would be of the size of what
    mostly cancels, and Newton–Schulz amplifies it.
    """
    step = end - start
    return jnp.where(weight < 0.5, start + weight * step, end - (1 - weight) * step)


def zeros_like_master(p: jax.Array) -> jax.Array:
    """Zeros of p's shape, in float32 where p is narrower: optimizer state is never rounded."""
    return jnp.zeros_like(p, dtype=jnp.promote_types(p.dtype, jnp.float32))


def hyperparameters(defaults: dict[str, Any], extra: dict[str, Any]) -> list[Any]:
    """Returns the hyperparameters in the order of ``defaults``, those of the update first.

    Raises:
      ValueError: one that neither side gives.
    """
    values = {name: extra.get(name, default) for name, default in defaults.items()}
    for name, value in values.items():
        if value is None:
            raise ValueError(f"{name} is missing; give it on construction or to update")
    return list(values.values())


def require_params(params: Any) -> None:
    """Raises ValueError where a transform that needs the parameters got none."""
    if params is None:
        raise ValueError("params are missing; this transform needs update(grads, state, params)")


def parameter_name(path: tuple[Any, ...]) -> str:
    """A leaf's path in its tree, joined by dots: what configurations name parameters by.

    The ``.value`` in which the path of a ``flax.nnx`` variable ends is no part of its name.
    """
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".")
