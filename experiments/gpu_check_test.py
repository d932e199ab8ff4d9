import dataclasses

import jax
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from experiments import gpu_check
from experiments.rivals import MUON


def test_the_cpu_passes_every_check():
    found = list(gpu_check.checks(jax.devices("cpu")[0]))
    assert len(found) == len(gpu_check.CONFIGS) + 1
    for check in found:
        assert check.passed, check


@pytest.mark.parametrize("change", [{"muon_momentum": 0.9}, {"muon_num_ns_steps": 4}])
def test_another_optimizer_is_far_from_the_oracle(change):
    truth = gpu_check.true_update(dataclasses.replace(MUON, **change))
    update = gpu_check.update_on(jax.devices("cpu")[0], MUON)
    assert gpu_check.distance(update, truth) > 1e-2


def test_a_device_that_computes_wrong_fails(monkeypatch):
    right = gpu_check.update_on
    results = iter((lambda *a: {n: 1.01 * u for n, u in right(*a).items()}, right))
    monkeypatch.setattr(gpu_check, "update_on", lambda *a: next(results)(*a))
    check = gpu_check.parity_check("AdamW", gpu_check.ADAM, jax.devices("cpu")[0])
    assert not check.passed and str(check).startswith("FAIL")


def test_times_both_precisions():
    times = gpu_check.precision_times(jax.devices("cpu")[0], repeat=1)
    assert times.keys() == {"highest", "medium"} and np.all(np.asarray(list(times.values())) > 0)


def test_without_a_gpu_it_says_so(monkeypatch):
    cpus = jax.devices("cpu")
    monkeypatch.setattr(jax, "devices", lambda *kind: cpus)
    app = typer.Typer()
    app.command()(gpu_check.main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2 and result.stdout.startswith("no GPU")
