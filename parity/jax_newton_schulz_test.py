"""Newton-Schulz beside emerging-optimizers'."""

import functools
import itertools
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.newton_schulz import COEFFICIENTS, newton_schulz, step_coefficients
from jax_impl.newton_schulz_test import CUSTOM, SPECTRA, exact, gaussian
from jax_impl.testing import assert_same_bits, relative_error


@functools.cache
def reference():
    """emerging-optimizers' module and torch."""
    import torch
    from emerging_optimizers.orthogonalized_optimizers import muon_utils
    from emerging_optimizers.utils import fp32_matmul_precision

    def run(x, steps, coefficient_type, precision="highest", custom=None):
        with fp32_matmul_precision(precision):
            out = muon_utils.newton_schulz(
                torch.tensor(x), steps, coefficient_type, custom_coefficient_sets=custom
            )
        return out.numpy()

    return muon_utils, run


def test_coefficients_are_those_of_emerging_optimizers():
    sets = reference()[0]._COEFFICIENT_SETS
    assert {k: list(v) for k, v in COEFFICIENTS.items()} == sets
    assert {*COEFFICIENTS, "custom"} == {*get_args(reference()[0].NSCoeffT)}


@pytest.mark.parametrize("steps", range(1, 13))
@pytest.mark.parametrize("coefficient_type", COEFFICIENTS)
def test_all_are_the_polynomial_of_the_singular_values(coefficient_type, steps):
    x = gaussian((4, 6), seed=steps)
    expected = exact(x, step_coefficients(steps, coefficient_type))
    # Twelve steps multiply rounding by some hundreds; a wrong coefficient costs 1e-2 and more.
    for method in ("standard", "gram"):
        out = newton_schulz(x, steps, coefficient_type, method=method)
        assert relative_error(out, expected) < 2e-4, method
    # The reference cycles or repeats the same sets.
    assert relative_error(reference()[1](x, steps, coefficient_type), expected) < 2e-4


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_custom_coefficients_are_cycled(method):
    x = gaussian((5, 8))
    out = newton_schulz(x, 7, "custom", custom_coefficients=CUSTOM, method=method)
    assert relative_error(out, exact(x, (*CUSTOM, *CUSTOM, CUSTOM[0]))) < 1e-5
    expected = reference()[1](x, 7, "custom", custom=list(CUSTOM))
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("kind", ["quintic", "simple", "polar_express", "aol"])
def test_as_close_to_the_truth_as_the_reference(kind):
    coefficients = step_coefficients(5, kind)
    ratios = {"gram": [], "standard": []}
    for make, shape in itertools.product(SPECTRA.values(), [(16, 96), (96, 16)]):
        matrices = [make(shape, seed) for seed in range(3)]
        truths = [exact(x, coefficients) for x in matrices]

        def error(run):
            distances = map(relative_error, map(run, matrices), truths)  # noqa: B023
            return np.sqrt(np.mean(np.square(list(distances)))) + np.finfo(np.float32).eps

        theirs = error(lambda x: reference()[1](x, 5, kind))
        for method, ratio in ratios.items():
            run = functools.partial(newton_schulz, coefficient_type=kind, method=method)
            ratio.append(error(run) / theirs)
    for method, ratio in ratios.items():
        assert np.sqrt(np.mean(np.square(ratio))) <= 1.5, (method, ratio)
        assert max(ratio) <= 3, (method, ratio)  # those of single matrices scatter


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (2, 12, 20)])
@pytest.mark.parametrize("coefficient_type", ["quintic", "polar_express"])
def test_medium_rounds_where_the_reference_rounds(coefficient_type, shape):
    x = gaussian(shape)
    ours = newton_schulz(x, 5, coefficient_type, fp32_matmul_prec="medium")
    theirs = reference()[1](x, 5, coefficient_type, "medium")
    truth = exact(x, step_coefficients(5, coefficient_type))
    # Sums in another order flip a bfloat16 rounding (2**-8) here and there; both stand off from
    # the truth by what rounding everywhere costs, which is much more.
    assert relative_error(ours, theirs) < 1e-2
    assert relative_error(ours, truth) <= 1.5 * relative_error(theirs, truth)
    assert relative_error(ours, truth) > 1e-3
    rounded = jnp.asarray(ours).astype(jnp.bfloat16).astype(jnp.float32)
    assert_same_bits(ours, rounded)  # the reference's last step ends in bfloat16
