import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.config import OptimizerConfig
from jax_impl.multi_lora import multi_lora_optimizer
from jax_impl.peft import CONFIG, WEIGHTS, export_adapter, import_adapter
from jax_impl.schedule import slot_schedule
from jax_impl.testing import assert_same_bits
from jax_impl.train_state import SlotTrainState

RANK, POOL_RANK, ALPHA = 3, 8, 12.0
MODULES = {
    "model.layers.0.self_attn.q_proj": (32, 32),
    "model.layers.0.self_attn.v_proj": (32, 16),
    "model.layers.1.mlp.down_proj": (48, 32),
}


def adapter(rank=RANK, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = {}
    for module, (n_in, n_out) in MODULES.items():
        shapes[f"{module}.linear_in"] = (rank, n_in)
        shapes[f"{module}.linear_out"] = (n_out, rank)
    return {n: jnp.asarray(rng.normal(size=s) * 0.2, dtype) for n, s in shapes.items()}


def in_a_pool():
    """A pool of four slots with the adapter in slot 2, at a rank below the pool's."""
    pool = {n: jax.ShapeDtypeStruct((4, *x.shape), x.dtype) for n, x in adapter(POOL_RANK).items()}
    tx = multi_lora_optimizer(OptimizerConfig(optimizer="adam"))
    state = SlotTrainState.create(tx, pool, rank=POOL_RANK)
    schedule = slot_schedule(lr=0.1, batch_size=1, num_step=9)
    return state.install(2, adapter(), rank=RANK, batch_size=1, schedule=schedule)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_round_trip(tmp_path, dtype):
    export_adapter(tmp_path, adapter(POOL_RANK, dtype=dtype), rank=RANK, alpha=6, base_model="x")
    loaded, rank, alpha = import_adapter(tmp_path)
    assert (rank, alpha) == (RANK, 6)
    for name, x in adapter(POOL_RANK, dtype=dtype).items():
        assert_same_bits(loaded[name], x[:RANK] if name.endswith("linear_in") else x[:, :RANK])
    assert json.loads((tmp_path / CONFIG).read_text())["target_modules"] == sorted(MODULES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(bias=np.zeros(3)), "bias is not <module>"),
        (lambda a: a.popitem(), "linear_in only"),
        (lambda a: a.update({"m.linear_in": np.zeros((2, 4))}), r"m.linear_in .*too small"),
        (lambda a: a.update({"m.linear_in": np.zeros(4)}), r"m.linear_in has shape \(4,\)"),
    ],
)
def test_what_is_no_adapter_is_refused(tmp_path, change, message):
    wrong = adapter()
    change(wrong)
    with pytest.raises(ValueError, match=message):
        export_adapter(tmp_path / "new", wrong, rank=RANK, alpha=1)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("use_dora", True, "use_dora is True; plain"),
        ("target_parameters", ["q"], "target_parameters is"),
        ("lora_alpha", None, "lora_alpha is None"),
        ("rank_pattern", {"q": 3}, "rank_pattern is"),
        ("peft_type", "LOHA", "peft_type is 'LOHA'"),
        ("r", 4, "but r is 4"),
    ],
)
def test_other_kinds_of_adapters_are_refused(tmp_path, field, value, message):
    export_adapter(tmp_path, adapter(), rank=RANK, alpha=1)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=message):
        import_adapter(tmp_path)


def test_damaged_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=f"{CONFIG}: cannot be read"):
        import_adapter(tmp_path)
    export_adapter(tmp_path, adapter(), rank=RANK, alpha=1)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{WEIGHTS}: cannot be read"):
        import_adapter(tmp_path)
