import json
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl.checkpoint import CheckpointError, TenantCheckpoints
from jax_impl.config import OptimizerConfig
from jax_impl.families import by_family
from jax_impl.multi_lora import multi_lora_optimizer
from jax_impl.per_slot import per_slot
from jax_impl.schedule import slot_schedule
from jax_impl.testing import assert_same_bits, damage_a_file
from jax_impl.train_state import SlotTrainState

MUON = OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest")
ADAM = OptimizerConfig(optimizer="adam", adam_beta2=0.95)
SHAPES = {"q.linear_in": (8, 12), "q.linear_out": (10, 8), "q.bias": (10,)}


def at_rank(rank):
    """The shapes of a pool of another rank than 8."""
    return {n: tuple(rank if d == 8 else d for d in shape) for n, shape in SHAPES.items()}


def make_pool(*configs, n_slots=4, rank=8, tx=None):
    tx = tx or multi_lora_optimizer(*(configs or (MUON,)))
    pool = {n: jax.ShapeDtypeStruct((n_slots, *s), jnp.float32) for n, s in at_rank(rank).items()}
    return SlotTrainState.create(tx, pool, rank=rank)


def weights(rank, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=s).astype(np.float32) for n, s in at_rank(rank).items()}


def install(state, slot, *, rank=8, seed=0, **kwargs):
    schedule = slot_schedule(lr=0.05, batch_size=4, num_step=50, lr_decay_style="cosine")
    return state.install(
        slot, weights(rank, seed), rank=rank, batch_size=4, schedule=schedule, **kwargs
    )


def train(state, slot, steps, *, rank=8, first=0, partial=0):
    """Steps one slot on gradients that only depend on the step, then leaves a partial batch."""
    step = jax.jit(SlotTrainState.step)
    for index in range(first, first + steps + bool(partial)):
        samples = np.zeros(state.n_slots, np.int32)
        samples[slot] = 4 if index < first + steps else partial
        own = weights(rank, seed=1000 + index)
        grads = {
            n: np.zeros((state.n_slots, *x.shape[1:]), np.float32) for n, x in state.params.items()
        }
        for name, g in own.items():
            grads[name][(slot, *map(slice, g.shape))] = g
        state = state.accumulate(grads, samples)
        if samples[slot] == 4:
            state, _ = step(state, np.array([slot]))
    return state


