import dataclasses
import os
import pathlib
import subprocess
import sys
import sysconfig

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon
from megatron.core.distributed import DistributedDataParallelConfig

from torch_ref.optimizer import (
    build_multi_lora_optimizer,
    reset_grad_metadata_keep_grads,
    step_adapter_slots,
    zero_adapter_slot_grads,
)
from torch_ref.setup import setup_model_and_optimizer
from torch_ref.slots import (
    adapter_slot_children,
    adapter_slot_parameters,
    multi_lora_layers,
)
from torch_ref.testing import (
    accumulate,
    assert_bits_equal,
    bits,
    install,
    make_pool,
    make_stack,
    pool_config,
    random_weights,
    slot_states,
)
from torch_ref.transformer import MultiLoRATransformer

BOTH_OPTIMIZERS = pytest.mark.parametrize("name", ["adam", "muon"])
BOTH_PRECISIONS = pytest.mark.parametrize("bf16", [False, True])


@BOTH_PRECISIONS
@pytest.mark.parametrize(("name", "n_children"), [("adam", 1), ("muon", 2)])
def test_each_slot_has_children_of_its_own(device, name, n_children, bf16):
    chunks, optimizer = make_pool(name, bf16=bf16)
    assert len(optimizer.chained_optimizers) == 3 * n_children
    owned = []
    for slot in range(3):
        children = adapter_slot_children(optimizer, slot)
        assert len(children) == n_children
        assert all(child.get_grad_stats_parallel_group() is None for child in children)
        masters = {id(p) for child in children for p in child.get_parameters()}
        assert masters == {
            id(p.main_param if bf16 else p) for _, p in adapter_slot_parameters(chunks, slot)
        }
        owned += masters
    assert len(owned) == len(set(owned)) == 3 * 6
    assert all(
        p.requires_grad for slot in range(3) for _, p in adapter_slot_parameters(chunks, slot)
    )


@BOTH_PRECISIONS
@BOTH_OPTIMIZERS
def test_steps_equal_a_standalone_optimizer(device, name, bf16):
    """Two steps of slot 1 against torch's AdamW and emerging-optimizers' Muon on that adapter."""
    chunks, optimizer = make_pool(name, bf16=bf16)
    install(chunks, optimizer, 1, seed=5, lr=3e-3, weight_decay=0.1)
    alone = {n: w.to(device).requires_grad_() for n, w in random_weights(chunks, 5).items()}
    matrices = [p for p in alone.values() if p.ndim == 2]
    biases = [p for p in alone.values() if p.ndim == 1]
    no_decay = {"params": biases, "weight_decay": 0.0}
    if name == "adam":
        adam = torch.optim.AdamW([{"params": matrices}, no_decay], lr=3e-3, weight_decay=0.1)
        optimizers = [adam]
    else:
        adam = torch.optim.AdamW([no_decay], lr=3e-3)
        muon = Muon(matrices, lr=3e-3, weight_decay=0.1, fp32_matmul_prec="highest")
        optimizers = [muon, adam]
    for step in range(2):
        accumulate(chunks, 1, seed=step)
        for parameter_name, parameter in adapter_slot_parameters(chunks, 1):
            alone[parameter_name].grad = parameter.main_grad * (1 / 4)
        expected_norm = torch.nn.utils.clip_grad_norm_(list(alone.values()), 1.0)
        for standalone in optimizers:
            standalone.step()
        norms = step_adapter_slots(optimizer, {1: 4}, clip_grad=1.0)
        assert norms == {1: pytest.approx(expected_norm.item(), rel=1e-6)}
    state = slot_states(chunks, optimizer, [1])[1]
    for parameter_name, expected in alone.items():
        torch.testing.assert_close(
            state[parameter_name]["master"], expected.detach(), rtol=1e-5, atol=1e-7
        )
        rounded = state[parameter_name]["master"].to(torch.bfloat16 if bf16 else torch.float32)
        assert torch.equal(state[parameter_name]["param"], rounded)


@pytest.mark.parametrize("clip_grad", [0.0, 0.5, 1e6])
def test_clips_by_one_norm_over_all_of_a_slots_children(device, clip_grad):
    """A first Muon momentum and a first Adam moment show the gradients that were used."""
    chunks, optimizer = make_pool("muon")
    accumulate(chunks, 0, seed=1)
    mean = {n: p.main_grad / 8 for n, p in adapter_slot_parameters(chunks, 0)}
    norm = torch.stack([g.norm() for g in mean.values()]).norm()
    coefficient = min(1.0, clip_grad / (norm.item() + 1e-6)) if clip_grad > 0 else 1.0
    assert step_adapter_slots(optimizer, {0: 8}, clip_grad) == {0: pytest.approx(norm.item())}
    for name, entry in slot_states(chunks, optimizer, [0])[0].items():
        moment, factor = ("exp_avg", 0.1) if name.endswith("bias") else ("momentum_buffer", 0.05)
        torch.testing.assert_close(entry[moment], factor * coefficient * mean[name])


