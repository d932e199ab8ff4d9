import math

import pytest
import torch

from torch_ref.optimizer import step_adapter_slots
from torch_ref.scheduler import (
    drop_slot_scheduler,
    install_slot_scheduler,
    step_slot_schedulers,
)
from torch_ref.setup import setup_model_and_optimizer
from torch_ref.slots import adapter_slot_children, adapter_slot_parameters
from torch_ref.testing import accumulate, make_pool, make_stack, pool_config, slot_states


def lr_and_wd(optimizer, slot):
    """(lr, weight decay) of a slot's matrices."""
    for child in adapter_slot_children(optimizer, slot):
        for group in child.param_groups:
            if group["wd_mult"] == 1.0:
                return group["lr"], group["weight_decay"]


def curve(optimizer, slot, batch_size, n_steps, **schedule):
    """[(lr, wd)] that each of a new schedule's steps uses."""
    install_slot_scheduler(optimizer, slot, batch_size=batch_size, **schedule)
    used = []
    for _ in range(n_steps):
        used.append(lr_and_wd(optimizer, slot))
        step_slot_schedulers(optimizer, {slot: batch_size})
    drop_slot_scheduler(optimizer, slot)
    return used


def test_counts_in_samples_with_a_fractional_warmup(device):
    """Horizon 15 samples, warm-up 0.1 * 15 = 1.5 samples, then half a cosine over 13.5."""
    _, optimizer = make_pool("muon")
    schedule = {"lr": 1e-2, "min_lr": 1e-3, "lr_decay_style": "cosine", "weight_decay": 0.2}
    used = curve(optimizer, 1, 3, 7, num_step=5, lr_warmup_fraction=0.1, **schedule)
    for step, (lr, wd) in enumerate(used):
        progress = (3 * step - 1.5) / 13.5
        cosine = 1e-3 + 9e-3 * (1 + math.cos(math.pi * progress)) / 2
        expected = 0.0 if step == 0 else cosine if step <= 5 else 1e-3
        assert (lr, wd) == (pytest.approx(expected, rel=1e-12), 0.2)


def test_warms_up_in_steps_from_its_init(device):
    _, optimizer = make_pool("adam")
    used = curve(optimizer, 0, 4, 4, lr=1e-2, lr_warmup_init=2e-3, lr_warmup_iters=2, num_step=9)
    assert [lr for lr, _ in used] == pytest.approx([2e-3, 6e-3, 1e-2, 1e-2])


@pytest.mark.parametrize("style", ["constant", "cosine", "WSD"])
def test_without_a_horizon_it_warms_up_then_holds(device, style):
    _, optimizer = make_pool("adam")
    used = curve(optimizer, 0, 4, 9, lr=1e-2, lr_warmup_iters=2, lr_decay_style=style)
    assert [lr for lr, _ in used] == pytest.approx([0.0, 5e-3] + [1e-2] * 7)


@pytest.mark.parametrize(
    ("style", "late"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 2 * 0.5**0.5 - 1),
        ("minus_sqrt", 1 - 0.5**0.5),
    ],
)
def test_wsd_decays_over_its_last_steps(device, style, late):
    _, optimizer = make_pool("adam")
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": style}
    used = curve(optimizer, 0, 2, 11, lr=1e-2, num_step=10, **wsd)
    assert [lr for lr, _ in used[:7]] == [1e-2] * 7
    assert used[8][0] == pytest.approx(1e-2 * late)
    assert used[10][0] == pytest.approx(0.0, abs=1e-12)


def test_inverse_square_root(device):
    _, optimizer = make_pool("adam")
    root = {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 2, "min_lr": 4e-3}
    used = curve(optimizer, 0, 2, 12, lr=1e-2, num_step=20, **root)
    assert used[8][0] == pytest.approx(1e-2 * math.sqrt(4 / 16))
    assert used[11][0] == pytest.approx(1e-2 * math.sqrt(4 / 22))


