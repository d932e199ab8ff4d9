import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_impl.clip import NORM_EPS, clip_by_total_norm, clip_factor, total_l2_norm
from jax_impl.per_slot import per_slot
from jax_impl.testing import assert_same_bits

GRADS = {"w": jnp.asarray([[3.0, 0.0], [0.0, 4.0]]), "b": jnp.asarray([12.0]), "s": jnp.float32(84)}
NORM = 85.0  # 3, 4, 12, 84


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 84.0, 85.0, 85.1, 1e6])
def test_the_factor_of_megatron(max_norm):
    tx = clip_by_total_norm(max_norm)
    clipped, state = tx.update(GRADS, tx.init(GRADS))
    factor = min(1.0, max_norm / (NORM + NORM_EPS))
    assert state.norm == NORM
    for k, g in GRADS.items():
        np.testing.assert_allclose(clipped[k], factor * np.asarray(g), rtol=3e-7)
    if max_norm > NORM + 0.01:
        assert_same_bits(clipped, GRADS)


def test_megatrons_epsilon_shows_where_the_norm_is_small():
    grads = jax.tree.map(lambda g: g / NORM * 3e-6, GRADS)
    tx = clip_by_total_norm(1e-6)
    clipped, _ = tx.update(grads, tx.init(grads))
    for k, g in grads.items():
        np.testing.assert_allclose(clipped[k], np.asarray(g) / 4, rtol=1e-6)


@pytest.mark.parametrize("max_norm", [0.0, -1.0])
def test_off_at_zero_and_below_but_the_norm_is_kept(max_norm):
    tx = clip_by_total_norm(max_norm)
    clipped, state = tx.update(GRADS, tx.init(GRADS))
    assert_same_bits(clipped, GRADS)
    assert state.norm == NORM


def test_a_nan_norm_clips_nothing():
    grads = {**GRADS, "b": jnp.asarray([jnp.nan])}
    tx = clip_by_total_norm(1.0)
    clipped, state = tx.update(grads, tx.init(grads))
    assert np.isnan(state.norm)
    assert_same_bits(clipped["w"], grads["w"])
    assert clip_factor(jnp.float32(jnp.inf), 1.0) == 0.0


def test_zero_gradients_stay_zero():
    zeros = jax.tree.map(jnp.zeros_like, GRADS)
    tx = clip_by_total_norm(1.0)
    clipped, state = tx.update(zeros, tx.init(zeros))
    assert_same_bits(clipped, zeros)
    assert state.norm == 0


@pytest.mark.parametrize("size", [(2000, 2000), (4_000_000,), (1, 4_000_000), (4_000_000, 1)])
@pytest.mark.parametrize("jitted", [True, False])
def test_the_norm_of_a_large_leaf_keeps_its_digits(size, jitted):
    x = np.random.default_rng(0).normal(0.1, 0.01, size).astype(np.float32)
    expected = np.sqrt(np.sum(np.square(x, dtype=np.float64)))
    norm = (jax.jit(total_l2_norm) if jitted else total_l2_norm)({"w": jnp.asarray(x)})
    assert abs(float(norm) / expected - 1) < 1e-6
    lifted = jax.jit(jax.vmap(total_l2_norm))({"w": jnp.asarray(x)[None]})[0]
    assert abs(float(lifted) / expected - 1) < 1e-6


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=6, max_size=6),
    max_norm=st.floats(2**-6, 1e4, width=32),
)
def test_the_clipped_norm_is_at_most_max_norm(values, max_norm):
    grads = {"w": jnp.asarray(values[:4]).reshape(2, 2), "b": jnp.asarray(values[4:])}
    expected = np.linalg.norm(np.float64(values))
    tx = clip_by_total_norm(max_norm)
    clipped, state = tx.update(grads, tx.init(grads))
    # squares below 1e-38 are lost in float32
    np.testing.assert_allclose(state.norm, expected, rtol=1e-6, atol=1e-18)
    assert total_l2_norm(clipped) <= max_norm * (1 + 1e-6)


def test_max_norm_and_total_norm_are_taken_anew():
    tx = clip_by_total_norm(1.0)
    expected = clip_by_total_norm(5.0).update(GRADS, tx.init(GRADS))
    assert_same_bits(tx.update(GRADS, tx.init(GRADS), max_norm=5.0), expected)
    clipped, state = tx.update(GRADS, tx.init(GRADS), total_norm=jnp.float32(2.0))
    assert state.norm == 2.0
    np.testing.assert_allclose(clipped["b"], 6.0, rtol=1e-6)
    with pytest.raises(ValueError, match="max_norm is missing"):
        clip_by_total_norm(None).update(GRADS, tx.init(GRADS))


def test_each_slot_has_its_own_norm():
    tx = per_slot(clip_by_total_norm(1.0))
    grads = {"w": jnp.asarray([[3.0, 4.0], [0.3, 0.4], [jnp.nan, 1.0]])}
    clipped, state = tx.update(grads, tx.init(grads), max_norm=jnp.asarray([0.0, 0.25, 1.0]))
    np.testing.assert_allclose(state.norm, [5.0, 0.5, np.nan], rtol=1e-6)
    np.testing.assert_allclose(clipped["w"], [[3, 4], [0.15, 0.2], [np.nan, 1]], rtol=1e-5)


def test_bfloat16_gradients_have_a_float32_norm():
    grads = {"w": jnp.full((1000,), 0.1, jnp.bfloat16), "b": jnp.ones(3, jnp.float16)}
    tx = clip_by_total_norm(1.0)
    clipped, state = tx.update(grads, tx.init(grads))
    assert state.norm.dtype == jnp.float32
    assert jax.tree.map(lambda x: x.dtype, clipped) == jax.tree.map(lambda x: x.dtype, grads)
    value = float(grads["w"][0])
    np.testing.assert_allclose(state.norm, np.sqrt(1000 * value**2 + 3), rtol=1e-6)


def test_an_empty_tree_has_norm_zero_and_x64_a_float64_one():
    assert total_l2_norm({}) == 0.0
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=1000))
        norm = total_l2_norm({"w": x})
        assert norm.dtype == jnp.float64
        np.testing.assert_allclose(norm, np.linalg.norm(x), rtol=1e-14)
