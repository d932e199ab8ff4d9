"""The formulas are those of the compiled programs, and the tables are made of them."""

import dataclasses
import re

import pytest
from typer.testing import CliRunner

from experiments import scaling
from experiments.scaling import reduction_bytes, ring_bytes, step_cost
from experiments.workloads import LARGE, Workload
from jax_impl.testing import run_on_devices

SIZES = ["--width", "128", "--layers", "2", "--rank", "8", "--slots", "8"]
SKEWED = Workload("skewed", {"q": (64, 64), "o": (512, 64)}, n_layers=3, rank=4, n_slots=16)


def invoke(*arguments):
    app = scaling.typer.Typer()
    app.command()(scaling.main)
    return CliRunner().invoke(app, list(arguments))


def test_formulas_agree_with_compiled_programs():
    out = run_on_devices(8, "-m", "experiments.scaling", "--check", *SIZES)
    lines = out.strip().splitlines()
    assert [line.split(" over")[0] for line in lines] == [
        f"ok    {placement}" for placement in ("slot", "layer", "tensor", "tensor")
    ]
    for line in lines:
        products, everything = map(int, re.findall(r"(?:products|operations) (\d+)", line))
        # The rest is elementwise; of a branch for each device, XLA counts the costliest.
        assert products < everything < 1.6 * products, line


@pytest.mark.parametrize("wrong", [{"results": {"all-reduce": 8}}, {"messages": {}}])
def test_a_formula_that_is_wrong_is_seen(monkeypatch, wrong):
    def formula(*pool_and_place, **axes):
        return dataclasses.replace(right, **wrong)

    class Program:
        def as_text(self):
            return "%x = f32[1]{0} all-reduce(%y)"

        def cost_analysis(self):
            return {"flops": 0.0}

    right = scaling.StepCost({"all-reduce": 1}, {"all-reduce": 4}, 0, 0, 0.0)
    monkeypatch.setattr(scaling.jax.config, "update", lambda *_: None)  # too late in this process
    monkeypatch.setattr(scaling, "compiled_step", lambda *args, **axes: Program())
    monkeypatch.setattr(scaling, "step_cost", lambda *args, **axes: right)
    assert invoke("--check", "--devices", "1").exit_code == 0
    monkeypatch.setattr(scaling, "step_cost", formula)
    result = invoke("--check", "--devices", "1")
    assert result.exit_code == 1 and "FAIL  tensor" in result.output


def test_bytes_of_rings():
    assert ring_bytes("all-reduce", 80.0, 8) == 2 * 70
    assert ring_bytes("all-gather", 80.0, 8) == 70
    assert ring_bytes("reduce-scatter", 10.0, 8) == 70
    assert all(ring_bytes(kind, 8.0, 1) == 0 for kind in ("all-reduce", "all-gather"))
    assert reduction_bytes(LARGE, 2) == 4 * LARGE.n_parameters()


def test_spreading_divides_work_and_state():
    one, eight = (step_cost(SKEWED, "slot", devices) for devices in (1, 8))
    assert (one.flops, one.state) == (8 * eight.flops, 8 * eight.state)
    tensor = step_cost(SKEWED, "tensor", 4)
    assert tensor.state * 4 == one.state and one.flops / 4 < tensor.flops < one.flops
    layer = step_cost(SKEWED, "layer", 4)
    assert one.flops / 4 <= layer.flops < one.flops / 2
    halved = step_cost(SKEWED, "tensor", 4, slot_devices=2)
    assert halved.results["all-reduce"] < tensor.results["all-reduce"]
    assert halved.messages == tensor.messages


def test_slots_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="16 cannot be spread evenly over 5"):
        step_cost(SKEWED, "slot", 5)


def test_tables_of_placements_and_of_the_plan():
    result = invoke("--tenants", "1000", "--chips", "256")
    assert result.exit_code == 0, result.output
    assert "1000 tenants on 256 chips" in result.output
    assert re.search(r"1 +│ 256 +│ 4 +│ none", result.output)
    assert re.search(r"4 +│ 64 +│ 16 +│ 196 all-reduce", result.output)
    assert re.search(r"tensor +│ 196 all-reduce", result.output)
