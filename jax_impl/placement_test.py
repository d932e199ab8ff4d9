"""What placements refuse and say; what they do is tested on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_impl import OptimizerConfig, SlotTrainState, adaptive_muon, multi_lora_optimizer, per_slot
from jax_impl.placement import automatic, by_slot, by_tensor, bytes_on_devices, replicated

PARAMS = {
    "q.linear_in": jax.ShapeDtypeStruct((6, 4, 64), jnp.bfloat16),
    "q.linear_out": jax.ShapeDtypeStruct((6, 96, 4), jnp.bfloat16),
    "q.bias": jax.ShapeDtypeStruct((6, 96), jnp.bfloat16),
}


FOUR = AbstractMesh((4, 2), ("model", "data"))


def state():
    tx = multi_lora_optimizer(OptimizerConfig(optimizer="muon"))
    return jax.eval_shape(lambda: SlotTrainState.create(tx, PARAMS, rank=4))


def specs(shardings):
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def test_by_slot_cuts_the_first_axis():
    shardings = by_slot(state(), FOUR, "data")
    assert set(jax.tree.leaves(specs(shardings), is_leaf=is_spec)) == {PartitionSpec("data")}
    with pytest.raises(ValueError, match="6 slots cannot be spread evenly over the 4 of 'model'"):
        by_slot(state(), FOUR, "model")


def is_spec(x):
    return isinstance(x, PartitionSpec)


def test_by_tensor_cuts_the_long_side_of_parameters_and_of_all_that_is_like_them():
    found = specs(by_tensor(state(), PARAMS, FOUR, "model"))
    expected = {
        "q.linear_in": PartitionSpec(None, None, "model"),
        "q.linear_out": PartitionSpec(None, "model"),
        "q.bias": PartitionSpec(None, "model"),
    }
    assert found.params == found.grad_buffer == expected
    assert found.samples == found.schedule.max_lr == PartitionSpec()
    momentum = found.opt_state[1].inner_states["matrix"].inner_state.momentum_buffer
    assert momentum == {**expected, "q.bias": momentum["q.bias"]}


def test_by_tensor_as_the_base_layer_is_cut():
    found = specs(by_tensor(state(), PARAMS, FOUR, "model", partition_dim={"q.linear_out": 0}))
    assert found.params == {
        "q.linear_in": PartitionSpec(),
        "q.linear_out": PartitionSpec(None, "model"),
        "q.bias": PartitionSpec(),
    }


@pytest.mark.parametrize(
    ("params", "settings", "message"),
    [
        ({"w": (2, 3, 6)}, {}, r"axis 2 of treew?.*\(2, 3, 6\) cannot be spread evenly over the 4"),
        ({"w": (2, 3, 8)}, {"partition_dim": {"v": 0}}, r"names \['v'\], which are no parameters"),
    ],
)
def test_by_tensor_refuses(params, settings, message):
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}
    with pytest.raises(ValueError, match=message):
        by_tensor(params, params, FOUR, "model", **settings)


def test_what_is_like_no_parameter_is_not_silently_on_every_device():
    with pytest.raises(ValueError, match="is like no parameter"):
        by_tensor({"cache": jnp.zeros((6, 8))}, PARAMS, FOUR, "model")


@pytest.mark.parametrize("method", ["adamuon", "normuon", "namo"])
def test_second_moments_of_any_shape_go_along(method):
    matrices = {name: p for name, p in PARAMS.items() if len(p.shape) == 3}
    tx = per_slot(adaptive_muon(0.1, moment2_method=method))
    found = specs(by_tensor(jax.eval_shape(tx.init, matrices), matrices, FOUR, "model"))
    whole = method == "namo"  # a number per slot
    assert found.moment2_buffer == {
        "q.linear_in": PartitionSpec() if whole else PartitionSpec(None, None, "model"),
        "q.linear_out": PartitionSpec() if whole else PartitionSpec(None, "model"),
    }


def test_unknown_axes_are_named():
    with pytest.raises(ValueError, match="no axis 'tensor'; it has model, data"):
        by_slot(state(), FOUR, "tensor")


def test_bytes_count_every_leaf_and_dtype():
    mesh = jax.make_mesh((1,), ("x",))
    tree = {"a": jnp.zeros((2, 3)), "b": jnp.zeros((2, 5), jnp.bfloat16)}
    assert bytes_on_devices(tree, replicated(tree, mesh)) == {jax.devices()[0]: 24 + 20}
    assert automatic(mesh).axis_types == (AxisType.Auto,)
    assert np.array_equal(automatic(mesh).devices, mesh.devices)
