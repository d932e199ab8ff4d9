"""The command line: exit code 0 if all passed, 1 if a check failed, 2 for bad usage."""

import contextlib
import enum
import functools
import random
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from parity import html, report, versions
from parity.quiet import silence_import_notices
from parity.rank_worker import RanksError
from parity.scenario import Scenario, dump, load_scenarios, shipped

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Holds the JAX optimizers to the Megatron reference, event by event.",
)


class Placement(enum.StrEnum):
    """Where a pool is on a mesh: `parity.mesh.run_on_mesh`."""

    slot = "slot"
    layer = "layer"
    tensor = "tensor"


@app.command("list")
def list_scenarios() -> None:
    """Lists the scenarios that come with the package."""
    wide_console().print(report.scenario_table(shipped().values()))


@app.command("run")
def run_scenarios(
    scenarios: Annotated[
        list[str] | None,
        typer.Argument(help="Names as listed, or TOML files; all that are shipped if absent."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every check to this file.")] = None,
    html_report: Annotated[
        Path | None, typer.Option("--report", help="Write a page with figures to this file.")
    ] = None,
    stack_versions: Annotated[
        bool, typer.Option("--stack-versions", help="Print what is compared, and where.")
    ] = False,
) -> None:
    """Runs scenarios on both stacks and compares them after every event."""
    try:
        chosen = choose(scenarios or [])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    console = wide_console()
    if stack_versions:
        console.print(report.version_table(), f"on {versions.machine()}", sep="\n")
    for line in versions.untested():
        print(f"note: {line}", file=sys.stderr)
    try:
        results = run_all(console, chosen)
    except RanksError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    console.print(report.result_table(results))
    for result in results:
        report.print_failures(console, result, reproduce(scenarios or [], result.scenario))
    if json is not None:
        report.write_json(json, results)
    if html_report is not None:
        commands = functools.partial(reproduce, scenarios or [])
        html.write(html_report, results, commands)
    failed = sum(not result.passed for result in results)
    checks = sum(len(result.checks) for result in results)
    console.print(f"{len(results) - failed} scenarios passed, {failed} failed; {checks:,} checks")
    raise typer.Exit(1 if failed else 0)


@app.command("mesh")
def run_on_meshes(
    scenarios: Annotated[list[str], typer.Argument(help="Names as listed, or TOML files.")],
    placement: Annotated[
        list[Placement] | None, typer.Option(help="May be repeated; all three if absent.")
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="How many CPU devices to simulate.")] = 8,
) -> None:
    """Runs scenarios with the JAX side spread over several simulated devices."""
    try:
        chosen = choose(scenarios)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    console, results = wide_console(), []
    with both_stacks():
        from parity.mesh import run_on_mesh

        for scenario in chosen:
            for place in placement or Placement:
                results.append(run_on_mesh(scenario, place))
    console.print(report.result_table(results))
    for result in results:
        name = result.scenario.name.rpartition(" by ")
        again = f"python -m parity mesh {shlex.quote(name[0])} --placement {name[2]}"
        report.print_failures(console, result, f"{again} --devices {devices}")
    failed = sum(not result.passed for result in results)
    console.print(f"{devices} devices: {len(results) - failed} passed, {failed} failed")
    raise typer.Exit(1 if failed else 0)


@app.command("fuzz")
def fuzz_scenarios(
    examples: Annotated[int, typer.Option(min=1, help="How many scenarios to draw.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Other seeds draw others.")] = 0,
    failing: Annotated[Path, typer.Option(help="Where to write one that fails.")] = Path(
        "build/fuzz_failing.toml"
    ),
) -> None:
    """Runs random pools, tenants, options and lives until one fails, and shrinks that."""
    from parity.fuzz import fuzz

    console = wide_console()
    with both_stacks(), progress(console) as bar:
        from parity.candidate import MODES
        from parity.mutants_registry import forget_programs
        from parity.run import run

        task = bar.add_task("", total=examples)
        judged: Counter[bool] = Counter()
        rounds = {0}

        def passes(scenario: Scenario, variant: int) -> bool:
            bar.update(task, advance=1, description=f"round {variant}")
            if variant not in rounds:
                # No later round uses its programs, and a process can map only so many.
                rounds.add(variant)
                forget_programs()
            # The free mode and one of the locked ones, in turn: compiling takes the time.
            result = run(scenario, (MODES[variant % 2], MODES[2]))
            judged.update(check.kind != "unjudged" for check in result.checks)
            return result.passed

        outcome = fuzz(examples, seed, passes)
    console.print(report.coverage_table(outcome.coverage))
    verdict = "no mismatch" if outcome.failing is None else "a mismatch"
    console.print(
        f"{outcome.examples} examples with seed {seed}: {verdict}; {judged[True]:,} checks, and "
        f"{judged[False]:,} tensors unjudged, because rounding alone decides them"
    )
    if outcome.failing is not None:
        failing.parent.mkdir(parents=True, exist_ok=True)
        failing.write_text(dump(outcome.failing), encoding="utf-8")
        command = shlex.join(["python", "-m", "parity", "run", str(failing)])
        console.print(f"reproduce: {command}", markup=False, highlight=False)
        raise typer.Exit(1)


@app.command("mutants")
def hunt_mutants(
    names: Annotated[list[str] | None, typer.Argument(help="All of them if absent.")] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="Only so many, drawn.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    everywhere: Annotated[
        bool, typer.Option("--all", help="Run every scenario, and count those that fail.")
    ] = False,
) -> None:
    """Puts named faults into the JAX side, each of which a scenario must catch."""
    silence_import_notices()
    from parity.mutants import MUTANTS, hunt, hunting_order

    unknown = [name for name in names or [] if name not in MUTANTS]
    if unknown:
        print(f"error: no mutant {unknown[0]!r}; known: {', '.join(MUTANTS)}", file=sys.stderr)
        raise typer.Exit(2)
    chosen = [MUTANTS[name] for name in names or MUTANTS]
    if sample is not None:
        chosen = random.Random(seed).sample(chosen, min(sample, len(chosen)))
    console, known, verdicts = wide_console(), shipped(), []
    with both_stacks(), progress(console) as bar:
        from parity.run import run

        task = bar.add_task("", total=len(chosen))
        for mutant in chosen:
            bar.update(task, description=mutant.name)
            order = hunting_order(mutant, known)
            verdicts.append(hunt(mutant, order, run, everywhere=everywhere))
            bar.advance(task)
    console.print(report.verdict_table(verdicts))
    survivors = [verdict.mutant for verdict in verdicts if verdict.survived]
    small = sum(0 < verdict.change < 1e-3 for verdict in verdicts)
    console.print(
        f"{len(verdicts) - len(survivors)} of {len(verdicts)} mutants killed; "
        f"{small} of them change updates by less than 1e-3 of their size"
    )
    raise typer.Exit(1 if survivors else 0)


