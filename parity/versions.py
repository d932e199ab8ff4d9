"""What is compared: the versions of both stacks and the machine."""

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "optax", "torch", "megatron-core", "emerging-optimizers", "numpy")

# Beside the package in a checkout; an installed wheel has no record of what was tested.
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"


def installed() -> dict[str, str]:
    """The version of each package, "absent" where there is none."""
    return {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def tested() -> dict[str, str]:
    """The versions that this checkout was tested with."""
    if not CONSTRAINTS.exists():
        return {}
    pins = (
        line.split("==") for line in CONSTRAINTS.read_text("utf-8").splitlines() if "==" in line
    )
    return {name: version for name, version in pins if name in PACKAGES}


def untested() -> list[str]:
    """One line for each package that is not at its tested version."""
    have = installed()
    return [
        f"{name} is {have[name]}, tested was {version}"
        for name, version in tested().items()
        if have[name].split("+")[0] != version  # torch's wheels append their build
    ]


def machine() -> str:
    """The machine in one line."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"


@contextlib.contextmanager
def blamed_on_versions() -> Iterator[None]:
    """An error in here says which versions are not the tested ones, if there are any."""
    try:
        yield
    except Exception as error:
        for line in untested():
            error.add_note(f"perhaps because {line}")
        raise
