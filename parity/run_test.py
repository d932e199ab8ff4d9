"""Both stacks through whole lives, in small; `make parity` runs the shipped scenarios."""

import numpy as np
import pytest

import torch_ref
from parity.candidate import MODES, Candidate
from parity.mutants_test import SCENARIO
from parity.reference import Reference
from parity.run import run
from parity.scenario import parse, shipped


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
