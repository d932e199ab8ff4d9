import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_impl.config import OptimizerConfig
from jax_impl.multi_lora import multi_lora_optimizer
from jax_impl.per_slot import per_slot, put_slot, take_slot
from jax_impl.schedule import ParamScheduleConfig, param_schedule, slot_schedule
from jax_impl.testing import assert_same_bits, relative_error
from jax_impl.train_state import SlotTrainState

S, RANK = 3, 4
TX = multi_lora_optimizer(OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest"))
SHAPES = {"linear_in": (RANK, 6), "linear_out": (5, RANK), "bias": (5,)}
FULL = {k: jax.ShapeDtypeStruct((S, *shape), jnp.float32) for k, shape in SHAPES.items()}

SCHEDULES = (
    slot_schedule(lr=0.1, batch_size=2, num_step=5, lr_decay_style="cosine", weight_decay=0.5),
    slot_schedule(lr=0.2, batch_size=3, lr_warmup_iters=2, weight_decay=0.1),
    slot_schedule(
        lr=0.3,
        batch_size=1,
        num_step=9,
        lr_warmup_fraction=0.15,
        lr_decay_style="WSD",
        lr_wsd_decay_iters=4,
    ),
)
BATCH_SIZES = (2, 3, 1)


def weights(seed, rank=RANK):
    rng = np.random.default_rng(seed)
    shapes = {"linear_in": (rank, 6), "linear_out": (5, rank), "bias": (5,)}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def gradients(seed):
    rng = np.random.default_rng(1000 + seed)
    return {k: jnp.asarray(rng.normal(size=s.shape), jnp.float32) for k, s in FULL.items()}


def empty_pool(tx=TX, params=FULL):
    return SlotTrainState.create(tx, params, rank=RANK)


def only(slot, count):
    return jnp.zeros(S, jnp.int32).at[slot].set(count)


# Every operation as one program, in which the slot is a value like any other.
@functools.partial(jax.jit, static_argnames="rank")
def install(state, slot, params, kind, *, rank=RANK):
    schedule = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(y) for y in x])[kind], *SCHEDULES)
    batch_size = jnp.asarray(BATCH_SIZES)[kind]
    return state.install(slot, params, rank=rank, batch_size=batch_size, schedule=schedule)


accumulate = jax.jit(SlotTrainState.accumulate)
step = jax.jit(SlotTrainState.step)
discard = jax.jit(SlotTrainState.discard)
retire = jax.jit(SlotTrainState.retire)


def filled_pool():
    """Slots 0 and 2 in training, of different batch sizes and ranks, slot 1 free."""
    state = install(empty_pool(), 0, weights(0), 0)
    state = install(state, 2, weights(1, rank=3), 1, rank=3)
    for seed in range(2):
        state = accumulate(state, gradients(seed), jnp.asarray([2, 0, 3]))
        state, _ = step(state, jnp.asarray([True, False, True]))
    return state


FILLED = filled_pool()


def row(state, i):
    """Everything that slot ``i`` holds, on the host."""
    return [np.asarray(leaf)[i] for leaf in jax.tree.leaves(state)]


def as_seen(state):
    """A state whose gradient buffer holds its sums: what is left in it otherwise does not count."""
    if isinstance(state, SlotTrainState):
        return dataclasses.replace(state, grad_buffer=state.grad_sum)
    return state


def assert_same_row(state, i, other, message=""):
    state, other = as_seen(state), as_seen(other)
    for a, b in zip(row(state, i), row(other, i), strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), message


# --- properties over random lives ---------------------------------------------------------------

SLOT = st.integers(0, S - 1)
EVENT = st.one_of(
    st.tuples(st.just("install"), SLOT, st.integers(0, 2), st.sampled_from([3, RANK])),
    st.tuples(st.just("accumulate"), SLOT, st.integers(1, 3)),
    st.tuples(st.just("fill"), SLOT),
    st.tuples(st.just("poison"), SLOT, st.sampled_from([np.nan, np.inf, -np.inf])),
    st.tuples(st.just("step"), st.sets(SLOT, min_size=1), st.sampled_from(["mask", "index"])),
    st.tuples(st.just("discard"), SLOT),
    st.tuples(st.just("retire"), SLOT),
)


def as_slots(slots, how):
    if how == "mask":
        return jnp.asarray([i in slots for i in range(S)])
    return jnp.asarray([*slots, *[-1, S, 99][len(slots) :]], jnp.int32)


