"""The lift: any Optax transform for one adapter becomes one for a pool of slots.

A *stacked* tree carries a leading slot axis of length S on every leaf. Everything in this file
is about that axis: mapping over it, selecting along it, taking one slot out of it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any


def per_slot(
    inner: optax.GradientTransformation, *, n_slots: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """Lifts a transform for one adapter to a pool of S slots, each with a state of its own.

    ``init`` and ``update`` of ``inner`` are mapped over the leading axis of every leaf, so that
    clocks, moments, clip norms and schedule positions all become per-slot.

    The lifted ``update(grads, state, params=None, *, slots=None, **extra)`` takes and returns
    trees whose leaves are (S, ...). ``slots`` names the slots that step:

    - ``None``: all of them;
    - bool (S,): a mask; every slot is computed, the named ones are kept;
    - int (k,): only these are computed. A repeated entry steps once; entries outside [0, S) are
      padding (negative ones do not wrap), so that a varying number of slots can share a program.

    A slot that does not step keeps its state bit for bit and gets the update -0.0, the one float
    that adds to every other without changing it.

    ``extra`` goes to ``inner``: arrays with leading axis S are mapped, scalars are broadcast,
    callables are passed on as they are. An ``inner`` that draws random numbers from a seed draws
    the same ones in every slot, as it would if each adapter were trained alone.

    Args:
      inner: the transform of a single adapter.
      n_slots: S where no leaf tells it, i.e. for trees without arrays.

    Returns:
      The lifted transform.

    Raises:
      ValueError: a leaf, mask, index or extra array whose shape or dtype does not fit S.
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params):
        size = slot_count(n_slots, params=params)
        return jax.vmap(inner.init, axis_size=size)(params)

    def update_fn(updates, state, params=None, *, slots=None, **extra):
        size = slot_count(n_slots, updates=updates, params=params, state=state)
        leaves, treedef = jax.tree.flatten(extra)
        has_slot_axis = [_has_slot_axis(leaf, size, extra) for leaf in leaves]

        def update_one(updates, state, params, mapped):
            mapped = iter(mapped)
            merged = [
                next(mapped) if lifted else leaf
                for leaf, lifted in zip(leaves, has_slot_axis, strict=True)
            ]
            return inner.update(updates, state, params, **treedef.unflatten(merged))

        mapped = [leaf for leaf, lifted in zip(leaves, has_slot_axis, strict=True) if lifted]
        arguments = (updates, state, params, mapped)
        update_all = jax.vmap(update_one, axis_size=size)

        if slots is None:
            return update_all(*arguments)
        slots = as_slots(slots, size)
        if slots.dtype == bool:
            new_updates, new_state = update_all(*arguments)
            idle = jax.tree.map(_idle_update, new_updates)
            return select_slots(slots, new_updates, idle), select_slots(slots, new_state, state)
        chosen = gather_slots(arguments, slots)
        new_updates, new_state = jax.vmap(update_one, axis_size=slots.size)(*chosen)
        idle = jax.tree.map(lambda u: _idle_update(u, size), new_updates)
        return scatter_slots(idle, slots, new_updates), scatter_slots(state, slots, new_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def reset_slots(
    tx: optax.GradientTransformation, state: PyTree, params: PyTree, slots: Any
) -> PyTree:
    """Returns ``state`` as freshly initialised in ``slots``, every other slot bit-identical.

    Args:
      tx: the lifted transform that ``state`` belongs to.
      state: its state, leaves (S, ...).
      params: the parameters, leaves (S, ...); some transforms start from them.
      slots: bool (S,) mask or int (k,) indices as in `per_slot`.

    Raises:
      ValueError: ``slots`` has the wrong shape or dtype.
    """
    slots = as_slots(slots, slot_count(params=params, state=state))
    fresh = tx.init(params)
    if slots.dtype == bool:
        return select_slots(slots, fresh, state)
    return scatter_slots(state, slots, gather_slots(fresh, slots))


def take_slot(tree: PyTree, i: Any) -> PyTree:
    """Returns slot ``i`` of a stacked tree: leaves (S, ...) become (...).

    Raises:
      ValueError: ``i`` is outside [0, S). Under jit, where ``i`` is unknown, it is clipped instead.
    """
    _check_slot(i, tree)
    return jax.tree.map(lambda x: jnp.take(x, i, axis=0, mode="clip"), tree)


def put_slot(tree: PyTree, i: Any, slot_tree: PyTree) -> PyTree:
    """Returns the stacked ``tree`` with slot ``i`` replaced, every other slot bit-identical.

    Args:
      tree: leaves (S, ...).
      i: the slot.
      slot_tree: leaves (...) of exactly the shapes and dtypes that `take_slot` gives.

    Raises:
      ValueError: ``i`` is outside [0, S) (under jit nothing is written instead), or a leaf of
        ``slot_tree`` has another shape or dtype: rounding and broadcasting are the caller's.
    """
    _check_slot(i, tree)
    _check_structure(tree, slot_tree)

    def put(path, x, one):
        one = jnp.asarray(one)
        if one.shape != x.shape[1:] or one.dtype != x.dtype:
            raise ValueError(
                f"slot_tree{jax.tree_util.keystr(path)} is {one.dtype}{list(one.shape)}; "
                f"slot {i} of tree holds {x.dtype}{list(x.shape[1:])}"
            )
        return x.at[_drop_outside(jnp.asarray(i), x.shape[0])].set(one, mode="drop")

    return jax.tree_util.tree_map_with_path(put, tree, slot_tree)


def pad_slots(slots: Sequence[int], n_slots: int) -> np.ndarray:
    """Returns the indices int32 (k,), padded so that k is a power of two or ``n_slots``.

    The padding names no slot. However many slots step, there are only log2(S) + 1 lengths, and as
    many programs.

    Raises:
      ValueError: more slots than there are.
    """
    if len(slots) > n_slots:
        raise ValueError(f"slots has {len(slots)} entries; this pool has {n_slots} slots")
    length = min(1 << max(len(slots) - 1, 0).bit_length(), n_slots)
    return np.array([*slots, *[-1] * (length - len(slots))], np.int32)


def slot_count(fallback: int | None = None, **trees: PyTree) -> int:
    """Returns S, the leading axis that every leaf of every tree shares.

    Raises:
      ValueError: a leaf without that axis, or no leaf at all and no ``fallback``.
    """
    expected = None
    for name, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            shape = jnp.shape(leaf)
            where = f"{name}{jax.tree_util.keystr(path)}"
            if not shape:
                raise ValueError(f"{where} is a scalar; every leaf needs a leading slot axis")
            if expected is None:
                expected = shape[0]
            if shape[0] != expected:
                raise ValueError(
                    f"{where} has shape {shape}; its leading axis must be the {expected} slots"
                )
    if expected is None:
        expected = fallback
    if expected is None:
        raise ValueError(
            f"{', '.join(trees)}: no array leaf tells the number of slots; "
            "pass n_slots to per_slot for a tree without arrays"
        )
    return expected


def as_slots(slots: Any, size: int) -> jax.Array:
    """Returns ``slots`` as a bool (S,) mask or an int32 (k,) index whose padding is S.

    Raises:
      ValueError: any other dtype or shape.
    """
    if not isinstance(slots, jax.Array):
        slots = np.asarray(slots)  # in JAX a wide integer would wrap before it is looked at
        slots = slots if slots.size else slots.astype(np.int32)  # an empty list says no dtype
    if slots.dtype == bool:
        if slots.shape != (size,):
            raise ValueError(
                f"slots is a mask of shape {slots.shape}; a mask over this pool is ({size},)"
            )
        return jnp.asarray(slots)
    if not jnp.issubdtype(slots.dtype, jnp.integer) or slots.ndim > 1:
        raise ValueError(
            f"slots is {slots.dtype}{list(slots.shape)}; give None, a bool mask of shape ({size},) "
            "or a vector of integer indices"
        )
    return _drop_outside(slots.reshape(-1), size)


def gather_slots(tree: PyTree, slots: jax.Array) -> PyTree:
    """Returns the slots named by the index (k,): leaves (S, ...) become (k, ...).

    Padding entries read some slot; `scatter_slots` drops what is computed from it.
    """
    return jax.tree.map(lambda x: jnp.take(x, slots, axis=0, mode="clip"), tree)


def scatter_slots(tree: PyTree, slots: jax.Array, chosen: PyTree) -> PyTree:
    """Writes leaves (k, ...) back into a stacked tree (S, ...), dropping padding entries."""

    def scatter(x, new):
        if x.dtype == jax.dtypes.float0:  # carries no values, and has no ``at``
            return x
        return x.at[slots].set(_cast_like(new, x), mode="drop")

    return jax.tree.map(scatter, tree, chosen)


def select_slots(mask: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Takes the slots of ``new`` where the bool (S,) mask holds, of ``old`` elsewhere."""

    def select(new, old):
        named = mask.reshape((-1,) + (1,) * (old.ndim - 1))
        return jnp.where(named, _cast_like(new, old), old)

    return jax.tree.map(select, new, old)


def _cast_like(new: jax.Array, old: jax.Array) -> jax.Array:
    """``new`` in the dtype of ``old``; PRNG keys have no ``astype`` and need none."""
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _idle_update(update: jax.Array, size: int | None = None) -> jax.Array:
    """The update of a slot that does not step: -0.0 (or 0 for integers), in (S, ...)."""
    shape = update.shape if size is None else (size, *update.shape[1:])
    return jnp.full(shape, -0.0 if jnp.issubdtype(update.dtype, jnp.inexact) else 0, update.dtype)


def _drop_outside(slots: jax.Array, size: int) -> jax.Array:
    """Maps every entry outside [0, S) to S, which gathers clip and scatters drop."""
    size = np.int32(size)  # an array's dtype: S need not fit a narrow index's own
    return jnp.where((slots >= 0) & (slots < size), slots, size).astype(jnp.int32)


def _has_slot_axis(leaf: Any, size: int, extra: dict[str, Any]) -> bool:
    if callable(leaf) or jnp.ndim(leaf) == 0:
        return False
    if jnp.shape(leaf)[0] != size:
        name = next(n for n, v in extra.items() if any(leaf is x for x in jax.tree.leaves(v)))
        raise ValueError(
            f"{name} has shape {jnp.shape(leaf)}; give a scalar or one entry for each of the "
            f"{size} slots"
        )
    return True


def _check_slot(i: Any, tree: PyTree) -> None:
    """Raises ValueError where ``i`` is known and none of the tree's slots, if it has arrays."""
    size = slot_count(0, tree=tree)
    if size and not isinstance(i, jax.core.Tracer) and not 0 <= int(i) < size:
        raise ValueError(f"slot {i} is outside the pool; it must be in [0, {size})")


def _check_structure(tree: PyTree, slot_tree: PyTree) -> None:
    if (want := jax.tree.structure(tree)) != (got := jax.tree.structure(slot_tree)):
        raise ValueError(f"slot_tree has the structure {got}; the pool's is {want}")
