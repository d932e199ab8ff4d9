"""Tests of parity.gradients: determinism, spectra as named, padding, first weights."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from parity import gradients
from parity.scenario import SYNTHETIC_GRADIENTS, Accumulate, shipped

SCENARIO = dataclasses.replace(
    shipped()["one_muon"], events=(Accumulate(0, 4), Accumulate(0, 4), Accumulate(0, 1))
)


def _gradient(kind, shape=(8, 48), rank=8, name="q.linear_in", index=0, scenario=SCENARIO):
    return gradients.gradient(scenario, shape, rank, name, index, kind)


def _singular_values(kind, index=0):
    values = np.linalg.svd(_gradient(kind, index=index).astype(np.float64), compute_uv=False)
    return values / values[0]


@pytest.mark.parametrize("kind", SYNTHETIC_GRADIENTS)
def test_deterministic_and_float32(kind):
    first, second = _gradient(kind), _gradient(kind)
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("kind", sorted(set(SYNTHETIC_GRADIENTS) - {"zero"}))
def test_differs_with_event_tensor_and_seed(kind):
    other_seed = dataclasses.replace(SCENARIO, seed=1)
    others = [
        _gradient(kind, index=1),
        _gradient(kind, name="k.linear_in"),
        _gradient(kind, scenario=other_seed),
    ]
    assert all(np.abs(_gradient(kind) - other).max() > 0 for other in others)


def test_known_value():
    """The same numbers on every machine and in every run: hash() would not do."""
    assert _gradient("gaussian")[0, 0] == np.float32(1.0944081544876099)


@pytest.mark.parametrize("kind", SYNTHETIC_GRADIENTS)
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_padding_is_exactly_zero(kind, rank):
    rows = _gradient(kind, rank=rank)
    columns = _gradient(kind, (48, 8), rank, "q.linear_out")
    assert not rows[rank:].any() and not columns[:, rank:].any()
    if kind != "zero":
        assert rows[:rank].any(axis=1).all() and columns[:, :rank].any(axis=0).all()


def test_sums_over_samples():
    """A sum of n independent draws is sqrt(n) times as large."""
    four = np.std(_gradient("gaussian", (64, 512), 64, index=0))
    one = np.std(_gradient("gaussian", (64, 512), 64, index=2))
    assert four == pytest.approx(2.0, rel=0.03) and one == pytest.approx(1.0, rel=0.03)


def test_gaussian_is_well_conditioned():
    assert _singular_values("gaussian")[-1] > 0.2


def test_low_rank_has_rank_two_and_noise():
    values = _singular_values("low_rank")
    assert values[1] > 0.01 and 1e-5 < values[2] < 3e-3


def test_low_rank_keeps_its_directions():
    total = sum(_gradient("low_rank", index=i).astype(np.float64) for i in range(3))
    values = np.linalg.svd(total, compute_uv=False)
    assert values[2] < 3e-3 * values[0]


def test_ill_conditioned_spans_four_decades_in_sums_too():
    values = _singular_values("ill_conditioned")
    np.testing.assert_allclose(np.log10(values), np.linspace(0, -4, 8), atol=0.3)
    total = sum(_gradient("ill_conditioned", index=i).astype(np.float64) for i in range(3))
    values = np.linalg.svd(total, compute_uv=False)
    assert values[0] / values[-1] == pytest.approx(1e4, rel=0.5)


def test_scales():
    gaussian = _gradient("gaussian")
    assert not _gradient("zero").any()
    np.testing.assert_allclose(_gradient("tiny"), gaussian * 1e-12, rtol=1e-6)
    np.testing.assert_allclose(_gradient("huge"), gaussian * 1e12, rtol=1e-6)


def test_some_events_are_spikes_or_not_finite():
    events = (Accumulate(0, 1),) * 30
    scenario = dataclasses.replace(SCENARIO, events=events)
    outliers = [gradients.is_outlier(scenario, index) for index in range(30)]
    assert 5 <= sum(outliers) <= 15
    for index, outlier in enumerate(outliers):
        gaussian = _gradient("gaussian", index=index, scenario=scenario)
        spike = _gradient("spikes", index=index, scenario=scenario)
        np.testing.assert_allclose(spike, gaussian * (1e3 if outlier else 1.0), rtol=1e-6)
        infinite = np.isinf(_gradient("non_finite", index=index, scenario=scenario))
        assert infinite.sum() == outlier and infinite[0, 0] == outlier


@pytest.mark.parametrize("kind", SYNTHETIC_GRADIENTS)
def test_vectors(kind):
    vector = _gradient(kind, (96,), 4, "q.bias")
    assert vector.shape == (96,) and (kind == "zero" or vector.all())


def test_text_is_refused():
    with pytest.raises(ValueError, match="kind = 'text'"):
        _gradient("text")


def test_initial_weights_lora_and_random():
    tenants = SCENARIO.tenants | {
        "lora": dataclasses.replace(SCENARIO.tenants["alice"], init="lora", rank=4)
    }
    scenario = dataclasses.replace(SCENARIO, tenants=tenants)
    weights = gradients.initial_weights(scenario, "lora")
    assert {n: w.shape for n, w in weights.items()} == gradients.adapter_shapes(scenario, 4)
    for name, weight in weights.items():
        assert weight.dtype == np.float32
        assert weight.any() == name.endswith(".linear_in")
    assert all(w.any() for w in gradients.initial_weights(scenario, "alice").values())


def test_initial_weights_are_bf16_numbers_in_bf16():
    scenario = shipped()["one_muon[bf16]"]
    for weight in gradients.initial_weights(scenario, "alice").values():
        np.testing.assert_array_equal(weight, weight.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_adapter_shapes_of_a_stack():
    assert gradients.adapter_shapes(shipped()["clipping"], 4) == {
        "q.linear_in": (4, 48),
        "q.linear_out": (96, 4),
        "q.bias": (96,),
        "k.linear_in": (4, 96),
        "k.linear_out": (48, 4),
        "v.linear_in": (4, 64),
        "v.linear_out": (64, 4),
    }


def test_adapter_shapes_of_a_transformer():
    scenario = shipped()["real_text"]
    shapes = gradients.adapter_shapes(scenario, 4)
    hidden, ffn = scenario.model.hidden_size, scenario.model.ffn_hidden_size
    layers = {
        "layers.0.attention.fused_qkv": (hidden, 3 * hidden),
        "layers.0.attention.linear_proj": (hidden, hidden),
        "layers.0.mlp.linear_fc1": (hidden, ffn),
        "layers.0.mlp.linear_fc2": (ffn, hidden),
        "output": (hidden, gradients.VOCAB_SIZE),
    }
    assert len(shapes) == 3 * len(layers)
    for name, (in_features, out_features) in layers.items():
        assert shapes[f"{name}.linear_in"] == (4, in_features)
        assert shapes[f"{name}.linear_out"] == (out_features, 4)
        assert shapes[f"{name}.bias"] == (out_features,)


def test_pad_and_own_shape_are_inverse():
    array = np.ones((3, 5), np.float32)
    padded = gradients.pad(array, (8, 5))
    assert padded.sum() == 15 and padded.shape == (8, 5)
    assert gradients.own_shape("q.linear_in", padded.shape, 3) == array.shape
    assert gradients.own_shape("q.linear_out", (5, 8), 3) == (5, 3)
    assert gradients.own_shape("q.bias", (5,), 3) == (5,)


@pytest.mark.parametrize("kind", SYNTHETIC_GRADIENTS)
def test_shares_of_the_samples_add_up(kind):
    total = _gradient(kind)
    shares = [
        gradients.gradient(SCENARIO, (8, 48), 8, "q.linear_in", 0, kind, slice(rank, None, 2))
        for rank in range(2)
    ]
    np.testing.assert_allclose(sum(shares), total, rtol=0, atol=1e-6 * np.abs(total).max())
    small = gradients.gradient(SCENARIO, (8, 48), 8, "q.linear_in", 2, kind, slice(1, None, 2))
    assert not small.any(), "the second rank has none of one sample"
