"""Two processes, as data-parallel and as tensor-parallel ranks, against one."""

import os
import socket

import pytest
import torch

from torch_ref.megatron import start_megatron
from torch_ref.optimizer import step_adapter_slots
from torch_ref.slot_state import load_adapter_slot_state
from torch_ref.slots import adapter_slot_parameters
from torch_ref.tenant import retire_adapter
from torch_ref.testing import accumulate, install, make_pool, slot_states


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def train_and_read(bf16, seeds):
    """Two steps of slot 0 on the sum of the seeds' gradients; {name: master} of all ranks."""
    chunks, optimizer = make_pool("muon", bf16=bf16, n_slots=2)
    install(chunks, optimizer, 0)
    install(chunks, optimizer, 1, seed=1)
    norms = []
    for step in range(2):
        for seed in seeds:
            accumulate(chunks, 0, seed=10 * step + seed)
        for _ in range(2):
            chunks[0].finish_grad_sync()
        norms.append(step_adapter_slots(optimizer, {0: 4}, clip_grad=0.5)[0])
    parts = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, slot_states(chunks, optimizer, [0])[0])
    state = {name: entry for part in parts for name, entry in part.items()}
    params = {n: p.detach().clone() for n, p in adapter_slot_parameters(chunks, 0)}
    assert state.keys() == params.keys()
    retire_adapter(chunks, optimizer, 0)
    assert not any(p.any() or p.main_grad.any() for _, p in adapter_slot_parameters(chunks, 0))
    load_adapter_slot_state(optimizer, chunks, 0, state)
    reread = slot_states(chunks, optimizer, [0])[0]
    assert all(torch.equal(reread[n]["master"], state[n]["master"]) for n in reread)
    return norms, {n: entry["master"] for n, entry in state.items()}, params, len(reread)


def worker(rank, ports, expected):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    for tensor_parallel, port in enumerate(ports):
        os.environ["MASTER_PORT"] = str(port)
        with start_megatron(tensor_model_parallel_size=1 + tensor_parallel):
            # Data-parallel ranks hold a share of the batch each, tensor-parallel ones the whole.
            seeds = (1, 2) if tensor_parallel else (1 + rank,)
            for bf16 in (False, True):
                norms, masters, params, n_owned = train_and_read(bf16, seeds)
                assert norms == pytest.approx(expected[bf16][0], rel=1e-5)
                assert tensor_parallel == (n_owned == 6), "layer-wise spreads the parameters"
                for name, master in masters.items():
                    torch.testing.assert_close(
                        master, expected[bf16][1][name], rtol=1e-4, atol=1e-5
                    )
                    assert torch.equal(params[name], master.to(params[name].dtype))


def test_two_ranks_train_as_one():
    expected = {}
    for bf16 in (False, True):
        with start_megatron():
            expected[bf16] = train_and_read(bf16, (1, 2))[:2]
    ports = [free_port(), free_port()]
    torch.multiprocessing.spawn(worker, args=(ports, expected), nprocs=2)
