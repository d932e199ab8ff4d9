"""Which parts of a matrix live on which tensor-parallel rank, and which Muon sees alone."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np

from parity.scenario import Scenario, Stack
from torch_ref import PARTITION_DIM

Splits = tuple[tuple[int, tuple[int, ...]], ...]


def partition_dims(scenario: Scenario) -> dict[str, int]:
    """Returns the dimension along which each partitioned tensor is cut, by slot-free name."""
    layers = scenario.model.layers if isinstance(scenario.model, Stack) else ()
    return {
        f"{layer.name}.{tensor}": dim
        for layer in layers
        for tensor, dim in PARTITION_DIM.get(layer.parallel, {}).items()
    }


def shard(x: np.ndarray, dim: int | None, rank: int, ranks: int) -> np.ndarray:
    """Returns one rank's part of a whole tensor; all of it where it is replicated."""
    return x if dim is None else np.split(x, ranks, axis=dim)[rank]


def muon_pieces(
    scenario: Scenario, name: str, shape: tuple[int, int]
) -> list[tuple[np.ndarray, ...]]:
    """Returns the index of each part of a matrix that Muon orthogonalises alone."""
    ranks, dim = scenario.ranks.tensor_parallel, partition_dims(scenario).get(name)
    splits: Splits = ()
    if dim is not None and scenario.optimizer.get("muon_tp_mode", "blockwise") == "blockwise":
        splits += ((dim, (shape[dim] // ranks,) * ranks),)
    if scenario.optimizer.get("muon_split_qkv", True):
        shapes = qkv_split_shapes(scenario, name)
        splits += ((0, shapes),) if shapes else ()
    return piece_indices(shape, splits)


def qkv_split_shapes(scenario: Scenario, name: str) -> tuple[int, ...] | None:
    """Returns the rows of each projection in a group of a fused matrix; None for any other."""
    for pattern, shapes in scenario.optimizer.get("qkv_split_shapes", {}).items():
        if fnmatchcase(name, pattern):
            return tuple(shapes)
    return None


def piece_indices(shape: Sequence[int], splits: Splits) -> list[tuple[np.ndarray, ...]]:
    """Returns for each piece of a (rows, columns) matrix the index that selects it.

    In each (axis, sizes) the sizes repeat along the axis, and what has the same place in every
    round is one piece. Further splits cut the pieces again.
    """
    pieces = [tuple(map(np.arange, shape))]
    for axis, sizes in splits:
        pieces = [cut for piece in pieces for cut in _cut(piece, axis, sizes)]
    return [np.ix_(*piece) for piece in pieces]


def _cut(piece: tuple[np.ndarray, ...], axis: int, sizes: tuple[int, ...]) -> list:
    place = np.resize(np.repeat(np.arange(len(sizes)), sizes), len(piece[axis]))
    cuts = []
    for i in range(len(sizes)):
        cut = list(piece)
        cut[axis] = piece[axis][place == i]
        cuts.append(tuple(cut))
    return cuts
