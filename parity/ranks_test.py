"""Two processes are two, share the work, agree, and end with the run, however it ends."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

import jax_impl
import torch_ref
from parity import gradients, pieces
from parity.candidate import MODES
from parity.rank_worker import RanksError
from parity.ranks import RankedReference, Workers, agreed, agreed_tensor, standing_workers
from parity.run import run
from parity.scenario import Ranks, parse, shipped

SCENARIO = """
gradients = "gaussian"
[pool]
n_slots = 2
rank = 4
[ranks]
{ranks} = 2
[model]
layers = [
  {{name = "up", in_features = 12, out_features = 16, bias = true, parallel = "column"}},
  {{name = "down", in_features = 16, out_features = 12, bias = true, parallel = "row"}},
]
[optimizer]
optimizer = "muon"
clip_grad = 1.0
muon_fp32_matmul_prec = "highest"
[tenants.alice]
rank = 4
alpha = 8.0
batch_size = 3
lr = 0.05
weight_decay = 0.5
init = "random"
[lifecycle]
events = [{{install = "alice", slot = 0}}, {{accumulate = 3, slot = 0}}, {{step = [0]}}]
"""


def scenario(ranks):
    (parsed,) = parse(SCENARIO.format(ranks=ranks), "ranks.toml")
    return parsed


@pytest.fixture(scope="module", autouse=True)
def megatron():
    with torch_ref.start_megatron():
        yield


def alive(pid):
    """Whether a process runs; one that nobody has reaped does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(state.stdout.strip()) and not state.stdout.startswith("Z")


def kept_by(observation, kind):
    return {name for k, name in observation[0].tensors if k == kind}


def test_data_parallel_ranks_share_the_work():
    reference = RankedReference(scenario("data_parallel"))
    pids = {process.pid for process in reference.workers.processes}
    assert len(pids - {os.getpid()}) == 2 and all(map(alive, pids))
    reference.install("alice", 0)
    shares = reference.workers.call("accumulate", 0, 3, 1)
    views = reference.workers.call("observe")
    first, second = (kept_by(view, "master") for view in views)
    assert first and second and not first & second, "layer-wise spreads whole parameters"
    assert first | second == kept_by(views[0], "param") == shares[0].keys()
    for name, whole in gradients.adapter_shapes(scenario("data_parallel"), 4).items():
        assert not np.array_equal(shares[0][name], shares[1][name])
        total = gradients.gradient(scenario("data_parallel"), whole, 4, name, 1, "gaussian")
        np.testing.assert_allclose(shares[0][name] + shares[1][name], total, rtol=0, atol=1e-6)
        seen = reference.observe()[0].tensors["grad_sum", name]
        np.testing.assert_array_equal(seen, shares[0][name] + shares[1][name])


def test_tensor_parallel_ranks_hold_parts():
    tensor_parallel = scenario("tensor_parallel")
    reference = RankedReference(tensor_parallel)
    reference.install("alice", 0)
    reference.accumulate(0, 3, 1)
    (outcome,) = reference.step([0]).values()
    parts, whole = reference.workers.call("observe"), reference.observe()
    shapes = gradients.adapter_shapes(tensor_parallel, 4)
    for name, shape in shapes.items():
        tensor = whole[0].tensors["master", name]
        assert tensor.shape == shape
        dim = pieces.partition_dims(tensor_parallel).get(name)
        for rank, part in enumerate(parts):
            expected = pieces.shard(tensor, dim, rank, 2)
            np.testing.assert_array_equal(part[0].tensors["master", name], expected)
    assert pieces.partition_dims(tensor_parallel).keys() < shapes.keys()
    grads = [
        gradients.gradient(tensor_parallel, shape, 4, name, 1, "gaussian") / 3
        for name, shape in shapes.items()
    ]
    norm = np.sqrt(sum(np.square(grad, dtype=np.float64).sum() for grad in grads))
    assert outcome.norm == pytest.approx(norm, rel=1e-6), "replicas count once, parts all"


@pytest.mark.parametrize("name", ["tp2_blockwise", "tp2_distributed_medium[bf16]", "dp2_text"])
def test_shipped_scenarios_pass(name):
    result = run(shipped()[name], MODES[1:])
    assert result.passed, [check for check in result.checks if not check.passed][:3]


def test_a_whole_matrix_is_not_taken_for_its_blocks(monkeypatch):
    monkeypatch.setattr("jax_impl.multi_lora.matrix_splits", lambda config, name, shape: ())
    jax_impl.multi_lora_optimizer.cache_clear()
    try:
        result = run(scenario("tensor_parallel"), MODES[1:])
    finally:
        jax_impl.multi_lora_optimizer.cache_clear()
    failed = {(c.kind, c.tensor) for c in result.checks if not c.passed}
    assert {("muon update", "up.linear_out"), ("muon update", "down.linear_in")} <= failed
    assert ("muon update", "up.linear_in") not in failed, "a replica is whole"


def test_an_earlier_runner_gets_no_answers_meant_for_a_later_one():
    earlier = RankedReference(scenario("data_parallel"))
    RankedReference(scenario("data_parallel"))
    with pytest.raises(RanksError, match="taken over"):
        earlier.observe()


def test_a_rank_that_fails_says_how():
    workers = standing_workers(2)
    refused = replace(scenario("tensor_parallel"), ranks=Ranks(tensor_parallel=3))
    with pytest.raises(RanksError, match=r"(?s)ranks: rank \d failed in 'open'.*world_size"):
        RankedReference(refused, workers)
    assert not workers.running and standing_workers(2) is not workers


@pytest.mark.parametrize(
    ("harm", "message"),
    [(signal.SIGKILL, "rank 1 died in 'accumulate', exit code -9"), (signal.SIGSTOP, "no answer")],
)
def test_a_lost_rank_ends_the_run_in_time(harm, message):
    workers = Workers(2)
    pids = [process.pid for process in workers.processes]
    reference = RankedReference(scenario("data_parallel"), workers)
    reference.install("alice", 0)
    workers.timeout = 3.0
    os.kill(pids[1], harm)
    start = time.monotonic()
    with pytest.raises(RanksError, match=message):
        reference.accumulate(0, 3, 1)
    assert time.monotonic() - start < 10
    assert not any(map(alive, pids))


def test_ranks_end_with_their_parent():
    script = (
        "import os, signal; from parity.ranks import Workers\n"
        "print(*(process.pid for process in Workers(2).processes), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    pids = [int(pid) for pid in ended.stdout.split()]
    assert ended.returncode == -signal.SIGKILL and len(pids) == 2
    deadline = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))


def test_copies_that_differ_in_a_bit_are_seen():
    key, zeros = ("param", "q.linear_in"), np.zeros(3, np.float32)
    np.testing.assert_array_equal(agreed_tensor(key, [zeros, zeros.copy()]), zeros)
    with pytest.raises(RanksError, match="different copies of param q.linear_in"):
        agreed_tensor(key, [zeros, -zeros])
    assert agreed("lr", [0.5, 0.5]) == 0.5
    with pytest.raises(RanksError, match="disagree on lr: 0.5, 0.25"):
        agreed("lr", [0.5, 0.25])
