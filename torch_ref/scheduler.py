"""One of Megatron's own schedules per slot, counted in the slot's samples."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from torch_ref.slots import adapter_slot_children

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WD_INCR_STYLES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSchedule:
    """A tenant's learning rate and weight decay over its training.

    Steps are the tenant's optimizer steps, each of `batch_size` samples; the horizon is
    `num_step * batch_size` samples. Without a horizon the learning rate warms up, then holds,
    whatever the decay style.

    Attributes:
        lr: highest learning rate, reached at the end of the warm-up.
        batch_size: samples per step.
        min_lr: where the decay ends.
        num_step: steps to the horizon, or None.
        lr_warmup_fraction: warm-up as a fraction of the horizon; need not be whole samples.
        lr_warmup_iters: warm-up in steps; excludes the fraction.
        lr_warmup_init: where the warm-up starts.
        lr_decay_style: one of `LR_DECAY_STYLES`.
        lr_wsd_decay_iters: for "WSD", the steps of its final decay.
        lr_wsd_decay_style: one of `WSD_DECAY_STYLES`.
        weight_decay: constant weight decay; None: the optimizer config's.
        start_weight_decay: with `end_weight_decay`, in place of `weight_decay`.
        end_weight_decay: reached at the horizon.
        weight_decay_incr_style: one of `WD_INCR_STYLES`.
        resume_step: steps already taken.

    Raises:
        ValueError: naming the argument, its value and what is right.
    """

    lr: float
    batch_size: int
    min_lr: float = 0.0
    num_step: int | None = None
    lr_warmup_fraction: float | None = None
    lr_warmup_iters: int = 0
    lr_warmup_init: float = 0.0
    lr_decay_style: str = "constant"
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_style: str = "exponential"
    weight_decay: float | None = None
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    weight_decay_incr_style: str = "constant"
    resume_step: int = 0

    def __post_init__(self):
        self._check_counts()
        self._check_lr()
        self._check_warmup()
        self._check_wsd()
        self._check_weight_decay()

    def _require(self, holds: bool, argument: str, right: str) -> None:
        if not holds:
            raise ValueError(f"{argument}={getattr(self, argument)!r}: must be {right}")

    def _check_counts(self) -> None:
        self._require(is_count(self.batch_size, 1), "batch_size", "an integer of at least 1")
        self._require(
            self.num_step is None or is_count(self.num_step, 1),
            "num_step",
            "an integer of at least 1, or None",
        )
        for argument in ("lr_warmup_iters", "resume_step"):
            self._require(
                is_count(getattr(self, argument), 0), argument, "an integer of at least 0"
            )

    def _check_lr(self) -> None:
        self._require(0 <= self.lr < math.inf, "lr", "finite and at least 0")
        for argument in ("min_lr", "lr_warmup_init"):
            self._require(
                0 <= getattr(self, argument) <= self.lr, argument, f"from 0 to lr={self.lr}"
            )
        self._require(
            self.lr_decay_style in LR_DECAY_STYLES, "lr_decay_style", f"one of {LR_DECAY_STYLES}"
        )

    def _check_warmup(self) -> None:
        if self.lr_warmup_fraction is not None:
            self._require(self.lr_warmup_iters == 0, "lr_warmup_iters", "0 beside a fraction")
            self._require(
                0 <= self.lr_warmup_fraction < 1, "lr_warmup_fraction", "from 0 to below 1"
            )
            self._require(self.num_step is not None, "num_step", "given for a warm-up fraction")
        if self.num_step is not None:
            self._require(
                self.lr_warmup_iters < self.num_step,
                "lr_warmup_iters",
                f"below num_step={self.num_step}",
            )

    def _check_wsd(self) -> None:
        self._require(
            self.lr_wsd_decay_style in WSD_DECAY_STYLES,
            "lr_wsd_decay_style",
            f"one of {WSD_DECAY_STYLES}",
        )
        if self.lr_decay_style == "WSD" and self.num_step is not None:
            self._require(
                is_count(self.lr_wsd_decay_iters, 1) and self.lr_wsd_decay_iters <= self.num_step,
                "lr_wsd_decay_iters",
                f"an integer from 1 to num_step={self.num_step}",
            )

    def _check_weight_decay(self) -> None:
        self._require(
            self.weight_decay_incr_style in WD_INCR_STYLES,
            "weight_decay_incr_style",
            f"one of {WD_INCR_STYLES}",
        )
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay is not None:
            self._require(start is None, "start_weight_decay", "None beside weight_decay")
            self._require(end is None, "end_weight_decay", "None beside weight_decay")
            self._require(
                0 <= self.weight_decay < math.inf, "weight_decay", "finite and at least 0"
            )
        if start is None and end is None:
            return
        self._require(start is not None, "start_weight_decay", "given with end_weight_decay")
        self._require(end is not None, "end_weight_decay", "given with start_weight_decay")
        self._require(start >= 0, "start_weight_decay", "at least 0")
        self._require(
            start <= end < math.inf, "end_weight_decay", f"at least start_weight_decay={start}"
        )
        if start != end:
            self._require(
                self.weight_decay_incr_style != "constant",
                "weight_decay_incr_style",
                "'linear' or 'cosine' from one weight decay to another",
            )
            self._require(self.num_step is not None, "num_step", "given for a growing weight decay")

    def scheduler_arguments(self, default_weight_decay: float) -> dict[str, Any]:
        """The arguments of Megatron's `OptimizerParamScheduler`, its steps being samples."""
        horizon = self.num_step and self.num_step * self.batch_size
        warmup = (
            self.lr_warmup_iters * self.batch_size
            if self.lr_warmup_fraction is None
            else self.lr_warmup_fraction * horizon
        )
        if self.start_weight_decay is None:
            constant = self.weight_decay
            start_wd = end_wd = default_weight_decay if constant is None else constant
        else:
            start_wd, end_wd = self.start_weight_decay, self.end_weight_decay
        # Megatron wants a horizon beyond the warm-up; "constant" never looks at it.
        steps = horizon or warmup + 1
        return {
            "init_lr": self.lr_warmup_init,
            "max_lr": self.lr,
            "min_lr": self.min_lr,
            "lr_warmup_steps": warmup,
            "lr_decay_steps": steps,
            "lr_decay_style": self.lr_decay_style if horizon else "constant",
            "start_wd": start_wd,
            "end_wd": end_wd,
            "wd_incr_steps": steps,
            "wd_incr_style": self.weight_decay_incr_style,
            "wsd_decay_steps": self.lr_wsd_decay_iters
            and self.lr_wsd_decay_iters * self.batch_size,
            "lr_wsd_decay_style": self.lr_wsd_decay_style,
        }


