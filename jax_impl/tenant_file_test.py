import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.checkpoint_test import ADAM, MUON, install, make_pool, same_tenant, train
from jax_impl.multi_lora import multi_lora_optimizer
from jax_impl.schedule import slot_schedule
from jax_impl.tenant_file import load_tenant, save_tenant
from jax_impl.train_state import SlotTrainState
from tenant_format import TenantFileError, read, write


def trained(*configs, slot=1, rank=8, partial=0, **kwargs):
    state = install(make_pool(*configs), slot, rank=rank, **kwargs)
    return train(state, slot, 3, rank=rank, partial=partial)


@pytest.mark.parametrize("partial", [0, 2])
@pytest.mark.parametrize("config", [MUON, ADAM])
def test_goes_on_elsewhere_bit_for_bit(tmp_path, config, partial):
    state = trained(config, partial=partial)
    save_tenant(tmp_path / "a.safetensors", state, 1, config, alpha=16.0)
    busy = train(install(make_pool(config), 0, seed=7), 0, 2)
    loaded = load_tenant(tmp_path / "a.safetensors", busy, 3, config)
    same_tenant(loaded.tenant(0), busy.tenant(0))
    assert int(loaded.accumulated[3]) == partial
    if not partial:
        loaded, state = train(loaded, 3, 20, first=9), train(state, 1, 20, first=9)
    same_tenant(loaded.tenant(3).params, state.tenant(1).params)
    same_tenant(loaded.tenant(3).grad_buffer, state.tenant(1).grad_buffer)
    same_tenant(loaded.tenant(3).schedule, state.tenant(1).schedule)
    _, record = read(tmp_path / "a.safetensors")
    assert record["alpha"] == 16.0 and record["samples"] == 12


def test_finds_its_family_and_another_rank(tmp_path):
    state = trained(MUON, ADAM, family=1, rank=4)
    save_tenant(tmp_path / "a.safetensors", state, 1, MUON, ADAM)
    loaded = load_tenant(tmp_path / "a.safetensors", make_pool(ADAM, MUON, rank=5), 0, ADAM, MUON)
    assert (int(loaded.family[0]), int(loaded.rank[0])) == (0, 4)
    mine, theirs = loaded.tenant(0).params, state.tenant(1).params
    for name, x in mine.items():
        common = tuple(map(slice, np.minimum(x.shape, theirs[name].shape)))
        assert np.array_equal(x[common], theirs[name][common]) and np.any(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, r: a.pop("q.bias/master"), "q.bias/master is not there"),
        (lambda a, r: a.update(new=np.zeros(1)), "new is none of this pool's"),
        (lambda a, r: a.update({"q.bias/master": np.zeros(3, "f4")}), r"q.bias.* is float32\[3\]"),
        (lambda a, r: a.update({"q.bias/master": np.zeros(10)}), "q.bias/master is float64"),
        (lambda a, r: r["clocks"].clear(), "clocks of"),
        (lambda a, r: r.update(rank=9), "rank is 9"),
        (lambda a, r: r["config"].update(muon_momentum=0.5), "config.muon_momentum is 0.5"),
        (lambda a, r: r["config"].update(clip_grad=0.5), "config.clip_grad is 0.5"),
        (lambda a, r: r["config"].update(rank_aware=True), "config.rank_aware is True"),
        (lambda a, r: r.update(accumulated=9), "accumulated is 9 of 4 samples"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, change, message):
    path = tmp_path / "a.safetensors"
    save_tenant(path, trained(), 1, MUON)
    arrays, record = read(path)
    change(arrays, record)
    write(path, arrays, record)
    with pytest.raises(TenantFileError, match=f"a.safetensors: .*{message}"):
        load_tenant(path, make_pool(), 0, MUON)


def test_damaged_files_are_refused(tmp_path):
    path, rng, refused = tmp_path / "a.safetensors", random.Random(0), 0
    state = trained()
    save_tenant(path, state, 1, MUON)
    whole, pool = path.read_bytes(), make_pool()
    for _ in range(40):
        at = rng.randrange(len(whole))
        flipped = whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]
        path.write_bytes(rng.choice([flipped, whole[:at]]))
        try:
            loaded = load_tenant(path, pool, 0, MUON)
        except TenantFileError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            same_tenant(loaded.tenant(0).params, state.tenant(1).params)
    assert refused > 30


