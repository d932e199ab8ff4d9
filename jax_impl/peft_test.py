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


def test_a_base_model_with_it_gives_the_logits_of_merged_weights(tmp_path):
    torch = pytest.importorskip("torch")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    base = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.arange(40).reshape(2, 20) % 61
    with torch.no_grad():
        plain = base(tokens).logits
        export_adapter(tmp_path, in_a_pool().tenant(2).params, rank=RANK, alpha=ALPHA)
        ours = {n: torch.from_numpy(np.array(x)) for n, x in adapter().items()}
        kept = {k: v.clone() for k, v in base.state_dict().items()}
        for module in MODULES:
            weight = base.get_submodule(module).weight
            b, a = ours[f"{module}.linear_out"], ours[f"{module}.linear_in"]
            weight += ALPHA / RANK * b @ a
        merged = base(tokens).logits
        base.load_state_dict(kept)
        adapted = peft.PeftModel.from_pretrained(base, tmp_path).eval()
        theirs = adapted(tokens).logits
    assert (merged - plain).abs().max() > 0.01
    torch.testing.assert_close(theirs, merged, rtol=1e-4, atol=1e-5)


def test_what_peft_itself_saves_can_be_installed(tmp_path):
    torch = pytest.importorskip("torch")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    model.save_pretrained(tmp_path)
    loaded, rank, alpha = import_adapter(tmp_path)
    assert (rank, alpha) == (4, 8)
    (name,) = (n for n in loaded if n.endswith("linear_in"))
    module = "model.layers.0.self_attn.q_proj"
    assert name == f"{module}.linear_in" and loaded[f"{module}.linear_out"].shape == (32, 4)
    theirs = model.get_submodule(f"base_model.model.{module}.lora_A.default").weight
    assert np.array_equal(np.asarray(loaded[name]), theirs.detach().numpy())
    assert torch.is_tensor(theirs)


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
