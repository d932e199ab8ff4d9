"""Tests of parity.options: nothing is exercised nowhere, and what does nothing is not counted."""

import dataclasses

import pytest

import torch_ref
from parity.options import exercises, measurable, options_table, refused, scenario_without
from parity.scenario import shipped


@pytest.fixture(scope="module", autouse=True)
def megatron():
    with torch_ref.start_megatron():
        yield


def test_every_option_is_exercised_and_would_be_seen():
    table, incomplete = options_table()
    assert not incomplete
    assert table.row_count > 40


def test_an_option_that_does_nothing_moves_nothing():
    scenario = shipped()["one_adam"]
    idle = dataclasses.replace(scenario, optimizer={**scenario.optimizer, "muon_momentum": 0.1})
    moved = {exercise.option: exercise.moved for exercise in exercises(idle)}
    assert moved["muon_momentum"] == 0
    assert moved["lr"] > 1 and moved["adam_beta2"] > 1


def test_without_an_option_what_needs_it_is_gone_too():
    custom = shipped()["coefficients[custom]"]
    for option in ("custom_coefficients", "muon_coefficient_type"):
        settings = scenario_without(custom, option).optimizer
        assert settings.keys() == custom.optimizer.keys() - {
            "custom_coefficients",
            "muon_coefficient_type",
        }


def test_measures_each_scenario_once():
    names = [scenario.name for scenario in measurable(shipped().values())]
    assert "one_muon" in names and "one_muon[bf16]" not in names and "medium[bf16]" in names


def test_what_is_refused_says_so():
    errors = dict(refused())
    assert "choose one of" in errors["optimizer = 'sgd'"] and "fp16" in errors["fp16"]
