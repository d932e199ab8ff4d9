import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.adamw import AdamState, adamw, bias_correction
from jax_impl.per_slot import per_slot
from jax_impl.testing import assert_same_bits

EPS = float(np.finfo(np.float32).eps)
SHAPES = {"w": (6, 11), "b": (7,), "s": ()}


def tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {
        k: jnp.asarray(scale * rng.normal(size=shape), jnp.float32) for k, shape in SHAPES.items()
    }


def positive(seed):
    return jax.tree.map(jnp.square, tree(seed))


def adamw64(p, m, v, g, t, *, lr, wd, b1=0.9, b2=0.999, eps=1e-8, decoupled=True):
    """One step in float64; ``t`` is the clock after it."""
    p, m, v, g = (np.asarray(x, np.float64) for x in (p, m, v, g))
    if not decoupled:
        g = g + wd * p
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    change = -lr / (1 - b1**t) * m / (np.sqrt(v) / np.sqrt(1 - b2**t) + eps)
    return change - (lr * wd * p if decoupled else 0.0), m, v


@pytest.mark.parametrize("clock", [0, 1, 9, 999, 999_999])
@pytest.mark.parametrize("decoupled", [True, False])
def test_a_step_is_within_a_few_eps_of_float64(clock, decoupled):
    settings = dict(lr=0.5, wd=0.4)
    tx = adamw(0.5, weight_decay=0.4, decoupled_weight_decay=decoupled)
    params, grads = tree(0), tree(1)
    state = AdamState(jnp.int32(clock), tree(2), positive(3))
    updates, new = jax.jit(tx.update)(grads, state, params)
    assert new.step == clock + 1
    for k in SHAPES:
        u, m, v = adamw64(
            params[k],
            state.exp_avg[k],
            state.exp_avg_sq[k],
            grads[k],
            clock + 1,
            decoupled=decoupled,
            **settings,
        )
        # Each is a sum of two terms: a few eps of the larger one.
        terms = [np.abs(x).max() for x in (u, m, v, params[k], grads[k])]
        np.testing.assert_allclose(updates[k], u, rtol=8 * EPS, atol=4 * EPS * max(terms))
        np.testing.assert_allclose(new.exp_avg[k], m, rtol=4 * EPS, atol=2 * EPS * max(terms))
        np.testing.assert_allclose(new.exp_avg_sq[k], v, rtol=4 * EPS)


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.95, 0.999, 0.9999])
@pytest.mark.parametrize("t", [1, 2, 10, 1000, 10**6])
def test_bias_correction_does_not_cancel(decay, t):
    expected = 1 - np.longdouble(decay) ** t
    actual = bias_correction(decay, jnp.int32(t))
    np.testing.assert_allclose(np.float64(actual), float(expected), rtol=4 * EPS)
    # A float32 decay is another number, but what follows from it is right again.
    rounded = np.float32(decay)
    expected = 1 - np.longdouble(rounded) ** t
    actual = bias_correction(jnp.asarray(rounded), jnp.int32(t))
    np.testing.assert_allclose(np.float64(actual), float(expected), rtol=4 * EPS)


def test_zero_gradients_decay_and_nothing_else():
    params = tree(0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = adamw(0.1, weight_decay=0.5)
    updates, state = tx.update(zeros, tx.init(params), params)
    for k in SHAPES:
        np.testing.assert_allclose(updates[k], -0.05 * params[k], rtol=4 * EPS)
        assert not state.exp_avg[k].any() and not state.exp_avg_sq[k].any()


def test_hyperparameters_given_anew_are_those_of_construction():
    given = dict(learning_rate=0.3, weight_decay=0.7, b1=0.6, b2=0.9, eps=1e-3)
    params, state = tree(0), AdamState(jnp.int32(3), tree(2), positive(3))
    expected = adamw(**given).update(tree(1), state, params)
    assert_same_bits(adamw().update(tree(1), state, params, **given), expected)
    other = adamw(9.0, weight_decay=9.0, b1=0.1, b2=0.1, eps=9.0)
    assert_same_bits(other.update(tree(1), state, params, **given), expected)
    for name, value in given.items():  # each of them alone, too
        partly = adamw(**{**given, name: 0.123})
        assert_same_bits(partly.update(tree(1), state, params, **{name: value}), expected)


def test_slots_have_hyperparameters_and_clocks_of_their_own():
    tx = per_slot(adamw())
    pool = jax.tree.map(lambda *x: jnp.stack(x), *map(tree, range(3)))
    grads = jax.tree.map(lambda *x: jnp.stack(x), *map(tree, range(3, 6)))
    names = ("learning_rate", "weight_decay", "b1", "b2", "eps")
    rng = np.random.default_rng(0)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def update(grads, state, hyperparameters):
        return tx.update(grads, state, pool, **hyperparameters)

    state = tx.init(pool)
    state = state._replace(step=jnp.asarray([0, 5, 500], jnp.int32))
    for _ in range(2):
        given = {name: jnp.asarray(rng.uniform(0.1, 0.9, 3), jnp.float32) for name in names}
        updates, new_state = update(grads, state, given)
        for i in range(3):
            lr, wd, b1, b2, eps = (float(given[name][i]) for name in names)
            for k in SHAPES:
                u, m, v = adamw64(
                    pool[k][i],
                    state.exp_avg[k][i],
                    state.exp_avg_sq[k][i],
                    grads[k][i],
                    int(state.step[i]) + 1,
                    lr=lr,
                    wd=wd,
                    b1=b1,
                    b2=b2,
                    eps=eps,
                )
                np.testing.assert_allclose(updates[k][i], u, rtol=8 * EPS, atol=16 * EPS)
                np.testing.assert_allclose(new_state.exp_avg[k][i], m, atol=8 * EPS)
                np.testing.assert_allclose(new_state.exp_avg_sq[k][i], v, rtol=8 * EPS)
        state = new_state
    assert state.step.tolist() == [2, 7, 502]


def test_bfloat16_parameters_keep_float32_moments():
    params = {"w": jnp.full((3,), 3.0, jnp.bfloat16)}
    grads = {"w": jnp.full((3,), 0.1, jnp.bfloat16)}
    tx = adamw(0.1)
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["w"].dtype == jnp.bfloat16
    chex.assert_type([state.exp_avg["w"], state.exp_avg_sq["w"]], jnp.float32)
    g = float(grads["w"][0])
    np.testing.assert_allclose(state.exp_avg_sq["w"], 0.001 * g * g, rtol=4 * EPS)


def test_float64_under_x64():
    with jax.enable_x64(True):
        params, grads = (
            jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), tree(i)) for i in (0, 1)
        )
        tx = adamw(0.5, weight_decay=0.5)
        updates, state = tx.update(grads, tx.init(params), params)
        assert state.step.dtype == jnp.int32
        for k in SHAPES:
            u, _, v = adamw64(params[k], 0.0, 0.0, grads[k], 1, lr=0.5, wd=0.5)
            np.testing.assert_allclose(updates[k], u, rtol=1e-13)
            np.testing.assert_allclose(state.exp_avg_sq[k], v, rtol=1e-15)


def test_errors():
    params = tree(0)
    tx = adamw()
    with pytest.raises(ValueError, match="learning_rate is missing"):
        tx.update(params, tx.init(params), params)
    with pytest.raises(ValueError, match="params"):
        tx.update(params, tx.init(params), learning_rate=0.1)
