import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_impl.newton_schulz import (
    COEFFICIENTS,
    GRAM_GROWTH_LIMIT,
    gram_segments,
    newton_schulz,
    step_coefficients,
)
from jax_impl.pieces import Split, join, split
from jax_impl.testing import assert_same_bits, relative_error

SHAPES = {"tall": (24, 7), "wide": (7, 24), "square": (9, 9), "batched": (2, 3, 5, 8)}
CUSTOM = ((3.0, -3.5, 1.4), (2.0, -1.5, 0.5), (1.5, -0.6, 0.1))


def gaussian(shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def exact(x, coefficients, eps=1e-7):
    """U p(S) Vᵀ in float64, where p is the iteration on one singular value."""
    u, s, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    s = s / np.maximum(np.linalg.norm(s, axis=-1, keepdims=True), eps)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ vt


def with_spectrum(singular_values, shape, seed=0):
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.normal(size=(n, len(singular_values))))[0] for n in shape)
    return (u * singular_values @ v.T).astype(np.float32)


SPECTRA = {
    "gaussian": gaussian,
    "condition 1e2": lambda shape, seed: with_spectrum(np.geomspace(1, 1e-2, 16), shape, seed),
    "condition 1e4": lambda shape, seed: with_spectrum(np.geomspace(1, 1e-4, 16), shape, seed),
    "rank 4": lambda shape, seed: with_spectrum(np.ones(4), shape, seed),
    "rank 1 and noise": lambda shape, seed: (
        with_spectrum(np.ones(1), shape, seed) + gaussian(shape, seed, 1e-4 / np.sqrt(16 * 96))
    ),
    "tiny": lambda shape, seed: gaussian(shape, seed, 1e-12),
    "huge": lambda shape, seed: gaussian(shape, seed, 1e12),
}


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape(shape, method):
    x = gaussian(shape)
    out = newton_schulz(jnp.asarray(x), method=method)
    assert out.shape == shape and out.dtype == jnp.float32
    assert relative_error(out, exact(x, step_coefficients(5, "quintic"))) < 1e-5
    transposed = newton_schulz(jnp.asarray(x).mT, method=method).mT
    assert relative_error(transposed, out) < 1e-5


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(6, 16), (16, 6), (6, 6)])
def test_padding_stays_exactly_zero(shape, method, precision):
    x = np.zeros(shape, np.float32)
    x[:4, :4] = gaussian((4, 4))
    out = np.asarray(newton_schulz(x, method=method, fp32_matmul_prec=precision))
    assert np.count_nonzero(out[4:]) == 0 and np.count_nonzero(out[:, 4:]) == 0
    # and the padding does not show in the rest, within what the precision keeps
    own = newton_schulz(x[:4, :4], method=method, fp32_matmul_prec=precision)
    assert relative_error(out[:4, :4], own) < (2e-2 if precision == "medium" else 1e-5)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_a_zero_matrix_stays_zero(method, precision):
    x = jnp.zeros((2, 3, 5)).at[1].set(gaussian((3, 5)))
    out = newton_schulz(x, method=method, fp32_matmul_prec=precision)
    assert not out[0].any() and np.isfinite(out).all() and out[1].any()


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("eps", [1e-7, 1e-3, 10.0])
def test_norms_below_eps_are_not_divided_by(method, eps):
    coefficients = step_coefficients(5, "quintic")
    for factor in (0.1, 0.9, 1.1):
        x = gaussian((5, 8))
        x = (x / np.linalg.norm(x) * factor * eps).astype(np.float32)
        out = newton_schulz(x, method=method, eps=eps)
        assert relative_error(out, exact(x, coefficients, eps)) < 1e-5


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_what_becomes_of_the_result_does_not_change_how_it_is_rounded(method):
    """XLA would fuse steps with this, which then was seen to be off by 7e-6."""
    cuts = (Split(0, (8, 4, 4)),)

    def orthogonalize(x):
        pieces = split(x, cuts)
        return join([newton_schulz(piece, method=method) for piece in pieces], cuts)

    x = gaussian((20, 1, 48, 8))
    got = split(jax.jit(orthogonalize)(x), cuts)
    for piece, y in zip(split(x, cuts), got, strict=True):
        assert relative_error(y, exact(piece, step_coefficients(5, "quintic"))) < 2e-6


def test_medium_has_one_form():
    x = gaussian((8, 20))
    gram, standard = (
        newton_schulz(x, method=method, fp32_matmul_prec="medium")
        for method in ("gram", "standard")
    )
    assert_same_bits(gram, standard)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_are_computed_in_float32(dtype):
    x = jnp.asarray(gaussian((5, 8))).astype(dtype)
    out = newton_schulz(x)
    assert out.dtype == dtype
    assert_same_bits(out, newton_schulz(x.astype(jnp.float32)).astype(dtype))


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(6, 16), (16, 6)])
def test_float64_under_x64(shape, method):
    x = gaussian(shape).astype(np.float64)
    with jax.enable_x64(True):
        out = newton_schulz(jnp.asarray(x), 8, "deepseekv4", method=method)
        assert out.dtype == jnp.float64
        assert relative_error(out, exact(x, step_coefficients(8, "deepseekv4"))) < 1e-13


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    kind=st.sampled_from(sorted(COEFFICIENTS)),
    steps=st.integers(1, 30),
)
def test_segments_are_the_steps_cut_before_rounding_grows(kind, steps):
    coefficients = step_coefficients(steps, kind)
    segments = gram_segments(coefficients)
    assert sum(segments, ()) == coefficients
    for i, segment in enumerate(segments):
        growth = np.prod([a**2 for a, _, _ in segment[:-1]])
        assert len(segment) == 1 or growth <= GRAM_GROWTH_LIMIT
        if i + 1 < len(segments):  # and not cut any earlier than that
            assert growth * segment[-1][0] ** 2 > GRAM_GROWTH_LIMIT


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_works_under_jit_vmap_and_grad(method):
    x = jnp.asarray(gaussian((3, 4, 6)))
    run = functools.partial(newton_schulz, method=method)
    np.testing.assert_allclose(jax.jit(jax.vmap(run))(x), run(x), atol=1e-5)
    gradient = jax.grad(lambda x: jnp.sum(run(x)))(x)
    assert np.isfinite(gradient).all() and gradient.any()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(coefficient_type="quartic"), "coefficient_type is 'quartic'"),
        (dict(method="grams"), "method is 'grams'"),
        (dict(fp32_matmul_prec="low"), "fp32_matmul_prec is 'low'"),
        (dict(steps=0), "steps is 0"),
        (dict(coefficient_type="custom"), "custom_coefficients is None"),
        (dict(coefficient_type="custom", custom_coefficients=()), "non-empty"),
        (dict(custom_coefficients=CUSTOM), "exactly for 'custom'"),
        (dict(x=jnp.ones(3)), r"x is float32\[3\]"),
        (dict(x=jnp.ones((3, 3), jnp.int32)), "x is int32"),
    ],
)
def test_errors_name_the_argument(kwargs, message):
    with pytest.raises(ValueError, match=message):
        newton_schulz(**{"x": jnp.ones((3, 4)), **kwargs})
