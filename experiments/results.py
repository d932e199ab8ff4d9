"""``python -m experiments.results``: writes what the studies found into RESULTS.md.

Between ``<!-- NAME -->`` and ``<!-- /NAME -->`` stand the command, the seconds that it took and the
table of the study NAME, as its last run at the full setting left them; the words around are a
person's. Figures are copied to ``experiments/figures``.
"""

import json
import pathlib
import re
import shutil

from experiments import studies

HERE = pathlib.Path(__file__).parent


def fill(text: str, found: pathlib.Path) -> str:
    """Returns the text with every study's part replaced by what ``found/NAME`` holds of it."""

    def part(match: re.Match) -> str:
        name = match[1]
        folder = found / name
        if not (folder / "results.json").exists():
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
        for kind in ("png", "svg"):
            for picture in sorted((found / name).glob(f"*.{kind}")):
                shutil.copyfile(picture, to / f"{name}-{picture.name}")


def main() -> None:
    """Does both for the full setting."""
    page = HERE / "RESULTS.md"
    page.write_text(fill(page.read_text(), studies.OUT / "full"))
    copy_figures(studies.OUT / "full", HERE / "figures")


if __name__ == "__main__":
    main()
