"""The studies: each a module with settings, a run, a table and figures.

A study has

- ``SETTINGS``: {"small": config, "full": config}, a dataclass each;
- ``run(config)``: everything it measures, as a tree of lists, names and numbers (JSON);
- ``table(results)``: markdown;
- ``figures(results)``: {name: matplotlib figure}.
"""

import dataclasses
import importlib
import json
import pathlib
import time
from types import ModuleType
from typing import Any

from experiments import plots

NAMES = (
    "alone_or_together",
    "what_a_leak_costs",
    "muon_against_adam",
    "lr_across_rank",
    "mixed_pool",
)
OUT = pathlib.Path("build/studies")


def load(name: str) -> ModuleType:
    """The study's module.

    Raises:
      ValueError: an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"there is no study {name!r}; choose one of {', '.join(NAMES)}")
    return importlib.import_module(f"experiments.studies.{name}")


def perform(name: str, setting: str, out: pathlib.Path | None = None) -> dict[str, Any]:
    """Runs a study and writes results, table and figures under ``out/setting/name``."""
    study = load(name)
    config = study.SETTINGS[setting]
    start = time.perf_counter()
    results = study.run(config)
    record = {
        "command": command(name, setting),
        "seconds": round(time.perf_counter() - start, 1),
        "config": dataclasses.asdict(config),
        "results": results,
    }
    folder = (out or OUT) / setting / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "table.md").write_text(study.table(results) + "\n")
    for title, figure in study.figures(results).items():
        plots.save(figure, folder / title)
    return record


def record_of(name: str, setting: str, out: pathlib.Path | None = None) -> dict[str, Any]:
    """What `perform` found, read from where it wrote it, or found now."""
    path = (out or OUT) / setting / name / "results.json"
    return json.loads(path.read_text()) if path.exists() else perform(name, setting, out)


def command(name: str, setting: str) -> str:
    """What to type to repeat it."""
    return f"python -m experiments.studies {name} --setting {setting}"
