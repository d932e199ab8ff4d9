"""The four ways of decaying weights that emerging-optimizers knows."""

import jax

METHODS = ("decoupled", "independent", "l2", "palm")


def decay_gradient(g: jax.Array, p: jax.Array, weight_decay, method: str) -> jax.Array:
    """Returns the gradient, to which "l2" adds ``weight_decay * p``."""
    return g + weight_decay * p if method == "l2" else g


def decay_update(p: jax.Array, learning_rate, weight_decay, method: str):
    """Returns what decay adds to the parameter ``p`` itself; it always reads the old one.

    "decoupled" -lr*wd*p (https://arxiv.org/abs/1711.05101), "independent" -wd*p,
    "palm" -lr²*wd*p, "l2" nothing.
    """
    rate = {
        "decoupled": lambda: learning_rate * weight_decay,
        "independent": lambda: weight_decay,
        "palm": lambda: learning_rate * learning_rate * weight_decay,
        "l2": lambda: 0.0,
    }[method]()
    return -rate * p
