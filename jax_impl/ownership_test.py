"""Shares are even, never larger than allowed, and do not depend on who computes them."""

import itertools
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jax_impl.newton_schulz import newton_schulz, step_coefficients
from jax_impl.ownership import balance, gram_products, update_cost


def loads(costs, owners, result):
    return [sum(c for c, o in zip(costs, result, strict=True) if o == i) for i in range(owners)]


def test_equal_costs_are_dealt_out():
    assert balance([1, 1, 1, 1, 1], 2) == [0, 1, 0, 1, 0]
    assert balance([], 3) == []


def test_large_items_go_first_and_small_ones_fill_up():
    assert sorted(loads([1, 1, 6, 3, 3], 2, balance([1, 1, 6, 3, 3], 2))) == [7, 7]


@pytest.mark.parametrize("seed", range(20))
def test_within_four_thirds_of_the_best(seed):
    rng = random.Random(seed)
    costs = [rng.choice([1, 2, 3, 5, 8, 13]) for _ in range(8)]
    best = min(max(loads(costs, 3, r)) for r in itertools.product(range(3), repeat=len(costs)))
    assert max(loads(costs, 3, balance(costs, 3))) <= 4 / 3 * best


def test_an_owner_takes_at_most_so_many():
    result = balance([9, 1, 1, 1, 1, 1], 2, at_most=3)
    assert sorted(result) == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="7 items do not fit 2 owners of at most 3"):
        balance([1] * 7, 2, at_most=3)


def test_sums_do_not_depend_on_the_order_of_adding():
    """In floats 0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1."""
    costs = [0.1, 0.2, 0.3] * 40 + [1e9]
    program = f"from jax_impl.ownership import balance; print(balance({costs}, 7))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout.strip() == str(balance(costs, 7))


@pytest.mark.parametrize(("costs", "owners"), [([1], 0), ([-1], 1), ([float("nan")], 1)])
def test_refuses_what_means_nothing(costs, owners):
    with pytest.raises(ValueError, match="owners is 0|costs"):
        balance(costs, owners)


@pytest.mark.parametrize("kind", ["quintic", "polar_express", "deepseekv4"])
@pytest.mark.parametrize("shape", [(8, 512), (512, 8)])
def test_costs_are_those_of_the_program(kind, shape):
    """The operations of products, as XLA counts them; it counts elementwise ones as well."""
    coefficients = step_coefficients(7, kind)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    compiled = jax.jit(lambda x: newton_schulz(x, 7, kind)).lower(x).compile()
    large, cubes = gram_products(coefficients)
    products = 2 * 8 * 8 * (512 * large + 8 * cubes)
    assert products <= compiled.cost_analysis()["flops"] <= 1.1 * products
    assert products < update_cost(shape, coefficients) < 1.2 * products


def test_vectors_cost_their_size():
    assert update_cost((96,)) * 2 == update_cost((192,)) < update_cost((96, 2))
