"""What is installed, and what is said where it is not what was tested."""

import pytest
from typer.testing import CliRunner

from parity import versions
from parity.cli import app
from parity.mutants_test import SCENARIO


def test_the_tested_versions_name_every_package():
    assert versions.tested().keys() == set(versions.PACKAGES)
    assert "absent" not in versions.installed().values()


def test_an_untested_version_is_named(monkeypatch):
    tested = versions.installed() | {"jax": "0.1"}
    monkeypatch.setattr(versions, "tested", lambda: {"jax": tested["jax"]})
    (line,) = versions.untested()
    assert line == f"jax is {versions.installed()['jax']}, tested was 0.1"
    with pytest.raises(TypeError) as caught, versions.blamed_on_versions():
        raise TypeError("unexpected keyword")
    assert caught.value.__notes__ == [f"perhaps because {line}"]


def test_local_builds_count_as_their_version(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: {"torch": "2.14.1+cpu"})
    monkeypatch.setattr(versions, "tested", lambda: {"torch": "2.14.1"})
    assert versions.untested() == []


def test_run_prints_what_is_compared(tmp_path, monkeypatch):
    scenario = tmp_path / "mine.toml"
    scenario.write_text(SCENARIO)
    monkeypatch.setattr(versions, "tested", lambda: {"megatron-core": "0.0"})
    result = CliRunner().invoke(app, ["run", str(scenario), "--stack-versions"])
    assert result.exit_code == 0, result.output
    for name, version in versions.installed().items():
        assert name in result.output and version in result.output
    assert "note: megatron-core is" in result.output
