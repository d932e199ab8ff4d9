"""The harness fails for every fault, and names the tensor that shows it."""

import pytest
from typer.testing import CliRunner

from parity.cli import app
from parity.mutants import MUTANTS

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

# The tensor, as printed, in which each fault must be seen.
SHOWN_IN = {
    "momentum_not_zeroed_on_retire": "momentum_buffer q.linear_in",
    "adam_clock_not_reset": "step",
    "weight_decay_of_updated_parameter": "q.linear_in",
    "clip_over_whole_pool": "grad_norm",
    "schedule_counted_in_steps": "samples",
    "sum_not_divided_by_batch_size": "grad_norm",
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


def test_every_fault_is_listed():
    assert MUTANTS.keys() == SHOWN_IN.keys()


@pytest.mark.parametrize("name", SHOWN_IN)
def test_fault_is_caught(name, scenario):
    with MUTANTS[name]():
        result = run(scenario)
    assert result.exit_code == 1, result.output
    failures = [line for line in result.output.splitlines() if line.startswith("FAILED faults")]
    assert any(f", {SHOWN_IN[name]} (" in line for line in failures), result.output
    assert "reproduce: python -m parity run" in result.output
