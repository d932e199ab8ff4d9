import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl.adaptive_muon import METHODS, adaptive_muon
from jax_impl.muon import scale_factor
from jax_impl.muon_test import matrices, newton_schulz64
from jax_impl.per_slot import per_slot, reset_slots
from jax_impl.testing import relative_error

HIGHEST = dict(fp32_matmul_prec="highest")
BOTH = ("wide", "tall", "square")


def adapted64(method, o, v, g, u, *, beta2, eps):
    """One matrix in float64: what is scaled, and the new second moment."""
    observed = {
        "adamuon": lambda: o**2,
        "normuon": lambda: np.mean(o**2, axis=1 if o.shape[0] >= o.shape[1] else 0, keepdims=True),
        "namo": lambda: np.array([np.sum(g**2)]),
    }[method]()
    v = beta2 * v + (1 - beta2) * observed
    if method == "adamuon":
        return o / (np.sqrt(v) + eps), v
    if method == "namo":
        return o * np.linalg.norm(u) / (np.sqrt(v) + eps), v
    lines = o / np.sqrt(np.maximum(v, eps))
    return lines * np.linalg.norm(o) / np.linalg.norm(lines), v


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_follows_float64(method, nesterov):
    lr, wd, momentum, beta2, eps = 0.5, 0.3, 0.8, 0.7, 1e-3
    tx = adaptive_muon(
        lr,
        moment2_method=method,
        beta2=beta2,
        moment2_eps=eps,
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=wd,
        extra_scale_factor=0.2,
        **HIGHEST,
    )
    params = jax.tree.map(jnp.asarray, matrices(0))
    state = tx.init(params)
    for t in range(3):
        grads = matrices(t + 1)
        updates, new_state = jax.jit(tx.update)(grads, state, params)
        for k in BOTH:
            p, m, v, g = (
                np.asarray(x, np.float64)
                for x in (params[k], state.momentum_buffer[k], state.moment2_buffer[k], grads[k])
            )
            m = momentum * m + (1 - momentum) * g
            u = (1 - momentum) * g + momentum * m if nesterov else m
            o, v = adapted64(method, newton_schulz64(u), v, g, u, beta2=beta2, eps=eps)
            expected = -lr * wd * p - lr * 0.2 * scale_factor(*p.shape, "spectral") * o
            assert relative_error(updates[k], expected) < 2e-5, k
            assert new_state.moment2_buffer[k].shape == v.shape
            assert relative_error(new_state.moment2_buffer[k], v) < 2e-5, k
        params, state = optax.apply_updates(params, updates), new_state


@pytest.mark.parametrize("method", METHODS)
def test_zeros_and_padding_stay_exactly_zero(method):
    padded = {
        "a": jnp.pad(jnp.asarray(matrices(0)["wide"]), ((0, 3), (0, 0))),
        "b": jnp.zeros((5, 2)),
    }
    tx = adaptive_muon(0.5, moment2_method=method, weight_decay=0.0, **HIGHEST)
    updates, state = tx.update(padded, tx.init(padded), padded)
    assert not updates["a"][4:].any() and updates["a"][:4].all() and not updates["b"].any()
    assert not state.moment2_buffer["b"].any()


@pytest.mark.parametrize("method", METHODS)
def test_a_reset_slot_has_no_second_moment_and_its_neighbour_all_of_it(method):
    pool = {k: jnp.stack([x, 2 * x]) for k, x in matrices(0).items()}
    tx = per_slot(adaptive_muon(0.5, moment2_method=method, **HIGHEST))
    _, state = tx.update(pool, tx.init(pool), pool)
    fresh = reset_slots(tx, state, pool, [0])
    for k in BOTH:
        old, new = state.moment2_buffer[k], fresh.moment2_buffer[k]
        assert old[0].any() and not new[0].any()
        np.testing.assert_array_equal(new[1], old[1])


def test_its_floats_can_be_given_anew():
    params, grads = matrices(0), matrices(1)
    built = adaptive_muon(0.1, beta2=0.5, moment2_eps=0.3, **HIGHEST)
    late = adaptive_muon(0.1, **HIGHEST)
    expected = built.update(grads, built.init(params), params)
    given = late.update(grads, late.init(params), params, beta2=0.5, moment2_eps=0.3)
    jax.tree.map(np.testing.assert_array_equal, given, expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(moment2_method="adam"), "moment2_method is 'adam'"),
        (dict(moment2_method="namo", weight_decay_method="l2"), "'namo' reads the gradient"),
        (dict(scale_mode="big"), "scale_mode is 'big'"),
    ],
)
def test_what_it_cannot_do_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        adaptive_muon(0.1, **settings)