@pytest.mark.parametrize(("style", "quarter"), [("linear", 0.25), ("cosine", 0.5 - 0.5**1.5)])
def test_weight_decay_grows_to_the_horizon(device, style, quarter):
    _, optimizer = make_pool("adam")
    growth = {"start_weight_decay": 0.1, "end_weight_decay": 0.3, "weight_decay_incr_style": style}
    used = curve(optimizer, 0, 2, 10, lr=1e-2, num_step=8, **growth)
    weight_decays = [wd for _, wd in used]
    assert weight_decays[0] == pytest.approx(0.1)
    assert weight_decays[2] == pytest.approx(0.1 + 0.2 * quarter)
    assert weight_decays[8:] == pytest.approx([0.3, 0.3])


def test_weight_decay_is_the_configs_unless_given(device):
    _, optimizer = make_pool("adam", weight_decay=0.07)
    assert curve(optimizer, 0, 1, 1, lr=1e-2) == [(1e-2, 0.07)]


def test_resumes_at_resume_step_times_batch_size(device):
    _, optimizer = make_pool("adam")
    schedule = {"lr": 1e-2, "num_step": 10, "lr_decay_style": "linear"}
    whole = curve(optimizer, 0, 4, 8, **schedule)
    scheduler = install_slot_scheduler(optimizer, 0, batch_size=4, resume_step=5, **schedule)
    assert scheduler.num_steps == 20
    assert lr_and_wd(optimizer, 0) == whole[5]


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_the_tenants_lr_reaches_the_step(device, name):
    """The config's lr and min_lr sit in the groups' own max_lr and min_lr and would win."""
    updates = []
    for config_lr in (0.5, 3e-3):
        chunks, optimizer = make_pool(name, lr=config_lr, min_lr=config_lr / 2, weight_decay=0.0)
        install_slot_scheduler(optimizer, 1, lr=3e-3, batch_size=4)
        accumulate(chunks, 1, seed=0)
        step_adapter_slots(optimizer, {1: 4}, clip_grad=0.0)
        updates.append([p.detach().clone() for _, p in adapter_slot_parameters(chunks, 1)])
        assert {e["lr"] for e in slot_states(chunks, optimizer, [1])[1].values()} == {3e-3}
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*updates, strict=True))


@pytest.mark.parametrize(("decoupled_min_lr", "last"), [(None, 1e-3), (5e-3, 5e-3)])
def test_a_decoupled_lr_is_kept(device, decoupled_min_lr, last):
    stack = make_stack()
    for adapter in stack.tall.adapters:
        adapter.linear_in.is_embedding_or_output_parameter = True
    config = pool_config("adam", decoupled_lr=0.2, decoupled_min_lr=decoupled_min_lr, min_lr=9e-3)
    chunks, optimizer = setup_model_and_optimizer(stack, config)
    schedule = {"lr": 1e-2, "min_lr": 1e-3, "lr_decay_style": "linear", "num_step": 2}
    install_slot_scheduler(optimizer, 2, batch_size=1, **schedule)

    def lrs():
        state = slot_states(chunks, optimizer, [2])[2]
        return [state[f"{layer}.linear_in"]["lr"] for layer in ("tall", "wide")]

    assert lrs() == pytest.approx([0.2, 1e-2])
    step_slot_schedulers(optimizer, {2: 2})
    assert lrs() == pytest.approx([last, 1e-3])


def test_slots_have_schedules_of_their_own(device):
    _, optimizer = make_pool("adam")
    for slot, batch_size in ((0, 2), (1, 5)):
        schedule = {"lr": 1e-2, "num_step": 10, "lr_decay_style": "linear"}
        install_slot_scheduler(optimizer, slot, batch_size=batch_size, **schedule)
    step_slot_schedulers(optimizer, {1: 5})
    assert [optimizer.adapter_slot_schedulers[slot].num_steps for slot in (0, 1)] == [0, 5]
    assert lr_and_wd(optimizer, 0)[0] == 1e-2
    assert lr_and_wd(optimizer, 1)[0] == pytest.approx(9e-3)


