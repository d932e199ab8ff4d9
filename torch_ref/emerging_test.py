import dataclasses
import pathlib
import re

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon, Muon
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from torch_ref.emerging import SlotOptimizerConfig, is_beyond_megatron
from torch_ref.optimizer import step_adapter_slots
from torch_ref.setup import setup_model_and_optimizer
from torch_ref.slot_state import zero_optimizer_state_for_adapter
from torch_ref.slots import adapter_slot_children, adapter_slot_parameters
from torch_ref.testing import (
    accumulate,
    assert_bits_equal,
    bits,
    install,
    make_stack,
    pool_config,
    random_weights,
    slot_states,
)

CUSTOM = ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
BEYOND = [
    {"optimizer": "muon", "weight_decay_method": "l2"},
    {"optimizer": "muon", "weight_decay_method": "independent"},
    {"optimizer": "muon", "weight_decay_method": "palm", "muon_nesterov": True},
    {"optimizer": "muon", "muon_coefficient_type": "custom", "custom_coefficients": CUSTOM},
    {"optimizer": "adaptive_muon"},
    {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"},
    {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "namo"},
]
IN_REACH = [
    {"optimizer": "adam", "weight_decay_method": "l2"},
    {"optimizer": "muon", "muon_coefficient_type": "cans"},
    {"optimizer": "muon", "muon_scalar_optimizer": "lion"},
]


def make_pool(stack=None, *, bf16=False, **settings):
    settings = {"lr": 1e-2, "min_lr": 0.0, "muon_fp32_matmul_prec": "highest"} | settings
    stack = stack or make_stack(bf16=bf16)
    return setup_model_and_optimizer(stack, SlotOptimizerConfig(bf16=bf16, **settings))


def test_says_what_megatron_cannot_reach():
    assert all(is_beyond_megatron(SlotOptimizerConfig(**settings)) for settings in BEYOND)
    assert not any(is_beyond_megatron(SlotOptimizerConfig(**settings)) for settings in IN_REACH)
    assert not is_beyond_megatron(OptimizerConfig(optimizer="muon"))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("settings", BEYOND)
def test_the_own_class_takes_megatrons_place_in_its_slot_alone(device, settings, bf16):
    chunks, optimizer = make_pool(bf16=bf16, **settings)
    kind = Muon if settings["optimizer"] == "muon" else AdaptiveMuon
    for slot in range(3):
        muon, adam = adapter_slot_children(optimizer, slot)
        assert type(muon.optimizer) is kind and isinstance(adam.optimizer, torch.optim.AdamW)
        install(chunks, optimizer, slot, seed=slot)
        accumulate(chunks, slot, seed=slot)
    before = slot_states(chunks, optimizer, range(3))
    step_adapter_slots(optimizer, {1: 4}, clip_grad=1.0)
    after = slot_states(chunks, optimizer, range(3))
    for slot in (0, 2):
        assert_bits_equal(after[slot], before[slot])
    zero_optimizer_state_for_adapter(optimizer, 1)
    for name, entry in slot_states(chunks, optimizer, [1])[1].items():
        assert not torch.equal(entry["master"], before[1][name]["master"])
        for moment in {"momentum_buffer", "moment2_buffer", "exp_avg", "exp_avg_sq"} & entry.keys():
            assert after[1][name][moment].any() and not bits(entry[moment]).any()
        adaptive = kind is AdaptiveMuon and not name.endswith("bias")
        assert ("moment2_buffer" in entry) == adaptive


@pytest.mark.parametrize("method", ["l2", "independent", "palm"])
def test_steps_equal_the_class_alone(device, method):
    chunks, optimizer = make_pool(optimizer="muon", weight_decay_method=method)
    install(chunks, optimizer, 0, seed=5, lr=0.1, weight_decay=0.3)
    alone = {n: w.to(device) for n, w in random_weights(chunks, 5).items() if w.ndim == 2}
    alone = {n: w.requires_grad_() for n, w in alone.items()}
    settings = {"fp32_matmul_prec": "highest", "weight_decay_method": method}
    muon = Muon(alone.values(), lr=0.1, momentum=0.95, weight_decay=0.3, **settings)
    for step in range(2):
        accumulate(chunks, 0, seed=step)
        parameters = dict(adapter_slot_parameters(chunks, 0))
        for name, weight in alone.items():
            weight.grad = parameters[name].main_grad * (1 / 4)
        muon.step()
        step_adapter_slots(optimizer, {0: 4}, clip_grad=0.0)
    state = slot_states(chunks, optimizer, [0])[0]
    for name, weight in alone.items():
        torch.testing.assert_close(state[name]["master"], weight.detach(), rtol=1e-6, atol=1e-7)


def test_custom_sets_equal_the_named_set_they_repeat(device):
    """emerging-optimizers' "simple" set, given as a custom one."""
    states = []
    for settings in (
        {"muon_coefficient_type": "simple"},
        {"muon_coefficient_type": "custom", "custom_coefficients": ((3.4445, -4.7750, 2.0315),)},
    ):
        chunks, optimizer = make_pool(optimizer="muon", muon_extra_scale_factor=0.2, **settings)
        install(chunks, optimizer, 0)
        accumulate(chunks, 0, seed=0)
        step_adapter_slots(optimizer, {0: 4}, clip_grad=1.0)
        states.append(slot_states(chunks, optimizer, [0])[0])
    assert_bits_equal(*states)


def tagged_stack(shapes):
    stack = make_stack()
    for adapter in stack.tall.adapters:
        adapter.linear_out.is_qkv, adapter.linear_out.qkv_split_shapes = True, shapes
    return stack


@pytest.mark.parametrize(
    ("settings", "shapes", "message"),
    [
        ({"optimizer": "muon", "muon_coefficient_type": "custom"}, None, "custom_coefficients"),
        ({"optimizer": "muon", "custom_coefficients": CUSTOM}, None, "custom_coefficients"),
        ({**BEYOND[3], "optimizer": "adaptive_muon"}, None, "takes no custom sets"),
        ({**BEYOND[1]}, [4, 4, 4], "tall.linear_out is fused.*does not split"),
        ({"optimizer": "muon"}, [4, 4, 2], "tall.linear_out is tagged is_qkv: its 24 rows"),
        ({"optimizer": "muon", "grad_norm_skip_threshold": 3.0}, None, "must be infinite"),
        ({"optimizer": "muon", "muon_scalar_optimizer": "sgd"}, None, "must be 'adam' or 'lion'"),
    ],
)
def test_what_cannot_be_is_refused(device, settings, shapes, message):
    stack = tagged_stack(shapes) if shapes else make_stack()
    with pytest.raises(ValueError, match=message):
        make_pool(stack, **settings)


@pytest.mark.parametrize("bf16", [False, True])
def test_lion_owns_the_biases_and_has_no_clock(device, bf16):
    chunks, optimizer = make_pool(bf16=bf16, optimizer="muon", muon_scalar_optimizer="lion")
    install(chunks, optimizer, 0, seed=1, lr=0.25)
    before = slot_states(chunks, optimizer, [0])[0]["wide.bias"]
    accumulate(chunks, 0, seed=0)
    sums = dict(adapter_slot_parameters(chunks, 0))["wide.bias"].main_grad.clone()
    step_adapter_slots(optimizer, {0: 4}, clip_grad=0.0)
    after = slot_states(chunks, optimizer, [0])[0]["wide.bias"]
    assert "step" not in after and "exp_avg_sq" not in after
    torch.testing.assert_close(after["master"] - before["master"], -0.25 * torch.sign(sums))
    torch.testing.assert_close(after["exp_avg"], 0.02 * sums / 4)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("shapes", [[4, 4, 4], [4, 4, 2, 2]])
def test_fused_matrices_are_split_per_projection(device, shapes, bf16):
    stack = make_stack(bf16=bf16)
    for adapter in stack.tall.adapters:
        adapter.linear_out.is_qkv, adapter.linear_out.qkv_split_shapes = True, shapes
    chunks, optimizer = make_pool(stack, bf16=bf16, optimizer="muon", weight_decay=0.0)
    install(chunks, optimizer, 0, lr=1.0, weight_decay=0.0)
    before = slot_states(chunks, optimizer, [0])[0]["tall.linear_out"]["master"]
    accumulate(chunks, 0, seed=0)
    gradient = dict(adapter_slot_parameters(chunks, 0))["tall.linear_out"].main_grad.clone()
    step_adapter_slots(optimizer, {0: 1}, clip_grad=0.0)
    moved = slot_states(chunks, optimizer, [0])[0]["tall.linear_out"]["master"] - before
    rows = torch.arange(24).view(-1, sum(shapes)).split(shapes, dim=1)
    for projection in rows:
        part = projection.flatten()
        expected = torch.nn.Parameter(torch.zeros(len(part), 4, device=device))
        expected.grad = gradient[part]
        Muon([expected], lr=1.0, fp32_matmul_prec="highest").step()
        torch.testing.assert_close(moved[part], expected.detach(), rtol=1e-4, atol=1e-5)


class FusedLinear(MegatronModule):
    """One matrix under the name by which Megatron knows fused QKV ones; 8 heads' rows a group."""

    def __init__(self, rows):
        super().__init__(
            TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, kv_channels=4)
        )
        self.linear_qkv = torch.nn.Linear(8, rows, bias=False)


