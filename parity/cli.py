"""The command line: exit code 0 if all passed, 1 if a check failed, 2 for bad usage."""

import logging
import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from parity import report
from parity.scenario import Scenario, load_scenarios, shipped

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Holds the JAX optimizers to the Megatron reference, event by event.",
)


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
) -> None:
    """Runs scenarios on both stacks and compares them after every event."""
    try:
        chosen = choose(scenarios or [])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    console = wide_console()
    results = run_all(console, chosen)
    console.print(report.result_table(results))
    for result in results:
        report.print_failures(console, result, reproduce(scenarios or [], result.scenario))
    if json is not None:
        report.write_json(json, results)
    failed = sum(not result.passed for result in results)
    checks = sum(len(result.checks) for result in results)
    console.print(f"{len(results) - failed} scenarios passed, {failed} failed; {checks:,} checks")
    raise typer.Exit(1 if failed else 0)


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
    # Importing both stacks takes seconds: not before the arguments are known to be good. They
    # announce which of their optional parts are absent; nothing here needs those.
    warnings.filterwarnings("ignore", module=r"megatron")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    import torch_ref
    from parity.run import run

    results = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with torch_ref.start_megatron(), Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(scenarios))
        for index, scenario in enumerate(scenarios, 1):
            name = scenario.name.replace("[", r"\[")
            bar.update(task, description=f"{index}/{len(scenarios)} {name}")
            results.append(run(scenario))
    return results


def reproduce(names: list[str], scenario: Scenario) -> str:
    """The command that runs one scenario again."""
    files = [name for name in names if name.endswith(".toml")]
    again = files if any(scenario in load_scenarios(file) for file in files) else [scenario.name]
    return f"python -m parity run {' '.join(map(shlex.quote, again))}"
