import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_impl.adamw import adamw
from jax_impl.per_slot import pad_slots, per_slot, put_slot, reset_slots, take_slot
from jax_impl.testing import assert_same_bits

S = 4
SHAPES = {"a": (3, 5), "b": (5,)}


def stacked(seed, n_slots=S):
    rng = np.random.default_rng(seed)
    return {
        k: jnp.asarray(rng.normal(size=(n_slots, *shape)), jnp.float32)
        for k, shape in SHAPES.items()
    }


def mask(slots):
    return jnp.zeros(S, bool).at[jnp.asarray(slots, jnp.int32)].set(True)


def one_decayed(learning_rate):
    return optax.chain(optax.add_decayed_weights(0.1), optax.sgd(learning_rate))


TRANSFORMS = {
    "adabelief": optax.adabelief(1e-2),
    "adadelta": optax.adadelta(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=3),
    "adagrad": optax.adagrad(1e-2),
    "adam": optax.adam(1e-2),
    "adamax": optax.adamax(1e-2),
    "adamw": optax.adamw(1e-2),
    "add_noise": optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "centralize": optax.centralize(),
    "chain": optax.chain(optax.clip(0.5), optax.scale_by_adam(), optax.scale(-1e-2)),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1e-2)),
    "ema": optax.ema(0.9),
    "inject_hyperparams": optax.inject_hyperparams(one_decayed)(
        learning_rate=optax.linear_schedule(1e-1, 0.0, 5)
    ),
    "lamb": optax.lamb(1e-2),
    "lion": optax.lion(1e-2),
    "masked": optax.masked(optax.adam(1e-2), lambda p: jax.tree.map(lambda x: x.ndim == 2, p)),
    "multi_steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "muon": optax.contrib.muon(1e-2),
    "nadam": optax.nadam(1e-2),
    "novograd": optax.novograd(1e-2),
    "partition": optax.partition(
        {"matrix": optax.adam(1e-2), "rest": optax.sgd(1e-1)},
        lambda p: jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "rest", p),
    ),
    "radam": optax.radam(1e-2),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9),
    "scale_by_schedule": optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 4)),
    "sgd_with_momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "trace": optax.trace(0.9),
    "yogi": optax.yogi(1e-2),
}

# Neither powers of the clock nor sums over a parameter: equal to the last bit. XLA computes those
# otherwise for a vector of slots than for one.
EXACT = {
    "adadelta",
    "adagrad",
    "inject_hyperparams",
    "lion",
    "rmsprop",
    "scale_by_schedule",
    "sgd_with_momentum",
    "trace",
}
# Optax's 1 - b**t turns one ulp of the power into 6e-5 of the update, which is lr = 1e-2 of it.
CLOSE = dict(rtol=1e-5, atol=1e-6)

# Their control flow would be compiled anew at every call.
CONTROL_FLOW = {"apply_if_finite", "multi_steps", "muon"}

# How the slots of five steps are named. The index has the length S throughout, with entries
# repeated, negative or too large.
ALL = (tuple(range(S)),) * 5
SOME = ((0, 2), (1,), (), (2, 0, 3), (2,))
INDICES = dict(
    zip(
        SOME,
        ([2, -1, 0, 2], [99, 1, 1, 1], [-1, S, -S, 99], [2, 0, 3, S], [-3, 2, S, 2]),
        strict=True,
    )
)
CALLS = {
    "none": (ALL, lambda slots: None),
    "mask": (SOME, mask),
    "index": (SOME, lambda slots: jnp.asarray(INDICES[slots], jnp.int32)),
}