@BOTH_PRECISIONS
@BOTH_OPTIMIZERS
def test_step_leaves_cotenants_bit_identical(device, name, bf16):
    chunks, optimizer = make_pool(name, bf16=bf16)
    for slot in range(3):
        install(chunks, optimizer, slot, seed=slot)
        accumulate(chunks, slot, seed=slot)
    step_adapter_slots(optimizer, {0: 4, 2: 4}, clip_grad=1.0)
    for slot in range(3):
        accumulate(chunks, slot, seed=10 + slot)
    chunks[0].finish_grad_sync()
    before = slot_states(chunks, optimizer, range(3))
    step_adapter_slots(optimizer, {1: 4}, clip_grad=1.0)
    after = slot_states(chunks, optimizer, range(3))
    for slot in (0, 2):
        assert_bits_equal(after[slot], before[slot])
    for name, entry in after[1].items():
        assert not torch.equal(entry["master"], before[1][name]["master"])
        assert not bits(entry["grad_sum"]).any()


def test_sums_survive_other_slots_steps_and_repeated_syncs(device):
    """Slot 0 accumulates two batches of a bf16 model, in float32, while slot 1 steps."""
    sizes = {"n_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "n_heads": 2, "seq_length": 8}
    model = MultiLoRATransformer(**sizes, n_slots=2, rank=2, params_dtype=torch.bfloat16)
    chunks, optimizer = setup_model_and_optimizer(model, pool_config("adam", bf16=True))
    for _, layer in multi_lora_layers(chunks):
        layer.scaling.fill_(1.0)
    for slot in range(2):
        for _, parameter in adapter_slot_parameters(chunks, slot):
            torch.nn.init.normal_(parameter, std=0.1)
    parameters = [p for _, p in adapter_slot_parameters(chunks, 0)]
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    slots = torch.tensor([0, 1], device=device)
    for _ in range(2):
        tokens = torch.randint(0, 256, (2, 9), device=device)
        grads = torch.autograd.grad(model.sample_losses(tokens, slots).sum(), parameters)
        for total, grad in zip(sums, grads, strict=True):
            total.add_(grad)
        model.sample_losses(tokens, slots).sum().backward()
        for _ in range(3):
            chunks[0].finish_grad_sync()
        step_adapter_slots(optimizer, {1: 1}, clip_grad=1.0)
        reset_grad_metadata_keep_grads(chunks)
    for parameter, total in zip(parameters, sums, strict=True):
        assert total.any()
        assert torch.equal(bits(parameter.main_grad), bits(total))
    assert not any(p.main_grad.any() for _, p in adapter_slot_parameters(chunks, 1))


def test_reset_grad_metadata_keeps_the_buffers(device):
    chunks, _ = make_pool("adam")
    accumulate(chunks, 0, seed=0)
    parameters = [p for _, p in adapter_slot_parameters(chunks, 0)]
    sums = [p.main_grad.clone() for p in parameters]
    parameters[0].grad_added_to_main_grad = True
    reset_grad_metadata_keep_grads(chunks)
    assert not parameters[0].grad_added_to_main_grad
    assert all(torch.equal(p.main_grad, s) for p, s in zip(parameters, sums, strict=True))


@BOTH_PRECISIONS
def test_zero_grads_drops_one_slots_gradients_everywhere(device, bf16):
    chunks, optimizer = make_pool("muon", bf16=bf16)
    for slot in range(2):
        accumulate(chunks, slot, seed=slot)
    for child in optimizer.chained_optimizers:
        child.prepare_grads()
    zero_adapter_slot_grads(optimizer, 0)
    for _, parameter in adapter_slot_parameters(chunks, 0):
        assert parameter.grad is None
        assert getattr(parameter, "main_param", parameter).grad is None
        assert not bits(parameter.main_grad).any()
    for _, parameter in adapter_slot_parameters(chunks, 1):
        assert getattr(parameter, "main_param", parameter).grad is not None
        assert parameter.main_grad.any()


@BOTH_OPTIMIZERS
def test_a_list_of_model_chunks_is_one_adapter_per_slot(device, name):
    chunks, optimizer = setup_model_and_optimizer(
        [make_stack(n_slots=2), make_stack(n_slots=2)], pool_config(name)
    )
    names = [n for n, _ in adapter_slot_parameters(chunks, 1)]
    assert len(names) == len(set(names)) == 12
    assert names[0] == "chunks.0.wide.linear_in"
    accumulate(chunks, 1, seed=0)
    squares = sum(
        (p.main_grad / 4).square().sum().item() for _, p in adapter_slot_parameters(chunks, 1)
    )
    assert step_adapter_slots(optimizer, {1: 4}, 0.0) == {1: pytest.approx(squares**0.5)}
    assert all(p.any() for _, p in adapter_slot_parameters(chunks, 1))
    assert not any(p.any() for _, p in adapter_slot_parameters(chunks, 0))


def test_dist_muon_means_muon(device):
    with pytest.warns(DeprecationWarning, match="dist_muon"):
        chunks, optimizer = make_pool("dist_muon")
    assert optimizer.config.optimizer == "muon"
    assert len(optimizer.chained_optimizers) == 6
    accumulate(chunks, 0, seed=0)
    step_adapter_slots(optimizer, {0: 1}, 0.0)
    assert "momentum_buffer" in slot_states(chunks, optimizer, [0])[0]["wide.linear_in"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_distributed_optimizer": True}, "use_distributed_optimizer=True: must be False"),
        ({"fp16": True}, "fp16=True: must be False"),
        ({"optimizer": "sgd"}, "optimizer='sgd': must be 'adam', 'muon' or 'adaptive_muon'"),
        ({"optimizer": "lion"}, "optimizer='lion': must be"),
    ],
)
def test_config_that_cannot_work_is_refused(device, settings, message):
    config = dataclasses.replace(pool_config("muon"), **settings)
    with pytest.raises(ValueError, match=message):
        setup_model_and_optimizer(make_stack(), config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grad_reduce_in_fp32": False}, "grad_reduce_in_fp32=False: must be True"),
        ({"overlap_grad_reduce": True}, "overlap_grad_reduce=True: must be False"),
    ],
)
def test_ddp_config_that_cannot_work_is_refused(device, settings, message):
    ddp_config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True} | settings)
    with pytest.raises(ValueError, match=message):
        setup_model_and_optimizer(make_stack(), pool_config("adam"), ddp_config)


