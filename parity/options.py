"""Which scenarios exercise each option, and whether the harness would see it go wrong there.

An option counts as exercised where a scenario sets it to something else than its default. There,
two oracles live through the scenario side by side, one with the scenario's settings and one with
that option at its default; how far the second strays from the first, over the error that a check
would let pass (see `policy`), says whether a stack that ignored the option would fail.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from megatron.core.optimizer import OptimizerConfig as MegatronConfig
from rich.table import Table

import jax_impl
from parity import oracle, policy
from parity.ranks import start_reference
from parity.scenario import (
    OPTIMIZER_FIELDS,
    Accumulate,
    Install,
    Ranks,
    Resume,
    Retire,
    Scenario,
    Stack,
    Step,
    Tenant,
    shipped,
)
from parity.truth import Judge, SlotTruth

# What is not in a scenario's [optimizer], and the scenario in which it has another value.
ELSEWHERE: dict[str, Callable[[Scenario], Scenario]] = {
    "lr": lambda scenario: with_tenants(scenario, lambda tenant: {"lr": 2 * tenant.lr}),
    "weight_decay": lambda scenario: with_tenants(scenario, lambda tenant: NO_DECAY),
    "tensor_model_parallel_size": lambda scenario: dataclasses.replace(scenario, ranks=Ranks()),
    "partition_dim": lambda scenario: dataclasses.replace(scenario, model=unpartitioned(scenario)),
}
NO_DECAY = {
    "weight_decay": 0.0,
    "start_weight_decay": None,
    "end_weight_decay": None,
    "weight_decay_incr_style": "constant",
}

# Settings of which one means nothing without another: both go back to their defaults together.
TOGETHER = {
    "muon_coefficient_type": ("custom_coefficients",),
    "custom_coefficients": ("muon_coefficient_type",),
}


@dataclasses.dataclass(frozen=True)
class Exercise:
    """One option in one scenario.

    Attributes:
        moved: how far the option moves the oracle, over the limit of the check that sees it most:
            more than 1 is seen.
    """

    option: str
    scenario: str
    moved: float


class Lives:
    """A scenario's slots in float64 under some settings, and who sits where."""

    def __init__(self, scenario: Scenario):
        self.judge = Judge(scenario)
        self.slots: dict[int, SlotTruth] = {}
        self.retired: dict[str, SlotTruth] = {}

    def play(self, event, occupants: dict[int, str], sums, samples: dict[int, int]) -> None:
        """Moves past an event; ``occupants``, gradient sums and samples are those before it."""
        match event:
            case Install(tenant, slot):
                self.slots[slot] = self.judge.install(tenant)
            case Resume(tenant, slot):
                self.slots[slot] = self.retired.pop(tenant)
            case Retire(slot):
                self.retired[occupants[slot]] = self.slots.pop(slot)
            case Step(slots):
                for slot in slots:
                    arguments = sums[slot], occupants[slot], samples[slot]
                    self.slots[slot] = self.judge.step(
                        self.slots[slot], *arguments, iterate=self.iterate
                    )

    @property
    def iterate(self) -> Callable[..., np.ndarray]:
        """An iteration in bf16 differs from the truth by its rounding alone."""
        is_medium = self.judge.optimizer["muon_fp32_matmul_prec"] == "medium"
        return oracle.newton_schulz_bf16 if is_medium else oracle.newton_schulz


def options_table() -> tuple[Table, bool]:
    """The table of all options, and whether an option is exercised nowhere or would go unseen.

    Call it inside `torch_ref.start_megatron`.
    """
    by_option: dict[str, list[Exercise]] = {name: [] for name in (*OPTIMIZER_FIELDS, *ELSEWHERE)}
    for scenario in measurable(shipped().values()):
        for exercise in exercises(scenario):
            by_option[exercise.option].append(exercise)
    table = Table(
        "option",
        "scenarios, and by how many limits it moves the oracle there",
        title="Every option that changes an update",
    )
    for option, found in by_option.items():
        seen = sorted(found, key=lambda e: -e.moved)
        cells = (f"{e.scenario} {e.moved:.2g}".replace("[", r"\[") for e in seen)
        table.add_row(option, ", ".join(cells))
    table.add_row("ns_method", "changes rounding only; every scenario runs both forms")
    for option, error in refused():
        table.add_row(option, f"refused: {error}".replace("[", r"\["))
    return table, not all(any(e.moved > 1 for e in found) for found in by_option.values())


def measurable(scenarios: Iterable[Scenario]) -> Iterator[Scenario]:
    """One scenario of each name, in the first of its precisions."""
    seen = set()
    for scenario in scenarios:
        name = scenario.name.removesuffix(f"[{scenario.precision}]")
        if name not in seen:
            seen.add(name)
            yield scenario


def exercises(scenario: Scenario) -> list[Exercise]:
    """Every option that the scenario sets to other than its default, with how far it moves."""
    options = [
        option for option, value in scenario.optimizer.items() if value != default_of(option, value)
    ]
    if len(scenario.tenants) == 1:
        options += ["lr", "weight_decay"]
    if scenario.ranks.tensor_parallel > 1:
        options += ["tensor_model_parallel_size", "partition_dim"]
    moved = dict.fromkeys(options, 0.0)
    for option, distance in distances(scenario, options):
        moved[option] = max(moved[option], distance)
    return [Exercise(option, scenario.name, distance) for option, distance in moved.items()]