def test_errors(tmp_path):
    path, state = tmp_path / "a.safetensors", trained()
    with pytest.raises(ValueError, match="slot 0 is free"):
        save_tenant(path, state, 0, MUON)
    with pytest.raises(TenantFileError, match="cannot be read"):
        load_tenant(path, state, 0, MUON)
    save_tenant(path, state, 1, MUON)
    with pytest.raises(ValueError, match="slot 1 is occupied"):
        load_tenant(path, state, 1, MUON)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    assert jax.tree.leaves(state)


def test_parameters_of_flax_nnx(tmp_path):
    """A model's variables are the tree; names are the attributes', without nnx's ``.value``."""
    nnx = pytest.importorskip("flax.nnx")

    class Adapter(nnx.Module):
        def __init__(self, rngs):
            self.linear_in = nnx.Param(jax.random.normal(rngs.params(), (4, 12)))
            self.linear_out = nnx.Param(jnp.zeros((10, 4)))
            self.bias = nnx.Param(jnp.ones(10))

    graph, params = nnx.split(Adapter(nnx.Rngs(0)), nnx.Param)
    pool = jax.tree.map(lambda x: jnp.zeros((3, *x.shape)), params)
    state = SlotTrainState.create(multi_lora_optimizer(MUON), pool, rank=4)
    schedule = slot_schedule(lr=0.1, batch_size=1, weight_decay=0.5)
    state = state.install(1, params, rank=4, batch_size=1, schedule=schedule)
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    state = state.accumulate(zeros, jnp.array([0, 1, 0]))
    state, report = jax.jit(SlotTrainState.step, donate_argnums=0)(state)
    assert report.stepped.tolist() == [False, True, False]
    model = nnx.merge(graph, state.tenant(1).params)
    assert (model.bias[...] == 1).all()  # a bias is not decayed, and its gradient is zero
    assert not (model.linear_in[...] == params["linear_in"][...]).all()
    save_tenant(tmp_path / "a.safetensors", state, 1, MUON)
    arrays, record = read(tmp_path / "a.safetensors")
    assert {"linear_in/master", "linear_in/momentum_buffer", "bias/exp_avg"} <= arrays.keys()
    assert record["clocks"] == {"bias": 1}
    loaded = load_tenant(tmp_path / "a.safetensors", state, 0, MUON)
    same_tenant(loaded.tenant(0).params, state.tenant(1).params)


def test_what_is_not_the_pools_or_not_unique_is_refused(tmp_path):
    path, state = tmp_path / "a.safetensors", trained(MUON, ADAM, family=1)
    for configs in ((MUON,), (ADAM, MUON), ()):
        with pytest.raises((ValueError, IndexError), match="this pool's optimizer|index"):
            save_tenant(path, state, 1, *configs)
        with pytest.raises((ValueError, IndexError), match="this pool's optimizer|index"):
            load_tenant(path, state, 0, *configs)
    same = {"a": {"b.c": jnp.zeros((1, 4, 6))}, "a.b": {"c": jnp.ones((1, 4, 6))}}
    twice = SlotTrainState.create(multi_lora_optimizer(MUON), same, rank=4)
    one = jax.tree.map(lambda x: x[0], same)
    schedule = slot_schedule(lr=0.1, batch_size=1)
    twice = twice.install(0, one, rank=4, batch_size=1, schedule=schedule)
    with pytest.raises(ValueError, match="two parameters have the name a.b.c"):
        save_tenant(path, twice, 0, MUON)


def test_rates_are_the_decimals_that_they_were(tmp_path):
    """0.05 in float32 is written as 0.05, for a stack that keeps float64."""
    save_tenant(tmp_path / "a.safetensors", trained(), 1, MUON)
    _, record = read(tmp_path / "a.safetensors")
    assert record["schedule"]["max_lr"] == 0.05 and record["schedule"]["start_wd"] == 0.01
