"""Muon with a second moment, as emerging-optimizers' ``AdaptiveMuon`` does it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_impl.config import OptimizerConfig, one_of
from jax_impl.hyperparameters import hyperparameters, lerp, zeros_like_master
from jax_impl.muon import Adaptation, muon


class Moment2(NamedTuple):
    """One way to keep and to use a second moment of a matrix.

    Attributes:
      zeros: p (m, n) -> its buffer.
      observe: (orthogonal, gradient) -> what the buffer is the running mean of.
      normalize: (orthogonal, buffer, direction, eps) -> the update before Muon's scale.
    """

    zeros: Callable[[jax.Array], jax.Array]
    observe: Callable[[jax.Array, jax.Array], jax.Array]
    normalize: Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array]


def adaptive_muon(
    learning_rate: float | jax.Array | None = None,
    *,
    moment2_method: str = OptimizerConfig.adaptive_muon_moment2_method,
    beta2: float | jax.Array = OptimizerConfig.adaptive_muon_beta2,
    moment2_eps: float | jax.Array = OptimizerConfig.adaptive_muon_eps,
    **muon_settings: Any,
) -> optax.GradientTransformationExtraArgs:
    """`muon` whose orthogonalised momentum o is normalised before it is scaled.

    With v the running mean over steps, v <- lerp(v, observed, 1 - beta2):

    - "adamuon" (https://arxiv.org/abs/2507.11005): v of o², element by element;
      o / (sqrt(v) + eps).
    - "normuon" (https://arxiv.org/abs/2510.05491): v of the mean of o² over each row of a tall
      matrix, over each column of a wide one; o / sqrt(max(v, eps)), brought to the norm of o.
    - "namo" (https://arxiv.org/abs/2602.17080): v of |g|², one number;
      o * |direction| / (sqrt(v) + eps), with the direction that was orthogonalised.

    Args:
      learning_rate: lr, where the caller gives none with the update.
      moment2_method: one of the three.
      beta2: decay of v.
      moment2_eps: eps. ``update`` takes both anew as extra arguments.
      **muon_settings: those of `muon`.

    Raises:
      ValueError: an unknown method, "namo" with "l2" decay, which would change g; and see `muon`.
    """
    one_of("moment2_method", moment2_method, METHODS)
    if moment2_method == "namo" and muon_settings.get("weight_decay_method") == "l2":
        raise ValueError("moment2_method 'namo' reads the gradient, which 'l2' decay changes")
    zeros, observe, normalize = METHODS[moment2_method]
    defaults = dict(beta2=beta2, moment2_eps=moment2_eps)

    def init(params):
        return jax.tree.map(zeros, params)

    def apply(orthogonal, buffer, grads, direction, extra):
        beta2, eps = hyperparameters(defaults, extra)
        buffer = jax.tree.map(
            lambda v, o, g: lerp(v, observe(o, g), 1 - beta2), buffer, orthogonal, grads
        )
        adapted = jax.tree.map(lambda *xs: normalize(*xs, eps), orthogonal, buffer, direction)
        return adapted, buffer

    return muon(learning_rate, adaptation=Adaptation(init, apply), **muon_settings)


def divide_elementwise(o, v, u, eps):
    """adamuon's step."""
    return o / (jnp.sqrt(v) + eps)


def divide_lines(o, v, u, eps):
    """normuon's step: lines of equal size, and the norm of o."""
    normalized = o * jax.lax.rsqrt(jnp.maximum(v, eps))
    return normalized * (norm(o) / jnp.maximum(norm(normalized), eps))


def multiply_by_signal(o, v, u, eps):
    """namo's step: the share of the gradient's size that the momentum keeps."""
    return o * (norm(u) / (jnp.sqrt(v) + eps))


def norm(x: jax.Array) -> jax.Array:
    """The Frobenius norm, (), by row sums first: one running sum would lose digits."""
    return jnp.sqrt(jnp.sum(jnp.sum(jnp.square(x), axis=-1)))


def line_means(x: jax.Array) -> jax.Array:
    """Means over each row of a tall (m, n), (m, 1); over each column of a wide one, (1, n)."""
    return jnp.mean(x, axis=-1 if x.shape[0] >= x.shape[1] else -2, keepdims=True)


METHODS = {
    "adamuon": Moment2(
        zeros=zeros_like_master,
        observe=lambda o, g: jnp.square(o),
        normalize=divide_elementwise,
    ),
    "normuon": Moment2(
        zeros=lambda p: line_means(zeros_like_master(p)),
        observe=lambda o, g: line_means(jnp.square(o)),
        normalize=divide_lines,
    ),
    "namo": Moment2(
        zeros=lambda p: jnp.zeros(1, zeros_like_master(p).dtype),
        observe=lambda o, g: jnp.square(norm(g))[None],
        normalize=multiply_by_signal,
    ),
}
