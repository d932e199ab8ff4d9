"""Keeps XLA from starting on every matrix of a tree at once."""

import jax
import jax.numpy as jnp

# How many matrices go through the iteration together. Left alone, XLA does one step of it for the
# whole tree before the next: each intermediate result then exists for every matrix at once, and has
# left every cache when it is needed. One by one, the small operations would be too many.
TOGETHER = 8


def after(x: jax.Array | float, earlier: jax.Array) -> jax.Array:
    """Returns the scalar ``x``, which XLA may use only once it has computed ``earlier``.

    What is added is always zero, a NaN in ``earlier`` included, but XLA cannot tell. (An
    optimization barrier would say it better; XLA drops them before it orders the program.)
    """
    zero = jnp.minimum(jnp.isnan(earlier[(0,) * earlier.ndim]), 0)
    return x + zero.astype(earlier.dtype)
