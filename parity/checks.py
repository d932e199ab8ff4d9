"""The outcome of comparisons. Light to import: the report needs neither stack."""

import dataclasses

from parity.scenario import Scenario


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        event: index of the event and its name, e.g. "7 step".
        step: how many steps the slot's tenant has taken.
        slot: the slot, or None for a figure of the whole scenario.
        tensor: what was compared.
        mode: the `candidate.Mode`'s name, or "reference" for the reference's own promises.
        kind: "exact", "schedule" (ulp), a ratio's class ("update", "momentum_buffer", ...), or
            "rms <class>" over the scenario.
        value, limit: passed if value <= limit. Of an exact check, the number of differences.
        jax_error, reference_error: relative distances from the oracle, where there are any; of a
            schedule, its ulp.
        detail: both values, where the numbers above do not say it.
    """

    event: str
    step: int | None
    slot: int | None
    tensor: str
    mode: str
    kind: str
    value: float
    limit: float
    jax_error: float | None = None
    reference_error: float | None = None
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


@dataclasses.dataclass(frozen=True)
class Where:
    """The place that checks are about."""

    event: str
    slot: int
    step: int
    mode: str

    def check(self, tensor: str, kind: str, value: float, limit: float, **extra) -> Check:
        return Check(
            self.event, self.step, self.slot, tensor, self.mode, kind, value, limit, **extra
        )

    def exact(self, tensor: str, problem: str = "") -> Check:
        """A check of exact equality; ``problem`` names both values if it does not hold."""
        return self.check(tensor, "exact", 1.0 if problem else 0.0, 0.0, detail=problem)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Learning rate and weight decay that both stacks stepped a slot with, as they report them."""

    event: int
    slot: int
    tenant: str
    jax: tuple[float, float]
    reference: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Result:
    """A scenario's outcome.

    Attributes:
        scenario: what was run.
        checks: every comparison, the scenario's own ratios last.
        free_gap: after each event, the relative distance of the free-running JAX weights from the
            reference's.
        rates: of every slot's every step.
        reference: whose class updated the matrices that Muon owns: "megatron", or
            "emerging-optimizers" where Megatron does not pass an option on.
    """

    scenario: Scenario
    checks: list[Check]
    free_gap: list[float]
    rates: list[Rates] = dataclasses.field(default_factory=list)
    reference: str = "megatron"

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)
