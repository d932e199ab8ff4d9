"""Exit codes, messages and the JSON file of the command line."""

import json

import pytest
from typer.testing import CliRunner

from parity.cli import app
from parity.mutants_test import SCENARIO
from parity.scenario import shipped


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_list_names_every_scenario():
    result = invoke("list")
    assert result.exit_code == 0
    for name in shipped():
        assert name in result.output


def test_run_a_file_and_write_json(tmp_path):
    scenario, report = tmp_path / "mine.toml", tmp_path / "new" / "report.json"
    scenario.write_text(SCENARIO)
    result = invoke("run", str(scenario), "--json", str(report))
    assert result.exit_code == 0, result.output
    assert "1 scenarios passed, 0 failed" in result.output
    document = json.loads(report.read_text())
    assert document["passed"] is True
    (entry,) = document["scenarios"]
    assert entry["name"] == "mine" and entry["passed"] is True
    fields = {"event", "step", "slot", "tensor", "mode", "kind", "value", "limit"}
    fields |= {"jax_error", "reference_error", "passed"}
    assert all(fields <= check.keys() for check in entry["checks"])
    assert {check["mode"] for check in entry["checks"]} == {
        "gram",
        "standard",
        "free",
        "reference",
    }
    kinds = {check["kind"] for check in entry["checks"]}
    assert {"exact", "schedule", "muon update", "adam update", "norm"} <= kinds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not toml at all [", "not valid TOML"),
        (SCENARIO.replace("rank = 2", "rank = 5"), "tenants.bob.rank = 5"),
        (SCENARIO.replace("batch_size = 3", "batch_size = 0"), "tenants.bob.batch_size = 0"),
        (SCENARIO.replace("{retire = 0}", "{retire = 3}"), "slot 3"),
    ],
)
def test_malformed_file_is_one_clear_line(tmp_path, text, message):
    scenario = tmp_path / "bad.toml"
    scenario.write_text(text)
    result = invoke("run", str(scenario))
    assert result.exit_code == 2
    assert message in result.output and "bad.toml" in result.output
    assert result.output.count("\n") == 1


def test_unknown_name_and_missing_file():
    result = invoke("run", "no_such_scenario")
    assert result.exit_code == 2 and "no scenario 'no_such_scenario'" in result.output
    assert invoke("run", "no_such_file.toml").exit_code == 2
    assert invoke("walk").exit_code == 2