@functools.cache
def alone(name, steps):
    """Every adapter of the pool trained by itself: parameters and states after each step."""
    tx = TRANSFORMS[name]
    update = jax.jit(tx.update) if name in CONTROL_FLOW else tx.update
    params = [take_slot(stacked(0), i) for i in range(S)]
    states = [tx.init(p) for p in params]
    trajectory = []
    for t, slots in enumerate(steps):
        for i in slots:
            updates, states[i] = update(take_slot(stacked(t + 1), i), states[i], params[i])
            params[i] = optax.apply_updates(params[i], updates)
        trajectory.append(list(zip(params, states, strict=True)))
    return trajectory


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_pool_is_its_adapters_trained_alone(name, call):
    steps, as_argument = CALLS[call]
    tx = per_slot(TRANSFORMS[name])
    update = jax.jit(tx.update) if name in CONTROL_FLOW else tx.update
    params = stacked(0)
    state = tx.init(params)
    for t, slots in enumerate(steps):
        updates, new_state = update(stacked(t + 1), state, params, slots=as_argument(slots))
        for i in set(range(S)) - set(slots):
            idle = take_slot(updates, i)
            assert_same_bits(idle, jax.tree.map(lambda u: jnp.full_like(u, -0.0), idle))
            assert_same_bits(take_slot(new_state, i), take_slot(state, i))
        params, state = optax.apply_updates(params, updates), new_state
        for i, solo in enumerate(alone(name, steps)[t]):
            pooled = take_slot((params, state), i)
            if name in EXACT:
                assert_same_bits(pooled, jax.tree.map(jnp.asarray, solo))
            else:
                chex.assert_trees_all_close(*without_keys(pooled, solo), **CLOSE)


def without_keys(*trees):
    """The trees with PRNG keys as the integers behind them."""

    def plain(x):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return [jax.tree.map(plain, tree) for tree in trees]


def test_an_empty_index_steps_nothing():
    tx = per_slot(optax.adam(1e-2))
    params = stacked(0)
    state = tx.init(params)
    updates, new_state = tx.update(params, state, params, slots=jnp.zeros(0, jnp.int32))
    assert_same_bits(new_state, state)
    assert_same_bits(updates, jax.tree.map(lambda p: jnp.full_like(p, -0.0), params))


def test_noise_differs_between_slots_only_through_their_clocks():
    tx = per_slot(TRANSFORMS["add_noise"])
    zeros = jax.tree.map(jnp.zeros_like, stacked(0))
    updates, state = tx.update(zeros, tx.init(zeros), slots=mask([1]))
    updates, state = tx.update(zeros, state, slots=mask([0, 1]))
    assert (updates["a"][0] != updates["a"][1]).all()
    assert_same_bits(take_slot(state, 2), take_slot(tx.init(zeros), 2))


SPECIALS = np.array(
    [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001, 0x80000001, 0x7F800000],
    np.uint32,
).view(np.float32)  # NaNs with payloads, -0.0, denormals, inf


@pytest.mark.parametrize("as_argument", [mask, jnp.asarray])
@pytest.mark.parametrize("jitted", [False, True])
def test_skipped_slots_keep_every_bit(as_argument, jitted):
    params = {"w": jnp.asarray(np.tile(SPECIALS, (S, 1)))}
    tx = per_slot(optax.trace(0.9))
    state = tx.init(params)._replace(trace=params)
    update = jax.jit(tx.update) if jitted else tx.update
    updates, new_state = update(params, state, slots=as_argument([1]))
    for i in (0, 2, 3):
        assert_same_bits(take_slot(new_state, i), take_slot(state, i))
        assert_same_bits(updates["w"][i], jnp.full(SPECIALS.shape, -0.0))
    assert not np.array_equal(updates["w"][1], updates["w"][0])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("slots", [None, mask([0, 1, 3]), jnp.asarray([0, 1, 3])])
