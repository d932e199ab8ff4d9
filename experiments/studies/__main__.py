"""``python -m experiments.studies [NAME...] --setting small|full --out DIR``."""

import pathlib
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from experiments import studies


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Studies to run; none: all.")] = None,
    setting: Annotated[str, typer.Option(help="small or full.")] = "small",
    out: Annotated[pathlib.Path, typer.Option(help="Where results are written.")] = studies.OUT,
) -> None:
    """Runs studies and writes tables (markdown, JSON) and figures (PNG, SVG)."""
    unknown = set(names or ()) - set(studies.NAMES)
    if unknown or setting not in ("small", "full"):
        raise typer.BadParameter(
            f"studies are {', '.join(studies.NAMES)}; settings are small and full"
        )
    console = Console()
    for name in names or studies.NAMES:
        console.rule(f"{name} ({setting})")
        record = studies.perform(name, setting, out)
        console.print(Markdown(studies.load(name).table(record["results"])))
        console.print(f"{record['seconds']} s; written to {out / setting / name}")


if __name__ == "__main__":
    typer.run(main)
