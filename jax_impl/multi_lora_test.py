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
from jax_impl.schedule import slot_schedule
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
    usual = {
        "linear_in": "matrix",
        "linear_out": "matrix",
        "square": "matrix",
        "bias": "scalar undecayed",
    }
    assert label_parameters(MUON, one) == usual
    outer = dataclasses.replace(MUON, embedding_or_output_parameters=["*_out", "bias"])
    assert label_parameters(outer, one) == {**usual, "linear_out": "scalar"}
    decoupled = dataclasses.replace(outer, decoupled_lr=0.1)
    assert label_parameters(decoupled, one) == {
        **usual,
        "linear_out": "scalar decoupled",
        "bias": "scalar undecayed decoupled",
    }
    nested = {"q": {"bias": jnp.ones((2, 2)), "conv": jnp.ones((2, 2, 2))}}
    assert label_parameters(MUON, nested) == {"q": {"bias": "matrix undecayed", "conv": "scalar"}}
    state = multi_lora_optimizer(MUON).init(pool(0))
    inner = state[1].inner_states
    buffers = inner["matrix"].inner_state.momentum_buffer
    moments = inner["scalar undecayed"].inner_state
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
    first_moment = state[1].inner_states["scalar undecayed"].inner_state.exp_avg["bias"]
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
    assert state[1].inner_states["scalar undecayed"].inner_state.step.tolist() == [0, 1, 0]
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
        (
            dict(optimizer="adaptive_muon", adaptive_muon_moment2_method="adam"),
            "moment2_method is 'adam'",
        ),
        (
            dict(optimizer="adaptive_muon", qkv_split_shapes={"q": (1, 1)}),
            "'adaptive_muon', which normalises whole matrices",
        ),
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


def test_lion_owns_what_muon_does_not():
    config = dataclasses.replace(MUON, muon_scalar_optimizer="lion", clip_grad=0.0)
    tx = multi_lora_optimizer(config)
    params, grads = pool(0), pool(1)
    updates, state = tx.update(grads, tx.init(params), params, learning_rate=0.3)
    np.testing.assert_allclose(updates["bias"], -0.3 * jnp.sign(grads["bias"]), rtol=1e-6)
    moments = state[1].inner_states["scalar undecayed"].inner_state.exp_avg["bias"]
    np.testing.assert_allclose(moments, 0.02 * grads["bias"], rtol=1e-5)
    muons = multi_lora_optimizer(dataclasses.replace(MUON, clip_grad=0.0))
    others, _ = muons.update(grads, muons.init(params), params, learning_rate=0.3)
    assert_same_bits(updates["square"], others["square"])


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
@pytest.mark.parametrize("min_lr", [None, 0.01])
def test_embedding_and_output_parameters_follow_the_schedule_between_their_own_bounds(
    optimizer, min_lr
):
    config = dataclasses.replace(
        MUON,
        optimizer=optimizer,
        weight_decay=0.0,
        decoupled_lr=0.5,
        decoupled_min_lr=min_lr,
        embedding_or_output_parameters=("linear_out", "bias"),
    )
    schedule = slot_schedule(
        lr=0.2, min_lr=0.1, batch_size=1, num_step=10, lr_decay_style="linear", lr_warmup_iters=2
    )
    schedule = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * S), schedule)
    samples = jnp.asarray([1, 6, 10])  # half way up, half way down, at the end
    lowest = 0.1 if min_lr is None else min_lr
    own = [0.25, (0.5 + lowest) / 2, lowest]
    tx = multi_lora_optimizer(config)
    params, grads = pool(0), pool(1)
    given = dict(learning_rate=jnp.full(S, 0.2), schedule=schedule, samples=samples)
    updates, _ = tx.update(grads, tx.init(params), params, **given)
    for k in ("linear_out", "bias"):  # a first step of Adam has the length lr in each element
        expected = -np.reshape(own, (S,) + (1,) * (grads[k].ndim - 1)) * jnp.sign(grads[k])
        np.testing.assert_allclose(updates[k], expected, rtol=1e-3)  # but for eps
    without = multi_lora_optimizer(dataclasses.replace(config, decoupled_lr=None))
    usual, _ = without.update(grads, without.init(params), params, **given)
    assert_same_bits(updates["square"], usual["square"])
    alone, _ = tx.update(grads, tx.init(params), params, learning_rate=0.2)
    np.testing.assert_allclose(alone["bias"], -0.5 * jnp.sign(grads["bias"]), rtol=1e-3)


