"""Faults of Muon and its Newton-Schulz iteration."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from parity.mutants_registry import mutant, replaced, wrapped


@mutant("skipped_spikes")
def nesterov_on():
    return _settings(lambda settings: {"nesterov": True})


@mutant("scaling[shape_scaling]")
def extra_scale_ignored():
    return _settings(lambda settings: {"extra_scale_factor": 1.0})


@mutant("one_muon")
def momentum_in_half_precision():
    return _settings(lambda settings: {"momentum": float(np.float16(settings["momentum"]))})


def _settings(changed):
    return wrapped(
        "multi_lora.muon_settings",
        lambda settings, config: settings(config) | changed(settings(config)),
    )


@mutant("one_muon")
def momentum_lerp_reversed():
    def faulty(lerp, start, end, weight):
        return jnp.where(weight < 0.5, lerp(end, start, weight), lerp(start, end, weight))

    return wrapped("muon.lerp", faulty)


@mutant("one_muon")
def nesterov_lerp_reversed():
    def faulty(lerp, start, end, weight):
        return jnp.where(weight > 0.5, lerp(end, start, weight), lerp(start, end, weight))

    return wrapped("muon.lerp", faulty)


@mutant("interleaved")
def weight_decay_of_updated_parameter():
    def faulty(muon_from, config):
        inner = muon_from(config)

        def update(updates, state, params, *, learning_rate, weight_decay, **extra):
            rates = {"learning_rate": learning_rate, "weight_decay": 0.0}
            updates, state = inner.update(updates, state, params, **rates, **extra)
            shrink = 1 - learning_rate * weight_decay
            return jax.tree.map(lambda u, p: (p + u) * shrink - p, updates, params), state

        return optax.GradientTransformationExtraArgs(inner.init, update)

    return wrapped("multi_lora.muon_from", faulty)


@mutant("decay[independent]")
def independent_decay_takes_the_learning_rate():
    def faulty(decay_update, p, learning_rate, weight_decay, method):
        method = "decoupled" if method == "independent" else method
        return decay_update(p, learning_rate, weight_decay, method)

    return wrapped("weight_decay.decay_update", faulty)


@mutant("scaling[unit_rms_norm]")
def scale_transposed():
    return wrapped(
        "muon.scale_factor", lambda scale, rows, columns, mode: scale(columns, rows, mode)
    )


@mutant("one_muon")
def scale_in_half_precision():
    def faulty(scale_factor, *arguments):
        return float(np.float16(scale_factor(*arguments)))

    return wrapped("muon.scale_factor", faulty)


@mutant("rank_aware[unit_rms_norm]")
def padding_counted_as_rank():
    return replaced("muon.own_sizes", lambda shape, rank, whole: shape)


@mutant("fused_qkv[split]")
def qkv_orthogonalized_whole():
    return replaced("multi_lora.matrix_splits", lambda config, name, shape: ())


@mutant("one_muon")
def one_newton_schulz_step_less():
    return wrapped(
        "newton_schulz.step_coefficients", lambda steps, *arguments: steps(*arguments)[:-1]
    )


@mutant("one_muon")
def last_coefficient_wrong_in_its_fourth_digit():
    def faulty(step_coefficients, *arguments):
        *steps, (a, b, c) = step_coefficients(*arguments)
        return (*steps, (a, b, c + 1e-4))

    return wrapped("newton_schulz.step_coefficients", faulty)


@mutant("coefficients[polar_express]")
def last_coefficients_not_repeated():
    return replaced("newton_schulz.REPEAT_LAST", ())


@mutant("ill_conditioned")
def gram_form_not_restarted():
    return replaced("newton_schulz.gram_segments", lambda coefficients: [tuple(coefficients)])


@mutant("ill_conditioned")
def gram_matrix_regularized():
    def faulty(gram_polynomial, gram, coefficients):
        return gram_polynomial(gram + 1e-6 * jnp.eye(gram.shape[-1]), coefficients)

    return wrapped("newton_schulz.gram_polynomial", faulty)


@mutant("one_muon")
def products_in_seventeen_bits():
    def faulty(apply, products, q, x):
        return apply(products, q, jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=16))

    return wrapped("newton_schulz._Products.apply", faulty)


@mutant("tiny_from_zero")
def eps_added_to_the_norm():
    def faulty(newton_schulz_all, xs, *arguments, **options):
        # The sum of both in place of the larger: what is divided by eps is then a little less.
        smaller = [x * (1e-7 / (1e-7 + jnp.linalg.norm(x))) for x in xs]
        return newton_schulz_all(smaller, *arguments, **options)

    return wrapped("muon.newton_schulz_all", faulty)