def test_one_slots_non_finite_gradients_stay_in_it(bad, slots):
    tx = per_slot(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    params, grads = stacked(0), stacked(1)
    poisoned = jax.tree.map(lambda g: g.at[1].set(bad), grads)
    clean = tx.update(grads, tx.init(params), params, slots=slots)
    dirty = tx.update(poisoned, tx.init(params), params, slots=slots)
    for i in (0, 2, 3):
        assert_same_bits(take_slot(dirty, i), take_slot(clean, i))
    assert not np.isfinite(dirty[0]["a"][1]).any()


def extra_transform():
    """Adds up all that its extra arguments say, so that each of them shows in the update."""

    def update_fn(updates, state, params=None, *, value, scale, grad, value_fn, **extra):
        del params, extra
        total = scale * value + grad["x"].sum() + value_fn(grad["y"])
        return jax.tree.map(lambda u: u + total, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_fn)


@pytest.mark.parametrize("slots", [None, mask([0, 2]), jnp.asarray([2, 0, -1])])
def test_extra_arguments_are_mapped_broadcast_or_passed_on(slots):
    tx = per_slot(extra_transform(), n_slots=S)
    zeros = {"w": jnp.zeros((S, 2))}
    value = jnp.asarray([1.0, 2.0, 3.0, 4.0])
    grad = {"x": jnp.arange(8.0).reshape(S, 2), "y": 10.0 * jnp.arange(S)}
    extra = dict(value=value, scale=100.0, grad=grad, value_fn=lambda y: 1000.0 * y)
    updates, _ = tx.update(zeros, tx.init(zeros), slots=slots, unused=jnp.ones(()), **extra)
    expected = 100.0 * value + grad["x"].sum(-1) + 1000.0 * grad["y"]
    for i in range(S) if slots is None else (0, 2):
        np.testing.assert_array_equal(updates["w"][i], np.full(2, expected[i]))


def test_an_optax_transform_that_needs_values_gets_them():
    tx = per_slot(optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    grads = stacked(1)
    state = tx.init(grads)
    for value in ([1.0, 9.0, 1.0, 9.0], [2.0, 8.0, 2.0, 8.0], [3.0, 7.0, 3.0, 7.0]):
        _, state = tx.update(grads, state, value=jnp.asarray(value))
    np.testing.assert_array_equal(state.scale, [0.25, 1.0, 0.25, 1.0])


def test_a_line_search_runs_in_every_slot():
    def loss(p):
        return jnp.sum(jnp.square(p["w"])) * 3

    tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))
    params = {"w": jnp.asarray([[1.0, 2.0], [30.0, -4.0], [0.5, 0.0]])}
    value, grad = jax.vmap(jax.value_and_grad(loss))(params)
    lifted = per_slot(tx)
    updates, _ = lifted.update(
        grad, lifted.init(params), params, value=value, grad=grad, value_fn=loss
    )
    for i in range(3):
        one, g = take_slot((params, grad), i)
        solo, _ = tx.update(g, tx.init(one), one, value=value[i], grad=g, value_fn=loss)
        chex.assert_trees_all_close(take_slot(updates, i), solo, rtol=1e-6)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (jnp.ones(S + 1, bool), "slots is a mask of shape"),
        (jnp.ones((S, 1), bool), "slots is a mask of shape"),
        (jnp.ones(S), "slots is float32"),
        (jnp.zeros((2, 2), jnp.int32), "slots is int32"),
        ("all", "slots is"),
    ],
)
def test_slots_that_do_not_fit_are_named(slots, message):
    tx = per_slot(optax.adam(1e-2))
    params = stacked(0)
    state = tx.init(params)
    with pytest.raises(ValueError, match=message):
        tx.update(params, state, params, slots=slots)
    with pytest.raises(ValueError, match=message):
        reset_slots(tx, state, params, slots)


def test_trees_that_do_not_fit_are_named():
    tx = per_slot(adamw(1e-2))
    params = stacked(0)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"params\['c'\] is a scalar"):
        tx.init({"b": jnp.ones((S, 2)), "c": jnp.ones(())})
    with pytest.raises(ValueError, match=r"params\['c'\] has shape \(5,\)"):
        tx.init({"b": jnp.ones((S, 2)), "c": jnp.ones(5)})
    with pytest.raises(ValueError, match=r"updates\['a'\]|params\['a'\]"):
        tx.update(stacked(1, n_slots=3), state, params)
    with pytest.raises(ValueError, match="state"):
        tx.update(params, take_slot(state, 0), params)
    with pytest.raises(ValueError, match="learning_rate has shape"):
        tx.update(params, state, params, learning_rate=jnp.ones(S - 1))
    with pytest.raises(ValueError, match="grad has shape"):
        tx.update(params, state, params, grad={"x": jnp.ones((S, 2)), "y": jnp.ones(2)})


