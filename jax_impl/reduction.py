"""Gradient sums of data-parallel devices: added up by each alone, and over all once per step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_impl.placement import automatic

PyTree = Any


def device_sums(params: PyTree, mesh: Mesh, axis: str) -> PyTree:
    """Returns zeros (D, S, ...) of which each of the D devices has its own (1, S, ...).

    Args:
      params: the parameters (S, ...), of which only shapes and dtypes count.
      mesh: the devices.
      axis: the name of the data-parallel axis.
    """
    sharding = NamedSharding(automatic(mesh), P(axis))
    shapes = jax.tree.map(lambda p: (mesh.shape[axis], *p.shape), params)

    def zeros():
        return jax.tree.map(
            lambda p, shape: jnp.zeros(shape, jnp.promote_types(p.dtype, jnp.float32)),
            params,
            shapes,
        )

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda _: sharding, params))()


def accumulate_on_devices(
    gradients: Callable[..., PyTree], mesh: Mesh, axis: str
) -> Callable[..., PyTree]:
    """Returns a function (sums, params, batch) -> sums that communicates nothing.

    To be jitted, with the sums donated, and called for every micro-batch.

    Args:
      gradients: (params, batch) -> gradients (S, ...), sums over the samples of the batch that
        it is given, which is one device's share.
      mesh: the devices. The parameters are on all of them, leaves of the batch are cut along
        their first axis.
      axis: the name of the data-parallel axis.
    """

    def on_device(sums, params, batch):
        grads = gradients(params, batch)
        return jax.tree.map(lambda s, g: s + g.astype(s.dtype), sums, _with_device_axis(grads))

    return jax.shard_map(
        on_device,
        mesh=automatic(mesh),
        in_specs=(P(axis), P(), P(axis)),
        out_specs=P(axis),
        check_vma=False,  # else gradients of replicated params would be reduced at once
    )


def reduce_sums(sums: PyTree, mesh: Mesh, axis: str, *, by_slot: bool = False) -> PyTree:
    """Returns the sums (S, ...) over all devices, for `SlotTrainState.accumulate`.

    Communicates once, an all-reduce; or, where each device needs only its own slots of the
    result, a reduce-scatter, which moves half of that.

    Args:
      sums: (D, S, ...), see `device_sums`.
      mesh: the devices.
      axis: the name of the data-parallel axis.
      by_slot: place the result `jax_impl.placement.by_slot` along the same axis.
    """

    def on_device(sums):
        own = jax.tree.map(lambda s: s[0], sums)
        if by_slot:
            return jax.lax.psum_scatter(own, axis, tiled=True)
        return jax.lax.psum(own, axis)

    out = P(axis) if by_slot else P()
    return jax.shard_map(on_device, mesh=automatic(mesh), in_specs=P(axis), out_specs=out)(sums)


def _with_device_axis(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[None], tree)
