"""Runs the tests that need eight devices in a process that simulates them."""

import pathlib
import re

from jax_impl.testing import run_on_devices

FILES = sorted(map(str, pathlib.Path(__file__).parent.glob("*_on_mesh.py")))


def test_on_eight_devices():
    out = run_on_devices(8, "-m", "pytest", "-p", "no:cacheprovider", *FILES)
    (passed,) = re.findall(r"(\d+) passed", out)
    assert int(passed) > 30 and "skipped" not in out
