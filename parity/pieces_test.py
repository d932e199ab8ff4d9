"""Which parts tensor-parallel ranks hold, and which Muon orthogonalises alone."""

import dataclasses

import numpy as np
import pytest

from parity import oracle, pieces
from parity.scenario import shipped
from parity.truth import Judge

BLOCKWISE = shipped()["tp2_blockwise"]
X = np.arange(12 * 6.0).reshape(12, 6)


def test_a_lora_pair_follows_its_base_layer():
    assert pieces.partition_dims(BLOCKWISE) == {
        "qkv.linear_out": 0,
        "qkv.bias": 0,
        "proj.linear_in": 1,
    }


def test_shards_cover_the_whole():
    for dim in (0, 1):
        parts = [pieces.shard(X, dim, rank, 2) for rank in range(2)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=dim), X)
    assert pieces.shard(X, None, 1, 2) is X


def test_sizes_repeat_along_the_axis_and_further_splits_cut_again():
    rows = [X[index] for index in pieces.piece_indices(X.shape, ((0, (3, 1, 2)),))]
    np.testing.assert_array_equal(rows[1], X[[3, 9]])
    np.testing.assert_array_equal(rows[2], X[[4, 5, 10, 11]])
    quarters = [X[index] for index in pieces.piece_indices(X.shape, ((0, (6, 6)), (1, (3, 3))))]
    np.testing.assert_array_equal(quarters[1], X[:6, 3:])
    np.testing.assert_array_equal(quarters[2], X[6:, :3])


@pytest.mark.parametrize("mode", ["blockwise", "duplicated", "distributed"])
def test_only_blockwise_cuts(mode):
    scenario = dataclasses.replace(
        BLOCKWISE, optimizer={**BLOCKWISE.optimizer, "muon_tp_mode": mode}
    )
    blocks = 2 if mode == "blockwise" else 1
    assert len(pieces.muon_pieces(scenario, "proj.linear_in", (8, 64))) == blocks
    assert len(pieces.muon_pieces(scenario, "proj.linear_out", (32, 8))) == 1
    projections = pieces.muon_pieces(scenario, "qkv.linear_out", (96, 8))
    assert len(projections) == 3 * blocks
    rows, _ = projections[0]
    assert rows.ravel()[:10].tolist() == [*range(8), 16, 17]
    assert rows.max() == 96 // blocks - 9, "those of the first block alone"


def test_the_oracle_orthogonalizes_and_scales_each_block_alone():
    """Blocks with orthogonal rows have all singular values equal: closed form, block by block."""
    judge = Judge(BLOCKWISE)
    truth = judge.install("alice")
    name = "proj.linear_in"
    blocks = [np.eye(8, 32), np.eye(8, 32)[::-1]]
    grads = {key: np.zeros_like(p) for key, p in truth.params.items()}
    grads[name] = np.concatenate(blocks, axis=1)
    lr, wd = judge.rates("alice", 0)
    after = judge.step(truth, grads, "alice", 0)
    singular = 8**-0.5
    for a, b, c in oracle.cycle_or_repeat(judge.coefficients, 5, "quintic"):
        singular = a * singular + b * singular**3 + c * singular**5
    expected = (1 - lr * wd) * truth.params[name] - lr * 32**0.5 * singular * grads[name]
    np.testing.assert_allclose(after.params[name], expected, rtol=1e-12, atol=1e-12)
