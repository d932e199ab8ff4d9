import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl.lion import lion
from jax_impl.per_slot import per_slot
from jax_impl.testing import relative_error


def tree(seed):
    rng = np.random.default_rng(seed)
    shapes = {"w": (4, 6), "b": (5,)}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def lion64(p, m, g, *, lr, wd, b1, b2):
    p, m, g = (np.asarray(x, np.float64) for x in (p, m, g))
    new = p - lr * wd * p - lr * np.sign(b1 * m + (1 - b1) * g)
    return new, b2 * m + (1 - b2) * g


def test_follows_float64():
    settings = dict(wd=0.4, b1=0.8, b2=0.7)
    tx = lion(0.5, weight_decay=0.4, b1=0.8, b2=0.7)
    params = tree(0)
    state = tx.init(params)
    for t in range(3):
        grads = tree(t + 1)
        updates, new_state = jax.jit(tx.update)(grads, state, params)
        for k in params:
            p, m = lion64(params[k], state.exp_avg[k], grads[k], lr=0.5, **settings)
            assert relative_error(params[k] + updates[k], p) < 2e-7
            assert relative_error(new_state.exp_avg[k], m) < 2e-7
        params, state = optax.apply_updates(params, updates), new_state


def test_is_optaxs_lion_without_its_order_of_arguments():
    """Optax decays by lr * wd * p too, and has the betas' other defaults."""
    params, grads = tree(0), tree(1)
    ours, theirs = lion(0.1, b1=0.9, b2=0.99, weight_decay=0.3), optax.lion(0.1, weight_decay=0.3)
    u, _ = ours.update(grads, ours.init(params), params)
    v, _ = theirs.update(grads, theirs.init(params), params)
    np.testing.assert_allclose(u["w"], v["w"], rtol=1e-6)


def test_no_gradient_and_no_moment_leave_decay_alone():
    params = tree(0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = lion(0.5, weight_decay=0.2)
    updates, state = tx.update(zeros, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.1 * params["w"], rtol=1e-6)
    assert not state.exp_avg["w"].any()


def test_each_slot_may_have_floats_of_its_own():
    pool = {"w": jnp.stack([tree(0)["w"]] * 2)}
    grads = {"w": jnp.stack([tree(1)["w"]] * 2)}
    tx = per_slot(lion(weight_decay=0.0))
    given = dict(learning_rate=jnp.asarray([0.1, 0.3]), b2=jnp.asarray([0.5, 0.9]))
    updates, state = tx.update(grads, tx.init(pool), pool, **given)
    np.testing.assert_allclose(updates["w"][1], 3 * updates["w"][0], rtol=1e-6)
    np.testing.assert_allclose(state.exp_avg["w"][0], 5 * state.exp_avg["w"][1], rtol=1e-6)


def test_bfloat16_parameters_keep_a_float32_moment():
    params = {"w": jnp.ones((3, 4), jnp.bfloat16)}
    tx = lion(0.1, b2=0.95)
    updates, state = tx.update(params, tx.init(params), params)
    assert updates["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(state.exp_avg["w"], np.full((3, 4), 0.05), rtol=1e-6)


def test_needs_a_learning_rate_and_parameters():
    tx = lion()
    with pytest.raises(ValueError, match="learning_rate is missing"):
        tx.update(tree(1), tx.init(tree(0)), tree(0))
    with pytest.raises(ValueError, match="params are missing"):
        tx.update(tree(1), tx.init(tree(0)), learning_rate=0.1)