@pytest.mark.parametrize(("rows", "is_split"), [(24, True), (28, False)])
def test_megatron_itself_silently_leaves_whole_what_does_not_divide(device, rows, is_split):
    """Megatron on a plain model: 28 rows are no groups of 12, and no one is told."""
    torch.manual_seed(0)
    model = FusedLinear(rows)
    config = pool_config("muon", weight_decay=0.0, lr=1.0, clip_grad=0.0)
    chunks, _ = setup_model_and_optimizer(model, config)
    optimizer = get_megatron_optimizer(dataclasses.replace(config), chunks)
    (parameter,) = (p for p in chunks[0].parameters())
    before = parameter.detach().clone()
    parameter.main_grad.normal_()
    whole = torch.nn.Parameter(torch.zeros_like(before))
    whole.grad = parameter.main_grad.clone()
    Muon([whole], lr=1.0, fp32_matmul_prec="highest").step()
    optimizer.step()
    moved = parameter.detach() - before
    difference = (moved - whole.detach()).norm() / whole.detach().norm()
    assert (difference > 0.05) if is_split else (difference < 1e-4)


def test_megatrons_own_adaptive_muon_fails_at_its_first_step(device):
    """Why its reference is emerging-optimizers' class: see the README."""
    chunks, _ = setup_model_and_optimizer(FusedLinear(24), pool_config("muon"))
    optimizer = get_megatron_optimizer(pool_config("adaptive_muon"), chunks)
    chunks[0].module.linear_qkv.weight.main_grad.normal_()
    with pytest.raises(AttributeError, match="scale_mode"):
        optimizer.step()


def test_the_readmes_reproduction_of_that_fails_the_same_way():
    readme = (pathlib.Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(import torch\n.*?)```", readme, re.DOTALL)
    assert len(block.split("\n\n")[1].splitlines()) == 3
    with pytest.raises(AttributeError, match="scale_mode"):
        exec(block, {})
