"""``python -m experiments.results``: writes what the studies found into RESULTS.md.

Between ``<!-- NAME -->`` and ``<!-- /NAME -->`` stand the command, the seconds that it took and the
table of the study NAME, as its last run at the full setting left them, or where there is none
at the small one; the words around are a person's. Figures are copied to ``experiments/figures``.
"""

import json
import pathlib
import re
import shutil

from experiments import studies

HERE = pathlib.Path(__file__).parent


def folder_of(name: str, found: pathlib.Path) -> pathlib.Path | None:
    """Where a study's results are: of the full setting, else of the small one, else nowhere."""
    folders = [found / setting / name for setting in ("full", "small")]
    return next((folder for folder in folders if (folder / "results.json").exists()), None)


def fill(text: str, found: pathlib.Path) -> str:
    """Returns the text with every study's part replaced by what was found."""

    def part(match: re.Match) -> str:
        name = match[1]
        folder = folder_of(name, found)
        if folder is None:
            return match[0]
        record = json.loads((folder / "results.json").read_text())
        body = f"`{record['command']}` ({record['seconds']:.0f} s)\n\n"
        body += (folder / "table.md").read_text()
        return f"<!-- {name} -->\n{body}<!-- /{name} -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- /\1 -->", part, text, flags=re.DOTALL)


def copy_figures(found: pathlib.Path, to: pathlib.Path) -> None:
    """Copies every study's pictures, named NAME-FIGURE."""
    to.mkdir(exist_ok=True)
    for name in studies.NAMES:
        folder = folder_of(name, found)
        for kind in ("png", "svg") if folder else ():
            for picture in sorted(folder.glob(f"*.{kind}")):
                shutil.copyfile(picture, to / f"{name}-{picture.name}")


def main() -> None:
    """Does both."""
    page = HERE / "RESULTS.md"
    page.write_text(fill(page.read_text(), studies.OUT))
    copy_figures(studies.OUT, HERE / "figures")


if __name__ == "__main__":
    main()