def test_slot_without_parameters_is_refused(device):
    with pytest.raises(ValueError, match="slot=3 has no parameters: the model has 3"):
        setup_model_and_optimizer(make_stack(), pool_config("adam"), n_slots=4)


def test_trainable_parameters_outside_the_slots_are_refused(device):
    with pytest.raises(ValueError, match="belongs to none of the 2 slots: freeze it"):
        setup_model_and_optimizer(make_stack(), pool_config("adam"), n_slots=2)


def test_no_slots_are_refused(device):
    chunks, _ = make_pool("adam")
    with pytest.raises(ValueError, match="n_slots=0"):
        build_multi_lora_optimizer(pool_config("adam"), chunks, 0)


def test_expert_parallel_adapters_are_refused(device):
    stack = make_stack()
    stack.tall.adapters[1].linear_in.allreduce = False
    with pytest.raises(ValueError, match="tall.linear_in is an expert-parallel adapter"):
        setup_model_and_optimizer(stack, pool_config("adam"))


@pytest.mark.parametrize(
    ("batch_sizes", "message"), [({0: 0}, "must be at least 1"), ({7: 1}, "slot=7")]
)
def test_bad_steps_are_refused_before_any_slot_moves(device, batch_sizes, message):
    chunks, optimizer = make_pool("adam")
    accumulate(chunks, 1, seed=0)
    before = slot_states(chunks, optimizer, [1])
    with pytest.raises(ValueError, match=message):
        step_adapter_slots(optimizer, {1: 1} | batch_sizes, 0.0)
    assert_bits_equal(slot_states(chunks, optimizer, [1])[1], before[1])


def test_muon_without_emerging_optimizers_is_refused(tmp_path):
    """In a process whose packages are all of this one's but emerging-optimizers."""
    for package in pathlib.Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not package.name.startswith("emerging_optimizers"):
            (tmp_path / package.name).symlink_to(package)
    script = (
        "from torch_ref import setup_model_and_optimizer, start_megatron\n"
        "from torch_ref.testing import make_pool\n"
        "with start_megatron():\n"
        "    make_pool('adam')\n"
        "    try:\n"
        "        make_pool('muon')\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    root = pathlib.Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(tmp_path)])}
    result = subprocess.run(
        [sys.executable, "-S", "-c", script], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "optimizer='muon' needs the package emerging-optimizers" in result.stdout
