"""Tests of `parity convert`: what goes through every kind comes back as it was."""

import json

import pytest
from typer.testing import CliRunner

import tenant_format
from jax_impl.checkpoint_test import ADAM, MUON, install, make_pool, train
from jax_impl.tenant_file import save_tenant
from parity.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


@pytest.mark.parametrize("config", [MUON, ADAM])
def test_to_a_checkpoint_and_back(tmp_path, config):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    save_tenant(first, train(install(make_pool(config), 2), 2, 3), 2, config, alpha=16.0)
    assert run(first, tmp_path / "pool/alice", "--to", "checkpoint").exit_code == 0
    assert run(tmp_path / "pool/alice", second, "--alpha", 16).exit_code == 0
    (arrays, record), (again, record_again) = map(tenant_format.read, (first, second))
    assert record == record_again
    assert {k: x.tobytes() for k, x in arrays.items()} == {k: x.tobytes() for k, x in again.items()}


def test_to_peft(tmp_path):
    path, state = tmp_path / "a.safetensors", make_pool()
    params = {name: x for name, x in state.params.items() if name != "q.bias"}
    state = type(state).create(state.tx, params, rank=8)
    weights = {
        name: x[0, :4] + 1 if name.endswith("in") else x[0, :, :4] + 1 for name, x in params.items()
    }
    schedule = install(make_pool(), 0).tenant(0).schedule
    state = state.install(0, weights, rank=4, batch_size=1, schedule=schedule)
    save_tenant(path, state, 0, MUON)
    result = run(path, tmp_path / "peft", "--to", "peft")
    assert result.exit_code == 2 and "no alpha" in result.output
    assert run(path, tmp_path / "peft", "--to", "peft", "--alpha", 8).exit_code == 0
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)


def test_bad_usage(tmp_path):
    for arguments in (
        (tmp_path / "none.safetensors", tmp_path / "x.safetensors"),
        (tmp_path / "none", tmp_path / "x"),
        (tmp_path / "none", tmp_path / "x", "--to", "zip"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and "error: " in result.output, result.output
