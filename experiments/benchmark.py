"""``python -m experiments.benchmark``: what a step of the whole pool costs, beside its rivals.

Times are medians of repetitions in which all rivals take turns, in one process. The ratios that
the project promises are listed with what was measured; nothing here fails because of a speed.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from experiments import rivals
from experiments.rivals import Rival
from experiments.workloads import LARGE, WORKLOADS, Workload


@dataclasses.dataclass(frozen=True)
class Timing:
    """What one rival took.

    Attributes:
        name: the rival's.
        milliseconds: of each repetition.
        first_call_seconds: tracing, compiling and the first step.
        peak_memory, bytes_accessed, note: see `Rival`.
    """

    name: str
    milliseconds: tuple[float, ...]
    first_call_seconds: float
    peak_memory: float | None
    bytes_accessed: float | None
    note: str

    @property
    def median(self) -> float:
        """In milliseconds."""
        return statistics.median(self.milliseconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third, in milliseconds."""
        low, _, high = statistics.quantiles(self.milliseconds, n=4, method="inclusive")
        return low, high


@dataclasses.dataclass(frozen=True)
class Claim:
    """A promise: ``value`` is to be at most or at least ``target``."""

    text: str
    value: float
    sense: str
    target: float

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.sense == "<=" else self.value >= self.target


@dataclasses.dataclass(frozen=True)
class Curve:
    """How rivals grow: {rival: its timing at each of ``points``} along ``axis``."""

    axis: str
    points: tuple[int, ...]
    timings: dict[str, list[Timing]]


# --- timing -------------------------------------------------------------------------------------


REST = 0.02  # seconds: idle worker threads of the rival before spin for some milliseconds


def seconds_of_a_step(rival: Rival) -> float:
    """Times one step, after the machine has come to rest."""
    rival.prepare()
    time.sleep(REST)
    started = time.perf_counter()
    rival.step()
    return time.perf_counter() - started


def take_turns(entries: dict[str, Rival], repeat: int) -> dict[str, Timing]:
    """Times all rivals in turn, ``repeat`` times over: what slows the machine slows all of them."""
    first = {key: r.compile_seconds + seconds_of_a_step(r) for key, r in entries.items()}
    rounds = [
        {key: 1e3 * seconds_of_a_step(rival) for key, rival in entries.items()}
        for _ in range(repeat)
    ]
    return {
        key: Timing(
            name=rival.name,
            milliseconds=tuple(times[key] for times in rounds),
            first_call_seconds=first[key],
            peak_memory=rival.peak_memory,
            bytes_accessed=rival.bytes_accessed,
            note=rival.note,
        )
        for key, rival in entries.items()
    }


ON_JAX: dict[str, Callable[..., Rival]] = {
    "ours": rivals.ours,
    "train_state": rivals.train_state,
    "our_adamw": rivals.our_adamw,
    "mixed": rivals.mixed,
    "optax_adamw": rivals.per_slot_adamw,
    "loop": rivals.looped_muon,
    "vmap": rivals.vmapped_muon,
    "whole_pool": rivals.whole_pool_adamw,
    "floor": rivals.floor,
}


def compare(
    workload: Workload, repeat: int, keys: Sequence[str] = tuple(ON_JAX), with_torch: bool = True
) -> dict[str, Timing]:
    """Times the rivals of `ON_JAX` under ``keys``, a NumPy copy, and the torch reference."""
    params, grads = workload.random(seed=0, scale=0.02), workload.random(seed=1, scale=1e-3)
    resident = rivals.on_device(grads)
    entries = {key: ON_JAX[key](params, resident) for key in keys}
    if "floor" in entries and jax.default_backend() == "cpu":  # it copies the host's memory
        entries["numpy"] = rivals.numpy_copy(params)
    with contextlib.ExitStack() as stack:
        if with_torch:
            reference = rivals.torch_reference(workload, params, grads)
            entries["torch"] = stack.enter_context(reference)
        return take_turns(entries, repeat)


def has_torch_reference() -> bool:
    """Whether everything is installed that the torch reference needs."""
    return all(map(importlib.util.find_spec, ("torch", "megatron", "emerging_optimizers")))


# --- growth -------------------------------------------------------------------------------------

SLOT_COUNTS = (1, 2, 4, 8, 16, 32, 64)
RANKS = (8, 16, 32, 64, 128)
LAYER_COUNTS = (1, 2, 4, 8, 16, 28)
OF_SLOTS = 64


