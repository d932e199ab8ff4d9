"""The report as one page that opens offline: no scripts, no other files."""

import html
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from parity import html_plots as plots
from parity import policy, report, versions
from parity.checks import Check, Result
from parity.scenario import Event, Install, Resume, Retire, Scenario, Step

WORST_SHOWN = 8

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1180px; padding: 0 1em;
       color: #222; }
h1 { margin-bottom: 0; }
table { border-collapse: collapse; margin: 0.7em 0; }
th, td { border-bottom: 1px solid #ddd; padding: 3px 10px; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.passed { color: #0072B2; } .failed { color: #D55E00; font-weight: bold; }
details { border-top: 2px solid #999; padding: 0.6em 0; }
summary { font-size: 1.15em; cursor: pointer; }
.charts { display: flex; flex-wrap: wrap; }
figure { margin: 0.6em 0.6em 0 0; } figcaption { font-weight: 600; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #333; }
code { background: #f4f4f4; padding: 1px 4px; }
"""


def write(path: Path, results: list[Result], reproduce: Callable[[Scenario], str]) -> None:
    """Writes the report; ``reproduce`` gives the command that runs a scenario again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(results, reproduce), encoding="utf-8")


def page(results: list[Result], reproduce: Callable[[Scenario], str]) -> str:
    """The whole document."""
    failed = sum(not result.passed for result in results)
    checks = sum(len(result.checks) for result in results)
    verdict = f"{len(results) - failed} scenarios passed, {failed} failed; {checks:,} checks"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>perslot parity</title>',
        f"<style>{STYLE}</style></head><body>",
        "<h1>JAX held to Megatron</h1>",
        f'<p class="{"failed" if failed else "passed"}">{verdict}</p>',
        summary(results),
        *(section(result, reproduce(result.scenario), len(results)) for result in results),
        stacks(),
        "</body></html>",
    ]
    return "\n".join(parts)


def summary(results: list[Result]) -> str:
    """One line per scenario."""
    head = ("scenario", "reference", "checks", "worst ratio", "limit", "schedule, ulp", "result")
    rows = []
    for result in results:
        ulps = max((c.value for c in result.checks if c.kind == "schedule"), default=0.0)
        numbers = (
            f"{len(result.checks):,}",
            f"{report.worst_ratio(result):.2f}",
            f"{policy.SINGLE_RATIO:g}",
            f"{ulps:.1f}",
        )
        rows.append(
            [
                escape(result.scenario.name),
                escape(result.reference),
                *(f'<td class="number">{number}</td>' for number in numbers),
                verdict(result),
            ]
        )
    return table(head, rows)


def section(result: Result, command: str, n_results: int) -> str:
    """A scenario's figures; open where it failed or is alone."""
    opened = " open" if n_results == 1 or not result.passed else ""
    scenario = result.scenario
    return "\n".join(
        [
            f"<details{opened}><summary>{escape(scenario.name)}: {verdict(result)}</summary>",
            f"<p>{escape(scenario.description)}</p>",
            '<div class="charts">',
            slots_chart(scenario),
            *rate_charts(result),
            ratio_chart(result),
            error_chart(result),
            "</div>",
            worst_table(result, command),
            "</details>",
        ]
    )


def verdict(result: Result) -> str:
    word = "passed" if result.passed else "failed"
    return f'<span class="{word}">{word}</span>'


def slots_chart(scenario: Scenario) -> str:
    """Who occupied what when, and when each slot stepped."""
    marks = [
        (slot, index)
        for index, event in enumerate(scenario.events)
        if isinstance(event, Step)
        for slot in event.slots
    ]
    spans = list(occupancy(scenario.events))
    return plots.timeline(spans, scenario.pool.n_slots, len(scenario.events), marks)


def occupancy(events: tuple[Event, ...]) -> Iterator[tuple[int, int, int, str]]:
    """(slot, first event, event after the last, tenant) of every stay."""
    since: dict[int, tuple[int, str]] = {}
    for index, event in enumerate(events):
        match event:
            case Install(tenant, slot) | Resume(tenant, slot):
                since[slot] = index, tenant
            case Retire(slot):
                start, tenant = since.pop(slot)
                yield slot, start, index + 1, tenant
    for slot, (start, tenant) in since.items():
        yield slot, start, len(events), tenant


def rate_charts(result: Result) -> Iterator[str]:
    """What both stacks stepped with: the reference's rate as a line, JAX's as dots over it."""
    tenants = list(dict.fromkeys(rate.tenant for rate in result.rates))
    for title, pick in (("Learning rate", 0), ("Weight decay", 1)):
        series = []
        for i, tenant in enumerate(tenants):
            mine = [rate for rate in result.rates if rate.tenant == tenant]
            color = plots.PALETTE[i % len(plots.PALETTE)]
            reference = [(rate.event, rate.reference[pick]) for rate in mine]
            jax = [(rate.event, rate.jax[pick]) for rate in mine]
            series += [
                plots.Series(tenant, reference, color),
                plots.Series("", jax, "#000000", "dots"),
            ]
        caption = f"{title} of each step: Megatron's (lines), JAX's (dots)"
        yield plots.chart(series, title=caption, x_label="event", y_label=title.lower())


MODE_COLORS = {
    "gram": plots.BLUE,
    "standard": plots.ORANGE,
    "free": plots.GREEN,
    "reference": plots.PURPLE,
}


def ratio_chart(result: Result) -> str:
    """Every ratio against the limit."""
    judged = [check for check in ratios(result)]
    events = [event_index(check) for check in judged]
    series = [
        plots.Series(
            mode,
            [(event_index(c), c.value) for c in judged if c.mode == mode],
            color,
            "dots",
        )
        for mode, color in MODE_COLORS.items()
    ]
    if events:
        ends = (min(events), max(events))
        limit = [(event, policy.SINGLE_RATIO) for event in ends]
        series.append(plots.Series("limit", limit, plots.VERMILION, "dashed"))
    return plots.chart(
        series,
        title="JAX's distance from the oracle over Megatron's, every tensor",
        x_label="event",
        y_label="ratio",
        log=True,
    )


def error_chart(result: Result) -> str:
    """The largest relative error of each step's updates, of both stacks."""
    errors: dict[tuple[str, str], dict[int, float]] = {}
    for check in ratios(result):
        if not check.kind.endswith(" update") or check.mode == "reference":
            continue
        kind = "free" if check.mode == "free" else "locked"
        for stack, error in (("JAX", check.jax_error), ("Megatron", check.reference_error)):
            worst = errors.setdefault((stack, kind), {})
            worst[event_index(check)] = max(worst.get(event_index(check), 0.0), error)
    colors = {"locked": (plots.BLUE, plots.SKY), "free": (plots.GREEN, plots.ORANGE)}
    series = [
        plots.Series(
            f"{stack}, {kind}",
            sorted(worst.items()),
            colors[kind][stack == "Megatron"],
            "line" if stack == "JAX" else "dashed",
        )
        for (stack, kind), worst in errors.items()
    ]
    return plots.chart(
        series,
        title="Largest error of an update, relative to it",
        x_label="event",
        y_label="relative error",
        log=True,
    )


def worst_table(result: Result, command: str) -> str:
    """The tensors nearest to their limits, or beyond them, and how to see them again."""
    failed = [check for check in result.checks if not check.passed]
    nearest = sorted(ratios(result), key=lambda c: (c.value, c.jax_error), reverse=True)
    chosen = list(dict.fromkeys([*failed, *nearest]))[:WORST_SHOWN]
    head = (
        "tensor",
        "event",
        "slot",
        "mode",
        "kind",
        "value",
        "limit",
        "JAX's error",
        "Megatron's",
    )
    rows = [
        [
            escape(check.tensor),
            escape(check.event),
            "" if check.slot is None else str(check.slot),
            check.mode,
            check.kind,
            *(
                f'<td class="number">{_number(x)}</td>'
                for x in (check.value, check.limit, check.jax_error, check.reference_error)
            ),
        ]
        for check in chosen
    ]
    shown = f"<p>{len(failed)} checks failed. " if failed else "<p>"
    return f"{shown}Worst tensors; to see them again: <code>{escape(command)}</code></p>" + table(
        head, rows
    )


def ratios(result: Result) -> list[Check]:
    """The checks of single ratios."""
    return [c for c in result.checks if c.limit == policy.SINGLE_RATIO and c.slot is not None]


def event_index(check: Check) -> int:
    return int(check.event.split()[0])


def stacks() -> str:
    """What was compared, and where."""
    rows = [[escape(name), escape(version)] for name, version in versions.installed().items()]
    notes = "".join(f"<p>{escape(line)}</p>" for line in versions.untested())
    return (
        "<details open><summary>Versions and machine</summary>"
        f"<p>{escape(versions.machine())}</p>{table(('package', 'version'), rows)}{notes}</details>"
    )


def table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    """A table; a cell that is not yet a ``td`` becomes one."""
    cells = (
        "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row)
        for row in rows
    )
    heads = "".join(f"<th>{title}</th>" for title in head)
    return f"<table><tr>{heads}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def escape(text: str) -> str:
    return html.escape(text)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if math.isfinite(value) else "infinite"
