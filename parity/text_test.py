"""Tests of parity.text: real, deterministic, different per seed, event and tenant."""

import numpy as np

from parity import text


def test_shape_dtype_and_range():
    tokens = text.batch(0, 1, 5, 32)
    assert tokens.shape == (5, 33) and tokens.dtype == np.int64
    assert tokens.min() >= 0 and tokens.max() < 256


def test_is_english_text():
    words = bytes(text.batch(0, 0, 1, 20_000)[0].astype(np.uint8)).split()
    assert words.count(b"the") > 50


def test_deterministic_and_different():
    tokens = text.batch(0, 1, 4, 32, "alice")
    np.testing.assert_array_equal(tokens, text.batch(0, 1, 4, 32, "alice"))
    for other in (
        text.batch(1, 1, 4, 32, "alice"),
        text.batch(0, 2, 4, 32, "alice"),
        text.batch(0, 1, 4, 32, "bob"),
    ):
        assert (tokens != other).any(axis=1).all()


def test_windows_cover_the_text():
    tokens = text.batch(0, 0, 2000, 64)
    assert len(np.unique(tokens, axis=0)) > 1900
