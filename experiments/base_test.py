import dataclasses

import jax
import numpy as np
from flax import nnx

from experiments import base, data
from experiments.model import Llama, LlamaConfig, flat_weights, sample_losses
from jax_impl.testing import assert_same_bits

MODEL = LlamaConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
CONFIG = base.BaseConfig(MODEL, steps=60, rows=9, length=24, lr=0.01)


def test_training_teaches_and_the_cache_keeps_every_bit(tmp_path, monkeypatch):
    trained = base.base_model(CONFIG, cache=tmp_path)
    tokens = data.held_out_batch("prose", 20, 25)
    fresh = Llama(MODEL, jax.random.key(CONFIG.seed))
    assert sample_losses(trained, tokens).mean() < sample_losses(fresh, tokens).mean() - 1
    monkeypatch.delattr(base, "train_base")
    again = base.base_model(CONFIG, cache=tmp_path)
    assert_same_bits(flat_weights(nnx.state(again)), flat_weights(nnx.state(trained)))


def test_another_configuration_is_another_model(tmp_path):
    for config in (CONFIG, dataclasses.replace(CONFIG, seed=1)):
        base.base_model(dataclasses.replace(config, steps=1), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_batch_is_of_the_whole_mix():
    rows = base.mixed_batch(CONFIG, 3)
    assert rows.shape == (9, 25)
    for i, name in enumerate(base.MIX):
        text = data.blocks(name).tobytes()
        assert all(bytes(r.astype(np.uint8)) in text for r in rows[3 * i : 3 * i + 3])
