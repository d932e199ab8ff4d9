"""The harness fails for every fault, and names the tensor that shows it."""

import contextlib

import pytest
from typer.testing import CliRunner

from parity import cli
from parity.checks import Check, Result
from parity.cli import app
from parity.mutants import MUTANTS, hunt, hunting_order
from parity.mutants_registry import Mutant
from parity.scenario import parse, shipped

SCENARIO = """
description = "Two tenants, both kinds of parameters, clipping, a schedule, and a reused slot."
[pool]
n_slots = 2
rank = 4
[model]
layers = [{name = "q", in_features = 12, out_features = 16, bias = true}]
[optimizer]
optimizer = "muon"
clip_grad = 1.0
muon_fp32_matmul_prec = "highest"
[tenants.alice]
rank = 4
alpha = 8.0
batch_size = 2
num_step = 8
lr = 0.05
lr_decay_style = "cosine"
weight_decay = 0.5
init = "random"
[tenants.bob]
rank = 2
alpha = 8.0
batch_size = 3
num_step = 8
lr = 0.02
lr_decay_style = "linear"
weight_decay = 0.1
init = "random"
[lifecycle]
events = [
  {install = "alice", slot = 0},
  {install = "bob", slot = 1},
  {repeat = 2, events = [{accumulate = 2, slot = 0}, {accumulate = 3, slot = 1}, {step = [0, 1]}]},
  {retire = 0},
]
"""

# The tensor, as printed, in which a fault must be seen.
SHOWN_IN = {
    "momentum_not_zeroed_on_retire": "momentum_buffer q.linear_in",
    "adam_clock_not_reset": "step",
    "weight_decay_of_updated_parameter": "q.linear_in",
    "clip_over_whole_pool": "grad_norm",
    "schedule_counted_in_steps": "samples",
    "sum_not_divided_by_batch_size": "momentum_buffer q.linear_in",
    "nesterov_on": "q.linear_in",
}


@pytest.fixture(scope="module")
def scenario(tmp_path_factory):
    path = tmp_path_factory.mktemp("scenario") / "faults.toml"
    path.write_text(SCENARIO)
    return str(path)


def run(scenario):
    return CliRunner().invoke(app, ["run", scenario])


def test_passes_without_a_fault(scenario):
    result = run(scenario)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", SHOWN_IN)
def test_fault_is_caught(name, scenario):
    with MUTANTS[name].applied():
        result = run(scenario)
    assert result.exit_code == 1, result.output
    failures = [line for line in result.output.splitlines() if line.startswith("FAILED faults")]
    assert any(f", {SHOWN_IN[name]} (" in line for line in failures), result.output
    assert "reproduce: python -m parity run" in result.output


def test_every_mutant_has_a_killer_that_is_shipped():
    assert len(MUTANTS) >= 32
    assert {mutant.killer for mutant in MUTANTS.values()} <= shipped().keys()


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_fits_the_code(name):
    with MUTANTS[name].applied():
        pass


def test_the_killer_comes_first_and_then_the_cheap():
    first, second, *others = hunting_order(MUTANTS["mask_ignored"], shipped())
    assert first.name == "mixed_pool"
    assert len(second.events) < len(others[-1].events)
    assert len({first.name, second.name, *(s.name for s in others)}) == 2 + len(others)


def fails_at(names):
    """Stands for running a scenario: one check, that fails in those of these names."""

    def run(scenario):
        value = float(scenario.name in names)
        check = Check("1 step", 1, 0, "q", "gram", "muon update", value, 0.5, 1e-4, 1e-6)
        return Result(scenario, [check], [0.0])

    return run


NOTHING = Mutant("nothing", "one_muon", contextlib.nullcontext)


def test_hunt_stops_at_the_first_kill_unless_told_to_go_on():
    (scenario,) = parse(SCENARIO, "faults.toml")
    scenarios = [shipped()[name] for name in ("one_muon", "one_adam", "resume")] + [scenario]
    run = fails_at({"one_adam", "faults"})
    verdict = hunt(NOTHING, scenarios, run)
    assert (*verdict.killers,) == ("one_adam",) and verdict.tried == 2
    assert verdict.change == 1e-4 and not verdict.survived
    assert (*hunt(NOTHING, scenarios, run, everywhere=True).killers,) == ("one_adam", "faults")
    assert hunt(NOTHING, scenarios, fails_at(())).survived


def test_a_survivor_fails_the_command(monkeypatch):
    (scenario,) = parse(SCENARIO, "faults.toml")
    monkeypatch.setitem(MUTANTS, "nothing", Mutant("nothing", "faults", contextlib.nullcontext))
    monkeypatch.setattr(cli, "shipped", lambda: {"faults": scenario})
    result = CliRunner().invoke(app, ["mutants", "nothing"])
    assert result.exit_code == 1, result.output
    assert "SURVIVED" in result.output and "0 of 1 mutants killed" in result.output
    assert CliRunner().invoke(app, ["mutants", "no_such_mutant"]).exit_code == 2


def test_a_sample_is_killed():
    result = CliRunner().invoke(app, ["mutants", "--sample", "3", "--seed", "0"])
    assert result.exit_code == 0, result.output
    assert "3 of 3 mutants killed" in result.output
