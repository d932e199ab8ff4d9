"""Faults of Adam."""

import jax
import jax.numpy as jnp
import optax

from jax_impl.adamw import bias_correction
from parity.mutants_registry import mutant, replaced, wrapped


@mutant("one_adam")
def bias_correction_missing():
    return replaced("adamw.bias_correction", lambda decay, step: jnp.float32(1))


@mutant("from_zero")
def bias_correction_by_subtraction():
    """1 - bᵗ in float32 cancels."""
    return replaced("adamw.bias_correction", lambda decay, step: 1 - jnp.float32(decay) ** step)


@mutant("from_zero")
def bias_correction_with_a_float32_logarithm():
    def faulty(decay, step):
        return -jnp.expm1(step * jnp.log(jnp.float32(decay)))

    return replaced("adamw.bias_correction", faulty)


@mutant("one_adam")
def betas_swapped():
    def faulty(adamw, *arguments, b1, b2, **options):
        return adamw(*arguments, b1=b2, b2=b1, **options)

    return wrapped("multi_lora.adamw", faulty)


@mutant("tiny")
def eps_inside_the_root():
    return _quotient(lambda m, v, c1, c2, eps: (m / c1) / jnp.sqrt(v / c2 + eps))


@mutant("tiny")
def eps_before_the_correction():
    return _quotient(lambda m, v, c1, c2, eps: (m / c1) * jnp.sqrt(c2) / (jnp.sqrt(v) + eps))


@mutant("tiny")
def eps_missing():
    return _quotient(lambda m, v, c1, c2, eps: (m / c1) / jnp.maximum(jnp.sqrt(v / c2), 1e-30))


def _quotient(direction):
    """Adam with another formula for its direction."""

    def faulty(adamw_from, config):
        inner = adamw_from(config)

        def update(updates, state, params, *, learning_rate, weight_decay, **extra):
            rates = {"learning_rate": learning_rate, "weight_decay": weight_decay}
            _, state = inner.update(updates, state, params, **rates, **extra)
            c1 = bias_correction(config.adam_beta1, state.step)
            c2 = bias_correction(config.adam_beta2, state.step)

            def new_update(p, m, v):
                decay = weight_decay * p
                return -learning_rate * (direction(m, v, c1, c2, config.adam_eps) + decay)

            return jax.tree.map(new_update, params, state.exp_avg, state.exp_avg_sq), state

        return optax.GradientTransformationExtraArgs(inner.init, update)

    return wrapped("multi_lora.adamw_from", faulty)


@mutant("adam_l2")
def l2_decay_decoupled():
    def faulty(adamw, *arguments, decoupled_weight_decay, **options):
        return adamw(*arguments, decoupled_weight_decay=True, **options)

    return wrapped("multi_lora.adamw", faulty)


@mutant("one_adam")
def step_size_in_half_precision():
    def faulty(correction, decay, step):
        return correction(decay, step).astype(jnp.float16).astype(jnp.float32)

    return wrapped("adamw.bias_correction", faulty)


@mutant("matrix_and_scalar")
def biases_decay():
    def faulty(multiply, inner, weight_decay, *, wd_mult):
        return multiply(inner, weight_decay, wd_mult=1.0)

    return wrapped("multi_lora.multiply_weight_decay", faulty)
