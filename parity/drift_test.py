"""Free runs drift apart by rounding, and the picture is drawn."""

import json

import pytest
from typer.testing import CliRunner

import torch_ref
from parity import drift
from parity.cli import app


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_drift_is_of_the_size_of_rounding(optimizer):
    with torch_ref.start_megatron():
        gaps = drift.measure(drift.scenario(optimizer, steps=5))
    assert gaps.keys() == set(drift.CURVES)
    for curve in gaps.values():
        assert len(curve) == 5
        assert 0 < curve[-1] < 2e-6


def test_writes_numbers_and_a_picture(tmp_path):
    picture, numbers = tmp_path / "drift.png", tmp_path / "new" / "drift.json"
    result = CliRunner().invoke(
        app, ["drift", "--steps", "2", "--plot", str(picture), "--json", str(numbers)]
    )
    assert result.exit_code == 0, result.output
    assert "JAX from the oracle" in result.output
    assert json.loads(numbers.read_text()).keys() == {"muon", "adam"}
    assert picture.read_bytes().startswith(b"\x89PNG")
