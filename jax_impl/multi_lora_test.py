import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_impl.adamw import adamw
from jax_impl.clip import clip_by_total_norm
from jax_impl.config import OptimizerConfig
from jax_impl.multi_lora import label_parameters, multi_lora_optimizer
from jax_impl.muon import muon
from jax_impl.per_slot import take_slot
from jax_impl.testing import assert_same_bits

S = 3
MUON = OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest")


def pool(seed):
    """S = 3 slots: under the lift (S, 5) is a vector and (S, 3, 3) a matrix, not the reverse."""
    rng = np.random.default_rng(seed)
    shapes = {"linear_in": (4, 6), "linear_out": (5, 4), "bias": (5,), "square": (S, S)}
    return {k: jnp.asarray(rng.normal(size=(S, *s)), jnp.float32) for k, s in shapes.items()}


def split(tree):
    matrices = {k: v for k, v in tree.items() if k != "bias"}
    return matrices, {"bias": tree["bias"]}


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_each_slot_is_the_stock_optimizers_of_its_two_groups(optimizer):
    config = dataclasses.replace(MUON, optimizer=optimizer, clip_grad=0.5)
    tx = multi_lora_optimizer(config)
    given = dict(learning_rate=0.3, weight_decay=0.9)
    on_matrices = muon(fp32_matmul_prec="highest") if optimizer == "muon" else adamw()
    params = pool(0)
    state = tx.init(params)
    ones = [take_slot(params, i) for i in range(S)]
    states = [[on_matrices.init(split(p)[0]), adamw().init(split(p)[1])] for p in ones]
    for t in range(2):
        grads = pool(t + 1)
        updates, state = tx.update(grads, state, params, **given)
        params = optax.apply_updates(params, updates)
        for i in range(S):
            clip = clip_by_total_norm(0.5)
            clipped, clip_state = clip.update(take_slot(grads, i), clip.init(ones[i]))
            matrices, scalars = split(ones[i])
            g_matrices, g_scalars = split(clipped)
            first, states[i][0] = on_matrices.update(g_matrices, states[i][0], matrices, **given)
            undecayed = {**given, "weight_decay": 0.0}
            second, states[i][1] = adamw().update(g_scalars, states[i][1], scalars, **undecayed)
            ones[i] = optax.apply_updates(ones[i], {**first, **second})
            np.testing.assert_allclose(state[0].norm[i], clip_state.norm, rtol=1e-6)
            # the iteration's hundredfold of 6e-8, twice
            chex.assert_trees_all_close(take_slot(params, i), ones[i], rtol=3e-5, atol=3e-5)


