"""Every study on a setting that is as small as can be, through its notebook's script."""

import dataclasses
import json
import pathlib
import re
import runpy

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import experiments.notebooks
from experiments import studies
from experiments.base import BaseConfig
from experiments.model import LlamaConfig
from experiments.pool import Tenant, full_pool
from experiments.studies import (
    alone_or_together,
    lr_across_rank,
    mixed_pool,
    muon_against_adam,
    what_a_leak_costs,
)
from experiments.studies.__main__ import main
from jax_impl import take_slot
from jax_impl.testing import assert_same_bits

NOTEBOOKS = pathlib.Path(experiments.notebooks.__file__).parent
BASE = BaseConfig(
    LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
    steps=3,
    rows=3,
    length=8,
)
SMALL = {name: studies.load(name).SETTINGS["small"] for name in studies.NAMES}
# Where it can be, pools are of one size, so that they share what is compiled.
TINY = {
    "alone_or_together": dataclasses.replace(
        SMALL["alone_or_together"], lrs={"adamw": 0.01}, n_steps=6, ranks=(2,), every=2
    ),
    "what_a_leak_costs": dataclasses.replace(
        SMALL["what_a_leak_costs"], lrs={"adamw": 0.1}, first_steps=3, n_steps=6, rank=2, points=3
    ),
    "muon_against_adam": dataclasses.replace(
        SMALL["muon_against_adam"],
        first_lr={"adamw": 1e-3},
        n_lrs=5,
        factor=3.0,
        seeds=2,
        n_steps=6,
        rank=2,
        points=2,
    ),
    "lr_across_rank": dataclasses.replace(
        SMALL["lr_across_rank"], first_lr={"adamw": 1e-3}, n_lrs=5, ranks=(2, 4), n_steps=4
    ),
    "mixed_pool": dataclasses.replace(
        SMALL["mixed_pool"], owners=("adamw",) * 2, tenants=3, ranks=(2,), n_steps=(3, 5, 2)
    ),
}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("studies")


@pytest.fixture
def tiny(monkeypatch, out):
    """Makes "tiny" a setting of every study, and what notebooks run."""
    for name, config in TINY.items():
        tiny_config = dataclasses.replace(config, base=BASE, held_out_rows=2)
        monkeypatch.setitem(studies.load(name).SETTINGS, "tiny", tiny_config)
    monkeypatch.setattr(studies, "OUT", out)
    monkeypatch.setenv("PERSLOT_SETTING", "tiny")
    monkeypatch.chdir(out)  # where build/base is made


@pytest.mark.parametrize("name", studies.NAMES)
def test_a_notebooks_script_runs_and_leaves_results_table_and_figures(name, tiny, out, capsys):
    runpy.run_path(str(NOTEBOOKS / f"{name}.py"))
    assert f"python -m experiments.studies {name}" in capsys.readouterr().out
    folder = out / "tiny" / name
    record = json.loads((folder / "results.json").read_text())
    assert record["config"]["base"]["steps"] == 3 and record["seconds"] > 0
    table = (folder / "table.md").read_text()
    assert not re.search(r"\bnan\b", table) and len(table.splitlines()) >= 3
    pictures = {p.stem for p in folder.glob("*.png")}
    assert pictures and pictures == {p.stem for p in folder.glob("*.svg")}
    check = {
        "alone_or_together": check_alone_or_together,
        "what_a_leak_costs": check_what_a_leak_costs,
        "muon_against_adam": check_muon_against_adam,
        "lr_across_rank": check_lr_across_rank,
        "mixed_pool": check_mixed_pool,
    }
    check[name](record["results"])


def check_alone_or_together(results):
    (tenant,) = results["tenants"].values()
    assert tenant["differing_together"] == 0
    assert 0 < tenant["gap_nudged"][0] < 2e-7 and tenant["gap_solo"][-1] < 1e-4
    assert len(results["steps"]) == len(tenant["gap_solo"]) == 4


def check_what_a_leak_costs(results):
    gaps = what_a_leak_costs.gaps(results["adamw"])
    assert not gaps[0].any()  # the clean slot itself
    np.testing.assert_array_equal(gaps[:, :, 0], 0)  # before the first step nothing shows
    assert gaps[1:, :, -1].all()  # every leak does something


def check_muon_against_adam(results):
    assert np.shape(results["adamw"]["losses"]) == (5, 2, 3)
    np.testing.assert_allclose(results["adamw"]["lrs"][:3], [1e-3, 3e-3, 9e-3])


