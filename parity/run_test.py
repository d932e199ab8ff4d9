"""Both stacks through whole lives, in small; `make parity` runs the shipped scenarios."""

import dataclasses

import numpy as np
import pytest

import torch_ref
from parity.candidate import MODES, Candidate
from parity.mutants_test import SCENARIO
from parity.reference import Reference, reference_name
from parity.run import run
from parity.scenario import parse, shipped
from parity.truth import Judge


@pytest.fixture(scope="module", autouse=True)
def megatron():
    with torch_ref.start_megatron():
        yield


@pytest.mark.parametrize("name", ["reuse_other_rank[bf16]", "resume", "one_adam"])
def test_shipped_scenarios_pass(name):
    result = run(shipped()[name])
    assert result.passed, [check for check in result.checks if not check.passed][:3]
    assert len(result.free_gap) == len(result.scenario.events)


def test_a_reference_that_disagrees_is_seen(monkeypatch):
    """Agreement has two sides: weights of the reference that are off by 3e-6 fail the run."""
    (scenario,) = parse(SCENARIO, "faults.toml")
    step = Reference.step

    def perturbed(self, slots):
        outcome = step(self, slots)
        for parameter in dict(torch_ref.adapter_slot_parameters(self.chunks, 0)).values():
            parameter.data.mul_(1 + 3e-6)
        return outcome

    monkeypatch.setattr(Reference, "step", perturbed)
    failed = {(check.mode, check.kind) for check in run(scenario).checks if not check.passed}
    assert ("reference", "muon update") in failed


def test_locked_candidate_shows_what_it_adopted():
    (scenario,) = parse(SCENARIO, "faults.toml")
    reference, candidate = Reference(scenario), Candidate(scenario, MODES[0])
    for slot, tenant in enumerate(scenario.tenants):
        samples = scenario.tenants[tenant].batch_size
        reference.install(tenant, slot)
        candidate.install(tenant, slot)
        reference.accumulate(slot, samples, 2 + slot)
    reference.step([0, 1])
    seen = reference.observe()
    candidate.adopt(seen)
    for slot, view in candidate.observe().items():
        assert view.clocks == seen[slot].clocks
        for key, x in view.tensors.items():
            if key[0] != "grad_sum":
                np.testing.assert_array_equal(x, seen[slot].tensors[key], err_msg=str(key))


@pytest.mark.parametrize("name", ["skipped_spikes", "non_finite"])
def test_skipped_steps_are_judged(name):
    """Some slots skip, others step at the same event, and skipping alone changes nothing."""
    result = run(shipped()[name])
    assert result.passed, [check for check in result.checks if not check.passed][:3]
    steps = {
        (c.event, c.slot, c.kind.startswith("muon")) for c in result.checks if c.slot is not None
    }
    skipped = {(c.event, c.slot) for c in result.checks if c.tensor == "skipped"}
    stepped = {(event, slot) for event, slot, is_update in steps if is_update}
    assert skipped and stepped and not skipped & stepped
    assert {event for event, _ in skipped} & {event for event, _ in stepped}


def test_a_candidate_that_steps_where_it_should_skip_is_seen(monkeypatch):
    step = Candidate.step

    def careless(self, slots):
        self.state = dataclasses.replace(self.state, grad_norm_skip_threshold=float("inf"))
        return step(self, slots)

    monkeypatch.setattr(Candidate, "step", careless)
    failed = {check.tensor for check in run(shipped()["skipped_spikes"]).checks if not check.passed}
    assert {"skipped", "samples", "master q.linear_in"} <= failed


def test_every_parameter_may_have_a_rate_of_its_own():
    (scenario,) = parse(SCENARIO, "own_rates.toml")
    settings = {"decoupled_lr": 0.01, "embedding_or_output_parameters": ["q.*"]}
    scenario = dataclasses.replace(scenario, optimizer={**scenario.optimizer, **settings})
    result = run(scenario)
    assert result.passed, [check for check in result.checks if not check.passed][:3]


def test_says_which_reference_it_used():
    names = {"decay[palm]", "coefficients[custom]", "adaptive[namo]"}
    for name, scenario in shipped().items():
        own = name in names or name.startswith(("decay[", "adaptive["))
        assert reference_name(scenario) == ("emerging-optimizers" if own else "megatron"), name


def test_signs_that_rounding_decides_are_left_out():
    """Lion on gradients that cancel its moment: neither stack can be wrong there, alone there."""
    scenario = shipped()["lion[bf16]"]
    judge = Judge(scenario)
    truth = judge.install("alice")
    sums = {name: np.ones(p.shape) for name, p in truth.params.items()}
    first = judge.step(truth, sums, "alice", 0)
    assert not any(doubts.any() for doubts in first.doubts.values())
    beta1 = judge.optimizer["lion_beta1"]
    moment = first.state["q.bias"]["exp_avg"]
    grads = {name: 0 * x for name, x in sums.items()}
    grads["q.bias"] = -beta1 / (1 - beta1) * moment * scenario.tenants["alice"].batch_size
    grads["q.bias"][1:] *= 1.01
    second = judge.step(first, grads, "alice", 2)
    assert second.doubts["q.bias"].tolist() == [True] + [False] * 95
