"""Where a pool lives on a mesh of devices: which axis of which array is spread over which devices.

Each function here gives a tree of `NamedSharding` for a `SlotTrainState`, or for any other tree
with leading slot axes, such as the state of a lifted optimizer. `create` makes a pool so placed;
``jax.jit(..., out_shardings=...)`` keeps it there.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_impl.hyperparameters import parameter_name
from jax_impl.per_slot import as_slots, slot_count

PyTree = Any


def by_slot(tree: PyTree, mesh: Mesh, axis: str) -> PyTree:
    """Every device owns whole slots: the next S/D of them, of D along ``axis``.

    A step of all slots, or of those of a mask, then communicates nothing; for slots named by
    index, see `on_own_slots`.

    Args:
      tree: leaves (S, ...), arrays or `jax.ShapeDtypeStruct`.
      mesh: the devices; the tree is the same along its other axes.
      axis: the name of the axis to spread over.

    Raises:
      ValueError: S is no multiple of D.
    """
    size, devices = slot_count(tree=tree), _size(mesh, axis)
    if size % devices:
        raise ValueError(f"{size} slots cannot be spread evenly over the {devices} of {axis!r}")
    sharding = NamedSharding(automatic(mesh), P(axis))
    return jax.tree.map(lambda _: sharding, tree)


def by_tensor(
    tree: PyTree,
    params: PyTree,
    mesh: Mesh,
    axis: str,
    *,
    partition_dim: Mapping[str, int] | None = None,
    slot_axis: str | None = None,
) -> PyTree:
    """Every device owns a part of each parameter, and of all state in the parameter's shape.

    What has no more than a number per slot is on every device, or on all that own the slot.

    Args:
      tree: leaves (S, ...) in which those of ``params`` recur, under the same names.
      params: the parameters (S, ...).
      mesh: the devices; the tree is the same along its other axes.
      axis: the name of the axis to spread over.
      partition_dim: by parameter name, the axis of one slot's parameter that is partitioned, as
        in `OptimizerConfig`; what it does not name is whole on every device, as LoRA's A beside a
        column-parallel layer and its B beside a row-parallel one. None: of every parameter its
        longest axis.
      slot_axis: another axis of the mesh, to spread whole slots over as `by_slot` does.

    Raises:
      ValueError: an axis that is no multiple of the devices, a name that no parameter has, or a
        leaf that is neither a parameter's nor a number per slot.
    """
    if slot_axis is not None:
        by_slot(tree, mesh, slot_axis)
    mesh, devices = automatic(mesh), _size(mesh, axis)
    whole = NamedSharding(mesh, P() if slot_axis is None else P(slot_axis))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    shapes = {path: p.shape for path, p in leaves}
    names = {path: parameter_name(path) for path in shapes}
    dims = partition_dim
    if dims is None:
        dims = {names[path]: int(np.argmax(shape[1:])) for path, shape in shapes.items()}
    if unknown := set(dims) - set(names.values()):
        raise ValueError(f"partition_dim names {sorted(unknown)}, which are no parameters")

    def place(path, leaf):
        if np.prod(leaf.shape[1:], dtype=int) == 1:
            return whole
        owner = next((path[i:] for i in range(len(path) + 1) if path[i:] in shapes), None)
        where = f"tree{jax.tree_util.keystr(path)} of shape {leaf.shape}"
        if owner is None or len(leaf.shape) != len(shapes[owner]):
            raise ValueError(f"{where} is like no parameter; say yourself where it is to be")
        if names[owner] not in dims:
            return whole
        at = 1 + dims[names[owner]]
        if leaf.shape[at] == 1 != shapes[owner][at]:  # a mean along this axis
            return whole
        if leaf.shape[at] % devices:
            raise ValueError(
                f"axis {at} of {where} cannot be spread evenly over the {devices} of {axis!r}; "
                "say in partition_dim what is to be partitioned"
            )
        return NamedSharding(mesh, P(slot_axis, *[None] * (at - 1), axis))

    return jax.tree_util.tree_map_with_path(place, tree)


def replicated(tree: PyTree, mesh: Mesh) -> PyTree:
    """Every device has all of it."""
    sharding = NamedSharding(automatic(mesh), P())
    return jax.tree.map(lambda _: sharding, tree)


def create(make: Callable[[], PyTree], place: Callable[[PyTree], PyTree]) -> PyTree:
    """Returns ``make()`` placed as ``place`` says, no device ever holding more than its part.

    Args:
      make: makes the tree, of constants, e.g. calls `SlotTrainState.create`.
      place: gives the shardings of a tree of `jax.ShapeDtypeStruct`, e.g. calls `by_slot`.
    """
    return jax.jit(make, out_shardings=place(jax.eval_shape(make)))()


def on_own_slots(operation: Callable[..., Any], mesh: Mesh, axis: str) -> Callable[..., Any]:
    """Returns ``operation`` done by each device on its own slots alone, without communication.

    For pools placed `by_slot`: slots named by an index could be anywhere for XLA, which then
    brings them to all devices. Here each device sees the entries that are its own, and the others
    as padding; it computes no more than its own slots.

    Args:
      operation: (state, slots, *arguments) -> leaves with leading slot axis, such as
        `SlotTrainState.step`.
      mesh: the devices.
      axis: the name of the axis that the slots are spread over.

    Returns:
      A function (state, slots, *arguments), to be jitted. ``slots`` is None, a mask or an index
      as in `per_slot`. Leaves of the arguments are scalars, the same for all slots, or (S, ...).

    Raises:
      ValueError: when called: S is no multiple of the devices, or malformed ``slots``.
    """
    mesh, devices = automatic(mesh), _size(mesh, axis)

    def function(state, slots=None, *arguments):
        size = slot_count(state=state)
        by_slot(state, mesh, axis)
        slots = None if slots is None else as_slots(slots, size)
        by_index = slots is not None and slots.dtype != bool

        def on_device(state, slots, *arguments):
            own = size // devices
            if by_index:
                slots = slots - own * jax.lax.axis_index(axis)
                if slots.size >= own:
                    named = as_slots(slots, own)
                    slots = jax.numpy.zeros(own, bool).at[named].set(True, mode="drop")
            return operation(state, slots, *arguments)

        def spec(x):
            return P(axis) if np.ndim(x) else P()

        specs = (P(axis), P() if by_index else P(axis), *jax.tree.map(spec, arguments))
        return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(axis))(
            state, slots, *arguments
        )

    return function


def automatic(mesh: Mesh) -> Mesh:
    """The same devices, where XLA places what lies between inputs and outputs.

    With explicit axes, the default of `jax.make_mesh`, every contraction over a partitioned axis
    would have to name its result's sharding.
    """
    return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def bytes_on_devices(tree: PyTree, shardings: PyTree | None = None) -> dict[jax.Device, int]:
    """How many bytes of the tree each device holds.

    Args:
      tree: arrays, or `jax.ShapeDtypeStruct` with ``shardings``.
      shardings: of its leaves; None: their own.
    """
    shardings = jax.tree.map(lambda x: x.sharding, tree) if shardings is None else shardings
    total: dict[jax.Device, int] = {}
    for x, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
        part = int(np.prod(sharding.shard_shape(x.shape))) * x.dtype.itemsize
        for device in sharding.device_set:
            total[device] = total.get(device, 0) + part
    return total


def _size(mesh: Mesh, axis: str) -> int:
    if axis not in mesh.axis_names:
        raise ValueError(f"the mesh has no axis {axis!r}; it has {', '.join(mesh.axis_names)}")
    return mesh.shape[axis]
