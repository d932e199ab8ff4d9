"""Cuts a matrix into the pieces that Muon orthogonalises each on its own, and puts it together."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Split(NamedTuple):
    """One way to cut a matrix.

    The sizes repeat along the axis as often as they fit, and what lies at the same place of each
    round is one piece. One round gives contiguous blocks; ``Split(0, (q, k, v))`` separates the
    projections of a fused QKV matrix whose rows are groups of q, k and v rows, which is what
    Megatron-Core's ``qkv_split_shapes`` means.

    Attributes:
      axis: 0 cuts between rows, 1 between columns.
      sizes: of the pieces in one round.
    """

    axis: int
    sizes: tuple[int, ...]


class Blocks(NamedTuple):
    """Equal contiguous blocks, which stay together as one stack (..., count, m, n).

    A matrix that is partitioned over devices along this axis so becomes a stack partitioned along
    ``count``, without communication; pieces one by one would have to be fetched.

    Attributes:
      axis: 0 cuts between rows, 1 between columns.
      count: how many.
    """

    axis: int
    count: int


def equal_blocks(axis: int, size: int, count: int) -> Split:
    """Returns the split of an axis of ``size`` into ``count`` contiguous blocks.

    Raises:
      ValueError: it does not divide.
    """
    if size % count:
        raise ValueError(f"axis {axis} of size {size} cannot be cut into {count} equal blocks")
    return Split(axis, (size // count,) * count)


def split(x: jax.Array, splits: Sequence[Split | Blocks]) -> list[jax.Array]:
    """Returns the pieces of ``x`` (..., m, n), each cut again by every further split.

    Raises:
      ValueError: an axis is no multiple of the split's sizes.
    """
    if not splits:
        return [x]
    first, *rest = splits
    if isinstance(first, Blocks):
        return split(_stack(x, first), rest)
    axis, sizes = first
    at = x.ndim - 2 + axis
    if x.shape[at] % sum(sizes):
        raise ValueError(
            f"axis {axis} of a matrix {x.shape[-2:]} is no multiple of {sum(sizes)}, the sum of "
            f"the split {sizes}"
        )
    before, after = x.shape[:at], x.shape[at + 1 :]
    rounds = x.reshape(*before, -1, sum(sizes), *after)
    parts = jnp.split(rounds, list(accumulate(sizes))[:-1], axis=at + 1)
    pieces = (part.reshape(*before, -1, *after) for part in parts)
    return [smaller for piece in pieces for smaller in split(piece, rest)]


def join(pieces: Sequence[jax.Array], splits: Sequence[Split | Blocks]) -> jax.Array:
    """Returns the (..., m, n) whose pieces `split` gives."""
    if not splits:
        (x,) = pieces
        return x
    first, *rest = splits
    if isinstance(first, Blocks):
        return _unstack(join(pieces, rest), first.axis)
    axis, sizes = first
    each = len(pieces) // len(sizes)
    parts = [join(pieces[i : i + each], rest) for i in range(0, len(pieces), each)]
    at = parts[0].ndim - 2 + axis
    before, after = parts[0].shape[:at], parts[0].shape[at + 1 :]
    rounds = [
        part.reshape(*before, -1, size, *after) for part, size in zip(parts, sizes, strict=True)
    ]
    return jnp.concatenate(rounds, axis=at + 1).reshape(*before, -1, *after)


def whole(name: str, shape: tuple[int, int]) -> tuple[Split, ...]:
    """The default: every matrix is one piece."""
    del name, shape
    return ()


def _stack(x: jax.Array, blocks: Blocks) -> jax.Array:
    """The blocks of ``x`` (..., m, n) as one stack, whose axis is the third from the end."""
    axis, count = blocks
    at = x.ndim - 2 + axis
    if x.shape[at] % count:
        raise ValueError(
            f"axis {axis} of a matrix {x.shape[-2:]} cannot be cut into {count} equal blocks"
        )
    cut = x.reshape(*x.shape[:at], count, -1, *x.shape[at + 1 :])
    return jnp.moveaxis(cut, at, -3)


def _unstack(stack: jax.Array, axis: int) -> jax.Array:
    """The inverse of `_stack`."""
    *before, count, rows, columns = stack.shape
    sizes = (count * rows, columns) if axis == 0 else (rows, count * columns)
    return jnp.moveaxis(stack, -3, -3 + axis).reshape(*before, *sizes)