@pytest.mark.parametrize("slots", [None, mask([1]), jnp.asarray([1, -1])])
def test_integer_leaves_have_float0_gradients(slots):
    params = {"w": jnp.ones((S, 2)), "n": jnp.arange(S)}
    grads = jax.grad(lambda p: jnp.sum(p["w"] * p["n"][:, None]), allow_int=True)(params)
    tx = per_slot(optax.masked(optax.adam(1e-2), {"w": True, "n": False}))
    updates, state = tx.update(grads, tx.init(params), params, slots=slots)
    assert updates["n"].dtype == jax.dtypes.float0 and updates["n"].shape == (S,)
    assert updates["w"][1, 0] < 0
    np.testing.assert_array_equal(
        state.inner_state[0].count, [1] * S if slots is None else [0, 1, 0, 0]
    )


@pytest.mark.parametrize("slots", [mask([1]), jnp.asarray([1, 1, S])])
def test_a_tree_without_arrays_needs_n_slots(slots):
    with pytest.raises(ValueError, match="pass n_slots to per_slot"):
        per_slot(optax.adam(1e-2)).init({})
    tx = per_slot(optax.adam(1e-2), n_slots=S)
    state = tx.init({})
    _, state = tx.update({}, state, {})
    updates, state = tx.update({}, state, {}, slots=slots)
    assert updates == {}
    np.testing.assert_array_equal(state[0].count, [1, 2, 1, 1])
    state = reset_slots(tx, state, {}, slots)
    np.testing.assert_array_equal(state[0].count, [1, 0, 1, 1])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, np.int64, np.uint32])
def test_an_index_of_any_width_never_wraps(dtype):
    size = 200  # more than int8 can say
    tx = per_slot(optax.sgd(1.0))
    ones = {"w": jnp.ones((size, 1))}
    far = {np.int64: 2**32 + 3, np.uint32: 2**32 - 1}.get(dtype, 127)
    array = np.asarray if dtype in (np.int64, np.uint32) else jnp.asarray
    updates, _ = tx.update(ones, tx.init(ones), slots=array([5, far], dtype))
    expected = [5, 127] if far == 127 else [5]
    np.testing.assert_array_equal(np.flatnonzero(updates["w"]), expected)


def test_slots_and_hyperparameters_change_without_recompiling():
    tx = per_slot(adamw())
    params = stacked(0)
    state = tx.init(params)

    @jax.jit
    @chex.assert_max_traces(n=2)  # one for masks, one for indices
    def update(grads, state, params, slots, learning_rate, b2):
        return tx.update(grads, state, params, slots=slots, learning_rate=learning_rate, b2=b2)

    for t in range(4):
        lr = jnp.linspace(0.0, 0.1 * t, S)
        masked = update(params, state, params, mask([t]), lr, 0.9 + t / 100)
        indexed = update(params, state, params, jnp.asarray([t, S]), lr, 0.9 + t / 100)
        chex.assert_trees_all_close(masked, indexed, rtol=1e-6)
        assert masked[1].step[t] == state.step[t] + 1 and masked[1].step.sum() == t + 1
        state = masked[1]


def test_donated_buffers_are_reused():
    tx = per_slot(optax.adam(1e-2))
    params = stacked(0)
    state = tx.init(params)
    before = jax.tree.map(jnp.copy, state)
    update = jax.jit(tx.update, donate_argnums=1)
    updates, new_state = update(stacked(1), state, params, slots=jnp.asarray([2]))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert_same_bits(take_slot(new_state, 0), take_slot(before, 0))
    assert new_state[0].count.tolist() == [0, 0, 1, 0]
    assert (updates["a"][2] != 0).all()


def stateful_pool():
    """A pool after one step of everything that states are made of, a PRNG key among it."""
    tx = per_slot(optax.chain(optax.adam(1e-2), optax.add_noise(0.1, 0.5, jax.random.key(3))))
    params = stacked(0)
    return tx, params, tx.update(stacked(1), tx.init(params), params)[1]


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("as_argument", [mask, jnp.asarray])
def test_reset_slots_scrubs_the_named_ones_only(as_argument, jitted):
    tx, params, state = stateful_pool()
    reset = functools.partial(reset_slots, tx)
    new = (jax.jit(reset) if jitted else reset)(state, params, as_argument([1, 3]))
    fresh = tx.init(params)
    for i in range(S):
        assert_same_bits(take_slot(new, i), take_slot(fresh if i in (1, 3) else state, i))