def test_slots_without_a_schedule_do_not_step(device):
    _, optimizer = make_pool("adam")
    scheduler = install_slot_scheduler(optimizer, 0, lr=1e-2, batch_size=2)
    with pytest.raises(ValueError, match="slot=1: must have a schedule"):
        step_slot_schedulers(optimizer, {0: 2, 1: 2})
    assert scheduler.num_steps == 0


HORIZON = {"num_step": 10}


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: must be an integer of at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5: must be an integer"),
        ({"num_step": 0}, "num_step=0: must be an integer of at least 1"),
        ({"resume_step": -1}, "resume_step=-1: must be an integer of at least 0"),
        ({"lr": float("nan")}, "lr=nan: must be finite"),
        ({"lr": -1e-3}, "lr=-0.001: must be finite and at least 0"),
        ({"min_lr": 0.1}, "min_lr=0.1: must be from 0 to lr=0.01"),
        ({"lr_warmup_init": 0.1}, "lr_warmup_init=0.1: must be from 0 to lr=0.01"),
        ({"lr_decay_style": "cosin"}, "lr_decay_style='cosin': must be one of"),
        (
            HORIZON | {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 2},
            "lr_warmup_iters=2: must be 0",
        ),
        (
            HORIZON | {"lr_warmup_fraction": 1.0},
            "lr_warmup_fraction=1.0: must be from 0 to below 1",
        ),
        ({"lr_warmup_fraction": 0.1}, "num_step=None: must be given for a warm-up fraction"),
        (HORIZON | {"lr_warmup_iters": 10}, "lr_warmup_iters=10: must be below num_step=10"),
        ({"lr_warmup_iters": -1}, "lr_warmup_iters=-1: must be an integer of at least 0"),
        ({"lr_wsd_decay_style": "x"}, "lr_wsd_decay_style='x': must be one of"),
        (HORIZON | {"lr_decay_style": "WSD"}, "lr_wsd_decay_iters=None: must be an integer from 1"),
        (
            HORIZON | {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 11},
            "lr_wsd_decay_iters=11: must be an integer from 1 to num_step=10",
        ),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: must be finite and at least 0"),
        (
            {"weight_decay": 0.1, "start_weight_decay": 0.1},
            "start_weight_decay=0.1: must be None beside weight_decay",
        ),
        ({"start_weight_decay": 0.1}, "end_weight_decay=None: must be given"),
        (
            {"start_weight_decay": 0.2, "end_weight_decay": 0.1},
            "end_weight_decay=0.1: must be at least start_weight_decay=0.2",
        ),
        ({"weight_decay_incr_style": "x"}, "weight_decay_incr_style='x': must be one of"),
        (
            HORIZON | {"start_weight_decay": 0.1, "end_weight_decay": 0.2},
            "weight_decay_incr_style='constant': must be 'linear' or 'cosine'",
        ),
        (
            {
                "start_weight_decay": 0.1,
                "end_weight_decay": 0.2,
                "weight_decay_incr_style": "linear",
            },
            "num_step=None: must be given for a growing weight decay",
        ),
    ],
)
def test_bad_arguments_are_refused_before_anything_changes(device, schedule, message):
    _, optimizer = make_pool("adam")
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=message):
        install_slot_scheduler(optimizer, 0, **{"lr": 1e-2, "batch_size": 4} | schedule)
    assert optimizer.adapter_slot_schedulers == {}
    for group, old in zip(optimizer.param_groups, before, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in old.items() if k != "params"
        }


def test_an_occupied_or_unknown_slot_is_refused(device):
    _, optimizer = make_pool("adam")
    install_slot_scheduler(optimizer, 0, lr=1e-2, batch_size=4)
    with pytest.raises(ValueError, match="slot=0: must be empty"):
        install_slot_scheduler(optimizer, 0, lr=2e-2, batch_size=4)
    assert lr_and_wd(optimizer, 0)[0] == 1e-2
    with pytest.raises(ValueError, match="slot=9"):
        install_slot_scheduler(optimizer, 9, lr=1e-2, batch_size=4)