class Life:
    """A pool, and for every tenant its twin: a pool in which it lives alone."""

    def __init__(self):
        self.pool = empty_pool()
        self.twins = {}

    def full(self, slot):
        return bool(self.pool.ready[slot])

    def room(self, slot):
        return int(self.pool.batch_size[slot] - self.pool.accumulated[slot])

    def on_slot(self, slot, operation):
        """Applies ``operation`` to the pool and the tenant's twin; nothing else may change."""
        before = self.pool
        self.pool = operation(before)
        self.twins[slot] = operation(self.twins[slot])
        for other in set(range(S)) - {slot}:
            assert_same_row(self.pool, other, before)

    def apply(self, t, kind, slot, *args):
        if kind == "install" and slot not in self.twins:
            schedule, rank = args
            self.twins[slot] = empty_pool()
            params = weights(t, rank)
            self.on_slot(slot, lambda pool: install(pool, slot, params, schedule, rank=rank))
        elif kind == "step":
            self.step({i for i in slot if i in self.twins and self.full(i)}, *args)
        elif slot not in self.twins:
            return
        elif kind == "accumulate" and args[0] <= self.room(slot):
            samples = only(slot, args[0])
            self.on_slot(slot, lambda pool: accumulate(pool, gradients(t), samples))
        elif kind in ("fill", "poison") and self.room(slot):
            grads = gradients(t)
            if kind == "poison":
                grads["bias"] = grads["bias"].at[slot, 0].set(args[0])
            samples = only(slot, self.room(slot))
            self.on_slot(slot, lambda pool: accumulate(pool, grads, samples))
        elif kind == "discard":
            self.on_slot(slot, lambda pool: discard(pool, jnp.asarray([slot])))
        elif kind == "retire":
            self.on_slot(slot, lambda pool: retire(pool, slot))
            assert_same_row(self.pool, slot, empty_pool())
            del self.twins[slot]

    def step(self, slots, how):
        before = self.pool
        self.pool, report = step(before, as_slots(slots, how))
        for i in range(S):
            finite = all(np.isfinite(g[i]).all() for g in before.grad_sum.values())
            assert bool(report.stepped[i]) == (i in slots and finite)
            assert bool(report.skipped[i]) == (i in slots and not finite)
            if i in slots:
                self.twins[i], twin_report = step(self.twins[i], as_slots({i}, how))
                assert_same_row(report, i, twin_report)
                if not finite:
                    assert_same_row(self.pool, i, discard(before, jnp.asarray([i])))
            else:
                assert_same_row(self.pool, i, before)

    def check(self):
        for i in range(S):
            if i in self.twins:
                assert_same_row(self.pool, i, self.twins[i])
            else:
                assert_same_row(self.pool, i, empty_pool())


@settings(deadline=None, max_examples=25, derandomize=True)
@given(events=st.lists(EVENT, min_size=8, max_size=30))
def test_tenants_live_as_if_alone(events):
    life = Life()
    for slot in (0, 1):  # so that few events fall on free slots
        life.apply(100 + slot, "install", slot, slot, RANK)
    for t, event in enumerate(events):
        life.apply(t, *event)
        life.check()


# --- what one step does -------------------------------------------------------------------------


def test_a_step_is_the_optimizer_on_the_mean_at_the_schedules_rate():
    grads = gradients(7)
    state = accumulate(FILLED, grads, jnp.asarray([1, 0, 3]))
    state = accumulate(state, gradients(8), jnp.asarray([1, 0, 0]))
    new, report = step(state, as_slots({0, 2}, "mask"))
    assert FILLED.samples.tolist() == [4, 0, 6]
    assert new.samples.tolist() == [6, 0, 9] == report.samples.tolist()
    total = jax.tree.map(lambda a, b: a.at[0].add(b[0]), grads, gradients(8))
    mean = jax.tree.map(
        lambda g: g / jnp.asarray([2, 1, 3]).reshape((S,) + (1,) * (g.ndim - 1)), total
    )
    lr_0, wd_0 = param_schedule(SCHEDULES[0])(4)
    lr_2, wd_2 = param_schedule(SCHEDULES[1])(6)
    lr, wd = jnp.asarray([lr_0, 0, lr_2]), jnp.asarray([wd_0, 0, wd_2])
    updates, opt_state = TX.update(
        mean, FILLED.opt_state, FILLED.params, learning_rate=lr, weight_decay=wd
    )
    np.testing.assert_allclose(report.learning_rate, lr, rtol=3e-7)
    np.testing.assert_allclose(report.weight_decay, wd, rtol=3e-7)
    for i in (0, 2):
        norm = np.sqrt(sum(np.sum(np.square(np.float64(g[i]))) for g in mean.values()))
        np.testing.assert_allclose(report.grad_norm[i], norm, rtol=1e-6)
        expected = optax.apply_updates(FILLED.params, updates)
        # the iteration's hundredfold of 6e-8
        chex.assert_trees_all_close(take_slot(new.params, i), take_slot(expected, i), atol=2e-5)
        chex.assert_trees_all_close(
            take_slot(new.opt_state, i), take_slot(opt_state, i), rtol=1e-5, atol=1e-6
        )
    assert_same_row(new, 1, state)
    assert new.accumulated.tolist() == [0, 0, 0]
    assert not any(g.any() for g in new.grad_sum.values())


def test_a_mask_an_index_and_none_do_the_same():
    state = accumulate(FILLED, gradients(3), jnp.asarray([2, 0, 3]))
    by_mask = step(state, jnp.asarray([True, False, True]))
    by_none = step(state)
    by_index = step(state, jnp.asarray([2, -1, 0, 99, 2]))
    by_short_index = step(state, jnp.asarray([2, 0]))
    assert_same_bits(by_none, by_mask)
    for other in (by_index, by_short_index):
        assert other[0].samples.tolist() == by_mask[0].samples.tolist()
        chex.assert_trees_all_close(other, by_mask, rtol=1e-5, atol=2e-5)
        assert_same_row(other[0], 1, state)
    nothing, report = step(state, jnp.zeros(0, jnp.int32))
    assert_same_bits(nothing, state)
    assert not any(field.any() for field in report)