def same_tenant(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert_same_bits(x, y)


def test_goes_on_elsewhere_bit_for_bit(tmp_path):
    state = train(install(make_pool(), 1), 1, 3, partial=2)
    with TenantCheckpoints(tmp_path, MUON) as checkpoints:
        assert checkpoints.save("alice", state, 1) == 1
    busy = train(install(make_pool(), 0, seed=7), 0, 2)
    with TenantCheckpoints(tmp_path, MUON) as checkpoints:
        restored = checkpoints.restore("alice", busy, 3)
    same_tenant(restored.tenant(3), state.tenant(1))
    same_tenant(restored.tenant(0), busy.tenant(0))
    # The batch was half full; what was missing comes, and 20 more steps.
    more = weights(8, seed=5)

    def fill(state, slot):
        samples = np.zeros(4, np.int32)
        samples[slot] = 2
        grads = {n: np.stack([g] * 4) for n, g in more.items()}
        state, _ = state.accumulate(grads, samples).step(np.array([slot]))
        return train(state, slot, 20, first=50).tenant(slot)

    same_tenant(fill(restored, 3), fill(state, 1))


@pytest.mark.parametrize("rank", [4, 5, 16])
def test_into_a_pool_of_another_rank(tmp_path, rank):
    state = train(install(make_pool(), 2, rank=4), 2, 2, rank=4)
    with TenantCheckpoints(tmp_path, MUON) as checkpoints:
        checkpoints.save("bob", state, 2)
        checkpoints.wait()
        restored = checkpoints.restore("bob", make_pool(rank=rank), 0)
    there, here = restored.tenant(0), state.tenant(2)
    for x, y in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
        common = tuple(map(slice, np.minimum(x.shape, y.shape)))
        assert_same_bits(x[common], y[common])
        assert jnp.count_nonzero(x) == jnp.count_nonzero(x[common])
    assert int(restored.rank[0]) == 4 and int(restored.samples[0]) == 8


def test_too_small_a_pool_is_refused(tmp_path):
    with TenantCheckpoints(tmp_path, MUON) as checkpoints:
        checkpoints.save("alice", install(make_pool(), 0), 0)
        checkpoints.wait()
        with pytest.raises(CheckpointError, match="alice/1: .*rank is 8; this pool holds ranks"):
            checkpoints.restore("alice", make_pool(rank=4), 0)


def test_families_meet_their_own_configuration(tmp_path):
    state = install(make_pool(MUON, ADAM), 1, family=1)
    state = train(state, 1, 3)
    with TenantCheckpoints(tmp_path, MUON, ADAM) as checkpoints:
        checkpoints.save("carol", state, 1)
    with TenantCheckpoints(tmp_path, ADAM) as checkpoints:
        alone = checkpoints.restore("carol", make_pool(ADAM), 0)
    with TenantCheckpoints(tmp_path, ADAM, MUON) as checkpoints:
        swapped = checkpoints.restore("carol", make_pool(ADAM, MUON), 0)
    assert int(swapped.family[0]) == 0 and int(state.family[1]) == 1
    same_tenant(swapped.tenant(0).opt_state.families[0], state.tenant(1).opt_state.families[1])
    same_tenant(swapped.tenant(0).opt_state.families[0], alone.tenant(0).opt_state)
    with (
        TenantCheckpoints(tmp_path, MUON) as checkpoints,
        pytest.raises(CheckpointError, match=r"config\.optimizer is 'adam'; this pool has 'muon'"),
    ):
        checkpoints.restore("carol", make_pool(), 0)


def test_any_optax_transform(tmp_path):
    tx = per_slot(optax.adam(1e-3))
    state = train(install(make_pool(tx=tx), 1), 1, 2)
    with TenantCheckpoints(tmp_path) as checkpoints:
        checkpoints.save("dave", state, 1)
        checkpoints.wait()
        restored = checkpoints.restore("dave", make_pool(tx=tx), 0)
        same_tenant(restored.tenant(0), state.tenant(1))
        with pytest.raises(CheckpointError, match=r"opt_state.* is "):
            checkpoints.restore("dave", make_pool(), 0)


def test_the_state_may_be_donated_while_it_is_written(tmp_path):
    state = train(install(make_pool(), 1), 1, 1)
    expected = jax.device_get(state.tenant(1))
    with TenantCheckpoints(tmp_path, MUON) as checkpoints:
        checkpoints.save("alice", state, 1)
        jax.jit(lambda s: jax.tree.map(jnp.zeros_like, s), donate_argnums=0)(state)
        checkpoints.wait()
        same_tenant(checkpoints.restore("alice", make_pool(), 0).tenant(0), expected)


def test_numbers_count_up_and_old_ones_go(tmp_path):
    state = install(make_pool(), 0)
    with TenantCheckpoints(tmp_path, MUON, max_to_keep=2) as checkpoints:
        for expected in (1, 2, 3):
            assert checkpoints.save("alice", state, 0) == expected
        checkpoints.wait()
        assert checkpoints.numbers("alice") == [2, 3] and checkpoints.numbers("bob") == []
        with pytest.raises(CheckpointError, match=r"alice: no checkpoint 1; there are \[2, 3\]"):
            checkpoints.restore("alice", make_pool(), 0, number=1)
        with pytest.raises(CheckpointError, match="bob: no checkpoint"):
            checkpoints.restore("bob", make_pool(), 0)
        with pytest.raises(ValueError, match="slot 0 is occupied"):
            checkpoints.restore("alice", state, 0)
        with pytest.raises(ValueError, match="slot 1 is free"):
            checkpoints.save("alice", state, 1)
        for name in ("", "../alice", ".hidden", "a/b"):
            with pytest.raises(ValueError, match="name is"):
                checkpoints.save(name, state, 0)


def restored_or_refused(folder, scratch, expected, seed):
    """Damages a copy of the checkpoints and restores: True if exactly, False if refused."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(folder, scratch)
    damage_a_file(scratch / "alice", random.Random(seed))
    busy = install(make_pool(), 0, seed=3)
    with TenantCheckpoints(scratch, MUON) as checkpoints:
        try:
            state = checkpoints.restore("alice", busy, 1)
        except CheckpointError as error:
            assert str(scratch / "alice") in str(error)
            return False
    same_tenant(state.tenant(1), expected)
    same_tenant(state.tenant(0), busy.tenant(0))
    return True


def test_damaged_files_are_refused_or_restored_exactly(tmp_path):
    state = train(install(make_pool(), 2), 2, 1)
    with TenantCheckpoints(tmp_path / "whole", MUON) as checkpoints:
        checkpoints.save("alice", state, 2)
    found = [
        restored_or_refused(tmp_path / "whole", tmp_path / "damaged", state.tenant(2), seed)
        for seed in range(20)
    ]
    assert not all(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["metadata"].update(rank=3), "sha256 is not the recorded"),
        (lambda m: m.pop("metadata"), "damaged"),
        (lambda m: m["metadata"]["arrays"].popitem(), "sha256 is not the recorded"),
    ],
)
def test_changed_metadata_are_refused(tmp_path, change, message):
    with TenantCheckpoints(tmp_path, MUON) as checkpoints:
        checkpoints.save("alice", install(make_pool(), 0), 0)
    path = tmp_path / "alice/1/metadata/metadata"
    metadata = json.loads(path.read_text())
    change(metadata)
    path.write_text(json.dumps(metadata))
    with (
        TenantCheckpoints(tmp_path, MUON) as checkpoints,
        pytest.raises(CheckpointError, match=f"alice/1/metadata: .*{message}"),
    ):
        checkpoints.restore("alice", make_pool(), 0)


def test_what_is_being_written_is_what_is_restored(tmp_path):
    state = install(make_pool(), 0)
    with TenantCheckpoints(tmp_path, MUON) as checkpoints:
        checkpoints.save("alice", state, 0)
        checkpoints.wait()
        checkpoints.save("alice", train(state, 0, 1), 0)
        assert int(checkpoints.restore("alice", make_pool(), 1).samples[1]) == 4


def test_configurations_are_those_of_the_pool(tmp_path):
    state = install(make_pool(MUON, ADAM), 0, family=1)
    for configs in ((MUON,), (ADAM, MUON)):
        with TenantCheckpoints(tmp_path, *configs) as checkpoints:
            with pytest.raises(ValueError, match="this pool's optimizer is not"):
                checkpoints.save("alice", state, 0)
            with pytest.raises(ValueError, match="this pool's optimizer is not"):
                checkpoints.restore("alice", state, 1)
    assert not any(tmp_path.iterdir())  # nor does reading make folders
    with pytest.raises(ValueError, match="max_to_keep is 0"):
        TenantCheckpoints(tmp_path, max_to_keep=0)


def test_families_without_configurations_keep_their_place(tmp_path):
    def pool(*families):
        tx = by_family(families) if len(families) > 1 else families[0]
        return make_pool(tx=per_slot(tx))

    families = [optax.sgd(0.1), optax.adam(1e-2)]
    state = train(install(pool(*families), 2, family=1), 2, 2)
    with TenantCheckpoints(tmp_path) as checkpoints:
        checkpoints.save("alice", state, 2)
        same_tenant(checkpoints.restore("alice", pool(*families), 0).tenant(0), state.tenant(2))
        with pytest.raises(CheckpointError, match="family is 1; this pool has 1"):
            checkpoints.restore("alice", pool(families[1]), 0)


def test_random_keys_come_back(tmp_path):
    tx = per_slot(optax.noisy_sgd(1e-2, key=jax.random.key(3)))
    state = train(install(make_pool(tx=tx), 1), 1, 2)
    with TenantCheckpoints(tmp_path) as checkpoints:
        checkpoints.save("alice", state, 1)
        restored = checkpoints.restore("alice", make_pool(tx=tx), 0)
    same_tenant(train(restored, 0, 2).tenant(0), train(state, 1, 2).tenant(1))


def test_a_folder_under_another_name_is_refused(tmp_path):
    with TenantCheckpoints(tmp_path, MUON) as checkpoints:
        checkpoints.save("alice", install(make_pool(), 0), 0)
    (tmp_path / "alice").rename(tmp_path / "bob")
    with (
        TenantCheckpoints(tmp_path, MUON) as checkpoints,
        pytest.raises(CheckpointError, match="bob/1/metadata: name is 'alice', not 'bob'"),
    ):
        checkpoints.restore("bob", make_pool(), 0)