def check_lr_across_rank(results):
    assert np.shape(results["adamw"]["losses"]) == (2, 5, 2)


def check_mixed_pool(results):
    rows = results["rows"]
    for slot, tenant, first, end in results["together"]["spans"]:
        t = results["tenants"][tenant]
        assert (end - first) * rows == t["num_steps"] * t["batch_size"]
        assert results["owners"][slot] == t["optimizer"]
    # Together and alone a tenant learns from the same samples, and so ends alike.
    np.testing.assert_allclose(results["together"]["losses"], results["alone"]["losses"], rtol=1e-3)


@pytest.mark.parametrize("name", studies.NAMES)
def test_a_notebook_is_its_scripts_pair(name):
    jupytext = pytest.importorskip("jupytext")
    path = NOTEBOOKS / f"{name}.ipynb"
    script, notebook = jupytext.read(path.with_suffix(".py")), jupytext.read(path)
    assert [c.source for c in notebook.cells] == [c.source for c in script.cells]
    assert any(c.get("outputs") for c in notebook.cells) and path.stat().st_size < 300_000


def test_the_best_rate_is_a_parabolas_minimum():
    lrs = [0.1, 1.0, 10.0, 100.0]
    losses = (np.log10(lrs) - 0.3) ** 2
    np.testing.assert_allclose(lr_across_rank.best_lr(lrs, losses), 10**0.3)
    assert lr_across_rank.best_lr(lrs, np.asarray([1.0, 2.0, 3.0, 4.0])) == 0.1
    # A best rate that falls as one over the rank has the exponent -1.
    ranks = [2, 4, 8]
    at = np.stack([(np.log(lrs) - np.log(8 / rank)) ** 2 for rank in ranks])[..., None]
    found = lr_across_rank.analyse({"lrs": lrs, "ranks": ranks, "losses": at.tolist()})
    np.testing.assert_allclose(found["slope"], [-1.0], rtol=1e-6)
    assert found["cost"][0] == 0 and found["cost"][2] > 0


def test_a_leak_puts_back_what_it_says_and_nothing_else():
    tenants = [Tenant(rank=2, batch_size=2, seed=i) for i in range(2)]
    fresh = full_pool(BASE.model, tenants, 2)
    used = jax.tree.map(lambda x: x + 1, fresh)
    mask = np.asarray([False, True])
    for leak, (words, samples) in what_a_leak_costs.LEAKS.items():
        state = what_a_leak_costs.put_back(fresh, used, mask, words, samples)
        assert_same_bits(take_slot(state, 0), take_slot(fresh, 0))
        adam = take_slot(state.opt_state["adamw"][1], 1)
        assert int(adam.step) == (leak in ("clock", "everything"))
        for moments in (adam.exp_avg, adam.exp_avg_sq):
            assert all(x.all() == (leak in ("moments", "everything")) for x in moments.values())
        assert int(state.samples[1]) == (leak in ("schedule", "everything"))
        assert_same_bits(state.params, fresh.params)


def test_differing_bytes_and_gaps_are_counted():
    one = {"q.linear_in": np.ones((2, 3), np.float32), "q.linear_out": np.ones((3, 2), np.float32)}
    other = one | {"q.linear_out": np.nextafter(one["q.linear_out"], 2)}
    assert alone_or_together.differing(one, one) == 0
    assert alone_or_together.differing(one, other) == 6
    np.testing.assert_allclose(alone_or_together.gap(one, other, 2), 2**-23 / 2**0.5, rtol=1e-6)


def test_no_two_tenants_of_a_mixed_pool_are_alike():
    tenants = mixed_pool.make_tenants(mixed_pool.SETTINGS["full"])
    assert len({dataclasses.replace(t, name="", seed=0) for t in tenants}) == len(tenants) == 16


def test_the_best_rate_of_a_sweep_is_by_the_mean_over_seeds():
    losses = np.zeros((3, 2, 2))
    losses[:, :, -1] = [[1.0, 3.0], [1.5, 1.5], [0.0, 9.0]]
    assert muon_against_adam.best({"losses": losses.tolist()})[0] == 1


def test_the_command_line_refuses_what_it_does_not_know():
    import typer

    app = typer.Typer()
    app.command()(main)
    for arguments in (["no_such_study"], ["--setting", "huge"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and "studies are" in result.output
