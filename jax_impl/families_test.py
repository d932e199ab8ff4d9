import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl.config import OptimizerConfig
from jax_impl.families import by_family
from jax_impl.multi_lora import multi_lora_optimizer
from jax_impl.per_slot import per_slot
from jax_impl.schedule import slot_schedule
from jax_impl.testing import assert_same_bits
from jax_impl.train_state import SlotTrainState

MUON = OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest")
ADAM = OptimizerConfig(optimizer="adam")
SHAPES = {"linear_in": (4, 24), "linear_out": (20, 4), "bias": (20,)}


def pool(*configs, families):
    shapes = {n: jax.ShapeDtypeStruct((4, *s), jnp.float32) for n, s in SHAPES.items()}
    state = SlotTrainState.create(multi_lora_optimizer(*configs), shapes, rank=4)
    for slot, family in families.items():
        rng = np.random.default_rng(slot)
        weights = {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
        schedule = slot_schedule(lr=0.05, batch_size=2, num_step=20, weight_decay=0.3)
        kwargs = dict(rank=4, batch_size=2, schedule=schedule)
        state = state.install(slot, weights, family=family, **kwargs)
    return state


@jax.jit
def train(state, grads):
    state = state.accumulate(grads, jnp.where(state.occupied, 2, 0))
    return state.step()


def gradients(seed):
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=(4, *s)).astype(np.float32) for n, s in SHAPES.items()}


def test_each_family_trains_as_in_a_pool_of_its_own():
    """Bit for bit as alone in the same program, and but for rounding as in its family's own."""
    families = {0: 0, 1: 1, 3: 0}
    mixed = pool(MUON, ADAM, families=families)
    alone = {slot: pool(MUON, ADAM, families={slot: f}) for slot, f in families.items()}
    own = {0: pool(MUON, families={0: 0, 3: 0}), 1: pool(ADAM, families={1: 0})}
    for seed in range(4):
        grads = gradients(seed)
        mixed, report = train(mixed, grads)
        alone = {slot: train(state, grads)[0] for slot, state in alone.items()}
        own = {family: train(state, grads)[0] for family, state in own.items()}
    assert report.stepped.tolist() == [True, True, False, True]
    for slot, family in families.items():
        tenant = mixed.tenant(slot)
        assert_same_bits(jax.tree.leaves(tenant), jax.tree.leaves(alone[slot].tenant(slot)))
        twin = own[family].tenant(slot)
        for x, y in (
            (tenant.params, twin.params),
            (tenant.opt_state.families[family], twin.opt_state),
        ):
            chex.assert_trees_all_close(x, y, rtol=1e-4, atol=1e-6)


def test_the_state_of_the_other_family_stays_fresh():
    state = pool(MUON, ADAM, families={0: 0, 1: 1})
    fresh = state.opt_state
    for seed in range(2):
        state, _ = train(state, gradients(seed))
    for slot, other in ((0, 1), (1, 0)):
        take = lambda tree: jax.tree.map(lambda x: x[slot], tree)  # noqa: B023, E731
        assert_same_bits(take(state.opt_state.families[other]), take(fresh.families[other]))


def test_a_nan_in_one_family_stays_there():
    nan = optax.stateless(lambda updates, params: jax.tree.map(lambda g: g * jnp.nan, updates))
    tx = per_slot(by_family([optax.sgd(1.0), nan]))
    grads = {"w": jnp.ones((3, 2))}
    updates, _ = tx.update(grads, tx.init(grads), grads, family=jnp.array([0, 1, 7]))
    assert jnp.isnan(updates["w"]).tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert updates["w"][2].tolist() == [-1.0, -1.0]  # out of range counts as 0


def test_retire_forgets_the_family_and_install_checks_it():
    state = pool(MUON, ADAM, families={1: 1})
    assert int(state.retire(1).family[1]) == 0
    schedule = slot_schedule(lr=0.1, batch_size=1)
    weights = {n: np.zeros(s, np.float32) for n, s in SHAPES.items()}
    for families, family in ((state, 2), (state, -1), (pool(MUON, families={}), 1)):
        with pytest.raises(ValueError, match=r"family is -?\d; it must be in \[0, [12]\)"):
            families.install(0, weights, rank=4, batch_size=1, schedule=schedule, family=family)


def test_one_program_for_all_assignments():
    train.clear_cache()
    for families in ({0: 0, 1: 1}, {0: 1, 1: 0}, {2: 1}):
        train(pool(MUON, ADAM, families=families), gradients(0))
    assert train._cache_size() == 1
