import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.pieces import Blocks, Split, equal_blocks, join, split

X = np.arange(2 * 12 * 6.0).reshape(2, 12, 6)


def test_blocks_are_contiguous():
    pieces = split(jnp.asarray(X), [equal_blocks(1, 6, 3)])
    np.testing.assert_array_equal(pieces, np.split(X, 3, axis=2))


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_can_stay_together(axis):
    (stack,) = split(jnp.asarray(X), [Blocks(axis, 3)])
    blocks = np.split(X, 3, axis=1 + axis)
    np.testing.assert_array_equal(stack, np.stack(blocks, axis=1))


def test_projections_collect_the_rows_of_every_group():
    q, k, v = split(jnp.asarray(X), [Split(0, (3, 1, 2))])
    np.testing.assert_array_equal(q, X[:, [0, 1, 2, 6, 7, 8]])
    np.testing.assert_array_equal(k, X[:, [3, 9]])
    np.testing.assert_array_equal(v, X[:, [4, 5, 10, 11]])


def test_a_second_split_cuts_every_piece():
    pieces = split(jnp.asarray(X), [equal_blocks(0, 12, 2), Split(0, (4, 2))])
    rows = ([0, 1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11])
    for piece, expected in zip(pieces, rows, strict=True):
        np.testing.assert_array_equal(piece, X[:, expected])


@pytest.mark.parametrize(
    "splits",
    [
        (),
        (Split(0, (3, 1, 2)),),
        (Split(1, (1, 2)),),
        (Split(1, (3, 3)), Split(0, (1, 2))),
        (Split(0, (6, 6)), Split(0, (1, 1, 1)), Split(1, (2, 4))),
        (Blocks(0, 4),),
        (Blocks(1, 2), Split(0, (3, 1, 2))),
        (Blocks(0, 2), Blocks(1, 3)),
    ],
)
def test_join_undoes_split(splits):
    np.testing.assert_array_equal(join(split(jnp.asarray(X), splits), splits), X)


def test_what_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="no multiple of 5"):
        split(jnp.asarray(X), [Split(0, (3, 2))])
    with pytest.raises(ValueError, match="4 equal blocks"):
        equal_blocks(1, 6, 4)
    with pytest.raises(ValueError, match="4 equal blocks"):
        split(jnp.asarray(X), [Blocks(1, 4)])
