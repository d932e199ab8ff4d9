"""What a runner shows of its slots, in plain NumPy, so that both stacks can be compared."""

from dataclasses import dataclass, field

import numpy as np

MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "moment2_buffer")


@dataclass(frozen=True)
class SlotView:
    """One slot at one moment.

    Attributes:
        tensors: by (kind, slot-free name); kinds are "param" (as the model holds it), "master",
            "grad_sum" and `MOMENTS`. float32, or what the stack keeps them in.
        clocks: Adam's step, by slot-free name.
        samples: the schedule's position.
        lr: what the next step will use; None in an empty slot.
        weight_decay: likewise, of decayed parameters.
    """

    tensors: dict[tuple[str, str], np.ndarray]
    clocks: dict[str, int]
    samples: int
    lr: float | None
    weight_decay: float | None

    def all_of(self, kind: str) -> dict[str, np.ndarray]:
        """The tensors of one kind, by slot-free name."""
        return {name: x for (other, name), x in self.tensors.items() if other == kind}


@dataclass(frozen=True)
class StepOutcome:
    """What a runner reports of one slot's step."""

    norm: float
    lr: float
    weight_decay: float
    stepped: bool = field(default=True)


Observation = dict[int, SlotView]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are equal bit for bit, signs of zeros and NaN payloads included."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """Like `same_bits`, but any NaN is as good as another: stacks differ in how they write it."""
    return same_bits(*(np.where(np.isnan(x), np.asarray(np.nan, x.dtype), x) for x in (a, b)))


def first_difference(a: np.ndarray, b: np.ndarray) -> str:
    """Names the first entry in which two arrays differ, with both values."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} against {b.dtype}{list(b.shape)}"
    bits = [np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") for x in (a, b)]
    where = np.argwhere(bits[0] != bits[1])
    index = tuple(map(int, where[0]))
    return f"{len(where)} entries, first at {list(index)}: {a[index]!r} against {b[index]!r}"
