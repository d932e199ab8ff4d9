import jax
import pytest

from experiments.grouped import WAYS, inputs
from jax_impl.testing import relative_error


@pytest.mark.parametrize("name", [name for name in WAYS if name != "gather"])
def test_all_ways_are_one_function(name):
    args = inputs(n_slots=3, rows=2, length=5, size=8, rank=2)
    expected, pull_back = jax.vjp(lambda *x: WAYS["gather"](*x, args[3]), *args[:3])
    actual, pull_back_too = jax.vjp(lambda *x: WAYS[name](*x, args[3]), *args[:3])
    assert relative_error(actual, expected) < 1e-6
    for g, e in zip(pull_back_too(expected), pull_back(expected), strict=True):
        assert relative_error(g, e) < 1e-6
