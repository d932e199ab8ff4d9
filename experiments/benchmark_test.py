import dataclasses
import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import benchmark, rivals
from experiments.workloads import LARGE, Workload

TINY = Workload("tiny", {"q": (24, 40), "o": (40, 24)}, n_layers=1, rank=4, n_slots=3)
STEPS = 3


def inputs():
    """Parameters, and gradients of which one slot's are clipped and another's are not."""
    params, grads = TINY.random(seed=0, scale=0.1), TINY.random(seed=1, scale=1.0)
    sizes = np.asarray([1e-3, 1.0, 0.1], np.float32)[:, None, None]
    return params, {name: g * sizes for name, g in grads.items()}


def parameters_after(build):
    params, grads = inputs()
    rival = build(params, jax.tree.map(jax.numpy.asarray, grads))
    return step(rival)


def step(rival):
    for _ in range(STEPS):
        rival.prepare()
        rival.step()
    return rival.params()


def assert_same_updates(actual, expected, rtol):
    """Parameters moved alike; both from the same start."""
    start, _ = inputs()
    assert actual.keys() == expected.keys()
    for name in expected:
        moved, wanted = actual[name] - start[name], expected[name] - start[name]
        assert np.linalg.norm(wanted) > 0
        for slot in range(TINY.n_slots):
            error = np.linalg.norm(moved[slot] - wanted[slot]) / np.linalg.norm(wanted[slot])
            assert error < rtol, (name, slot, error)


# Newton-Schulz amplifies rounding; a wrong formula would be off by a percent and more.
@pytest.mark.parametrize("build", [rivals.train_state, rivals.looped_muon, rivals.vmapped_muon])
def test_every_muon_makes_the_same_updates(build):
    assert_same_updates(parameters_after(build), parameters_after(rivals.ours), rtol=1e-3)


@pytest.mark.parametrize("build", [rivals.per_slot_adamw, rivals.whole_pool_adamw])
def test_every_adamw_makes_the_same_updates(build):
    assert_same_updates(parameters_after(build), parameters_after(rivals.our_adamw), rtol=1e-3)


def test_the_torch_reference_makes_the_same_updates():
    params, grads = inputs()
    with rivals.torch_reference(TINY, params, grads) as rival:
        moved = step(rival)
    assert_same_updates(moved, parameters_after(rivals.ours), rtol=1e-3)


def test_only_the_named_slots_step():
    params, _ = inputs()
    moved = parameters_after(lambda p, g: rivals.train_state(p, g, slots=[2, -1]))
    for name, p in params.items():
        np.testing.assert_array_equal(moved[name][:2], p[:2])
        assert (moved[name][2] != p[2]).any()


def test_the_floor_touches_28_bytes_per_parameter():
    # Sums and factors of each leaf come on top: little, where leaves are large.
    wide = dataclasses.replace(TINY, linears={"q": (4096, 4096)})
    grads = rivals.on_device(wide.random(1, 1.0))
    floor = rivals.floor(wide.random(0, 1.0), grads)
    floor.step()
    assert floor.bytes_accessed / wide.n_parameters() == pytest.approx(28, rel=0.02)
    assert floor.peak_memory < 1.02


def test_the_large_workload_is_the_issues():
    assert len(LARGE.shapes()) == 28 * 7 * 2
    assert LARGE.n_parameters() == 80_740_352


def test_writes_tables_figures_and_a_picture(monkeypatch, tmp_path):
    monkeypatch.setitem(benchmark.WORKLOADS, "tiny", TINY)
    for name, values in {"SLOT_COUNTS": (1, 2), "RANKS": (4, 8), "LAYER_COUNTS": (1, 2)}.items():
        monkeypatch.setattr(benchmark, name, values)
    app = benchmark.typer.Typer()
    app.command()(benchmark.main)
    files = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    arguments = ["--workload", "tiny", "--repeat", "2", "--curves", *files]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "whole-pool / ours" in result.stdout
    figures = json.loads((tmp_path / "b.json").read_text())
    assert figures["timings"].keys() == {*benchmark.ON_JAX, "numpy", "torch"}
    assert all(t["median_ms"] > 0 for t in figures["timings"].values())
    assert [curve["points"] for curve in figures["curves"]] == [[1, 2], [4, 8], [1, 2], [4, 8]]
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_workload_is_refused():
    app = benchmark.typer.Typer()
    app.command()(benchmark.main)
    result = CliRunner().invoke(app, ["--workload", "huge"])
    assert result.exit_code == 2 and "huge" in result.stderr
