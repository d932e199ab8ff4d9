import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import transformers
from flax import nnx

from experiments import model as m
from jax_impl.testing import assert_same_bits, relative_error
from torch_ref.multi_lora import MultiLoRALinear

SMALL = m.LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def tokens(rows=3, length=9, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, SMALL.vocab_size, (rows, length)))


def pool(n_slots=3, rank=4, seed=1):
    """Adapters with B away from zero."""
    rng = np.random.default_rng(seed)
    shapes = m.pool_shapes(SMALL, n_slots, rank)
    return {k: jnp.asarray(rng.normal(size=x.shape) / 8, jnp.float32) for k, x in shapes.items()}


def lora(slots, adapters=None, **more):
    adapters = pool() if adapters is None else adapters
    return m.LoRA(adapters, jnp.asarray(slots), jnp.asarray([2.0, 0.5, 1.0]), **more)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_logits_are_hugging_faces(tmp_path, kv_heads):
    config = dataclasses.replace(SMALL, num_key_value_heads=kv_heads)
    torch.manual_seed(kv_heads)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**dataclasses.asdict(config), tie_word_embeddings=False)
    ).eval()
    for p in theirs.parameters():  # their own initialisation leaves norms at 1 and all else small
        torch.nn.init.normal_(p, std=0.3)
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    weights = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    ours = m.with_weights(m.Llama(config, jax.random.key(0)), weights)
    ids = tokens(rows=2, length=17)
    with torch.no_grad():
        expected = theirs(torch.tensor(np.asarray(ids))).logits.numpy()
        exact = theirs.double()(torch.tensor(np.asarray(ids))).logits.numpy()
    actual = jax.jit(lambda model, ids: model(ids))(ours, ids)
    assert relative_error(actual, exact) < max(2 * relative_error(expected, exact), 5e-7)
    assert relative_error(actual, expected) < 2e-6


def test_a_missing_or_misshapen_weight_is_an_error():
    model = m.Llama(SMALL, jax.random.key(0))
    weights = m.flat_weights(nnx.state(model))
    with pytest.raises(ValueError, match="norm.weight needs a weight of shape"):
        m.with_weights(model, {k: v for k, v in weights.items() if k != "norm.weight"})
    with pytest.raises(ValueError, match="lm_head needs"):
        m.with_weights(model, weights | {"lm_head": jnp.ones((2, 2))})


def test_gradients_of_the_layer_are_the_torch_layers():
    rng = np.random.default_rng(0)
    n_slots, rank, n_in, n_out, rows, length = 3, 4, 10, 7, 5, 6
    a, b, w, x, cotangent = (
        rng.normal(size=shape).astype(np.float32)
        for shape in (
            (n_slots, rank, n_in),
            (n_slots, n_out, rank),
            (n_out, n_in),
            (rows, length, n_in),
            (rows, length, n_out),
        )
    )
    slots, scaling = np.asarray([2, 0, 2, -1, 0]), np.asarray([0.5, 3.0, 2.0], np.float32)

    theirs = MultiLoRALinear(torch.from_numpy(w), n_slots, rank)
    theirs.scaling.copy_(torch.from_numpy(scaling))
    with torch.no_grad():
        for i, adapter in enumerate(theirs.adapters):
            adapter.linear_in.copy_(torch.from_numpy(a[i]))
            adapter.linear_out.copy_(torch.from_numpy(b[i]))
    inputs = torch.from_numpy(x).requires_grad_()
    y = theirs(inputs, torch.from_numpy(slots)[:, None].expand(rows, length))
    y.backward(torch.from_numpy(cotangent))

    layer = m.Linear(jnp.asarray(w), "l", 0)

    def ours(x, adapters):
        return layer(x, m.LoRA(adapters, jnp.asarray(slots), jnp.asarray(scaling)))

    adapters = {"l.linear_in": jnp.asarray(a), "l.linear_out": jnp.asarray(b)}
    out, pull_back = jax.vjp(ours, jnp.asarray(x), adapters)
    dx, grads = pull_back(jnp.asarray(cotangent))
    assert relative_error(out, y.detach()) < 1e-6
    assert relative_error(dx, inputs.grad) < 1e-6
    for i, adapter in enumerate(theirs.adapters):
        for name in ("linear_in", "linear_out"):
            expected = getattr(adapter, name).grad
            if expected is None:  # slot 1 has no row
                assert not grads[f"l.{name}"][i].any()
            else:
                assert relative_error(grads[f"l.{name}"][i], expected) < 1e-6


def test_each_row_has_its_own_adapter_and_rows_without_one_the_base():
    model, ids = m.Llama(SMALL, jax.random.key(0)), tokens(rows=4)
    mixed = model(ids, lora([2, -1, 0, 2]))
    for row, slot in enumerate([2, -1, 0, 2]):
        alone = model(ids[row : row + 1], None if slot < 0 else lora([slot]))
        np.testing.assert_allclose(mixed[row], alone[0], rtol=2e-5, atol=2e-5)
    assert relative_error(mixed[0], model(ids)[0]) > 0.1  # the adapter does something


def test_a_new_adapter_changes_nothing():
    model, ids = m.Llama(SMALL, jax.random.key(0)), tokens(rows=2)
    one = m.init_adapter(SMALL, 4, jax.random.key(3))
    fresh = jax.tree.map(lambda x: jnp.stack([x] * 3), one)
    assert_same_bits(model(ids, lora([0, 2], fresh)), model(ids))
    assert any(x.any() for x in one.values())


def test_dropout_is_a_rows_own_and_keeps_the_mean():
    x = jnp.ones((2, 50, 40))
    keys = jax.random.split(jax.random.key(0), 2)
    dropped = m.drop(x, jnp.asarray([0.25, 0.0]), keys)
    assert_same_bits(dropped[1], x[1])
    assert set(np.unique(dropped[0])) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(float(dropped[0].mean()) - 1) < 0.05
    swapped = m.drop(x, jnp.asarray([0.0, 0.25]), keys[::-1])
    assert_same_bits(swapped[1], dropped[0])


def test_dropout_acts_on_adapters_alone():
    model, ids = m.Llama(SMALL, jax.random.key(0)), tokens(rows=2)
    keys, rates = jax.random.split(jax.random.key(0), 2), jnp.asarray([0.5, 0.5, 0.5])
    noisy = model(ids, lora([0, -1], dropout=rates, keys=keys))
    assert relative_error(noisy[0], model(ids, lora([0, -1]))[0]) > 0.01
    np.testing.assert_allclose(noisy[1], model(ids)[1], rtol=1e-5, atol=1e-5)


def test_losses_are_cross_entropies_of_the_next_token():
    model, ids = m.Llama(SMALL, jax.random.key(0)), tokens(rows=2)
    logits = np.asarray(model(ids[:, :-1]), np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = [
        -np.mean([np.log(probabilities[b, t, ids[b, t + 1]]) for t in range(8)]) for b in range(2)
    ]
    np.testing.assert_allclose(m.sample_losses(model, ids), expected, rtol=1e-5)