def stepping_slots(workload: Workload, repeat: int) -> Curve:
    """`SlotTrainState.step` of k out of 64 slots."""
    pool = dataclasses.replace(workload, n_slots=OF_SLOTS)
    params = pool.random(seed=0, scale=0.02)
    grads = rivals.on_device(pool.random(seed=1, scale=1e-3))
    entries = {str(k): rivals.train_state(params, grads, range(k)) for k in SLOT_COUNTS}
    timings = take_turns(entries, repeat)
    return Curve("slots that step, of 64", SLOT_COUNTS, {"train_state": list(timings.values())})


def growth(axis: str, workloads: dict[int, Workload], repeat: int) -> Curve:
    """How ours, both of Optax's and the floor grow along a series of workloads."""
    keys = ("ours", "optax_adamw", "vmap", "floor")
    measured = [compare(w, repeat, keys, with_torch=False) for w in workloads.values()]
    return Curve(axis, tuple(workloads), {key: [m[key] for m in measured] for key in keys})


def growth_curves(workload: Workload, repeat: int) -> list[Curve]:
    """Along the number of slots, the rank, the slots that step, and the number of leaves."""
    one_layer = dataclasses.replace(workload, n_layers=1)

    def series(base, field, values):
        return {value: dataclasses.replace(base, **{field: value}) for value in values}

    layers = series(dataclasses.replace(workload, n_slots=2), "n_layers", LAYER_COUNTS)
    by_leaves = {len(w.shapes()): w for w in layers.values()}
    return [
        growth("slots", series(one_layer, "n_slots", SLOT_COUNTS), repeat),
        growth("rank", series(one_layer, "rank", RANKS), repeat),
        stepping_slots(one_layer, repeat),
        growth("leaves", by_leaves, repeat),
    ]


# --- claims -------------------------------------------------------------------------------------


def claims(workload: Workload, timings: dict[str, Timing], curves: Sequence[Curve]) -> list[Claim]:
    """What issue 4 promises, as far as this run measured it."""
    ours = timings["ours"]

    def slower(key: str) -> float:
        return timings[key].median / ours.median

    large = workload == LARGE
    found = []
    if large:
        found += [
            Claim("ours / floor", 1 / slower("floor"), "<=", 1.25),
            Claim("ours / per_slot(optax.adamw)", 1 / slower("optax_adamw"), "<=", 0.9),
            Claim(
                "our AdamW / per_slot(optax.adamw)",
                timings["our_adamw"].median / timings["optax_adamw"].median,
                "<=",
                1.0,
            ),
            Claim("first call, s", ours.first_call_seconds, "<=", 10.0),
            Claim("peak memory / parameters, gradients, state", ours.peak_memory, "<=", 1.25),
        ]
    if "mixed" in timings:
        own = ours.median + timings["our_adamw"].median
        found.append(Claim("mixed pool / Muon + AdamW", timings["mixed"].median / own, "<=", 1.0))
    if "torch" in timings:
        found.append(Claim("torch / ours", slower("torch"), ">=", 3.5 if large else 10.0))
    found += [
        Claim("vmap of optax.contrib.muon / ours", slower("vmap"), ">=", 2.0 if large else 3.0),
        Claim("whole-pool / ours", slower("whole_pool"), ">=", 1.1 * workload.n_slots),
    ]
    for curve in curves:
        if "train_state" in curve.timings:
            one, *_, every = curve.timings["train_state"]
            found.append(Claim("k = 1 of 64 / k = 64", one.median / every.median, "<=", 1 / 24))
    return found


# --- what comes out -----------------------------------------------------------------------------


def timing_table(title: str, timings: dict[str, Timing]) -> Table:
    """A row per rival; ratios are to ``ours``."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for heading in ("median ms", "quartiles", "/ ours", "first call s", "peak memory"):
        table.add_column(heading, justify="right")
    for timing in timings.values():
        low, high = timing.quartiles
        table.add_row(
            timing.name,
            f"{timing.median:.2f}",
            f"{low:.2f} – {high:.2f}",
            f"{timing.median / timings['ours'].median:.2f}",
            f"{timing.first_call_seconds:.1f}",
            "" if timing.peak_memory is None else f"{timing.peak_memory:.2f}",
        )
    table.caption = "; ".join(f"{t.name}: {t.note}" for t in timings.values() if t.note) or None
    return table


def curve_table(curve: Curve) -> Table:
    """A row per rival, a column per point: median ms, and the first call's seconds."""
    table = Table(title=f"{curve.axis}: median ms (first call s)", title_justify="left")
    table.add_column("")
    for point in curve.points:
        table.add_column(str(point), justify="right")
    for timings in curve.timings.values():
        cells = (f"{t.median:.2f} ({t.first_call_seconds:.1f})" for t in timings)
        table.add_row(timings[0].name, *cells)
    return table


