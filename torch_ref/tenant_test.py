import pytest
import torch

from torch_ref.optimizer import step_adapter_slots
from torch_ref.scheduler import step_slot_schedulers
from torch_ref.slot_state import load_adapter_slot_state
from torch_ref.slots import multi_lora_layers
from torch_ref.tenant import install_adapter, retire_adapter
from torch_ref.testing import (
    accumulate,
    assert_bits_equal,
    bits,
    install,
    make_pool,
    random_weights,
    slot_states,
)

BOTH_OPTIMIZERS = pytest.mark.parametrize("name", ["adam", "muon"])
BOTH_PRECISIONS = pytest.mark.parametrize("bf16", [False, True])
SCHEDULE = {"num_step": 10, "lr_decay_style": "cosine", "lr_warmup_fraction": 0.15}


def train(chunks, optimizer, slot, seeds):
    for seed in seeds:
        accumulate(chunks, slot, seed)
        step_adapter_slots(optimizer, {slot: 4}, clip_grad=1.0)
        step_slot_schedulers(optimizer, {slot: 4})


@BOTH_PRECISIONS
def test_install_writes_padded_weights_scaling_and_masters(device, bf16):
    chunks, optimizer = make_pool("muon", bf16=bf16)
    weights = random_weights(chunks, seed=3, rank=2)
    install_adapter(chunks, optimizer, 1, weights, rank=2, alpha=3.0, lr=1e-3, batch_size=4)
    state = slot_states(chunks, optimizer, [1])[1]
    for name, weight in weights.items():
        own = tuple(slice(size) for size in weight.shape)
        for key in ("param", "master"):
            assert torch.equal(state[name][key][own].cpu().float(), weight)
            assert state[name][key].count_nonzero() == weight.count_nonzero()
    assert {entry["lr"] for entry in state.values()} == {1e-3}
    for _, layer in multi_lora_layers(chunks):
        assert layer.scaling.tolist() == [0.0, 1.5, 0.0]


@BOTH_PRECISIONS
@BOTH_OPTIMIZERS
def test_padding_stays_exactly_zero(device, name, bf16):
    """Gradients of a zero-padded adapter are zero in the padding."""
    chunks, optimizer = make_pool(name, bf16=bf16)
    weights = random_weights(chunks, seed=3, rank=2)
    install_adapter(chunks, optimizer, 0, weights, rank=2, alpha=3.0, lr=1e-2, batch_size=1)
    x = torch.randn(5, 24, device=device, dtype=torch.bfloat16 if bf16 else torch.float32)
    for _ in range(3):
        y = chunks[0].module.wide(x, torch.zeros(5, dtype=torch.int64, device=device))
        y.square().sum().backward()
        step_adapter_slots(optimizer, {0: 1}, clip_grad=1.0)
    state = slot_states(chunks, optimizer, [0])[0]
    assert not state["wide.linear_in"]["master"][2:].any()
    assert not state["wide.linear_out"]["master"][:, 2:].any()
    assert not torch.equal(state["wide.linear_in"]["master"][:2].cpu(), weights["wide.linear_in"])


@BOTH_PRECISIONS
@BOTH_OPTIMIZERS
def test_retire_leaves_nothing_and_cotenants_alone(device, name, bf16):
    chunks, optimizer = make_pool(name, bf16=bf16)
    for slot in range(3):
        install(chunks, optimizer, slot, seed=slot)
        train(chunks, optimizer, slot, seeds=[slot, slot + 10])
        accumulate(chunks, slot, seed=slot + 20)
    before = slot_states(chunks, optimizer, range(3))
    retire_adapter(chunks, optimizer, 1)
    after = slot_states(chunks, optimizer, range(3))
    for slot in (0, 2):
        assert_bits_equal(after[slot], before[slot])
    for entry in after[1].values():
        assert entry.get("step", 0) == 0
        for value in entry.values():
            if isinstance(value, torch.Tensor):
                assert not bits(value).any()
    assert sorted(optimizer.adapter_slot_schedulers) == [0, 2]
    for _, layer in multi_lora_layers(chunks):
        assert layer.scaling.tolist() == [2.0, 0.0, 2.0]


@BOTH_PRECISIONS
@BOTH_OPTIMIZERS
def test_the_next_tenant_trains_as_in_a_fresh_pool(device, name, bf16):
    states = []
    for used in (True, False):
        chunks, optimizer = make_pool(name, bf16=bf16)
        if used:
            install(chunks, optimizer, 1, seed=1, lr=0.5, weight_decay=0.3)
            train(chunks, optimizer, 1, seeds=[1, 2])
            retire_adapter(chunks, optimizer, 1)
            accumulate(chunks, 1, seed=3)
        install(chunks, optimizer, 1, seed=4, **SCHEDULE)
        train(chunks, optimizer, 1, seeds=[5, 6, 7])
        states.append(slot_states(chunks, optimizer, [1])[1])
    assert_bits_equal(*states)


@BOTH_PRECISIONS
@BOTH_OPTIMIZERS
def test_a_tenant_resumes_in_another_slot_bit_for_bit(device, name, bf16):
    chunks, optimizer = make_pool(name, bf16=bf16)
    install(chunks, optimizer, 0, **SCHEDULE)
    train(chunks, optimizer, 0, seeds=range(3))
    kept = slot_states(chunks, optimizer, [0])[0]
    train(chunks, optimizer, 0, seeds=range(3, 6))
    expected = slot_states(chunks, optimizer, [0])[0]
    retire_adapter(chunks, optimizer, 0)
    install(chunks, optimizer, 2, seed=9, resume_step=3, **SCHEDULE)
    load_adapter_slot_state(optimizer, chunks, 2, kept)
    train(chunks, optimizer, 2, seeds=range(3, 6))
    assert_bits_equal(slot_states(chunks, optimizer, [2])[2], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot": 0}, "slot=0: must be empty, retire its tenant first"),
        ({"slot": 5}, "slot=5 has no parameters"),
        ({"rank": 5}, "rank=5: must be from 1 to the pool's 4"),
        ({"rank": 2}, "not zero beyond the adapter's rank 2|must be"),
        ({"weights": {}}, "weights: must name the slot's parameters"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_bad_installs_are_refused_before_anything_changes(device, change, message):
    chunks, optimizer = make_pool("adam")
    install(chunks, optimizer, 0, seed=0)
    accumulate(chunks, 1, seed=0)
    before = slot_states(chunks, optimizer, range(3))
    arguments = {"slot": 1, "weights": random_weights(chunks, 1), "rank": 4, "alpha": 1.0}
    arguments |= {"lr": 1e-2, "batch_size": 4} | change
    with pytest.raises(ValueError, match=message):
        install_adapter(chunks, optimizer, **arguments)
    after = slot_states(chunks, optimizer, range(3))
    for slot in range(3):
        assert_bits_equal(after[slot], before[slot])
    assert list(optimizer.adapter_slot_schedulers) == [0]