def is_count(value: Any, least: int) -> bool:
    """Whether a value is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def set_tenant_lr(param_groups: Sequence[dict[str, Any]], bounds: Mapping[str, float]) -> None:
    """Writes the tenant's `max_lr` and `min_lr` over the config's; explicit overrides stay.

    A group's own `max_lr` and `min_lr` beat the scheduler's, so without this the tenant's learning
    rate would never reach the step.
    """
    for group in param_groups:
        group.update({key: bounds[key] for key in group["tenant_lr_keys"]})


def install_slot_scheduler(
    optimizer: ChainedOptimizer, slot: int, **schedule: Any
) -> OptimizerParamScheduler:
    """Starts a slot's schedule; its learning rate and weight decay are set at once.

    Args:
        optimizer: as built by `build_multi_lora_optimizer`.
        slot: the slot.
        **schedule: the fields of `SlotSchedule`; `lr` and `batch_size` are required.

    Returns:
        The scheduler, at `resume_step * batch_size` samples.

    Raises:
        ValueError: an unknown slot, one that has a schedule, or a bad argument; nothing changed.
    """
    plan = SlotSchedule(**schedule)
    arguments = plan.scheduler_arguments(optimizer.config.weight_decay)
    return start_slot_scheduler(optimizer, slot, arguments, plan.resume_step * plan.batch_size)


def start_slot_scheduler(
    optimizer: ChainedOptimizer, slot: int, arguments: Mapping[str, Any], samples: int
) -> OptimizerParamScheduler:
    """Starts a slot's schedule at ``samples``, from the scheduler's own arguments.

    Raises:
        ValueError: an unknown slot, or one that has a schedule; nothing changed.
    """
    slot_optimizer = ChainedOptimizer(adapter_slot_children(optimizer, slot))
    if slot in optimizer.adapter_slot_schedulers:
        raise ValueError(f"slot={slot}: must be empty, its schedule is still installed")
    set_tenant_lr(slot_optimizer.param_groups, arguments)
    scheduler = OptimizerParamScheduler(slot_optimizer, **arguments)
    scheduler.step(samples)
    optimizer.adapter_slot_schedulers[slot] = scheduler
    return scheduler


def drop_slot_scheduler(optimizer: ChainedOptimizer, slot: int) -> None:
    """Forgets a slot's schedule, if it has one."""
    optimizer.adapter_slot_schedulers.pop(slot, None)


def step_slot_schedulers(optimizer: ChainedOptimizer, batch_sizes: Mapping[int, int]) -> None:
    """Advances the named slots' schedules, each by its batch size in samples.

    Raises:
        ValueError: a slot without a schedule; none was advanced.
    """
    schedulers = optimizer.adapter_slot_schedulers
    for slot in batch_sizes:
        if slot not in schedulers:
            raise ValueError(f"slot={slot}: must have a schedule, of {sorted(schedulers)}")
    for slot, batch_size in batch_sizes.items():
        schedulers[slot].step(batch_size)