def claim_table(found: Sequence[Claim]) -> Table:
    """What was promised, measured, and whether it holds."""
    table = Table("promised", title="Claims", title_justify="left")
    for heading in ("measured", "target", "met"):
        table.add_column(heading, justify="right")
    for claim in found:
        sign = "≤" if claim.sense == "<=" else "≥"
        target = f"{sign} {claim.target:.3g}"
        table.add_row(claim.text, f"{claim.value:.3g}", target, "yes" if claim.met else "NO")
    return table


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "device": jax.devices()[0].device_kind,
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", ""),
    }


def as_json(workload: Workload, timings, curves, found) -> dict[str, Any]:
    """Everything that was measured."""

    def timing(t: Timing) -> dict[str, Any]:
        return dataclasses.asdict(t) | {"median_ms": t.median, "quartiles_ms": t.quartiles}

    return {
        "workload": dataclasses.asdict(workload) | {"parameters": workload.n_parameters()},
        "machine": machine(),
        "timings": {key: timing(t) for key, t in timings.items()},
        "curves": [
            {
                "axis": curve.axis,
                "points": curve.points,
                "timings": {key: list(map(timing, ts)) for key, ts in curve.timings.items()},
            }
            for curve in curves
        ],
        "claims": [dataclasses.asdict(claim) | {"met": claim.met} for claim in found],
    }


def draw(path: Path, title: str, timings: dict[str, Timing], curves: Sequence[Curve]) -> None:
    """Writes a picture: a bar per rival, and a panel per curve."""
    from matplotlib.figure import Figure  # without pyplot: no display is asked for

    rows = 1 + (len(curves) + 1) // 2
    figure = Figure(figsize=(10, 1 + 3.5 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, 2)
    bars = figure.add_subplot(grid[0, :])
    ordered = sorted(timings.values(), key=lambda t: t.median, reverse=True)
    colors = ["tab:blue" if t.name.startswith("ours") else "tab:gray" for t in ordered]
    drawn = bars.barh([t.name for t in ordered], [t.median for t in ordered], color=colors)
    bars.bar_label(drawn, fmt="%.3g", padding=3)
    bars.set(title=title, xlabel="milliseconds per step of all slots", xscale="log")
    for index, curve in enumerate(curves):
        panel = figure.add_subplot(grid[1 + index // 2, index % 2])
        for own in curve.timings.values():
            panel.plot(curve.points, [t.median for t in own], marker="o", label=own[0].name)
        panel.set(xscale="log", yscale="log", xlabel=curve.axis, ylabel="milliseconds")
        panel.set_xticks(curve.points, curve.points)
        panel.minorticks_off()
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main(
    workload: Annotated[str, typer.Option(help="small or large.")] = "large",
    repeat: Annotated[int, typer.Option(min=2, help="Repetitions that medians are of.")] = 9,
    curves: Annotated[bool, typer.Option("--curves", help="Growth curves, too.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG) here.")] = None,
) -> None:
    """Times one step of the whole pool beside its rivals."""
    if workload not in WORKLOADS:
        print(f"error: no workload {workload!r}; choose small or large", file=sys.stderr)
        raise typer.Exit(2)
    report(WORKLOADS[workload], repeat, curves, json_file, plot)


def report(
    workload: Workload,
    repeat: int,
    with_curves: bool = False,
    json_file: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Measures, prints the tables and writes the files that were asked for."""
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    timings = compare(workload, repeat, with_torch=has_torch_reference())
    if "torch" not in timings:
        console.print("torch reference: not timed, megatron-core is not installed")
    found_curves = growth_curves(workload, repeat) if with_curves else []
    found = claims(workload, timings, found_curves)
    title = (
        f"{workload.name}: {workload.n_parameters() / 1e6:.1f}M parameters in "
        f"{workload.n_slots} slots, rank {workload.rank}, {len(workload.shapes())} leaves"
    )
    console.print(timing_table(title, timings))
    for curve in found_curves:
        console.print(curve_table(curve))
    console.print(claim_table(found))
    if json_file is not None:
        figures = as_json(workload, timings, found_curves, found)
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    if plot is not None:
        draw(plot, title, timings, found_curves)


if __name__ == "__main__":
    typer.run(main)
