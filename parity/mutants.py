"""Named faults on the JAX side. Each must make the harness fail: it is how we know that it can."""

import dataclasses
import math
from collections.abc import Callable, Iterable

# Imported for the faults that they register.
from parity import mutants_adam, mutants_muon, mutants_schedule, mutants_slots  # noqa: F401
from parity.checks import Check, Result
from parity.mutants_registry import MUTANTS, Mutant
from parity.scenario import Accumulate, Scenario, Step

__all__ = ["MUTANTS", "Verdict", "hunt", "hunting_order"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one mutant.

    Attributes:
        mutant: its name.
        killers: the scenarios that failed, by their first check that did.
        tried: how many scenarios were run.
        change: the largest distance from the truth, relative to the update, that an update of
            the first killer had in one step; 0 if none failed.
    """

    mutant: str
    killers: dict[str, Check]
    tried: int
    change: float

    @property
    def survived(self) -> bool:
        return not self.killers


def hunt(
    mutant: Mutant,
    scenarios: Iterable[Scenario],
    run: Callable[[Scenario], Result],
    *,
    everywhere: bool = False,
) -> Verdict:
    """Runs scenarios with the fault until one fails, or all of them."""
    killers: dict[str, Check] = {}
    tried, change = 0, 0.0
    with mutant.applied():
        for scenario in scenarios:
            result = run(scenario)
            tried += 1
            if not result.passed:
                change = change if killers else largest_change(result)
                killers[scenario.name] = next(c for c in result.checks if not c.passed)
                if not everywhere:
                    break
    return Verdict(mutant.name, killers, tried, change)


def hunting_order(mutant: Mutant, scenarios: dict[str, Scenario]) -> list[Scenario]:
    """The scenario that is to kill it, then the others from cheap to dear."""
    others = sorted(
        (s for s in scenarios.values() if s.name != mutant.killer and s.gradients != "text"),
        key=cost,
    )
    return [scenarios[mutant.killer], *others]


def cost(scenario: Scenario) -> int:
    """Roughly how long a scenario takes."""
    work = sum(isinstance(event, Step | Accumulate) for event in scenario.events)
    return work * scenario.pool.n_slots


def largest_change(result: Result) -> float:
    """The largest finite error of an update that failed, started from the reference's state."""
    return max(
        (
            check.jax_error
            for check in result.checks
            if check.kind.endswith(" update")
            and check.mode in ("gram", "standard")
            and not check.passed  # else rounding would be taken for the fault
            and math.isfinite(check.jax_error)
        ),
        default=0.0,
    )
