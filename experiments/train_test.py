import io
import os
import pathlib
import random
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from rich.console import Console

from experiments import train
from experiments.pool import empty_pool
from experiments.roster import Roster
from jax_impl.peft import import_adapter

EXAMPLE = pathlib.Path(train.__file__).with_name("example.toml")
TINY = """
out = "{out}"
[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
[base]
steps = 2
rows = 3
length = 8
[pool]
slots = ["adamw", "lion"]
rank = 4
rows = 2
length = 8
held_out_every = 20
held_out_rows = 2
checkpoint_every = 3
[defaults]
lr = 0.02
batch_size = 4
num_steps = 20
[[tenants]]
name = "a"
rank = 2
dropout = 0.1
[[tenants]]
name = "b"
optimizer = "lion"
rank = 4
num_steps = 45
[[tenants]]
name = "c"
domain = "source"
rank = 3
"""


def config_file(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    path = folder / "config.toml"
    path.write_text(TINY.format(out=folder / "out"))
    return path


def run(path):
    train.train(train.read_config(path), Console(file=io.StringIO()))
    return {
        name: jax.device_get(import_adapter(path.parent / "out" / "adapters" / name)[0])
        for name in "abc"
    }


def kill_at_some_step(path, seed):
    """Starts a run in a process of its own and kills it between its first and last checkpoint."""
    checkpoint = path.parent / "out" / "checkpoint.npz"
    command = [sys.executable, "-m", "experiments.train", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        while not checkpoint.exists():
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(random.Random(seed).uniform(0.0, 0.3))
        process.kill()
    return checkpoint


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path):
    expected = run(config_file(tmp_path / "whole"))
    path = config_file(tmp_path / "killed")
    checkpoint = kill_at_some_step(path, seed=time.time_ns())
    config = train.read_config(path)
    state = empty_pool(config.base.model, config.pool.slots, 4)
    _, step = train.restore(checkpoint, state, Roster(config.tenants, config.pool.slots))
    assert 3 <= step < 90, "it was not killed on its way"
    actual = run(path)
    for name, adapter in expected.items():
        for k, x in adapter.items():
            np.testing.assert_array_equal(actual[name][k], x, err_msg=f"{name} {k}")
            assert x.any()
    assert expected["a"]["model.layers.0.self_attn.q_proj.linear_in"].shape == (2, 16)
    logs = path.parent / "out" / "logs"
    assert sorted(p.name for p in logs.iterdir()) == ["a", "b", "c"]


def test_a_checkpoint_of_another_run_is_an_error(tmp_path):
    config = train.read_config(config_file(tmp_path / "run")).base.model
    roster = Roster((), ("adamw",))
    train.save(tmp_path / "c.npz", empty_pool(config, ("adamw",), 4), roster, 1)
    other = empty_pool(config, ("adamw",), 2)
    with pytest.raises(ValueError, match="of another configuration; remove it"):
        train.restore(tmp_path / "c.npz", other, roster)
    changed = Roster((train.Tenant(lr=0.5),), ("adamw",))
    with pytest.raises(ValueError, match="of another configuration"):
        train.restore(tmp_path / "c.npz", empty_pool(config, ("adamw",), 4), changed)
    state, step = train.restore(tmp_path / "absent.npz", other, roster)
    assert state is other and step == 0


def test_the_example_is_a_configuration():
    config = train.read_config(EXAMPLE)
    assert [t.name for t in config.tenants][2] == "code-pages"
    assert config.tenants[1].dropout == 0.05 and config.tenants[1].weight_decay == 0.0
    Roster(config.tenants, config.pool.slots)  # every tenant has a slot it can take


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden_size", "hiden_size", "LlamaConfig: unknown \\['hiden_size'\\]"),
        ("[defaults]", "[default]", "unknown \\['default'\\]"),
        ('name = "c"', 'name = "a"', "names of their own"),
        ("batch_size = 4", "batch_size = 3", "multiple of rows = 2"),
    ],
)
def test_a_mistake_is_named(tmp_path, old, new, message):
    path = tmp_path / "config.toml"
    path.write_text(TINY.replace(old, new))
    with pytest.raises(ValueError, match=message):
        train.read_config(path)


def test_an_adapter_is_exported_without_padding_under_the_names_of_llama(tmp_path):
    tenant = train.Tenant(rank=2, alpha=6)
    state = empty_pool(train.LlamaConfig(num_hidden_layers=1), ("adamw",), 4)
    state = train.install(train.LlamaConfig(num_hidden_layers=1), state, 0, tenant)
    adapter = train.adapter_of(state, 0, tenant)
    assert adapter["layers.0.mlp.up_proj.linear_out"].shape == (352, 2)
    train.export(tmp_path / "t", tenant, adapter)
    saved, rank, alpha = import_adapter(tmp_path / "t")
    assert (rank, alpha) == (2, 6)
    assert saved.keys() == {f"model.{name}" for name in adapter}
    assert all((saved[f"model.{name}"] == x).all() for name, x in adapter.items())
