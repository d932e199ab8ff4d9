"""Exported adapters in the real peft and transformers packages."""

import numpy as np
import pytest

from jax_impl.peft import export_adapter, import_adapter
from jax_impl.peft_test import ALPHA, MODULES, RANK, adapter, in_a_pool


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
