"""On eight devices (see `mesh_test`): owners and their state; `placement_on_mesh` has the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl.layerwise import by_layer, layerwise
from jax_impl.mesh_testing import AXIS, mesh_of
from jax_impl.per_slot import per_slot, put_slot, reset_slots, take_slot
from jax_impl.placement import create
from jax_impl.testing import assert_same_bits

MESH = mesh_of(8)
SHAPES = {"layers": [{"w": (4, 6), "b": (6,)} for _ in range(2)], "head": (6, 3)}
PARAMS = jax.tree.map(
    lambda shape: jnp.arange(1.0, 1 + 2 * np.prod(shape)).reshape(2, *shape),
    SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
)
ADAM = per_slot(optax.adam(0.1))


def spread_adam(cost=np.prod):
    tx = layerwise(ADAM, PARAMS, MESH, AXIS, cost=cost)
    return tx, create(lambda: tx.init(PARAMS), lambda tree: by_layer(tree, MESH, AXIS))


def test_the_costliest_come_first_and_some_devices_have_nothing():
    tx, _ = spread_adam()
    layers = [{"w": 0, "b": 3}, {"w": 1, "b": 4}]
    assert tx.owners == {"layers": layers, "head": 2}


def test_updates_and_state_are_those_of_the_transform():
    tx, state = spread_adam()
    expected_state = ADAM.init(PARAMS)
    assert_same_bits(tx.whole(state), expected_state)
    for slots in (jnp.asarray([1, -1]), jnp.asarray([True, False])):
        updates, state = jax.jit(tx.update)(PARAMS, state, PARAMS, slots=slots)
        expected, expected_state = jax.jit(ADAM.update)(PARAMS, expected_state, PARAMS, slots=slots)
        assert_same_bits(updates, expected)
        assert_same_bits(tx.whole(state), expected_state)
        assert_same_bits(tx.owned(tx.whole(state)), state)


def test_slots_of_it_can_be_taken_and_put():
    tx, state = spread_adam()
    _, stepped = jax.jit(tx.update)(PARAMS, state, PARAMS)
    moved = put_slot(state, 1, take_slot(stepped, 0))
    expected = put_slot(tx.whole(state), 1, take_slot(tx.whole(stepped), 0))
    assert_same_bits(tx.whole(moved), expected)
    assert_same_bits(reset_slots(tx, moved, PARAMS, [1]), state)


def test_it_gets_the_norm_of_all_gradients_and_callables_as_they_are():
    def update(updates, state, params=None, *, total_norm, factor, **extra):
        assert callable(factor)
        return jax.tree.map(lambda g: factor(total_norm) + 0 * g, updates), state

    tx = per_slot(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
    spread = layerwise(tx, PARAMS, MESH, AXIS)
    updates, _ = spread.update(PARAMS, spread.init(PARAMS), PARAMS, factor=lambda x: 2 * x)
    for slot in range(2):
        own = [np.ravel(p[slot]) for p in jax.tree.leaves(PARAMS)]
        norm = np.linalg.norm(np.concatenate(own))
        for u in jax.tree.leaves(updates):
            np.testing.assert_allclose(u[slot], 2 * norm, rtol=1e-6)


def test_a_tree_without_it_is_refused():
    with pytest.raises(ValueError, match="no LayerwiseState"):
        by_layer(ADAM.init(PARAMS), MESH, AXIS)
