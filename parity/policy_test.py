"""The arithmetic of tolerances."""

import math

import numpy as np
import pytest

from parity import policy
from parity.observation import first_difference, same_bits


def test_ratio_does_not_see_below_the_floor():
    assert policy.ratio(1e-9, 1e-12, floor=1e-7) == 1.0
    assert policy.ratio(4e-7, 1e-12, floor=1e-7) == pytest.approx(4.0)
    assert policy.ratio(1e-7, 1e-5, floor=1e-7) == pytest.approx(1e-2)
    assert policy.ratio(math.inf, math.inf, floor=1e-7) == math.inf


def test_relative_error_of_nothing_is_exact_equality():
    zero = np.zeros(3)
    assert policy.relative_error(zero, zero, zero) == 0
    assert policy.relative_error(np.array([0, 0, 1e-30]), zero, zero) == math.inf
    assert policy.relative_error(np.array([np.nan, 0, 0]), zero, np.ones(3)) == math.inf


def test_update_floor_grows_where_the_update_is_small_beside_the_parameter():
    p, change = np.ones(4), np.full(4, 1e-3)
    assert policy.update_floor(p, change) == pytest.approx(504 * policy.EPS, rel=2e-3)
    assert policy.update_floor(p, 0 * change) == policy.STATE_FLOOR


def test_ulps():
    one_up = float(np.nextafter(np.float32(0.01), np.float32(1)))
    exact = float(np.float32(0.01))
    assert policy.ulps(one_up, exact) == pytest.approx(1.0)
    assert policy.ulps(0.0, 0.0) == 0
    assert policy.ulps(1e-10, 0.0) > 1e30


def test_bits_tell_zeros_and_nans_apart():
    zero = np.zeros(2, np.float32)
    assert same_bits(zero, zero.copy())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.astype(np.float64))
    payload = np.array([0x7FC00001, 0x7FC00000], np.uint32).view(np.float32)
    assert same_bits(payload, payload.copy())
    assert not same_bits(payload, payload[::-1].copy())
    assert first_difference(zero, -zero).startswith("2 entries, first at [0]")
