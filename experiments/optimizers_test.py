import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.optimizers import OPTIMIZERS, assigned, optimizer
from jax_impl import per_slot, reset_slots, take_slot
from jax_impl.testing import assert_same_bits, relative_error

OWNERS = ("adamw", "lora_muon", "adamw", "lion")
FLOATS = dict(learning_rate=jnp.asarray([0.1, 0.2, 0.3, 0.4]), weight_decay=0.1)


def pool(seed):
    rng = np.random.default_rng(seed)
    shapes = {"q.linear_in": (4, 3, 8), "q.linear_out": (4, 5, 3)}
    return {k: jnp.asarray(rng.normal(size=shape), jnp.float32) for k, shape in shapes.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_steps_downhill_in_a_pool(name):
    tx, params = per_slot(optimizer(name)), pool(0)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params, **FLOATS)
    for slot in range(4):
        slope = sum(jnp.vdot(updates[k][slot], params[k][slot]) for k in params)
        assert slope < 0


def test_muon_on_b_leaves_a_to_adam():
    params, grads = pool(0), pool(1)
    updates = {}
    for name in ("muon", "adamw", "muon_on_b"):
        tx = per_slot(optimizer(name))
        updates[name], _ = tx.update(grads, tx.init(params), params, **FLOATS)
    for layer, owner in (("q.linear_in", "adamw"), ("q.linear_out", "muon")):
        assert relative_error(updates["muon_on_b"][layer], updates[owner][layer]) < 1e-6


def test_an_unknown_name_is_an_error():
    with pytest.raises(ValueError, match="choose one of adamw, muon"):
        optimizer("adam")


def test_each_slot_is_its_owners():
    params, tx = pool(0), assigned(OWNERS)
    state = tx.init(params)
    for t in range(2):
        updates, state = jax.jit(tx.update)(pool(t + 1), state, params, **FLOATS)
    for slot, name in enumerate(OWNERS):
        alone = per_slot(optimizer(name))
        own_state = alone.init(params)
        for t in range(2):
            expected, own_state = alone.update(pool(t + 1), own_state, params, **FLOATS)
        for k in params:
            assert relative_error(updates[k][slot], expected[k][slot]) < 1e-6


def test_slots_that_are_not_named_stay_and_a_reset_is_one_slots():
    params, tx = pool(0), assigned(OWNERS)
    _, state = tx.update(pool(1), tx.init(params), params, **FLOATS)
    mask = jnp.asarray([False, True, True, True])
    updates, new_state = tx.update(pool(2), state, params, slots=mask, **FLOATS)
    assert_same_bits(take_slot(new_state, 0), take_slot(state, 0))
    assert_same_bits(updates["q.linear_in"][0], jnp.full((3, 8), -0.0))
    fresh = reset_slots(tx, new_state, params, [2])
    assert_same_bits(take_slot(fresh, 2), take_slot(tx.init(params), 2))
    assert_same_bits(take_slot(fresh, 1), take_slot(new_state, 1))
    with pytest.raises(ValueError, match="a mask over the 4 slots"):
        tx.update(pool(2), state, params, slots=jnp.asarray([1]), **FLOATS)