def test_labels_are_those_of_one_adapter():
    one = take_slot(pool(0), 0)
    assert label_parameters(one) == {
        "linear_in": "matrix",
        "linear_out": "matrix",
        "square": "matrix",
        "bias": "scalar",
    }
    state = multi_lora_optimizer(MUON).init(pool(0))
    inner = state[1].inner_states
    buffers = inner["matrix"].inner_state.momentum_buffer
    moments = inner["scalar"].inner_state
    assert buffers["square"].shape == (S, S, S) and buffers["linear_in"].shape == (S, 4, 6)
    assert isinstance(buffers["bias"], optax.MaskedNode)
    assert moments.exp_avg["bias"].shape == (S, 5) and moments.step.shape == (S,)
    assert isinstance(moments.exp_avg["linear_in"], optax.MaskedNode)


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
@pytest.mark.parametrize("late", [False, True])
def test_only_matrices_are_decayed(optimizer, late):
    config = dataclasses.replace(MUON, optimizer=optimizer, lr=0.5, weight_decay=0.8)
    tx = multi_lora_optimizer(config)
    params = pool(0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    given = dict(weight_decay=jnp.asarray([0.0, 0.4, 0.8])) if late else {}
    updates, _ = tx.update(zeros, tx.init(params), params, **given)
    assert not updates["bias"].any()
    decay = np.asarray(given.get("weight_decay", jnp.full(S, 0.8)))
    for k in ("linear_in", "linear_out", "square"):
        expected = -0.5 * decay[:, None, None] * params[k]
        np.testing.assert_allclose(updates[k], expected, rtol=1e-6)


def test_clips_over_matrices_and_scalars_together():
    tx = multi_lora_optimizer(dataclasses.replace(MUON, optimizer="adam", clip_grad=1.0))
    params, grads = pool(0), pool(1)
    _, state = tx.update(grads, tx.init(params), params, learning_rate=0.1)
    expected = [
        np.sqrt(sum(np.sum(np.square(np.float64(g[i]))) for g in grads.values())) for i in range(S)
    ]
    np.testing.assert_allclose(state[0].norm, expected, rtol=1e-6)
    first_moment = state[1].inner_states["scalar"].inner_state.exp_avg["bias"]
    clipped = grads["bias"] / np.asarray(expected)[:, None]
    np.testing.assert_allclose(first_moment, 0.1 * clipped, rtol=1e-5)


def test_a_slots_clip_clock_and_momentum_are_its_own():
    tx = multi_lora_optimizer(MUON)
    params, grads = pool(0), pool(1)
    state = tx.init(params)
    loud = jax.tree.map(lambda g: g.at[1].multiply(1e6), grads)
    given = dict(learning_rate=0.1)
    update = jax.jit(tx.update)
    quiet_result = update(grads, state, params, **given)
    loud_result = update(loud, state, params, **given)
    for i in (0, 2):
        assert_same_bits(take_slot(loud_result, i), take_slot(quiet_result, i))
    _, state = update(grads, state, params, slots=jnp.asarray([1, -1, S]), **given)
    assert state[1].inner_states["scalar"].inner_state.step.tolist() == [0, 1, 0]
    buffers = state[1].inner_states["matrix"].inner_state.momentum_buffer["square"]
    assert buffers[1].any() and not buffers[0].any() and not buffers[2].any()


def test_every_float_can_be_given_anew():
    names = dict(
        learning_rate="lr",
        weight_decay="weight_decay",
        momentum="muon_momentum",
        b1="adam_beta1",
        b2="adam_beta2",
        eps="adam_eps",
        max_norm="clip_grad",
    )
    params, grads = pool(0), pool(1)
    base = dataclasses.replace(MUON, lr=0.1)
    for name, field in names.items():
        built = multi_lora_optimizer(dataclasses.replace(base, **{field: 0.37}))
        late = multi_lora_optimizer(base)
        state = late.init(params)
        state = late.update(grads, state, params)[1]
        expected = built.update(grads, state, params)
        assert_same_bits(late.update(grads, state, params, **{name: 0.37}), expected)
        unchanged = late.update(grads, state, params)
        assert any(
            (a != b).any()
            for a, b in zip(jax.tree.leaves(unchanged), jax.tree.leaves(expected), strict=True)
        ), name


def test_the_learning_rate_must_come_from_somewhere():
    tx = multi_lora_optimizer(MUON)
    with pytest.raises(ValueError, match="learning_rate is missing"):
        tx.update(pool(1), tx.init(pool(0)), pool(0))


def test_equal_configurations_share_a_transform():
    again = OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest")
    assert multi_lora_optimizer(again) is multi_lora_optimizer(MUON)
    listed = OptimizerConfig(custom_coefficients=[[1, 2, 3]])
    assert hash(listed) == hash(OptimizerConfig(custom_coefficients=((1.0, 2.0, 3.0),)))


def test_dist_muon_is_muon():
    with pytest.warns(DeprecationWarning, match="dist_muon"):
        config = OptimizerConfig(optimizer="dist_muon", muon_fp32_matmul_prec="highest")
    assert config == MUON


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(optimizer="adamw"), "optimizer is 'adamw'; choose one of 'adam', 'muon'"),
        (dict(muon_scalar_optimizer="sgd"), "muon_scalar_optimizer is 'sgd'"),
        (dict(optimizer="muon", muon_scale_mode="big"), "scale_mode is 'big'"),
        (dict(optimizer="muon", weight_decay_method="l1"), "weight_decay_method is 'l1'"),
        (dict(optimizer="muon", muon_coefficient_type="x"), "coefficient_type is 'x'"),
        (dict(optimizer="muon", muon_fp32_matmul_prec="low"), "fp32_matmul_prec is 'low'"),
        (dict(optimizer="muon", ns_method="grams"), "method is 'grams'"),
    ],
)
def test_unknown_names_are_refused_when_it_is_built(kwargs, message):
    with pytest.raises(ValueError, match=message):
        multi_lora_optimizer(OptimizerConfig(**kwargs))


def test_defaults_are_megatrons():
    from megatron.core.optimizer import OptimizerConfig as Megatron

    theirs = {f.name: f.default for f in dataclasses.fields(Megatron)}
    ours = {f.name: f.default for f in dataclasses.fields(OptimizerConfig)}
    assert ours.keys() - theirs.keys() == {
        "weight_decay_method",
        "custom_coefficients",
        "ns_method",
        "rank_aware",
    }
    shared = ours.keys() & theirs.keys()
    assert {k: ours[k] for k in shared} == {k: theirs[k] for k in shared}