def test_hyperparameters_go_before_the_schedule():
    state = accumulate(FILLED, gradients(3), jnp.asarray([2, 0, 3]))
    lr = jnp.asarray([0.0, 0.0, 0.7])
    scheduled, _ = step(state, as_slots({0, 2}, "mask"))
    for slots in (as_slots({0, 2}, "mask"), jnp.asarray([2, 0])):
        new, report = step(state, slots, learning_rate=lr, weight_decay=0.25)
        assert_same_bits(take_slot(new.params, 0), take_slot(state.params, 0))
        assert report.learning_rate.tolist() == lr.tolist()
        assert report.weight_decay.tolist() == [0.25, 0.0, 0.25]
        assert (new.params["bias"][2] != scheduled.params["bias"][2]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("how", ["mask", "index"])
def test_non_finite_gradients_are_skipped_and_reported(bad, how):
    grads = gradients(3)
    grads["linear_in"] = grads["linear_in"].at[0, 1, 2].set(bad)
    clean = step(accumulate(FILLED, gradients(3), jnp.asarray([2, 0, 3])), as_slots({0, 2}, how))
    new, report = step(accumulate(FILLED, grads, jnp.asarray([2, 0, 3])), as_slots({0, 2}, how))
    assert report.stepped.tolist() == [False, False, True]
    assert report.skipped.tolist() == [True, False, False]
    assert not np.isfinite(report.grad_norm[0])
    assert_same_row(new, 0, FILLED)  # whose sum was empty
    assert_same_row(new, 2, clean[0])
    assert report.samples.tolist() == new.samples.tolist() == [4, 0, 9]


@pytest.mark.parametrize("how", ["mask", "index"])
def test_norms_over_the_threshold_are_skipped_and_reported(how):
    full = accumulate(FILLED, gradients(3), jnp.asarray([2, 0, 3]))
    clean, reported = step(full, as_slots({0, 2}, how))
    threshold = float(reported.grad_norm[2])  # a sum over more samples, so a smaller mean
    assert reported.grad_norm[0] > threshold
    careful = dataclasses.replace(full, grad_norm_skip_threshold=threshold)
    new, report = step(careful, as_slots({0, 2}, how))
    assert report.skipped.tolist() == [True, False, False]
    assert report.stepped.tolist() == [False, False, True]
    np.testing.assert_array_equal(report.grad_norm, reported.grad_norm)
    assert_same_row(new, 0, FILLED)  # whose sum was empty
    assert_same_row(new, 2, clean)
    own = jnp.full(S, np.inf).at[2].set(0.0)
    _, report = full.step(as_slots({0, 2}, how), grad_norm_skip_threshold=own)
    assert report.skipped.tolist() == [False, False, True]


@pytest.mark.parametrize("scale_mode", ["shape_scaling", "unit_rms_norm"])
def test_rank_aware_a_tenant_trains_the_same_in_any_pool(scale_mode):
    """Rank 2 in a pool of rank 4 and in one of rank 2; padded sizes would give other factors."""

    def train(pool_rank, rank_aware):
        config = OptimizerConfig(
            optimizer="muon",
            muon_fp32_matmul_prec="highest",
            muon_scale_mode=scale_mode,
            rank_aware=rank_aware,
        )
        shapes = {"linear_in": (pool_rank, 6), "linear_out": (5, pool_rank), "bias": (5,)}
        pool = {k: jax.ShapeDtypeStruct((S, *shape), jnp.float32) for k, shape in shapes.items()}
        state = SlotTrainState.create(multi_lora_optimizer(config), pool, rank=pool_rank)
        state = state.install(
            1,
            weights(0, rank=2),
            rank=2,
            batch_size=1,
            schedule=slot_schedule(lr=0.1, batch_size=1),
        )
        for t in range(2):
            grads = {
                k: jnp.stack(
                    [jnp.pad(g, [(0, n - m) for m, n in zip(g.shape, shapes[k], strict=True)])] * S
                )
                for k, g in weights(t + 1, rank=2).items()
            }
            state, _ = step(accumulate(state, grads, only(1, 1)), jnp.arange(S) == 1)
        assert not state.params["linear_in"][1, 2:].any()
        return state.params["linear_in"][1, :2], state.params["linear_out"][1, :, :2]

    wide, narrow, padded = train(4, True), train(2, True), train(4, False)
    for a, b in zip(wide, narrow, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert relative_error(padded[1], narrow[1]) > 1e-2


def test_a_decoupled_learning_rate_follows_the_slots_schedule():
    config = OptimizerConfig(
        decoupled_lr=0.05, embedding_or_output_parameters=("linear_out",), clip_grad=0.0
    )
    state = empty_pool(multi_lora_optimizer(config))
    schedule = slot_schedule(
        lr=0.4, batch_size=1, num_step=4, lr_decay_style="linear", weight_decay=0.0
    )
    state = state.install(2, weights(0), rank=RANK, batch_size=1, schedule=schedule)
    for rest in (1.0, 0.75):
        old = state.params
        state, report = step(accumulate(state, gradients(3), only(2, 1)), jnp.arange(S) == 2)
        moved = {k: jnp.abs(state.params[k][2] - old[k][2]) for k in SHAPES}
        np.testing.assert_allclose(moved["linear_out"], np.full((5, RANK), rest * 0.05), rtol=1e-3)
        np.testing.assert_allclose(moved["linear_in"], np.full((RANK, 6), rest * 0.4), rtol=1e-3)
        np.testing.assert_allclose(report.learning_rate[2], rest * 0.4, rtol=1e-6)


def test_idle_slots_keep_every_bit():
    # Denormals and signed zeros; the last is a signalling NaN, which any arithmetic would quieten.
    special = np.array([1e-40, -1e-45, -0.0, 0.0, np.nan], np.float32)
    special.view(np.uint32)[-1] = 0x7F800001
    odd = {**weights(5), "bias": jnp.asarray(special)}
    state = dataclasses.replace(FILLED, params=put_slot(FILLED.params, 0, odd))
    state = accumulate(state, gradients(3), jnp.asarray([0, 0, 3]))
    for how in ("mask", "index"):
        new, _ = step(state, as_slots({2}, how))
        new = retire(install(discard(new, jnp.asarray([2])), 1, weights(6), 2), 2)
        assert np.asarray(new.params["bias"][0]).tobytes() == special.tobytes()


def test_accumulation_adds_sums_and_does_not_read_unnamed_slots():
    grads = jax.tree.map(lambda g: g.at[1].set(jnp.nan), gradients(3))
    state = accumulate(FILLED, grads, jnp.asarray([1, 0, 2]))
    again = accumulate(state, gradients(4), jnp.asarray([1, 0, 0]))
    assert again.accumulated.tolist() == [2, 0, 2]
    assert again.ready.tolist() == [True, False, False]
    for k, g in gradients(4).items():
        np.testing.assert_array_equal(again.grad_sum[k][0], grads[k][0] + g[0])
        np.testing.assert_array_equal(again.grad_sum[k][2], grads[k][2])
        assert not again.grad_sum[k][1].any()
    dropped = again.discard([2])
    assert dropped.accumulated.tolist() == [2, 0, 0]
    assert_same_row(dropped, 0, again)
    assert_same_row(dropped, 2, FILLED)


def test_bfloat16_gradients_are_summed_in_float32():
    narrow = jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradients(3))
    state = FILLED.accumulate(narrow, [1, 0, 0]).accumulate(narrow, [1, 0, 0])
    for k, g in narrow.items():
        np.testing.assert_array_equal(state.grad_sum[k][0], 2 * g[0].astype(jnp.float32))


# --- install and retire -------------------------------------------------------------------------


def test_a_narrow_adapter_is_padded_with_zeros_that_stay_zero():
    assert FILLED.rank.tolist() == [4, 0, 3] and FILLED.batch_size.tolist() == [2, 0, 3]
    state = FILLED
    inner = weights(1, rank=3)
    fresh = install(empty_pool(), 2, inner, 1, rank=3)
    for k in ("linear_in", "linear_out"):
        own = fresh.params[k][2][tuple(slice(n) for n in inner[k].shape)]
        np.testing.assert_array_equal(own, inner[k])
    for seed in range(3):
        grads = gradients(seed)
        grads["linear_in"] = grads["linear_in"].at[2, 3:].set(0.0)
        grads["linear_out"] = grads["linear_out"].at[2, :, 3:].set(0.0)
        fresh, _ = step(accumulate(fresh, grads, only(2, 3)))
    assert not fresh.params["linear_in"][2, 3:].any()
    assert not fresh.params["linear_out"][2, :, 3:].any()
    assert fresh.params["linear_in"][2, :3].all()
    assert (state.params["linear_in"][2, :3] != 0).all()


@pytest.mark.parametrize("slot", [0, 2])
def test_a_retired_slot_is_as_new(slot):
    state = accumulate(FILLED, gradients(3), only(slot, 1))
    new = retire(state, slot)
    assert_same_row(new, slot, empty_pool())
    for other in set(range(S)) - {slot}:
        assert_same_row(new, other, state)
    reused = install(new, slot, weights(9), 2)
    assert_same_row(reused, slot, install(empty_pool(), slot, weights(9), 2))


def test_a_tenant_resumes_where_it_stopped_even_in_another_slot():
    kept = take_slot(FILLED, 0)
    state = FILLED.retire(0).install(
        1,
        kept.params,
        rank=RANK,
        batch_size=2,
        schedule=SCHEDULES[0],
        samples=kept.samples,
        opt_state=kept.opt_state,
    )
    assert_same_bits(take_slot(as_seen(state), 1), take_slot(as_seen(FILLED), 0))
    assert_same_row(state, 0, empty_pool())
    assert_same_row(state, 2, FILLED)
    moved, _ = step(accumulate(state, gradients(3), only(1, 2)))
    stayed = jax.tree.map(lambda g: g.at[0].set(g[1]), gradients(3))
    expected, _ = step(accumulate(FILLED, stayed, only(0, 2)))
    chex.assert_trees_all_close(take_slot(moved, 1), take_slot(expected, 0), atol=2e-5)


def test_a_cold_start_at_a_later_position():
    state = empty_pool().install(
        0, weights(0), rank=RANK, batch_size=2, schedule=SCHEDULES[0], samples=6
    )
    state, report = state.accumulate(gradients(0), [2, 0, 0]).step()
    np.testing.assert_allclose(report.learning_rate[0], param_schedule(SCHEDULES[0])(6)[0])
    assert report.samples.tolist() == [8, 0, 0]


def test_a_transform_without_state_serves_too():
    tx = per_slot(optax.sgd(0.5), n_slots=S)
    state = SlotTrainState.create(tx, FULL, rank=RANK)
    arguments = dict(rank=RANK, batch_size=1, schedule=SCHEDULES[2])
    state = state.install(1, weights(0), opt_state=take_slot(state.opt_state, 1), **arguments)
    for slots in ([1], as_slots({1}, "mask")):
        new, report = state.accumulate(gradients(0), [0, 1, 0]).step(slots)
        assert report.stepped.tolist() == [False, True, False]
        expected = weights(0)["bias"] - 0.5 * gradients(0)["bias"][1]
        np.testing.assert_allclose(new.params["bias"][1], expected, rtol=1e-6)
    assert not new.retire(1).params["bias"].any()


# --- misuse -------------------------------------------------------------------------------------

GOOD = dict(rank=RANK, batch_size=2, schedule=SCHEDULES[0])
MISUSES = {
    "occupied": (lambda s: s.install(0, weights(0), **GOOD), "slot 0 is occupied"),
    "install outside": (lambda s: s.install(S, weights(0), **GOOD), "slot 3 is outside"),
    "install below": (lambda s: s.install(-1, weights(0), **GOOD), "slot -1 is outside"),
    "rank over": (lambda s: s.install(1, weights(0, 5), **{**GOOD, "rank": 5}), "rank is 5"),
    "rank zero": (lambda s: s.install(1, weights(0, 0), **{**GOOD, "rank": 0}), "rank is 0"),
    "no batch": (
        lambda s: s.install(1, weights(0), **{**GOOD, "batch_size": 0}),
        "batch_size is 0",
    ),
    "negative": (lambda s: s.install(1, weights(0), samples=-1, **GOOD), "samples is -1"),
    "shape": (
        lambda s: s.install(1, {**weights(0), "bias": jnp.ones(4)}, **GOOD),
        r"params\['bias'\] has shape \(4,\)",
    ),
    "axes": (
        lambda s: s.install(1, {**weights(0), "bias": jnp.ones((1, 5))}, **GOOD),
        r"params\['bias'\] has shape \(1, 5\)",
    ),
    "not its rank": (lambda s: s.install(1, weights(0, 2), **{**GOOD, "rank": 3}), "linear_in"),
    "structure": (lambda s: s.install(1, {"bias": jnp.ones(5)}, **GOOD), "structure"),
    "optimizer state": (
        lambda s: s.install(1, weights(0), opt_state=take_slot(s.params, 0), **GOOD),
        "structure",
    ),
    "retire free": (lambda s: s.retire(1), "slot 1 is free"),
    "retire outside": (lambda s: s.retire(S), "slot 3 is outside"),
    "step free": (lambda s: s.step([1]), "slot 1 is free"),
    "step free mask": (lambda s: s.step(as_slots({1}, "mask")), "slot 1 is free"),
    "step early": (lambda s: s.step([0]), "slot 0 cannot step"),
    "step half": (lambda s: s.accumulate(gradients(0), only(2, 2)).step([2]), "slot 2 cannot step"),
    "step mask": (lambda s: s.step(jnp.ones(2, bool)), "slots is a mask"),
    "discard mask": (lambda s: s.discard(jnp.ones(2, bool)), "slots is a mask"),
    "samples free": (lambda s: s.accumulate(gradients(0), only(1, 1)), "slot 1 is free"),
    "samples many": (lambda s: s.accumulate(gradients(0), only(2, 4)), "slot 2: more samples"),
    "samples negative": (
        lambda s: s.accumulate(gradients(0), only(2, -1)),
        "slot 2: samples is neg",
    ),
    "samples length": (lambda s: s.accumulate(gradients(0), [1, 0]), r"samples is int32\[2\]"),
    "samples floats": (lambda s: s.accumulate(gradients(0), [0.7, 0, 0]), "samples is float32"),
    "gradient shape": (
        lambda s: s.accumulate({**gradients(0), "bias": jnp.ones((S, 4))}, only(0, 1)),
        r"grads\['bias'\] has shape",
    ),
    "gradient structure": (lambda s: s.accumulate({}, only(0, 1)), "structure"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_refused_and_changes_nothing(misuse):
    operation, message = MISUSES[misuse]
    before = jax.tree.map(jnp.copy, FILLED)
    with pytest.raises(ValueError, match=message):
        operation(FILLED)
    assert_same_bits(FILLED, before)


def test_under_jit_misuse_does_not_take_part():
    three = jnp.full(S, 3)
    for slot in (0, 2, -1, S):  # occupied, or outside
        assert_same_bits(install(FILLED, slot, weights(9), 0), FILLED)
    for slot in (1, -1, S):  # free, or outside
        assert_same_bits(retire(FILLED, slot), FILLED)
        assert_same_bits(discard(FILLED, jnp.asarray([slot])), FILLED)
        assert_same_bits(step(FILLED, jnp.asarray([slot]))[0], FILLED)
    assert_same_bits(step(FILLED, jnp.ones(S, bool))[0], FILLED)
    assert_same_bits(step(FILLED, jnp.arange(S))[0], FILLED)
    state = accumulate(FILLED, gradients(0), three)  # too many for 0, 1 is free
    assert state.accumulated.tolist() == [0, 0, 3]
    assert_same_row(state, 0, FILLED)
    assert_same_row(state, 1, FILLED)
    assert_same_bits(accumulate(FILLED, gradients(0), -three), FILLED)

    @jax.jit
    def install_counts(state, batch_size, samples):
        arguments = dict(rank=RANK, schedule=SCHEDULES[0])
        return state.install(1, weights(9), batch_size=batch_size, samples=samples, **arguments)

    assert_same_bits(install_counts(FILLED, 0, 0), FILLED)
    assert_same_bits(install_counts(FILLED, 2, -1), FILLED)
    assert install_counts(FILLED, 2, 4).samples.tolist() == [4, 4, 6]


# --- as a JAX citizen ---------------------------------------------------------------------------


def test_nothing_recompiles_and_old_buffers_are_reused():
    def traced_once(function):
        return jax.jit(chex.assert_max_traces(function, n=1), donate_argnums=0)

    @traced_once
    def install_any(state, slot, params, schedule, batch_size, samples):
        arguments = dict(batch_size=batch_size, schedule=schedule, samples=samples)
        return state.install(slot, params, rank=RANK, **arguments)

    @traced_once
    def train(state, grads, slots, momentum, max_norm):
        state = state.accumulate(grads, state.batch_size)
        return state.step(slots, momentum=momentum, max_norm=max_norm)

    retire_any = traced_once(lambda state, slot: state.retire(slot))
    chex.clear_trace_counter()
    state = jax.tree.map(jnp.copy, empty_pool())
    for i in range(S):
        schedule = jax.tree.map(
            lambda x, like: jnp.asarray(x, like.dtype), SCHEDULES[i], take_slot(state.schedule, i)
        )
        state = install_any(state, i, weights(i), schedule, BATCH_SIZES[i], 0)
    for t in range(4):
        old = state
        slots = jnp.asarray([t % S, -1])
        state, report = train(old, gradients(t), slots, 0.9 - t / 10, jnp.full(S, 1.0 + t))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        assert report.stepped.tolist() == [i == t % S for i in range(S)]
        state = discard(state, jnp.ones(S, bool))
    for i in range(S):
        state = retire_any(state, i)
    assert_same_bits(state, empty_pool())


def test_is_a_pytree_of_stacked_leaves():
    shapes = jax.eval_shape(empty_pool)
    assert all(leaf.shape[0] == S for leaf in jax.tree.leaves(shapes))
    state, report = jax.eval_shape(lambda s: s.step(jnp.asarray([0])), shapes)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, shapes, jax.eval_shape(lambda: FILLED))
    assert all(field.shape == (S,) for field in report)
    assert FILLED.n_slots == S and FILLED.occupied.tolist() == [True, False, True]


def test_a_bfloat16_model_has_float32_masters():
    narrow = {k: jax.ShapeDtypeStruct(v.shape, jnp.bfloat16) for k, v in FULL.items()}
    state = install(empty_pool(params=narrow), 0, weights(0), 0)
    chex.assert_type(jax.tree.leaves((state.params, state.grad_sum)), jnp.float32)
    for k, w in weights(0).items():
        np.testing.assert_array_equal(state.params[k][0], w)
    model = state.model_params()
    chex.assert_type(jax.tree.leaves(model), jnp.bfloat16)
    assert_same_bits(model["bias"][0], weights(0)["bias"].astype(jnp.bfloat16))
    # A step too small for bfloat16 still reaches the master.
    state = accumulate(state, gradients(0), only(0, 2))
    new, _ = state.step(learning_rate=1e-6, weight_decay=0.0)
    assert (new.params["bias"][0] != state.params["bias"][0]).all()
    assert_same_bits(new.model_params()["bias"][0], model["bias"][0])
    assert empty_pool().model_params()["bias"].dtype == jnp.float32


def test_float64_under_x64():
    narrow = accumulate(FILLED, gradients(3), jnp.asarray([2, 0, 3]))
    in_float32, _ = step(narrow, as_slots({0, 2}, "mask"))
    with jax.enable_x64(True):
        wide = {k: jax.ShapeDtypeStruct(v.shape, jnp.float64) for k, v in FULL.items()}
        state = SlotTrainState.create(TX, wide, rank=RANK)
        floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        chex.assert_type(floats, jnp.float64)
        arguments = dict(rank=RANK, batch_size=3, schedule=SCHEDULES[1])
        state = state.install(1, jax.tree.map(np.asarray, weights(0)), **arguments)
        grads = jax.tree.map(lambda g: jnp.asarray(np.asarray(g), jnp.float64), gradients(3))
        new, report = step(state.accumulate(grads, [0, 3, 0]), jnp.asarray([1, -1, S]))
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        mean = np.concatenate([np.ravel(g[1]) for g in grads.values()]) / 3
        np.testing.assert_allclose(report.grad_norm[1], np.linalg.norm(mean), rtol=1e-14)
        assert report.samples.tolist() == [0, 3, 0]
    assert in_float32.params["bias"].dtype == jnp.float32
    same = install(empty_pool(), 1, weights(0), 1)
    same, _ = step(accumulate(same, gradients(3), only(1, 3)))
    for k in SHAPES:
        assert relative_error(same.params[k][1], new.params[k][1]) < 1e-5


def test_create_needs_a_rank_and_slots():
    with pytest.raises(ValueError, match="rank is 0"):
        SlotTrainState.create(TX, FULL, rank=0)
    with pytest.raises(ValueError, match="leading axis"):
        SlotTrainState.create(TX, {"a": jnp.ones((2, 3, 4)), "b": jnp.ones((3, 4))}, rank=3)
    assert isinstance(FILLED.schedule, ParamScheduleConfig)


def assert_same_tenant(a, b):
    assert_same_bits(jax.tree.leaves(a), jax.tree.leaves(b))


def test_move_and_clone_keep_every_bit():
    state = accumulate(filled_pool(), gradients(5), jnp.asarray([1, 0, 2]))
    for operation, source_is_free in ((SlotTrainState.move, True), (SlotTrainState.clone, False)):
        for run in (operation, jax.jit(operation)):
            after = run(state, 0, 1)
            assert_same_tenant(after.tenant(1), state.tenant(0))
            assert_same_tenant(after.tenant(2), state.tenant(2))
            assert bool(after.occupied[0]) != source_is_free
            if source_is_free:
                assert_same_bits(take_slot(after, 0).params, take_slot(empty_pool(), 0).params)


def test_a_clone_goes_its_own_way():
    state = filled_pool().clone(0, 1)
    for seed in (7, 8):
        state = accumulate(state, gradients(seed), jnp.asarray([2, 2, 0]))
        state, _ = step(state, jnp.asarray([True, True, False]))
    moved = jax.tree.map(lambda x: jnp.any(x[0] != x[1]), state.params)
    assert all(jax.tree.leaves(moved))


def test_a_tenant_fits_into_pools_of_other_ranks_and_no_others():
    state = filled_pool()
    wide = {
        n: jax.ShapeDtypeStruct((2, *(6 if d == RANK else d for d in s)), jnp.float32)
        for n, s in {"linear_in": (RANK, 7), "linear_out": (5, RANK), "bias": (5,)}.items()
    }
    with pytest.raises(ValueError, match=r"the tenant's \.params\['linear_in'\].* is float32"):
        SlotTrainState.create(TX, wide, rank=6).place(0, state.tenant(2))
    narrow = {
        n: jax.ShapeDtypeStruct((2, *(3 if d == RANK else d for d in s)), jnp.float32)
        for n, s in SHAPES.items()
    }
    pool = SlotTrainState.create(TX, narrow, rank=3)
    with pytest.raises(ValueError, match="is not zero beyond its rank"):
        pool.place(1, state.tenant(2))  # its gradients were not, either
    state = install(state.retire(2), 2, weights(1, rank=3), 1, rank=3)
    placed = pool.place(1, state.tenant(2))  # of rank 3
    assert_same_bits(placed.params["linear_in"][1], state.params["linear_in"][2, :3])
    back = state.retire(2).place(2, placed.tenant(1))
    assert_same_tenant(back.tenant(2), state.tenant(2))
    with pytest.raises(ValueError, match="the tenant's rank is 4; this pool holds ranks 1 to 3"):
        pool.place(0, state.tenant(0))
    other = SlotTrainState.create(per_slot(optax.adam(1.0)), FULL, rank=RANK)
    with pytest.raises(ValueError, match="the tenant has the structure"):
        other.place(0, state.tenant(0))


BAD_MOVES = [
    (SlotTrainState.move, (0, 2), "slot 2 is occupied"),
    (SlotTrainState.move, (0, 0), "slot 0 is occupied"),
    (SlotTrainState.move, (0, 3), "slot 3 is outside"),
    (SlotTrainState.move, (0, -1), "slot -1 is outside"),
    (SlotTrainState.move, (-1, 1), "slot -1 is outside"),
    (SlotTrainState.move, (3, 1), "slot 3 is outside"),
    (SlotTrainState.move, (1, 1), "slot 1 is free"),
    (SlotTrainState.clone, (0, 0), "slot 0 is occupied"),
    (SlotTrainState.clone, (1, 1), "slot 1 is free"),
    (SlotTrainState.clone, (-1, 1), "slot -1 is outside"),
    (SlotTrainState.clone, (3, 1), "slot 3 is outside"),
]


@pytest.mark.parametrize(("operation", "arguments", "message"), BAD_MOVES)
def test_bad_moves_change_nothing(operation, arguments, message):
    state = filled_pool()
    with pytest.raises(ValueError, match=message):
        operation(state, *arguments)
    assert_same_bits(jax.jit(operation)(state, *arguments), state)  # there are no errors under jit


def test_hyperparameters_of_the_wrong_length_or_name_are_refused():
    state = accumulate(filled_pool(), gradients(1), jnp.asarray([2, 0, 3]))
    for slots in (None, jnp.asarray([0, 2]), jnp.asarray([True, False, True])):
        for wrong in (jnp.ones(2), jnp.ones(1), jnp.ones(4)):
            with pytest.raises(ValueError, match=r"b1 has shape \(\d,\)"):
                state.step(slots, b1=wrong)
        with pytest.raises(TypeError, match="lr is none of .*learning_rate"):
            state.step(slots, lr=0.1)


def test_counts_do_not_wrap():
    state = filled_pool()
    samples = jnp.asarray([2**31 - 1, 0, 0])
    with pytest.raises(ValueError, match="slot 0: more samples than its batch size"):
        state.accumulate(gradients(0), samples)
    assert_same_bits(accumulate(state, gradients(0), samples), state)
    late = dataclasses.replace(state, samples=state.samples.at[0].set(2**31 - 2))
    late = accumulate(late, gradients(0), jnp.asarray([2, 0, 0]))
    late, report = step(late)
    assert report.samples[0] == late.samples[0] == 2**31 - 1


def test_weights_beyond_their_rank_are_refused():
    with pytest.raises(ValueError, match=r"\['linear_in'\] is not zero beyond its rank 3"):
        empty_pool().install(0, weights(0), rank=3, batch_size=1, schedule=SCHEDULES[0])
    with pytest.raises(ValueError, match="rank is 2.5"):
        empty_pool().install(0, weights(0), rank=2.5, batch_size=1, schedule=SCHEDULES[0])


def test_families_are_not_mistaken_for_those_of_another_pool():
    configs = [OptimizerConfig(optimizer="adam", adam_beta1=b1) for b1 in (0.5, 0.9)]
    one = empty_pool(multi_lora_optimizer(*configs))
    one = one.install(0, weights(0), rank=RANK, batch_size=1, schedule=SCHEDULES[0], family=1)
    for other in (configs[::-1], configs[:1]):
        with pytest.raises(ValueError, match="of family 1 of another pool"):
            empty_pool(multi_lora_optimizer(*other)).place(0, one.tenant(0))


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.lists(st.sampled_from(["move", "clone", "step", "discard", "retire"]), max_size=8))
def test_co_tenants_never_change(operations):
    """Slot 2 is left alone, whatever happens in 0 and 1."""
    state = accumulate(filled_pool(), gradients(9), jnp.asarray([0, 0, 1]))
    alone = state.tenant(2)
    for seed, operation in enumerate(operations):
        occupied = [slot for slot in (0, 1) if state.occupied[slot]]
        free = [slot for slot in (0, 1) if slot not in occupied]
        if operation in ("move", "clone") and occupied and free:
            state = getattr(state, operation)(occupied[0], free[0])
        elif operation == "step" and occupied:
            counts = [int(state.batch_size[s]) if s in occupied else 0 for s in (0, 1)]
            state = state.discard(jnp.asarray([0, 1]))
            state = accumulate(state, gradients(seed), jnp.asarray([*counts, 0]))
            state, _ = step(state, jnp.asarray([bool(c) for c in counts] + [False]))
        elif operation == "discard":
            state = discard(state, jnp.asarray([0, 1]))
        elif operation == "retire" and len(occupied) > 1:
            state = retire(state, occupied[1])
        assert_same_tenant(state.tenant(2), alone)


@pytest.mark.parametrize(
    "configs",
    [
        [OptimizerConfig(optimizer="adam")],
        [OptimizerConfig(optimizer="muon"), OptimizerConfig(optimizer="adam")],
        [OptimizerConfig(optimizer="muon", muon_scalar_optimizer="lion", decoupled_lr=0.1)],
        [OptimizerConfig(optimizer="adaptive_muon")],
    ],
)
def test_a_fresh_pool_can_be_donated(configs):
    """No two of its leaves may share a buffer."""
    state = empty_pool(multi_lora_optimizer(*configs))
    doubled = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s), donate_argnums=0)(state)
    assert_same_bits(doubled.params, empty_pool().params)


