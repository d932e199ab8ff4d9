"""How far a correct program may be from the truth: the oracle, rounding where a program must.

A shadow is the oracle with every matrix of its Newton-Schulz iteration rounded, as a program that
stores it has to, but in random directions. How far shadows end up from the truth is what rounding
alone does to this very matrix, amplification and all.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from parity import oracle, policy
from parity.truth import Judge, SlotTruth


@dataclasses.dataclass(frozen=True)
class Shadowed:
    """A slot's truth and its shadows, each in its own state."""

    truth: SlotTruth
    shadows: tuple[SlotTruth, ...]

    @classmethod
    def around(cls, truth: SlotTruth) -> "Shadowed":
        """The shadows start from the truth."""
        return cls(truth, (truth,) * policy.SHADOWS)

    def step(
        self,
        judge: Judge,
        grad_sums: dict[str, np.ndarray],
        tenant: str,
        samples: int,
        *,
        in_bf16: bool = False,
    ) -> "Shadowed":
        """All of them after a step at schedule position ``samples``.

        ``in_bf16`` takes for the truth what rounds to bf16 where the reference does; its shadows
        differ by the float32 rounding before that.
        """
        arguments = (grad_sums, tenant, samples)
        if in_bf16:
            exact, rounding = oracle.newton_schulz_bf16, nearly_bf16(seed=samples)
        else:
            bits = policy.SIGNIFICAND_BITS[judge.optimizer["muon_fp32_matmul_prec"]]
            exact, rounding = oracle.newton_schulz, rounded_at_random(bits, seed=samples)
        iterate = functools.partial(oracle.newton_schulz, rounded=rounding)
        return Shadowed(
            judge.step(self.truth, *arguments, iterate=exact),
            tuple(judge.step(shadow, *arguments, iterate=iterate) for shadow in self.shadows),
        )

    def spread(self, name: str) -> float:
        """Root mean square of the shadows' distances from the true parameter ``name``."""
        return self._distance(lambda slot: slot.params[name])

    def moment_spread(self, kind: str, name: str) -> float:
        """Likewise of a moment."""
        return self._distance(lambda slot: slot.state[name][kind])

    def _distance(self, tensor: Callable[[SlotTruth], np.ndarray]) -> float:
        truth = tensor(self.truth)
        return policy.root_mean_square(
            float(np.linalg.norm(tensor(shadow) - truth)) for shadow in self.shadows
        )


def rounded_at_random(bits: int, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that errs as storing a matrix in ``bits`` of significand may.

    Each element is rounded; and all have a float32 factor in common, a coefficient or the norm.
    """
    rng = np.random.default_rng(seed)

    def rounded(x: np.ndarray) -> np.ndarray:
        significand, exponent = np.frexp(x)
        error = rng.uniform(-0.5, 0.5, x.shape) * 2.0**-bits
        common = 1 + rng.uniform(-0.5, 0.5) * policy.EPS
        return common * np.ldexp(np.where(x == 0, 0, significand + error), exponent)

    return rounded


def nearly_bf16(seed: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the rounding to bf16 of what a float32 sum may be off by."""
    rounded = rounded_at_random(24, seed)
    return lambda x: oracle.round_to_bfloat16(rounded(x))
