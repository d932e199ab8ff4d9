import pytest
import torch

from tenant_format import TenantFileError, read, write
from torch_ref.optimizer import step_adapter_slots
from torch_ref.scheduler import step_slot_schedulers
from torch_ref.slots import adapter_slot_parameters
from torch_ref.tenant_file import load_tenant, save_tenant
from torch_ref.testing import (
    RANK,
    accumulate,
    assert_bits_equal,
    install,
    make_pool,
    slot_states,
)

TENANT = dict(rank=RANK, alpha=8.0, batch_size=4)


def step(chunks, optimizer, slot, seed):
    accumulate(chunks, slot, seed)
    step_adapter_slots(optimizer, {slot: 4}, clip_grad=1.0)
    step_slot_schedulers(optimizer, {slot: 4})


def trained(optimizer, **settings):
    chunks, optimizer = make_pool(optimizer, **settings)
    schedule = dict(num_step=20, lr_decay_style="WSD", lr_wsd_decay_iters=18, min_lr=1e-3)
    install(chunks, optimizer, 1, seed=3, **schedule)
    for seed in range(3):
        step(chunks, optimizer, 1, seed)
    return chunks, optimizer


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", ["muon", "adam"])
def test_goes_on_elsewhere_bit_for_bit(device, tmp_path, kind, bf16):
    chunks, optimizer = trained(kind, bf16=bf16)
    accumulate(chunks, 1, seed=50)
    path = tmp_path / "a.safetensors"
    save_tenant(path, chunks, optimizer, 1, accumulated=2, **TENANT)
    other_chunks, other = make_pool(kind, bf16=bf16)
    install(other_chunks, other, 0, seed=9)
    step(other_chunks, other, 0, seed=9)
    before = slot_states(other_chunks, other, [0])[0]
    record = load_tenant(path, other_chunks, other, 2)
    assert (record["samples"], record["accumulated"], record["alpha"]) == (12, 2, 8.0)
    for seed in range(60, 65):
        step(chunks, optimizer, 1, seed)
        step(other_chunks, other, 2, seed)
        assert_bits_equal(
            slot_states(other_chunks, other, [2])[2], slot_states(chunks, optimizer, [1])[1]
        )
    assert_bits_equal(slot_states(other_chunks, other, [0])[0], before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, r: a.pop("tall.bias/master"), "tall.bias/master is not there"),
        (lambda a, r: a.update({"new/master": a["tall.bias/master"]}), "new/master is none of"),
        (lambda a, r: a.pop("tall.linear_in/momentum_buffer"), "must have .*momentum_buffer"),
        (lambda a, r: a.update({"tall.bias/master": a["wide.bias/master"][:3]}), "shape"),
        (lambda a, r: r.update(rank=5), "rank is 5"),
        (lambda a, r: r["config"].update(adam_beta2=0.5), "config.adam_beta2 is 0.5"),
        (lambda a, r: r["clocks"].clear(), "must have .*step"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(device, tmp_path, change, message):
    chunks, optimizer = trained("muon")
    path = tmp_path / "a.safetensors"
    save_tenant(path, chunks, optimizer, 1, **TENANT)
    arrays, record = read(path)
    change(arrays, record)
    write(path, arrays, record)
    before = slot_states(chunks, optimizer, range(3))
    with pytest.raises(TenantFileError, match=f"a.safetensors: .*{message}"):
        load_tenant(path, chunks, optimizer, 0)
    for slot, state in slot_states(chunks, optimizer, range(3)).items():
        assert_bits_equal(state, before[slot])
    assert 0 not in optimizer.adapter_slot_schedulers


def test_errors(device, tmp_path):
    chunks, optimizer = trained("adam")
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match="slot=0: must be occupied"):
        save_tenant(path, chunks, optimizer, 0, **TENANT)
    for name, value in dict(rank=5, batch_size=0, accumulated=5).items():
        with pytest.raises(ValueError, match=f"{name}={value}: must be"):
            save_tenant(path, chunks, optimizer, 1, **TENANT | {name: value})
    save_tenant(path, chunks, optimizer, 1, **TENANT | {"alpha": None})
    with pytest.raises(ValueError, match="slot=1: must be empty"):
        load_tenant(path, chunks, optimizer, 1)
    with pytest.raises(ValueError, match="alpha=None"):
        load_tenant(path, chunks, optimizer, 0)
    load_tenant(path, chunks, optimizer, 0, alpha=4.0)
    assert all(torch.isfinite(p).all() for _, p in adapter_slot_parameters(chunks, 0))
