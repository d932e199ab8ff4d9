"""Shadows err as much as a float32 program does, and no more."""

import numpy as np
import pytest
from emerging_optimizers.orthogonalized_optimizers import muon_utils

from parity import oracle, policy
from parity.shadow import rounded_at_random

QUINTIC = muon_utils._COEFFICIENT_SETS["quintic"]


def matrix(spectrum):
    rng = np.random.default_rng(1)
    left = np.linalg.qr(rng.standard_normal((len(spectrum),) * 2))[0]
    right = np.linalg.qr(rng.standard_normal((40, len(spectrum))))[0]
    return (left * spectrum) @ right.T


def test_rounds_like_float32():
    x = np.random.default_rng(0).standard_normal((200, 200))
    random = policy.root_mean_square(
        np.linalg.norm(rounded_at_random(24, seed)(x) - x) for seed in range(20)
    )
    nearest = np.linalg.norm(x.astype(np.float32) - x)
    assert nearest < random < 3 * nearest  # a factor in common is rounded, too


def test_rounds_like_bf16():
    x = np.random.default_rng(0).standard_normal((200, 200))
    random = np.linalg.norm(rounded_at_random(8, seed=0)(x) - x)
    nearest = np.linalg.norm(oracle.round_to_bfloat16(x) - x)
    assert random == pytest.approx(nearest, rel=0.05)


def test_zeros_stay_zero():
    x = np.array([[0.0, 1.0], [0.0, 0.0]])
    assert (rounded_at_random(24, seed=0)(x)[x == 0] == 0).all()


@pytest.mark.parametrize(
    "spectrum", [np.ones(8), np.geomspace(1, 1e-4, 8), [1, 0.5, *[1e-5] * 6], [1, *[1e-4] * 7]]
)
def test_spread_is_what_a_float32_program_errs_by(spectrum):
    """Rounded to nearest in place of at random, the iteration is as far from the truth."""
    x = matrix(np.asarray(spectrum, np.float64))

    def iterate(rounded):
        return oracle.newton_schulz(x, 5, "quintic", QUINTIC, rounded=rounded)

    truth = iterate(lambda x: x)
    program = np.linalg.norm(iterate(lambda x: x.astype(np.float32).astype(float)) - truth)
    shadows = [np.linalg.norm(iterate(rounded_at_random(24, seed)) - truth) for seed in range(4)]
    spread = policy.root_mean_square(shadows)
    assert spread / 3 < program < 3 * spread