def default_of(option: str, value: Any) -> Any:
    """The option's default, in the form that a scenario has it."""
    default = getattr(jax_impl.OptimizerConfig(), option)
    return type(value)(default) if default == () else default


def distances(scenario: Scenario, options: list[str]) -> Iterator[tuple[str, float]]:
    """Plays the scenario on the reference and yields how far each option moves at each step."""
    reference = start_reference(scenario)
    truth = Lives(scenario)
    without = {option: Lives(scenario_without(scenario, option)) for option in options}
    occupants: dict[int, str] = {}
    for index, event in enumerate(scenario.events):
        before = reference.observe()
        sums = {
            slot: {name: x for (kind, name), x in view.tensors.items() if kind == "grad_sum"}
            for slot, view in before.items()
        }
        samples = {slot: view.samples for slot, view in before.items()}
        for lives in (truth, *without.values()):
            lives.play(event, occupants, sums, samples)
        apply(reference, event, index, truth)
        match event:
            case Install(tenant, slot) | Resume(tenant, slot):
                occupants[slot] = tenant
            case Retire(slot):
                del occupants[slot]
            case Step(slots):
                after = reference.observe()
                for option, lives in without.items():
                    for slot in slots:
                        pair = truth.slots[slot], lives.slots[slot]
                        yield option, distance(*pair, after[slot].tensors)


def apply(reference: Any, event, index: int, truth: Lives) -> None:
    """Applies one event to the reference, which leaves out the steps that the oracle skips."""
    match event:
        case Install(tenant, slot, resume_step):
            reference.install(tenant, slot, resume_step)
        case Resume(tenant, slot):
            reference.resume(tenant, slot)
        case Accumulate(slot, samples):
            reference.accumulate(slot, samples, index)
        case Retire(slot):
            reference.retire(slot)
        case Step(slots):
            skipped = [slot for slot in slots if not truth.slots[slot].stepped]
            reference.discard(skipped)
            reference.step([slot for slot in slots if slot not in skipped])


def distance(truth: SlotTruth, other: SlotTruth, tensors) -> float:
    """The largest distance of a parameter between two oracles, over what a check would let pass."""
    found = [0.0]
    for name, p in truth.params.items():
        change = p - truth.origin[name]
        if not change.any():
            continue
        error = policy.relative_error(tensors["master", name], p, change)
        floor = policy.update_floor(truth.origin[name], change)
        limit = policy.SINGLE_RATIO * max(error, floor)
        found.append(policy.relative_error(other.params[name], p, change) / limit)
    return max(found)


def scenario_without(scenario: Scenario, option: str) -> Scenario:
    """The scenario with one option, and what means nothing without it, at its default."""
    if option in ELSEWHERE:
        return ELSEWHERE[option](scenario)
    dropped = {option, *TOGETHER.get(option, ())}
    optimizer = {k: v for k, v in scenario.optimizer.items() if k not in dropped}
    optimizer = {"optimizer": MegatronConfig.optimizer, **optimizer}
    return dataclasses.replace(scenario, optimizer=optimizer)


def with_tenants(scenario: Scenario, changes: Callable[[Tenant], dict[str, Any]]) -> Scenario:
    """The scenario with other settings of its tenants."""
    tenants = {
        name: dataclasses.replace(tenant, **changes(tenant))
        for name, tenant in scenario.tenants.items()
    }
    return dataclasses.replace(scenario, tenants=tenants)


def unpartitioned(scenario: Scenario) -> Stack:
    """The scenario's model without a parallel layer."""
    layers = (dataclasses.replace(layer, parallel=None) for layer in scenario.model.layers)
    return Stack(tuple(layers))


def refused() -> Iterator[tuple[str, str]]:
    """Megatron's settings that change an update and that we do not have, with the error."""
    values = {"optimizer": "sgd", "muon_scalar_optimizer": "sgd"}
    ours = {field.name for field in dataclasses.fields(jax_impl.OptimizerConfig)}
    for name, value in values.items():
        yield (
            f"{name} = {value!r}",
            error_of(lambda n=name, v=value: jax_impl.OptimizerConfig(**{n: v})),
        )
    for field in dataclasses.fields(MegatronConfig):
        if field.name not in ours and changes_updates(field.name):
            yield (
                field.name,
                error_of(lambda n=field.name: jax_impl.OptimizerConfig(**{n: None})),
            )


def changes_updates(name: str) -> bool:
    """Whether a field of Megatron's is about the mathematics of a step or its precision.

    The rest is about memory, offloading, overlap and logging; `min_lr` is each tenant's.
    """
    return name.startswith(("sgd_", "soap_", "apply_wd_", "loss_scale", "use_precision_aware")) or (
        name in ("fp16", "use_distributed_optimizer")
    )


def error_of(build: Callable[[], Any]) -> str:
    """The error that a configuration gives.

    Raises:
        AssertionError: it gives none.
    """
    try:
        build()
    except (TypeError, ValueError) as error:
        return str(error)
    raise AssertionError("was not refused")
