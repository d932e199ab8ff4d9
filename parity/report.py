"""Shows results: a table and failures on the terminal, everything as JSON."""

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from parity import policy, versions
from parity.checks import Check, Result
from parity.observation import MOMENTS
from parity.scenario import Scenario

_FAILURES_SHOWN = 5


def scenario_table(scenarios: Iterable[Scenario]) -> Table:
    """What could be run."""
    table = Table("scenario", "optimizer", "slots", "events", "gradients", "description")
    for s in scenarios:
        pool, events = str(s.pool.n_slots), str(len(s.events))
        row = (s.name, s.optimizer["optimizer"], pool, events, s.gradients, s.description)
        table.add_row(*map(_literal, row))
    return table


# Which ratios a line of the table shows: column, modes, and the classes it is the largest of.
_COLUMNS = (
    ("muon\ngram", ("gram",), ("muon update",)),
    ("muon\nstandard", ("standard",), ("muon update",)),
    ("muon\nfree", ("free",), ("muon update",)),
    ("adam\nlocked", ("gram", "standard"), ("adam update",)),
    ("adam\nfree", ("free",), ("adam update",)),
    ("state,\nnorm", ("gram", "standard", "free"), (*MOMENTS, "norm")),
    ("Megatron\nover JAX", ("reference",), ("muon update", "adam update", *MOMENTS, "norm")),
)


def result_table(results: list[Result]) -> Table:
    """One line per scenario: its ratios, JAX's distance from the oracle over the reference's."""
    table = Table(
        "scenario",
        *(column for column, _, _ in _COLUMNS),
        "worst\nsingle",
        "schedule\nulp",
        "gap of\nfree run",
        "checks",
        "result",
        title="JAX's distance from the float64 oracle over Megatron's, root mean square",
    )
    for result in results:
        table.add_row(
            _literal(result.scenario.name),
            *(_largest_ratio(result, modes, kinds) for _, modes, kinds in _COLUMNS),
            f"{worst_ratio(result):.2f}",
            f"{max((c.value for c in result.checks if c.kind == 'schedule'), default=0):.1f}",
            f"{max(result.free_gap):.0e}",
            f"{len(result.checks):,}",
            "[green]passed[/]" if result.passed else "[red]FAILED[/]",
        )
    return table


def worst_ratio(result: Result) -> float:
    """The largest single ratio of a scenario."""
    ratios = [c.value for c in result.checks if c.limit == policy.SINGLE_RATIO]
    return max(ratios, default=0.0)


def coverage_table(coverage: Counter[tuple[str, str]]) -> Table:
    """How many examples met each value of each field."""
    table = Table("field", "values, and in how many examples")
    fields: dict[str, list[str]] = {}
    for (field, value), count in sorted(coverage.items()):
        fields.setdefault(field, []).append(f"{value}: {count}")
    for field, values in fields.items():
        table.add_row(field, _literal(", ".join(values)))
    return table


def verdict_table(verdicts: Iterable[Any]) -> Table:
    """One line per mutant: its `parity.mutants.Verdict`."""
    table = Table("mutant", "killed by", "check", "value / limit", "largest change", "scenarios")
    for verdict in verdicts:
        if verdict.survived:
            table.add_row(verdict.mutant, "[red]SURVIVED[/]", "", "", "", f"0/{verdict.tried}")
            continue
        scenario, check = next(iter(verdict.killers.items()))
        where = f"event {check.event}, {check.tensor} ({check.mode}, {check.kind})"
        found = f"{check.value:.2g} / {check.limit:.2g}"
        count = f"{len(verdict.killers)}/{verdict.tried}"
        row = (verdict.mutant, scenario, where, found, f"{verdict.change:.1e}", count)
        table.add_row(*map(_literal, row))
    return table


def version_table() -> Table:
    """What is installed beside what was tested."""
    table, tested = Table("package", "installed", "tested"), versions.tested()
    for name, version in versions.installed().items():
        table.add_row(name, version, tested.get(name, ""))
    return table


def print_failures(console: Console, result: Result, reproduce: str) -> None:
    """Says what failed, where, by how much, against what limit, and how to see it again."""
    failures = [check for check in result.checks if not check.passed]
    for check in failures[:_FAILURES_SHOWN]:
        console.print(
            f"FAILED {describe(result.scenario, check)}", style="red", markup=False, highlight=False
        )
    if len(failures) > _FAILURES_SHOWN:
        console.print(f"... and {len(failures) - _FAILURES_SHOWN} more", markup=False)
    if failures:
        console.print(f"reproduce: {reproduce}", markup=False, highlight=False)


def describe(scenario: Scenario, check: Check) -> str:
    """One failure in one line."""
    place = [scenario.name, f"event {check.event}"]
    if check.slot is not None:
        place += [f"slot {check.slot}", f"step {check.step}"]
    line = f"{', '.join(place)}, {check.tensor} ({check.mode}, {check.kind}): "
    if check.kind == "exact":
        return line + f"{check.detail or 'differs'}, must be equal"
    line += f"{check.value:.4g} over the limit {check.limit:.4g}"
    if check.jax_error is not None:
        line += (
            f"; error of JAX {check.jax_error:.3g}, of the reference {check.reference_error:.3g}"
        )
    return line + (f"; {check.detail}" if check.detail else "")


def write_json(path: Path, results: list[Result]) -> None:
    """Writes every check; numbers that JSON has no word for become null."""
    document = {
        "passed": all(result.passed for result in results),
        "scenarios": [
            {
                "name": result.scenario.name,
                "passed": result.passed,
                "free_gap": result.free_gap,
                "checks": [check_record(check) for check in result.checks],
            }
            for result in results
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def check_record(check: Check) -> dict[str, Any]:
    """A check as JSON."""
    names = ("value", "limit", "jax_error", "reference_error")
    record = {
        "event": check.event,
        "step": check.step,
        "slot": check.slot,
        "tensor": check.tensor,
        "mode": check.mode,
        "kind": check.kind,
        **{name: _finite(getattr(check, name)) for name in names},
        "passed": check.passed,
    }
    return record | ({"detail": check.detail} if check.detail else {})


def _largest_ratio(result: Result, modes: tuple[str, ...], kinds: tuple[str, ...]) -> str:
    wanted = [f"rms {kind}" for kind in kinds]
    ratios = [c.value for c in result.checks if c.mode in modes and c.kind in wanted]
    return f"{max(ratios):.2f}" if ratios else ""


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _literal(text: str) -> str:
    """Keeps rich from reading ``name[bf16]`` as markup."""
    return text.replace("[", r"\[")
