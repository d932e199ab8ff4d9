"""Runs the tests that need eight devices, each file in a process that simulates them."""

import pathlib

import pytest

from jax_impl.testing import run_on_devices

FILES = sorted(pathlib.Path(__file__).parent.glob("*_on_mesh.py"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_on_eight_devices(file):
    out = run_on_devices(8, "-m", "pytest", "-p", "no:cacheprovider", str(file))
    assert "passed" in out and "skipped" not in out
