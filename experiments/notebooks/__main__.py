"""``python -m experiments.notebooks``: makes every notebook anew from its script, and runs it."""

import pathlib

import jupytext
import nbclient

HERE = pathlib.Path(__file__).parent


def main() -> None:
    """Writes NAME.ipynb beside each NAME.py; results that were found before are read, see there."""
    for script in sorted(HERE.glob("[!_]*.py")):
        notebook = jupytext.read(script)
        nbclient.NotebookClient(
            notebook, timeout=3600, resources={"metadata": {"path": "."}}
        ).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times of day
        jupytext.write(notebook, script.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
