"""The pools of adapters that the benchmark steps."""

import dataclasses
from collections.abc import Mapping

import numpy as np

Arrays = dict[str, np.ndarray]

# (in, out) features of the linear layers that LoRA adapts in one layer of Qwen3-0.6B.
QWEN3_0_6B = {
    "attention.q": (1024, 2048),
    "attention.k": (1024, 1024),
    "attention.v": (1024, 1024),
    "attention.o": (2048, 1024),
    "mlp.gate": (1024, 3072),
    "mlp.up": (1024, 3072),
    "mlp.down": (3072, 1024),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A pool of LoRA adapters, float32.

    Attributes:
        name: what tables call it.
        linears: {name: (in, out) features} of one layer's adapted matrices.
        n_layers: how often they repeat.
        rank: the adapters' rank r.
        n_slots: S.
    """

    name: str
    linears: Mapping[str, tuple[int, int]]
    n_layers: int
    rank: int
    n_slots: int

    def adapted(self) -> dict[str, tuple[int, int]]:
        """{slot-free layer name: (in, out)} of all layers."""
        return {
            f"layers.{layer}.{name}": features
            for layer in range(self.n_layers)
            for name, features in self.linears.items()
        }

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """{slot-free name: shape (S, ...)}."""
        shapes = {}
        for name, (n_in, n_out) in self.adapted().items():
            shapes[f"{name}.linear_in"] = (self.n_slots, self.rank, n_in)
            shapes[f"{name}.linear_out"] = (self.n_slots, n_out, self.rank)
        return shapes

    def n_parameters(self) -> int:
        """Parameters of the whole pool."""
        return sum(int(np.prod(shape)) for shape in self.shapes().values())

    def random(self, seed: int, scale: float) -> Arrays:
        """Gaussian arrays of the pool's shapes, float32, the same for the same seed."""
        rng = np.random.default_rng(seed)
        return {
            name: rng.standard_normal(shape, np.float32) * np.float32(scale)
            for name, shape in self.shapes().items()
        }


LARGE = Workload("Qwen3-0.6B LoRA", QWEN3_0_6B, n_layers=28, rank=16, n_slots=8)
SMALL = Workload(
    "small",
    {name: (n_in // 4, n_out // 4) for name, (n_in, n_out) in QWEN3_0_6B.items()},
    n_layers=2,
    rank=8,
    n_slots=4,
)
WORKLOADS = {"small": SMALL, "large": LARGE}
