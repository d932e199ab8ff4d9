"""Two and four processes compute what one does, and end in time when one of them dies."""

import signal

import jax
import numpy as np
import pytest

from jax_impl.mesh_testing import N_SLOTS, PLACEMENTS, on_host, pool_on, tenant
from jax_impl.process_testing import HEARTBEAT_TIMEOUT, SAVED_SLOT, restore_tenant, run_processes
from jax_impl.testing import assert_same_bits, relative_error

RESTORED_SLOT = 6
# Pairs of placements: two processes saved a tenant by the first, one restores it by the second.
MOVES = ("slot:layer", "layer:tensor", "tensor:slot")


def run(processes, devices, task, *arguments):
    ended = run_processes(processes, devices, task, *map(str, arguments))
    assert [one.exit_code for one in ended] == [0] * processes, ended


def arrays(file):
    with np.load(file) as stored:
        return list(stored.values())


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    run(2, 4, "live_and_save", folder, *PLACEMENTS)
    return folder


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, two_processes):
    folder = tmp_path_factory.mktemp("one")
    run(1, 8, "live_and_restore", folder, two_processes, *MOVES)
    return folder


@pytest.mark.parametrize("placement", ["slot", "layer"])
def test_two_processes_compute_the_bits_of_one(one_process, two_processes, placement):
    assert_same_bits(*(arrays(f / f"{placement}.npz") for f in (two_processes, one_process)))


def assert_same_but_for_the_order_of_sums(got, expected):
    for a, b in zip(got, expected, strict=True):
        if b.dtype == np.float32 and b.any():
            assert a.dtype == b.dtype and relative_error(a, b) < 1e-5
        else:
            assert_same_bits(a, b)


def test_two_processes_by_tensor(one_process, two_processes):
    folders = two_processes, one_process
    assert_same_but_for_the_order_of_sums(*(arrays(f / "tensor.npz") for f in folders))


def test_four_processes_by_tensor(one_process, tmp_path):
    run(4, 2, "live", tmp_path, "tensor")
    folders = tmp_path, one_process
    assert_same_but_for_the_order_of_sums(*(arrays(f / "tensor.npz") for f in folders))


@pytest.mark.parametrize("move", MOVES)
def test_a_tenant_goes_on_in_fewer_processes_and_another_placement(
    one_process, two_processes, move
):
    old, _ = move.split(":")
    paths = [
        path for path, _ in jax.tree_util.tree_leaves_with_path(pool_on(None, n_layers=1).state)
    ]
    saved = arrays(two_processes / f"{old}.npz")
    restored = arrays(one_process / f"{move.replace(':', '_')}.npz")
    compared = 0
    for path, before, after in zip(paths, saved[: len(paths)], restored, strict=True):
        if path[0].name not in ("grad_buffer", "accumulated"):
            assert_same_bits(after[RESTORED_SLOT], before[SAVED_SLOT])
            compared += before[SAVED_SLOT].any()
        others = np.delete(after, RESTORED_SLOT, axis=0)
        assert not others.any() or path[0].name == "schedule"
    assert compared > 10, "a tenant that has trained"


def test_when_a_process_dies_the_other_ends_and_its_tenants_live_on(tmp_path):
    victim = 1  # not the coordinator, whose end the others see at once
    ended = run_processes(2, 2, "die", str(victim), str(tmp_path), timeout=60.0)
    dead, left = ended[victim], ended[1 - victim]
    assert dead.exit_code == -signal.SIGKILL, dead.output
    assert left.exit_code not in (0, None), "it must end with an error, by itself"
    assert left.seconds - dead.seconds < 2 * HEARTBEAT_TIMEOUT
    state = restore_tenant(tmp_path / "tenant", pool_on(None, n_layers=1), slot=2)
    for x, expected in zip(
        jax.tree.leaves(state.params), tenant(0, pool_on(None, n_layers=1)).values(), strict=True
    ):
        np.testing.assert_array_equal(x[2], expected)
    assert N_SLOTS - 1 == np.sum(on_host(state.batch_size)[0] == 0)
