"""Whole layers spread over devices: each updates its own, then all get what has changed.

What Megatron-Core's ``LayerWiseDistributedOptimizer`` does for data-parallel ranks: parameters
and gradients are on every device, optimizer state and the iteration are not.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_impl.clip import total_l2_norm
from jax_impl.ownership import balance, update_cost
from jax_impl.per_slot import slot_count
from jax_impl.placement import automatic

PyTree = Any


class LayerwiseState(NamedTuple):
    """Optimizer state of all owners, side by side: by dtype (S, D * C), C numbers per owner."""

    buffers: dict[str, jax.Array]


class LayerwiseTransformation(NamedTuple):
    """An Optax transform of a pool, whose state is spread over devices.

    Attributes:
      init, update: as of any lifted transform; see `layerwise`.
      whole: `LayerwiseState` -> the state of the transform that was spread, to look into it or to
        save it for other devices.
      owned: the inverse of ``whole``.
      owners: by parameter, the device that updates it.
    """

    init: Callable[[PyTree], LayerwiseState]
    update: Callable[..., tuple[PyTree, LayerwiseState]]
    whole: Callable[[LayerwiseState], PyTree]
    owned: Callable[[PyTree], LayerwiseState]
    owners: PyTree


def layerwise(
    tx: Any,
    params: PyTree,
    mesh: Mesh,
    axis: str,
    *,
    cost: Callable[[tuple[int, ...]], float] = update_cost,
) -> LayerwiseTransformation:
    """Spreads a pool's optimizer over D devices by parameters, each owned by one, in all slots.

    ``update`` communicates once: it gathers the updates, each from its owner. Everything else is
    done by owners alone, in a branch of the program of their own, so ``tx`` may look at no more
    than one parameter at a time, but for the norm of all gradients, which ``update`` takes as
    ``total_norm`` (S,) or else computes, and hands on. Place state and parameters `by_layer`.

    Args:
      tx: a lifted optimizer, such as `multi_lora_optimizer` makes.
      params: the parameters, (S, ...), of which only shapes and dtypes count.
      mesh: the devices.
      axis: the name of the axis to spread over.
      cost: of one slot's parameter of a shape, for `balance`.
    """
    mesh, devices = automatic(mesh), mesh.shape[axis]
    leaves, treedef = jax.tree.flatten(params)
    owners = balance([cost(p.shape[1:]) for p in leaves], devices)

    def part(tree: PyTree, owner: int) -> PyTree:
        """What an owner has of a tree like the params; None in all other places."""
        pairs = zip(treedef.flatten_up_to(tree), owners, strict=True)
        return treedef.unflatten([x if o == owner else None for x, o in pairs])

    abstract = jax.eval_shape(lambda tree: tree, params)
    own_params = [part(abstract, owner) for owner in range(devices)]
    # An owner of nothing has no state: a transform cannot even count the slots of no leaf.
    own_states = [jax.eval_shape(tx.init, own) if _any(own) else None for own in own_params]
    update_sizes, state_sizes = _sizes(own_params), _sizes(own_states)

    def init_fn(params):
        return owned_fn(tx.init(params))

    def owned_fn(whole):
        values = dict(jax.tree_util.tree_leaves_with_path(whole))

        def chosen(own):
            return jax.tree_util.tree_map_with_path(lambda path, _: values[path], own)

        size = slot_count(slot_count(params=params), whole=whole)
        chunks = [_pack(chosen(own), state_sizes, size) for own in own_states]
        return LayerwiseState(
            jax.tree.map(lambda *chunks: jnp.concatenate(chunks, axis=1), *chunks)
        )

    def whole_fn(state):
        values = {}
        for own, chunk in zip(own_states, _chunks(state.buffers, devices), strict=True):
            # A clock or a norm is every owner's, and the same.
            values |= jax.tree_util.tree_leaves_with_path(_unpack(chunk, own))
        return jax.tree_util.tree_map_with_path(
            lambda path, _: values[path], jax.eval_shape(tx.init, params)
        )

    def update_fn(updates, state, params=None, **extra):
        size = slot_count(updates=updates, state=state)
        if extra.get("total_norm") is None:
            extra["total_norm"] = jax.vmap(total_l2_norm)(updates)
        functions = {name: x for name, x in extra.items() if callable(x)}
        arrays = {name: x for name, x in extra.items() if not callable(x)}

        def update_own(owner, updates, buffers, params, arrays):
            own = part(updates, owner)
            if not _any(own):
                return _pack(None, update_sizes, size), buffers
            new_updates, new_state = tx.update(
                own,
                _unpack(buffers, own_states[owner]),
                None if params is None else part(params, owner),
                **functions,
                **arrays,
            )
            return _pack(new_updates, update_sizes, size), _pack(new_state, state_sizes, size)

        def on_device(updates, buffers, params, arrays):
            branches = [functools.partial(update_own, owner) for owner in range(devices)]
            own, buffers = jax.lax.switch(
                jax.lax.axis_index(axis), branches, updates, buffers, params, arrays
            )
            return jax.lax.all_gather(own, axis, axis=1, tiled=True), buffers

        spread = P(None, axis)
        gathered, buffers = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(P(), spread, P(), P()),
            out_specs=(P(), spread),
            check_vma=False,  # it cannot know that what was gathered is the same everywhere
        )(updates, state.buffers, params, arrays)
        parts = map(_unpack, _chunks(gathered, devices), own_params)
        return _merge(parts), LayerwiseState(buffers)

    return LayerwiseTransformation(
        init_fn, update_fn, whole_fn, owned_fn, treedef.unflatten(owners)
    )


def by_layer(tree: PyTree, mesh: Mesh, axis: str) -> PyTree:
    """The shardings of a tree with a `LayerwiseState`: that is spread, all else everywhere.

    Args:
      tree: leaves (S, ...), e.g. a `SlotTrainState` whose ``tx`` is from `layerwise`.
      mesh: the devices.
      axis: the name of the axis to spread over.

    Raises:
      ValueError: there is none in the tree.
    """
    mesh = automatic(mesh)
    whole, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, axis))

    def is_spread(x):
        return isinstance(x, LayerwiseState)

    if not any(map(is_spread, jax.tree.leaves(tree, is_leaf=is_spread))):
        raise ValueError("the tree holds no LayerwiseState; make its optimizer by layerwise")
    return jax.tree.map(
        lambda x: jax.tree.map(lambda _: spread if is_spread(x) else whole, x),
        tree,
        is_leaf=is_spread,
    )


def _any(tree: PyTree) -> bool:
    return bool(jax.tree.leaves(tree))


def _sizes(owned: list[PyTree]) -> dict[str, int]:
    """By dtype, the numbers per slot that the largest of the owners has."""
    sizes: dict[str, int] = {}
    for own in owned:
        counts: dict[str, int] = {}
        for x in jax.tree.leaves(own):
            counts[x.dtype.name] = counts.get(x.dtype.name, 0) + math.prod(x.shape[1:])
        sizes |= {dtype: max(n, sizes.get(dtype, 0)) for dtype, n in counts.items()}
    return sizes


def _pack(own: PyTree, sizes: Mapping[str, int], size: int) -> dict[str, jax.Array]:
    """The leaves (S, ...) of what an owner has, by dtype one after the other: (S, C)."""
    flat: dict[str, list[jax.Array]] = {dtype: [] for dtype in sizes}
    for x in jax.tree.leaves(own):
        flat[x.dtype.name].append(x.reshape(size, -1))
    for dtype, arrays in flat.items():
        filled = sum(x.shape[1] for x in arrays)
        arrays.append(jnp.zeros((size, sizes[dtype] - filled), dtype))
    return {dtype: jnp.concatenate(arrays, axis=1) for dtype, arrays in flat.items()}


def _unpack(buffers: Mapping[str, jax.Array], like: PyTree) -> PyTree:
    """The inverse of `_pack`: leaves in the shapes of ``like``, but with the buffers' own S."""
    start = dict.fromkeys(buffers, 0)

    def take(x):
        buffer, at = buffers[x.dtype.name], start[x.dtype.name]
        start[x.dtype.name] = end = at + math.prod(x.shape[1:])
        return buffer[:, at:end].reshape(-1, *x.shape[1:])

    return jax.tree.map(take, like)


def _chunks(buffers: Mapping[str, jax.Array], count: int) -> list[dict[str, jax.Array]]:
    """What each owner has in the buffers (S, D * C): (S, C)."""
    cut = {dtype: jnp.split(x, count, axis=1) for dtype, x in buffers.items()}
    return [{dtype: parts[i] for dtype, parts in cut.items()} for i in range(count)]


def _merge(parts: Iterable[PyTree]) -> PyTree:
    """One tree of all owners' parts: at each place the leaf that is not None."""
    return jax.tree.map(
        lambda *xs: next(x for x in xs if x is not None), *parts, is_leaf=lambda x: x is None
    )