SHAPES_3, SHAPES_4 = (2, 1, 1), (2, 2, 1, 1)


@pytest.mark.parametrize("sizes", [SHAPES_3, SHAPES_4])
def test_every_projection_of_a_fused_matrix_is_orthogonalised_alone(sizes):
    """Rows are groups of query, (gate,) key and value rows, as in Megatron's fused QKV."""
    groups, config = 3, dataclasses.replace(MUON, clip_grad=0.0)
    rng = np.random.default_rng(0)
    fused = jnp.asarray(rng.normal(size=(S, groups * sum(sizes), 4)), jnp.float32)
    split_config = dataclasses.replace(config, qkv_split_shapes={"*.fused": sizes})
    together = updates_of(split_config, {"a": {"fused": fused, "plain": fused}})["a"]
    rounds = fused.reshape(S, groups, sum(sizes), 4)
    parts = jnp.split(rounds, np.cumsum(sizes)[:-1], axis=2)
    alone = updates_of(config, {str(i): p.reshape(S, -1, 4) for i, p in enumerate(parts)})
    joined = [alone[str(i)].reshape(p.shape) for i, p in enumerate(parts)]
    joined = jnp.concatenate(joined, axis=2).reshape(fused.shape)
    np.testing.assert_allclose(together["fused"], joined, rtol=1e-4, atol=1e-5)
    whole = updates_of(config, {"a": {"fused": fused}})["a"]["fused"]
    np.testing.assert_allclose(together["plain"], whole, rtol=1e-4, atol=1e-5)
    assert jnp.linalg.norm(whole - joined) > 0.1 * jnp.linalg.norm(whole)
    off = dataclasses.replace(split_config, muon_split_qkv=False)
    assert_same_bits(updates_of(off, {"a": {"fused": fused}})["a"]["fused"], whole)


def test_fused_rows_that_do_not_divide_are_refused():
    config = dataclasses.replace(MUON, qkv_split_shapes={"linear_out": (2, 1, 1)})
    with pytest.raises(ValueError, match="no multiple of 4, the sum of the split"):
        updates_of(config, pool(0))


def updates_of(config, params):
    tx = multi_lora_optimizer(config)
    return tx.update(params, tx.init(params), params, learning_rate=0.3)[0]


def test_blockwise_is_muon_on_every_shard_alone():
    config = dataclasses.replace(MUON, clip_grad=0.0)
    params = {k: v for k, v in pool(0).items() if k in ("linear_in", "bias")}
    partitioned = dataclasses.replace(
        config, tensor_model_parallel_size=2, partition_dim={"linear_in": 1, "bias": 0}
    )
    together = updates_of(partitioned, params)
    halves = jnp.split(params["linear_in"], 2, axis=2)
    alone = updates_of(config, {"0": halves[0], "1": halves[1], "bias": params["bias"]})
    joined = jnp.concatenate([alone["0"], alone["1"]], axis=2)
    np.testing.assert_allclose(together["linear_in"], joined, rtol=1e-5, atol=1e-6)
    assert_same_bits(together["bias"], alone["bias"])
    whole = updates_of(config, params)["linear_in"]
    assert jnp.linalg.norm(whole - joined) > 0.1 * jnp.linalg.norm(whole)


@pytest.mark.parametrize("mode", ["duplicated", "distributed"])
def test_the_other_modes_see_the_whole_matrix(mode):
    partitioned = dataclasses.replace(
        MUON, muon_tp_mode=mode, tensor_model_parallel_size=2, partition_dim={"linear_out": 0}
    )
    assert_same_bits(updates_of(partitioned, pool(0)), updates_of(MUON, pool(0)))


def test_shards_that_do_not_divide_are_refused():
    config = dataclasses.replace(MUON, tensor_model_parallel_size=2, partition_dim={"square": 0})
    with pytest.raises(ValueError, match="2 equal blocks"):
        updates_of(config, pool(0))