def test_hyperparameters_of_each_step_share_one_program():
    run = jax.jit(lambda state, **floats: state.step(**floats))
    state = accumulate(filled_pool(), gradients(1), jnp.asarray([2, 0, 3]))
    floats = dict(learning_rate=0.1, weight_decay=0.2, momentum=0.9, b1=0.8, b2=0.9, eps=1e-6)
    floats |= dict(max_norm=0.5)
    results = []
    for factor in (1.0, 0.5, 0.25):
        after, _ = run(state, **{name: jnp.float32(factor * x) for name, x in floats.items()})
        results.append(after)
    assert run._cache_size() == 1
    for name in SHAPES:
        assert (results[0].params[name][0] != results[1].params[name][0]).any(), name


def test_hyperparameters_are_each_slots_own():
    """A slot steps as it would if its numbers were everyone's."""
    state = accumulate(filled_pool(), gradients(1), jnp.asarray([2, 0, 3]))
    for name, values in (
        ("learning_rate", (0.1, 0.3)),
        ("weight_decay", (0.0, 0.5)),
        ("momentum", (0.5, 0.9)),
        ("b1", (0.5, 0.9)),
        ("b2", (0.9, 0.99)),
        ("eps", (1e-8, 1e-2)),
        ("max_norm", (0.1, 1.0)),
    ):
        mixed, _ = step(state, **{name: jnp.asarray([values[0], 0.0, values[1]])})
        for slot, value in ((0, values[0]), (2, values[1])):
            alike, _ = step(state, **{name: jnp.full(S, value)})
            assert_same_tenant(mixed.tenant(slot), alike.tenant(slot))