def test_reset_slots_starts_from_the_parameters():
    tx = per_slot(optax.contrib.schedule_free_sgd(1e-2))
    params = stacked(0)
    state = tx.update(stacked(1), tx.init(params), params)[1]
    new = reset_slots(tx, state, stacked(5), jnp.asarray([2, -1, S]))
    assert_same_bits(take_slot(new, 2), take_slot(tx.init(stacked(5)), 2))
    assert_same_bits(take_slot(new, 3), take_slot(state, 3))


@settings(deadline=None, max_examples=20, derandomize=True)
@given(i=st.integers(0, S - 1), j=st.integers(0, S - 1))
def test_slots_move_whole(i, j):
    _, _, state = stateful_pool_once()
    one = take_slot(state, i)
    moved = put_slot(state, j, one)
    assert_same_bits(take_slot(moved, j), one)
    for k in set(range(S)) - {j}:
        assert_same_bits(take_slot(moved, k), take_slot(state, k))
    assert_same_bits(put_slot(moved, j, take_slot(state, j)), state)


stateful_pool_once = functools.cache(stateful_pool)


def test_put_slot_keeps_special_bits():
    pool = {"w": jnp.asarray(np.tile(SPECIALS, (S, 1)))}
    one = {"w": jnp.asarray(SPECIALS[::-1].copy())}
    new = jax.jit(put_slot)(pool, 2, one)
    assert_same_bits(take_slot(new, 2), one)
    assert_same_bits(take_slot(new, 3), take_slot(pool, 3))


@pytest.mark.parametrize("i", [-1, S, -S - 1])
def test_slots_outside_the_pool_are_refused_and_under_jit_not_written(i):
    pool = stacked(0)
    one = take_slot(stacked(1), 0)
    with pytest.raises(ValueError, match=f"slot {i} is outside the pool"):
        take_slot(pool, i)
    with pytest.raises(ValueError, match=f"slot {i} is outside the pool"):
        put_slot(pool, i, one)
    assert_same_bits(jax.jit(put_slot)(pool, i, one), pool)
    assert_same_bits(jax.jit(take_slot)(pool, i), take_slot(pool, 0 if i < 0 else S - 1))


@pytest.mark.parametrize(
    ("one", "message"),
    [
        ({"a": jnp.ones((3, 4)), "b": jnp.ones(5)}, r"slot_tree\['a'\]"),
        ({"a": jnp.ones((3, 5)), "b": jnp.ones((1, 5))}, r"slot_tree\['b'\]"),
        ({"a": jnp.ones((3, 5)), "b": jnp.ones(5, int)}, r"slot_tree\['b'\] is int32"),
        ({"a": jnp.ones((3, 5), jnp.bfloat16), "b": 0}, r"slot_tree\['a'\] is bfloat16"),
        ({"a": jnp.ones((3, 5))}, "structure"),
    ],
)
def test_put_slot_neither_rounds_nor_broadcasts(one, message):
    with pytest.raises(ValueError, match=message):
        put_slot(stacked(0), 1, one)


@pytest.mark.parametrize("n_slots", [1, 5, 8, 64])
def test_padded_lengths_are_few(n_slots):
    lengths = set()
    for count in range(n_slots + 1):
        padded = pad_slots(range(count), n_slots)
        assert padded.dtype == np.int32 and padded[:count].tolist() == list(range(count))
        assert (padded[count:] == -1).all()
        lengths.add(len(padded))
    assert len(lengths) <= np.ceil(np.log2(n_slots)) + 1 and max(lengths) <= n_slots
    with pytest.raises(ValueError, match=f"slots has {n_slots + 1} entries"):
        pad_slots(range(n_slots + 1), n_slots)
