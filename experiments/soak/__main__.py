"""Lives, kills and damages."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from experiments.soak.crashes import damage_checkpoints, kill_writers
from experiments.soak.life import soak


def main(
    operations: Annotated[int, typer.Option(min=0)] = 2000,
    kills: Annotated[int, typer.Option(min=0)] = 50,
    damaged: Annotated[int, typer.Option(min=0)] = 200,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Lives, kills and damages; exits with 1 at the first promise that does not hold."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="perslot-soak-") as folder:
        for name, count, run in (
            ("soak", operations, soak),
            ("kill", kills, kill_writers),
            ("damage", damaged, damage_checkpoints),
        ):
            if not count:
                continue
            if run is damage_checkpoints:
                print("(tracebacks on a closed event loop are TensorStore's, of reads it gave up)")
            try:
                console.print(name, run(count, seed, Path(folder) / name))
            except AssertionError as error:
                print(f"FAILED {name} with seed {seed}: {error}", file=sys.stderr)
                raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
