"""Random scenarios: what is drawn, what is found, and how small it gets."""

import dataclasses

from typer.testing import CliRunner

from parity import fuzz
from parity.cli import app
from parity.scenario import OPTIMIZER_FIELDS, Retire, Step, dump, parse, validate


def test_every_option_is_drawn_with_more_than_one_value():
    drawn = [fuzz.draw_program(0, variant).optimizer for variant in range(200)]
    for field in OPTIMIZER_FIELDS:
        values = {repr(optimizer[field]) for optimizer in drawn if field in optimizer}
        assert values == {*map(repr, fuzz.option_values(field))}, field
        assert len(values) > 1 or any(field not in optimizer for optimizer in drawn)


def test_scenarios_are_valid_survive_a_file_and_depend_on_the_seed():
    def drawn(seed):
        met = []
        fuzz.fuzz(40, seed, lambda scenario, variant: met.append(scenario) or True)
        return met

    scenarios = drawn(0)
    assert len(scenarios) == 40 and scenarios == drawn(0) != drawn(1)
    for scenario in scenarios:
        validate(scenario)
        assert parse(dump(scenario), "fuzz.toml") == [scenario]
    steps = sum(any(isinstance(e, Step) for e in s.events) for s in scenarios)
    assert steps > 30


def test_a_failure_is_shrunk_to_what_it_takes():
    def steps_and_retires(scenario):
        events = [type(event) for event in scenario.events]
        return Retire in events and Step in events

    outcome = fuzz.fuzz(100, 0, lambda scenario, variant: not steps_and_retires(scenario))
    failing = outcome.failing
    assert steps_and_retires(failing)
    assert len(failing.events) <= 5
    assert failing.optimizer.keys() == {"optimizer"} and len(failing.model.layers) == 1
    assert parse(dump(failing), "fuzz.toml") == [failing]


def test_an_error_counts_as_a_failure():
    def passes(scenario, variant):
        raise RuntimeError

    outcome = fuzz.fuzz(3, 0, passes)
    assert outcome.examples == 1 and outcome.failing is not None


def test_features_count_options_tenants_and_events():
    program = fuzz.draw_program(0, 0)
    scenario = fuzz.life_of(program, seed=0, gradients="tiny", tenants={"alice": fuzz.PLAIN})
    met = fuzz.features(dataclasses.replace(scenario, events=(Step((0,)),)))
    assert {("gradients", "tiny"), ("event", "step"), ("init", "lora")} <= met


def test_a_hundred_examples_agree(tmp_path):
    failing = tmp_path / "failing.toml"
    result = CliRunner().invoke(
        app, ["fuzz", "--examples", "100", "--seed", "0", "--failing", str(failing)]
    )
    assert result.exit_code == 0, result.output + (failing.read_text() if failing.exists() else "")
    assert "100 examples with seed 0: no mismatch" in result.output
    assert "muon_momentum" in result.output
