"""On eight devices (see `mesh_test`): what a step communicates, holds and computes."""

import dataclasses
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.collectives import collectives, count
from jax_impl.mesh_testing import (
    N_SLOTS,
    OPTIMIZER,
    PLACEMENTS,
    RANK,
    gradients,
    live,
    mesh_of,
    on_host,
    pool_on,
    tenant,
)
from jax_impl.muon import muon
from jax_impl.newton_schulz import gram_segments, step_coefficients
from jax_impl.placement import bytes_on_devices
from jax_impl.testing import assert_same_bits, bits, relative_error

DEVICES = 8
# How the slots of a step are named, and how many are then computed.
NAMED = {"all": N_SLOTS, "index": 4}
N_LAYERS, TOGETHER = 4, 4  # at least a matrix for every device, and two batches of them
SEGMENTS = len(gram_segments(step_coefficients(5, "quintic")))


@functools.cache
def pool(placement):
    # The module, not the function of that name.
    sys.modules[muon.__module__].TOGETHER = TOGETHER
    mesh = mesh_of(DEVICES) if placement != "none" else None
    return pool_on(mesh, placement, n_layers=N_LAYERS)


@functools.cache
def lived(placement):
    return live(pool(placement))


def communicated(placement, named):
    lived(placement)
    return collectives(pool(placement).programs[named])


def test_there_are_eight_devices():
    assert jax.device_count() == DEVICES


@pytest.mark.parametrize("named", NAMED)
def test_by_slot_nothing_is_communicated(named):
    assert communicated("slot", named) == []


def test_by_slot_nothing_is_for_a_mask():
    state = lived("slot").state
    pool("slot").step(jax.tree.map(jnp.copy, state), np.zeros(N_SLOTS, bool))
    assert communicated("slot", "mask") == []


@pytest.mark.parametrize("named", NAMED)
def test_by_layer_updates_are_gathered_once(named):
    (found,) = communicated("layer", named)
    updates = sum(p[: NAMED[named]].nbytes for p in jax.tree.leaves(lived("layer").state.params))
    assert found.kind == "all-gather" and updates <= found.bytes <= 1.1 * updates


@pytest.mark.parametrize("named", NAMED)
def test_by_tensor_only_gram_matrices_and_norms_are_reduced(named):
    found, slots, batches = communicated("tensor", named), NAMED[named], 2 * N_LAYERS // TOGETHER
    grams = [one for one in found if (slots, RANK, RANK) in one.shapes]
    others = [one for one in found if one not in grams]
    assert count(found) == {"all-reduce": batches * (SEGMENTS + 1)}
    assert len(grams) == batches * SEGMENTS
    assert sum(one.bytes for one in grams) == 4 * slots * RANK**2 * 2 * N_LAYERS * SEGMENTS
    # The norm: a number of each row of A, one of each B and of the bias. And one between batches.
    numbers = N_LAYERS * (RANK + 1) + 1 + batches - 1
    assert sum(one.bytes for one in others) <= 4 * slots * numbers


def test_by_tensor_blockwise_only_the_norm_is_reduced():
    dims = {"0.linear_in": 1, "0.linear_out": 0}
    config = dataclasses.replace(OPTIMIZER, tensor_model_parallel_size=DEVICES, partition_dim=dims)
    cut = pool_on(mesh_of(DEVICES), "tensor", n_layers=1, config=config, partition_dim=dims)
    cut.step(cut.state)
    (found,) = collectives(cut.programs["all"])
    assert found.kind == "all-reduce" and found.bytes == 4 * N_SLOTS * (RANK + 1)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_state_is_spread_evenly(placement):
    state = lived(placement).state
    spread = state.opt_state if placement == "layer" else state
    whole = state.tx.whole(state.opt_state) if placement == "layer" else state
    total = sum(x.nbytes for x in jax.tree.leaves(whole))
    constants = sum(x.nbytes for x in jax.tree.leaves(whole) if x.ndim == 1)
    held = bytes_on_devices(spread)
    assert len(held) == DEVICES and max(held.values()) <= total / DEVICES * 1.1 + constants


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pools_stay_where_they_are(placement):
    state, shardings = lived(placement).state, pool(placement).shardings
    for x, there in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert x.sharding == there


@pytest.mark.parametrize("placement", ("none", *PLACEMENTS))
def test_co_tenants_keep_every_bit(placement):
    events = lived(placement).events
    for (_, _, before, _), (what, slots, after, _) in itertools.pairwise(events):
        pairs = list(zip(after, before, strict=True))
        changed = [
            slot
            for slot in range(N_SLOTS)
            if any((bits(a[slot]) != bits(b[slot])).any() for a, b in pairs)
        ]
        assert changed == slots, what


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_same_as_on_one_device_but_for_the_order_of_sums(placement):
    # Matrices that go through the iteration together share products; here fewer do.
    stepped = False
    for (what, _, got, report), (_, _, expected, expected_report) in zip(
        lived(placement).events, lived("none").events, strict=True
    ):
        stepped |= what == "step"
        for a, b in zip(got + report, expected + expected_report, strict=True):
            if stepped and b.dtype == np.float32 and b.any():
                assert a.dtype == b.dtype and relative_error(a, b) < 1e-5, what
            else:
                assert_same_bits(a, b)


def test_by_slot_a_tenant_trains_alike_on_every_device():
    state, same = jax.tree.map(jnp.copy, lived("slot").state), pool("slot")
    for slot in range(N_SLOTS):
        state = same.retire(state, slot)
        state = same.install(state, slot, tenant(0, same))
    state = same.accumulate(state, gradients(0, [0] * N_SLOTS, same), np.full(N_SLOTS, 2, np.int32))
    state, report = same.step(state)
    assert report.stepped.all()
    for x in jax.tree.leaves(on_host(state)):
        assert_same_bits(x, np.broadcast_to(x[:1], x.shape))
