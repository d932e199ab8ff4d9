"""On eight devices (see `mesh_test`): gradients are reduced once per step, and completely."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.collectives import collectives
from jax_impl.mesh_testing import AXIS, mesh_of
from jax_impl.placement import replicated
from jax_impl.reduction import accumulate_on_devices, device_sums, reduce_sums

MESH, DEVICES, N_SLOTS, MICRO_BATCHES = mesh_of(8), 8, 16, 3
PARAMS = {"a": jnp.ones((N_SLOTS, 2, 5), jnp.bfloat16), "b": jnp.ones((N_SLOTS, 3))}


def gradients(params, batch):
    """Of a loss in which every sample belongs to one slot and has a weight of its own."""

    def loss(params):
        slots = batch["slot"]
        each = sum(p[slots].astype(jnp.float32).sum(range(1, p.ndim)) for p in params.values())
        return jnp.sum(batch["weight"] * each)

    return jax.grad(loss)(params)


def batch(seed):
    rng = np.random.default_rng(seed)
    slot, weight = rng.integers(N_SLOTS, size=32), rng.integers(9, size=32)
    return {"slot": jnp.asarray(slot), "weight": jnp.asarray(weight, jnp.float32)}


@functools.cache
def accumulate():
    step = accumulate_on_devices(gradients, MESH, AXIS)
    return jax.jit(step, donate_argnums=0).lower(sums(), PARAMS, batch(0)).compile()


def sums():
    return device_sums(PARAMS, MESH, AXIS)


def test_micro_batches_communicate_nothing():
    assert collectives(accumulate()) == []


@pytest.mark.parametrize("by_slot", [False, True])
def test_sums_are_over_all_devices_and_communicated_once(by_slot):
    total, params = sums(), jax.device_put(PARAMS, replicated(PARAMS, MESH))
    place = functools.partial(jax.device_put, device=accumulate().input_shardings[0][2])
    expected = jax.tree.map(lambda p: np.zeros(p.shape, np.float32), PARAMS)
    for seed in range(MICRO_BATCHES):
        total = accumulate()(total, params, place(batch(seed)))
        whole = gradients(PARAMS, batch(seed))
        expected = jax.tree.map(lambda s, g: s + np.asarray(g, np.float32), expected, whole)
    reduce = functools.partial(reduce_sums, mesh=MESH, axis=AXIS, by_slot=by_slot)
    reduce = jax.jit(reduce).lower(total).compile()
    for name, x in reduce(total).items():
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(x, expected[name])  # small integers: exact in any order
        own_slots = N_SLOTS // DEVICES if by_slot else N_SLOTS
        assert x.addressable_shards[0].data.shape[0] == own_slots
    found = collectives(reduce)
    assert {one.kind for one in found} == {"reduce-scatter" if by_slot else "all-reduce"}
    size = sum(4 * p.size for p in PARAMS.values())
    assert sum(one.bytes for one in found) == (size // DEVICES if by_slot else size)


def test_each_device_holds_one_sum():
    for name, x in sums().items():
        assert x.addressable_shards[0].data.shape == (1, *PARAMS[name].shape)
