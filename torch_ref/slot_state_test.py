import pytest
import torch
from megatron.core.optimizer import ChainedOptimizer, FP32Optimizer, OptimizerConfig

from torch_ref.optimizer import step_adapter_slots
from torch_ref.slot_state import (
    adapter_slot_state,
    load_adapter_slot_state,
    reload_adapter_slot_model_params,
    zero_optimizer_state_for_adapter,
)
from torch_ref.slots import adapter_slot_children, adapter_slot_parameters
from torch_ref.testing import accumulate, assert_bits_equal, bits, install, make_pool, slot_states

BOTH_OPTIMIZERS = pytest.mark.parametrize("name", ["adam", "muon"])
BOTH_PRECISIONS = pytest.mark.parametrize("bf16", [False, True])


def trained_pool(name, bf16):
    chunks, optimizer = make_pool(name, bf16=bf16)
    for slot in range(3):
        install(chunks, optimizer, slot, seed=slot)
        for step in range(2):
            accumulate(chunks, slot, seed=10 * slot + step)
            step_adapter_slots(optimizer, {slot: 4}, clip_grad=1.0)
        accumulate(chunks, slot, seed=100 + slot)
    return chunks, optimizer


@pytest.mark.parametrize(("name", "clock"), [("adam", {"step": 0}), ("muon", {})])
def test_a_state_not_made_yet_reads_as_zeros(device, name, clock):
    chunks, optimizer = make_pool(name)
    entry = adapter_slot_state(optimizer, chunks, 1)["wide.linear_in"]
    moments = {"adam": {"exp_avg", "exp_avg_sq"}, "muon": {"momentum_buffer"}}[name]
    assert (
        entry.keys()
        == {"param", "master", "grad_sum", "lr", "weight_decay"} | moments | clock.keys()
    )
    assert not any(bits(entry[moment]).any() for moment in moments)
    assert {key: entry[key] for key in clock} == clock


@BOTH_PRECISIONS
@BOTH_OPTIMIZERS
def test_reading_a_state_does_not_change_training(device, name, bf16):
    states = []
    for read in (False, True):
        chunks, optimizer = make_pool(name, bf16=bf16)
        install(chunks, optimizer, 0)
        if read:
            adapter_slot_state(optimizer, chunks, 0)
        accumulate(chunks, 0, seed=0)
        step_adapter_slots(optimizer, {0: 4}, clip_grad=1.0)
        states.append(adapter_slot_state(optimizer, chunks, 0))
    assert_bits_equal(*states)


@BOTH_PRECISIONS
@BOTH_OPTIMIZERS
def test_zero_state_is_exact_and_leaves_cotenants(device, name, bf16):
    chunks, optimizer = trained_pool(name, bf16)
    before = slot_states(chunks, optimizer, range(3))
    zero_optimizer_state_for_adapter(optimizer, 1)
    after = slot_states(chunks, optimizer, range(3))
    for slot in (0, 2):
        assert_bits_equal(after[slot], before[slot])
    for entry in after[1].values():
        assert entry.get("step", 0) == 0
        for moment in entry.keys() & {"momentum_buffer", "exp_avg", "exp_avg_sq"}:
            assert not bits(entry[moment]).any()
    assert any(entry.get("step") == 2 for entry in before[1].values())


class GroupClockSGD(torch.optim.SGD):
    """SGD whose groups count their steps, as fused optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
        return super().step(closure)


@pytest.mark.parametrize("clock", [lambda: 0, lambda: torch.zeros((), dtype=torch.int32)])
def test_clocks_in_param_groups_go_back_to_zero(device, clock):
    children, holders = [], []
    for slot in range(2):
        parameter = torch.nn.Parameter(torch.ones(2, device=device))
        parameter.grad = torch.ones(2, device=device)
        group = {"params": [parameter], "adapter_slot": slot, "step": clock()}
        sgd = GroupClockSGD([group], lr=0.1, momentum=0.9)
        sgd.step()
        holders.append(sgd)
        children.append(FP32Optimizer(sgd, OptimizerConfig(optimizer="sgd"), None))
    before = holders[0].param_groups[0]["step"]
    zero_optimizer_state_for_adapter(ChainedOptimizer(children), 0)
    after = holders[0].param_groups[0]["step"]
    assert type(after) is type(before)
    assert after == 0
    assert holders[1].param_groups[0]["step"] == 1
    (zeroed,), (kept,) = (sgd.state.values() for sgd in holders)
    assert not bits(zeroed["momentum_buffer"]).any()
    assert torch.equal(kept["momentum_buffer"], torch.ones(2, device=device))


@pytest.mark.parametrize("clock", [7, torch.tensor(7.0)])
def test_clocks_in_parameter_state_go_back_to_zero_number_or_tensor(device, clock):
    _, optimizer = trained_pool("adam", False)
    states = [
        state
        for slot in (0, 1)
        for child in adapter_slot_children(optimizer, slot)
        for state in child.optimizer.state.values()
    ]
    for state in states:
        state["step"] = clock.clone() if isinstance(clock, torch.Tensor) else clock
    zero_optimizer_state_for_adapter(optimizer, 0)
    half = len(states) // 2
    assert [state["step"] for state in states] == [0] * half + [7] * half
    assert all(type(state["step"]) is type(clock) for state in states)


def test_reload_keeps_the_low_bits_of_cotenants_masters(device):
    chunks, optimizer = trained_pool("muon", True)
    before = slot_states(chunks, optimizer, range(3))
    for entry in before[0].values():
        assert not torch.equal(entry["master"], entry["param"].float())
    for _, parameter in adapter_slot_parameters(chunks, 1):
        parameter.data.fill_(0.5)
    reload_adapter_slot_model_params(optimizer, 1)
    after = slot_states(chunks, optimizer, range(3))
    for slot in (0, 2):
        assert_bits_equal(after[slot], before[slot])
    for entry in after[1].values():
        assert torch.equal(entry["master"], torch.full_like(entry["master"], 0.5))


@BOTH_PRECISIONS
@BOTH_OPTIMIZERS
def test_a_loaded_state_goes_on_bit_for_bit_in_another_slot(device, name, bf16):
    chunks, optimizer = trained_pool(name, bf16)
    expected = slot_states(chunks, optimizer, [0, 2])
    load_adapter_slot_state(optimizer, chunks, 1, expected[0])
    assert_bits_equal(slot_states(chunks, optimizer, [2])[2], expected[2])
    for slot in (0, 1):
        for _, parameter in adapter_slot_parameters(chunks, slot):
            parameter.main_grad.zero_()
        accumulate(chunks, slot, seed=42)
    step_adapter_slots(optimizer, {0: 4, 1: 4}, clip_grad=1.0)
    states = slot_states(chunks, optimizer, [0, 1])
    assert_bits_equal(states[1], states[0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.pop("wide.linear_in"), "differs in .'wide.linear_in'"),
        (lambda state: state["wide.bias"].pop("step"), "must have .'step'"),
    ],
)
def test_states_that_do_not_fit_are_refused_before_anything_is_written(device, spoil, message):
    chunks, optimizer = trained_pool("adam", False)
    state, before = slot_states(chunks, optimizer, [0, 1]).values()
    spoil(state)
    with pytest.raises(ValueError, match=message):
        load_adapter_slot_state(optimizer, chunks, 1, state)
    assert_bits_equal(adapter_slot_state(optimizer, chunks, 1), before)