@app.command("drift")
def measure_drift(
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the numbers to this file.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="How long to run.")] = 200,
) -> None:
    """Lets both stacks run on freely, and shows how their weights drift apart."""
    console = wide_console()
    with both_stacks():
        from parity import drift

        runs = drift.measure_all(steps)
    console.print(drift.table(runs))
    if json is not None:
        drift.write_json(json, runs)
    if plot is not None:
        drift.write_plot(plot, runs)


@app.command("options")
def show_options() -> None:
    """Shows for every option where it is exercised, and that going wrong there would be seen."""
    console = wide_console()
    with both_stacks():
        from parity.options import options_table

        table, incomplete = options_table()
    console.print(table)
    raise typer.Exit(1 if incomplete else 0)


@app.command("convert")
def convert_tenant(
    source: Annotated[Path, typer.Argument(help="A tenant file, or FOLDER/NAME of checkpoints.")],
    target: Annotated[Path, typer.Argument(help="What to write.")],
    to: Annotated[
        str | None, typer.Option(help="tenant, checkpoint or peft; tenant for *.safetensors.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Of the adapter, if unrecorded.")] = None,
) -> None:
    """Turns a tenant of either stack into a tenant file, an Orbax checkpoint or a PEFT adapter."""
    from parity.convert import KINDS, convert

    kind = to or ("tenant" if target.suffix == ".safetensors" else None)
    try:
        if kind not in KINDS:
            raise ValueError(f"--to is {to!r}; choose one of {', '.join(KINDS)}")
        convert(source, target, kind, alpha=alpha)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def wide_console() -> Console:
    """A console that does not break the tables where nobody knows its width."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def choose(names: list[str]) -> list[Scenario]:
    """Returns the scenarios that names and files stand for; all that are shipped for none.

    Raises:
        ValueError: a name that is not known, or a malformed file.
        OSError: a file that cannot be read.
    """
    known = shipped()
    chosen = []
    for name in names:
        if name.endswith(".toml"):
            chosen += load_scenarios(name)
        elif name in known:
            chosen.append(known[name])
        else:
            raise ValueError(
                f"no scenario {name!r}; give a .toml file or one of {', '.join(known)}"
            )
    return chosen if names else list(known.values())


def run_all(console: Console, scenarios: list[Scenario]) -> list:
    """Runs the scenarios one after the other in one Megatron process."""
    results = []
    with both_stacks(), progress(console) as bar:
        from parity.run import run

        task = bar.add_task("", total=len(scenarios))
        for scenario in scenarios:
            bar.update(task, description=scenario.name.replace("[", r"\["))
            results.append(run(scenario))
            bar.advance(task)
    return results


@contextlib.contextmanager
def both_stacks() -> Iterator[None]:
    """Imports both stacks, which takes seconds, and starts Megatron."""
    silence_import_notices()
    with versions.blamed_on_versions():
        import torch_ref

        with torch_ref.start_megatron():
            yield


def progress(console: Console) -> Progress:
    """What is running now and for how long."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} {task.description}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True)


def reproduce(names: list[str], scenario: Scenario) -> str:
    """The command that runs one scenario again."""
    files = [name for name in names if name.endswith(".toml")]
    again = files if any(scenario in load_scenarios(file) for file in files) else [scenario.name]
    return f"python -m parity run {' '.join(map(shlex.quote, again))}"
