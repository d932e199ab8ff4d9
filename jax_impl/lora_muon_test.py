import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl.lora_muon import DAMPING, lora_muon, lora_pairs, whiten
from jax_impl.muon import muon
from jax_impl.newton_schulz import step_coefficients
from jax_impl.per_slot import per_slot
from jax_impl.testing import assert_same_bits, relative_error

RANK, N_IN, N_OUT = 4, 12, 9
EXACT = dict(fp32_matmul_prec="highest")


def adapter(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = {"q.linear_in": (RANK, N_IN), "q.linear_out": (N_OUT, RANK)}
    return {k: jnp.asarray(rng.normal(size=shape), dtype) for k, shape in shapes.items()}


def gradients(params, seed=1):
    """Of the factors, from a gradient of their product that does not depend on them."""
    g = np.random.default_rng(seed).normal(size=(N_OUT, N_IN))
    a, b = (np.asarray(params[k], np.float64) for k in ("q.linear_in", "q.linear_out"))
    return {
        "q.linear_in": jnp.asarray(b.T @ g, params["q.linear_in"].dtype),
        "q.linear_out": jnp.asarray(g @ a.T, params["q.linear_out"].dtype),
    }


def w(params):
    """The product of the factors, in float64."""
    return np.asarray(params["q.linear_out"], np.float64) @ np.asarray(
        params["q.linear_in"], np.float64
    )


def train(tx, params, steps=3, **extra):
    state = tx.init(params)
    for t in range(steps):
        updates, state = jax.jit(tx.update)(gradients(params, t), state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params, state


def newton_schulz64(x):
    """The polynomial that the iteration is, applied to the singular values."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s = s / np.linalg.norm(s)
    for a, b, c in step_coefficients(5, "quintic"):
        s = a * s + b * s**3 + c * s**5
    return u * s @ vt


def inverse_root64(gram):
    """(gram + damping)^(-1/2), by its eigenvectors: the paper's whitening."""
    values, vectors = np.linalg.eigh(gram + DAMPING * np.trace(gram) * np.eye(len(gram)))
    return vectors / np.sqrt(values) @ vectors.T


def lora_muon64(a, b, m_a, m_b, g_a, g_b, *, lr, wd, momentum):
    m_a, m_b = (momentum * m + (1 - momentum) * g for m, g in ((m_a, g_a), (m_b, g_b)))
    r_a, r_b = inverse_root64(a @ a.T), inverse_root64(b.T @ b)
    s = np.sqrt(1 - lr * wd)
    new_b = s * b - lr / 2 / s * newton_schulz64(m_b @ r_a) @ r_a
    new_a = s * a - lr / 2 / s * r_b @ newton_schulz64(r_b @ m_a)
    return new_a, new_b, m_a, m_b


def test_follows_float64():
    settings = dict(lr=0.3, wd=0.5, momentum=0.8)
    tx = lora_muon(0.3, weight_decay=0.5, momentum=0.8, **EXACT)
    params = adapter()
    state = tx.init(params)
    for t in range(3):
        grads = gradients(params, t)
        arrays = [
            np.asarray(tree[f"q.linear_{side}"], np.float64)
            for tree in (params, state.momentum_buffer, grads)
            for side in ("in", "out")
        ]
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        a, b, m_a, m_b = lora_muon64(*arrays, **settings)
        assert relative_error(params["q.linear_in"], a) < 3e-6
        assert relative_error(params["q.linear_out"], b) < 3e-6
        assert relative_error(state.momentum_buffer["q.linear_in"], m_a) < 2e-7
        assert relative_error(state.momentum_buffer["q.linear_out"], m_b) < 2e-7


def test_the_products_path_does_not_depend_on_the_factors_scales():
    tx = lora_muon(0.3, weight_decay=0.1, **EXACT)
    params = adapter()
    scaled = {
        "q.linear_in": params["q.linear_in"] * 100,
        "q.linear_out": params["q.linear_out"] / 100,
    }
    expected, actual = w(train(tx, params)[0]), w(train(tx, scaled)[0])
    assert relative_error(expected, w(params)) > 0.1
    assert relative_error(actual, expected) < 3e-6
    # Muon on each factor does depend on them.
    tx = muon(0.3, **EXACT)
    assert relative_error(w(train(tx, scaled)[0]), w(train(tx, params)[0])) > 0.1


def test_nor_on_any_other_change_of_basis():
    tx = lora_muon(0.3, weight_decay=0.1, **EXACT)
    params = adapter()
    change = np.random.default_rng(5).normal(size=(RANK, RANK)) + 2 * np.eye(RANK)
    changed = {
        "q.linear_in": jnp.asarray(change @ params["q.linear_in"], jnp.float32),
        "q.linear_out": jnp.asarray(params["q.linear_out"] @ np.linalg.inv(change), jnp.float32),
    }
    assert relative_error(w(train(tx, changed)[0]), w(train(tx, params)[0])) < 1e-3


def test_with_orthonormal_partners_it_is_muon_at_half_the_rate():
    params = adapter()
    params["q.linear_in"] = jnp.linalg.qr(params["q.linear_in"].T)[0].T
    updates, _ = (tx := lora_muon(0.2, weight_decay=0.0, damping=0.0, **EXACT)).update(
        gradients(params), tx.init(params), params
    )
    half = muon(0.1, weight_decay=0.0, scale_mode="shape_scaling", **EXACT)
    expected, _ = half.update(gradients(params), half.init(params), params)
    factor = max(1, N_OUT / RANK) ** 0.5
    assert relative_error(updates["q.linear_out"], expected["q.linear_out"] / factor) < 1e-5


def test_decay_is_of_the_product():
    params = adapter()
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = lora_muon(0.5, weight_decay=0.4, **EXACT)
    updates, _ = tx.update(zeros, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    assert relative_error(w(new), 0.8 * w(params)) < 3e-7


def test_zero_b_moves_by_half_a_step_and_a_stays():
    params = adapter() | {"q.linear_out": jnp.zeros((N_OUT, RANK))}
    tx = lora_muon(0.3, weight_decay=0.0, **EXACT)
    updates, _ = tx.update(gradients(params), tx.init(params), params)
    assert not updates["q.linear_in"].any()
    new = optax.apply_updates(params, updates)
    sizes = np.linalg.svd(w(new), compute_uv=False)[:RANK]
    assert (np.abs(sizes / 0.15 - 1) < 0.3).all()  # what Newton–Schulz calls 1
    params, _ = train(tx, params)
    assert all(np.isfinite(x).all() for x in params.values())
    # With a momentum of A's own, too: what B does not pass on cannot move the product.
    kicked = tx.init(params)._replace(momentum_buffer=jax.tree.map(jnp.ones_like, params))
    params = params | {"q.linear_out": jnp.zeros((N_OUT, RANK))}
    updates, _ = tx.update(gradients(params), kicked, params)
    assert not updates["q.linear_in"].any()


def test_padding_stays_zero_and_changes_nothing():
    params = adapter()
    padded = {
        "q.linear_in": jnp.pad(params["q.linear_in"], ((0, 3), (0, 0))),
        "q.linear_out": jnp.pad(params["q.linear_out"], ((0, 0), (0, 3))),
    }
    tx = lora_muon(0.3, weight_decay=0.1, **EXACT)
    (expected, _), (actual, state) = train(tx, params), train(tx, padded)
    for tree in (actual, state.momentum_buffer):
        assert not tree["q.linear_in"][RANK:].any()
        assert not tree["q.linear_out"][:, RANK:].any()
    assert relative_error(actual["q.linear_in"][:RANK], expected["q.linear_in"]) < 3e-6
    assert relative_error(actual["q.linear_out"][:, :RANK], expected["q.linear_out"]) < 3e-6


def test_each_slot_is_as_alone_and_idle_slots_stay():
    adapters = [adapter(seed) for seed in range(3)]
    stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)  # noqa: E731
    pool, grads = stack(*adapters), stack(*map(gradients, adapters))
    tx = per_slot(lora_muon(weight_decay=0.1, **EXACT))
    rates = jnp.asarray([0.1, 0.2, 0.3])
    state = tx.init(pool)
    updates, new_state = tx.update(
        grads, state, pool, slots=jnp.asarray([True, False, True]), learning_rate=rates
    )
    for i in (0, 2):
        one = lora_muon(float(rates[i]), weight_decay=0.1, **EXACT)
        expected, _ = one.update(gradients(adapters[i]), one.init(adapters[i]), adapters[i])
        for name in expected:
            assert relative_error(updates[name][i], expected[name]) < 1e-5
    take = lambda tree: jax.tree.map(lambda x: x[1], tree)  # noqa: E731
    assert_same_bits(take(optax.apply_updates(pool, updates)), adapters[1])
    assert_same_bits(take(new_state), take(state))


def test_bfloat16_parameters_keep_a_float32_momentum():
    params = adapter(dtype=jnp.bfloat16)
    tx = lora_muon(0.3, **EXACT)
    updates, state = tx.update(gradients(params), tx.init(params), params)
    assert updates["q.linear_in"].dtype == jnp.bfloat16
    assert state.momentum_buffer["q.linear_in"].dtype == jnp.float32
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    grads = jax.tree.map(lambda x: x.astype(jnp.float32), gradients(params))
    expected, _ = tx.update(grads, tx.init(wide), wide)
    assert relative_error(updates["q.linear_out"], expected["q.linear_out"]) < 5e-3


def test_whitened_rows_are_orthonormal():
    factor = adapter()["q.linear_in"] * 7
    white = whiten(factor, 0.0) @ factor
    np.testing.assert_allclose(white @ white.T, np.eye(RANK), atol=1e-5)


def test_needs_pairs_a_learning_rate_and_parameters():
    tx = lora_muon()
    with pytest.raises(ValueError, match="q.bias has no partner"):
        tx.init(adapter() | {"q.bias": jnp.ones(3)})
    with pytest.raises(ValueError, match="v.linear_out has no partner"):
        tx.init(adapter() | {"v.linear_out": jnp.ones((3, 2))})
    with pytest.raises(ValueError, match="learning_rate is missing"):
        tx.update(adapter(), tx.init(adapter()), adapter())
    with pytest.raises(ValueError, match="params are missing"):
        tx.update(adapter(), tx.init(adapter()), learning_rate=0.1)
    assert lora_pairs(adapter()) == [(0, 1)]
