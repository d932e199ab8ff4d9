"""What a check makes of numbers that rounding, or divergence, has decided."""

import dataclasses
import math

import numpy as np
import pytest

from parity import compare, policy
from parity.checks import Where
from parity.observation import SlotView, same_bits, same_numbers

WHERE = Where("3 step", 0, 1, "standard")


def judged(jax, reference, truth, **options):
    pair = [np.asarray(x, np.float32) for x in (jax, reference)]
    truth = np.asarray(truth, np.float64)
    return list(compare._judged(WHERE, "q", "muon update", pair, truth, truth, **options))


def test_both_directions_are_held_to_the_limit():
    forward, backward = judged([1 + 1e-4], [1 + 1e-6], [1.0])
    assert (forward.mode, backward.mode) == ("standard", "reference")
    assert not forward.passed and backward.passed
    forward, backward = judged([1 + 1e-6], [1 + 1e-4], [1.0])
    assert forward.passed and not backward.passed


def test_a_measured_spread_is_a_floor():
    assert not judged([1 + 1e-4], [1.0], [1.0])[0].passed
    floor = policy.relative_floor(np.ones(1), spread=1e-4)
    assert judged([1 + 1e-4], [1.0], [1.0], floor=floor)[0].passed
    assert not judged([1 + 1e-3], [1.0], [1.0], floor=floor)[0].passed


def test_subnormal_numbers_may_be_flushed():
    assert judged([0.0], [1e-39], [1e-39])[0].passed
    assert not judged([0.0], [1e-35], [1e-35])[0].passed


@pytest.mark.parametrize(
    ("spread", "reference", "judges"),
    [
        (0.5, 1.0, True),
        (0.0, 1.0, True),
        (1.5, 1.0, False),
        (math.nan, 1.0, False),
        (math.inf, 1.0, False),
        (0.5, math.inf, False),
        (0.5, math.nan, False),
    ],
)
def test_nothing_is_judged_that_rounding_alone_decides(spread, reference, judges):
    check = compare._unreachable(WHERE, "q", spread, np.ones(1), np.asarray([reference]))
    assert (check is None) == judges
    if check:
        assert check.passed and check.kind == "unjudged" and "rounding alone" in check.detail


def test_a_mean_square_of_few_is_held_to_the_limit_of_one():
    (check,) = judged([1 + 4e-6], [1 + 1e-6], [1.0])[:1]
    assert 2 < check.value < policy.SINGLE_RATIO
    for count in (policy.RMS_COUNT - 1, policy.RMS_COUNT):
        (rms,) = compare.scenario_ratios([check] * count)
        assert rms.value == pytest.approx(check.value)
        assert rms.passed == (count < policy.RMS_COUNT)


def test_any_nan_is_as_good_as_another_but_zeros_have_signs():
    nans = np.array([0x7FC00001, 0x7FC00000], np.uint32).view(np.float32)
    assert same_numbers(nans, nans[::-1].copy()) and not same_bits(nans, nans[::-1].copy())
    zero = np.zeros(2, np.float32)
    assert not same_numbers(zero, -zero)


def test_a_touched_co_tenant_is_named():
    tensors = {("master", "q"): np.ones(2, np.float32), ("master", "k"): np.ones(2, np.float32)}
    before = SlotView(tensors, {"q": 3}, samples=6, lr=0.1, weight_decay=0.0)
    (unchanged,) = compare.untouched(WHERE, before, before)
    assert unchanged.passed
    moved = tensors | {("master", "q"): np.nextafter(tensors["master", "q"], np.float32(2))}
    after = dataclasses.replace(before, tensors=moved, clocks={"q": 4})
    checks = list(compare.untouched(WHERE, before, after))
    assert [check.tensor for check in checks if not check.passed] == ["master q", "step"]
