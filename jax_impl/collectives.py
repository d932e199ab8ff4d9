"""Reads from a compiled program what it moves between devices."""

import math
import re
from typing import Any, NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

# ``%name = f32[8,16]{1,0} all-reduce(``: a result, which may be a tuple of arrays, then the kind.
# Where the operation is split in two, its "-done" half says nothing new.
_OPERATION = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")


class Collective(NamedTuple):
    """One communication of a program, which may carry several arrays.

    Attributes:
      kind: one of `KINDS`.
      shapes: of its results on one device.
      bytes: of these results.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int


def collectives(program: Any) -> list[Collective]:
    """Returns what a program communicates, as its text has it: a loop's body counts once.

    Args:
      program: `jax.stages.Compiled`, or the text of its HLO.
    """
    text = program if isinstance(program, str) else program.as_text()
    return [_collective(*found) for found in _OPERATION.findall(text)]


def count(found: list[Collective]) -> dict[str, int]:
    """How many of each kind, of the kinds that there are."""
    kinds = [one.kind for one in found]
    return {kind: kinds.count(kind) for kind in KINDS if kind in kinds}


def _collective(result: str, kind: str, start: str) -> Collective:
    arrays = _ARRAY.findall(result)
    if start and kind != "all-reduce":
        # (operands, results, and perhaps counters), of which the results come second.
        operands = [array for array in arrays if array[1] or len(arrays) == 2]
        arrays = operands[len(operands) // 2 :]
    shapes = [tuple(int(n) for n in dims.split(",") if n) for _, dims in arrays]
    sizes = [
        math.prod(shape) * _item_bits(dtype) / 8
        for (dtype, _), shape in zip(arrays, shapes, strict=True)
    ]
    return Collective(kind, tuple(shapes), math.ceil(sum(sizes)))


def _item_bits(dtype: str) -> int:
    """Bits of one number: "f32", "bf16", "s4", "f8e4m3fn", "pred"."""
    return 8 if dtype == "pred" else int(re.search(r"\d+", dtype).group())
