"""Newton–Schulz orthogonalisation of batches of matrices, in standard and in Gram form."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_impl.config import one_of

Coefficients = tuple[tuple[float, float, float], ...]

# (a, b, c) of X <- aX + (bA + cA²)X with A = XXᵀ, step by step.
COEFFICIENTS: dict[str, Coefficients] = {
    # One set for every step: K. Jordan, https://kellerjordan.github.io/posts/muon/
    "simple": ((3.4445, -4.7750, 2.0315),),
    # Tuned step by step: https://leloykun.github.io/ponder/muon-opt-coeffs/
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Polar Express with its safety factor of 1.01: https://arxiv.org/abs/2505.16932
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    # Chebyshev-accelerated, https://arxiv.org/abs/2506.10935
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    # Almost-orthogonal layers: https://github.com/thib-s/flash-newton-schulz
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
    # DeepSeek-V4's report: eight fast steps, then two that converge.
    "deepseekv4": ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2,
}

# Beyond their last set these stay at it; the others start again from their first.
REPEAT_LAST = ("polar_express", "cans", "deepseekv4")

MATMUL_PRECISIONS = ("highest", "high", "medium")
METHODS = ("gram", "standard")


def newton_schulz(
    x: jax.Array,
    steps: int = 5,
    coefficient_type: str = "quintic",
    *,
    custom_coefficients: Sequence[tuple[float, float, float]] | None = None,
    method: str = "gram",
    fp32_matmul_prec: str = "highest",
    eps: float = 1e-7,
) -> jax.Array:
    """Brings the singular values of each matrix near 1 and keeps its singular vectors.

    X = x / max(|x|, eps) in the Frobenius norm, then ``steps`` times
    ``A = XXᵀ; X = aX + (bA + cA²)X``, on the shorter side of the matrix: the definition of
    emerging-optimizers' ``newton_schulz``. Zero matrices, rows and columns stay exactly zero.

    The Gram form computes the same polynomial through the small matrix G = XXᵀ alone: every step
    is P = aI + bG + cG², Q <- PQ, G <- PGP, and X is touched only by X <- QX. Rounding in G grows
    by a² a step, so X and G are formed anew before that growth is felt (see `gram_segments`); so
    restarted it is faster than the standard form, and about as close to the exact polynomial,
    closer than emerging-optimizers for the default coefficients. With products of lower precision
    it would have to restart at every step, which is the standard form: that is what runs then.

    Args:
      x: (..., m, n), any float dtype; computed in float32 at least.
      steps: number of iterations, at least 1.
      coefficient_type: a key of `COEFFICIENTS`, or "custom".
      custom_coefficients: (a, b, c) per step for "custom", cycled.
      method: "gram" or "standard".
      fp32_matmul_prec: "highest", "high" or "medium" (bfloat16 with float32 accumulation, X, A
        and B rounded where the reference rounds them). It is for hardware with bfloat16 units: on a
        CPU, even one with such units, "highest" is faster below rank 128, for its fewer products.
      eps: smallest norm to divide by.

    Returns:
      (..., m, n) in the dtype of ``x``.

    Raises:
      ValueError: an unknown name, fewer than one step, or ``x`` with fewer than two axes.
    """
    return newton_schulz_all(
        [x],
        steps,
        coefficient_type,
        custom_coefficients=custom_coefficients,
        method=method,
        fp32_matmul_prec=fp32_matmul_prec,
        eps=eps,
    )[0]


def newton_schulz_all(
    xs: Sequence[jax.Array],
    steps: int,
    coefficient_type: str,
    *,
    custom_coefficients: Sequence[tuple[float, float, float]] | None = None,
    method: str,
    fp32_matmul_prec: str,
    eps: float = 1e-7,
) -> list[jax.Array]:
    """Returns `newton_schulz` of each of ``xs``, whose shapes may differ.

    In Gram form the arithmetic of the small matrices goes through one batch for all that are of
    one size; the large matrices are never copied together.
    """
    one_of("method", method, METHODS)
    one_of("fp32_matmul_prec", fp32_matmul_prec, MATMUL_PRECISIONS)
    coefficients = step_coefficients(steps, coefficient_type, custom_coefficients)
    for x in xs:
        if jnp.ndim(x) < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"x is {x.dtype}{list(jnp.shape(x))}; give floats of shape (..., m, n)"
            )
    products = [
        _Products(
            wide=x.shape[-2] <= x.shape[-1],
            prec=fp32_matmul_prec,
            dtype=jnp.promote_types(x.dtype, jnp.float32),
        )
        for x in xs
    ]
    in_gram_form = method == "gram" and fp32_matmul_prec == "highest"
    iterate = _gram_form if in_gram_form else _standard_form
    widened = [x.astype(p.dtype) for x, p in zip(xs, products, strict=True)]
    results = iterate(widened, coefficients, products, eps)
    return [y.astype(x.dtype) for x, y in zip(xs, results, strict=True)]


def step_coefficients(
    steps: int,
    coefficient_type: str,
    custom_coefficients: Sequence[tuple[float, float, float]] | None = None,
) -> Coefficients:
    """Returns (a, b, c) of each of ``steps`` steps.

    Raises:
      ValueError: an unknown type, no step, or "custom" without a set.
    """
    one_of("coefficient_type", coefficient_type, (*COEFFICIENTS, "custom"))
    if steps < 1:
        raise ValueError(f"steps is {steps}; at least 1 is needed")
    if (coefficient_type == "custom") != bool(custom_coefficients):
        raise ValueError(
            f"coefficient_type is {coefficient_type!r} and custom_coefficients is "
            f"{custom_coefficients!r}; give a non-empty set exactly for 'custom'"
        )
    sets = tuple(custom_coefficients or COEFFICIENTS[coefficient_type])
    last = sets[-1:] if coefficient_type in REPEAT_LAST else sets
    return tuple(itertools.islice(itertools.chain(sets, itertools.cycle(last)), steps))


# Largest growth of the rounding in G that a run of the Gram form may see before its last step:
# two steps of most sets.
GRAM_GROWTH_LIMIT = 20.0


def gram_segments(coefficients: Coefficients) -> list[Coefficients]:
    """Cuts the steps into runs after each of which X and its Gram matrix are formed anew.

    A direction of small singular value leaves a step multiplied by a, so what rounding put into G
    in its place is multiplied by a². A run ends before that product over its earlier steps
    exceeds `GRAM_GROWTH_LIMIT`.
    """
    segments, growth = [[coefficients[0]]], 1.0
    for previous, step in itertools.pairwise(coefficients):
        growth *= previous[0] ** 2
        if growth > GRAM_GROWTH_LIMIT:
            segments.append([])
            growth = 1.0
        segments[-1].append(step)
    return [tuple(segment) for segment in segments]


class _Products(NamedTuple):
    """The products of the iteration, on the shorter side of x without transposing it."""

    wide: bool
    prec: str
    dtype: jnp.dtype

    def gram(self, x: jax.Array) -> jax.Array:
        """xxᵀ for a wide x, xᵀx for a tall one: (..., r, r)."""
        return self._product(x, x, (-1, -1) if self.wide else (-2, -2))

    def apply(self, q: jax.Array, x: jax.Array) -> jax.Array:
        """qx for a wide x, xqᵀ for a tall one."""
        # q is symmetric but for rounding; transposed, a tall x sees what its transpose would.
        return self._product(q, x, (-1, -2)) if self.wide else self._product(x, q, (-1, -1))

    def round(self, x: jax.Array) -> jax.Array:
        """What the precision makes of a number that is kept between products."""
        if self.prec != "medium":
            return x
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)

    def times(self, a: float, x: jax.Array) -> jax.Array:
        """ax, not rounded."""
        return a * x.astype(self.dtype)

    def _product(self, a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
        """Sums over an axis of each, matrix by matrix; `jnp.einsum`, but quick to trace."""
        if self.prec == "medium":
            a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        batch = tuple(range(a.ndim - 2))
        summed = (a.ndim + axes[0],), (b.ndim + axes[1],)
        precision = "high" if self.prec == "high" else "highest"
        return jax.lax.dot_general(
            a, b, (summed, (batch, batch)), precision, preferred_element_type=self.dtype
        )


def _standard_form(xs, coefficients, products, eps):
    xs = [_normalized(x, p, eps) for x, p in zip(xs, products, strict=True)]
    for a, b, c in coefficients:
        grams = [p.round(p.gram(x)) for x, p in zip(xs, products, strict=True)]
        polynomial = functools.partial(_standard_polynomial, b=b, c=c, prec=products[0].prec)
        qs = _together(polynomial, grams)
        # Else XLA may fuse the steps' ``a * x`` into one chain, which rounds other than the x of
        # the products; their difference then grows by every later a, and no product takes it back.
        xs = jax.lax.optimization_barrier(
            [
                p.round(p.times(a, x) + p.apply(q, x))
                for q, x, p in zip(qs, xs, products, strict=True)
            ]
        )
    return xs


def _standard_polynomial(gram, b, c, prec):
    small = _Products(wide=True, prec=prec, dtype=jnp.promote_types(gram.dtype, jnp.float32))
    return small.round(small.times(b, gram) + c * small.apply(gram, gram))


def _normalized(x, products, eps):
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
    return products.round(x / jnp.maximum(norm, eps))


def _gram_form(xs, coefficients, products, eps):
    runs = gram_segments(coefficients)
    polynomials = [functools.partial(gram_polynomial, coefficients=run) for run in runs]
    if len(runs[0]) == 1:
        # Its coefficients are so large that aX must not be rounded with the rest.
        xs = _standard_form(xs, runs[0], products, eps)
        polynomials = polynomials[1:]
    else:
        polynomials[0] = functools.partial(_normalized_polynomial, coefficients=runs[0], eps=eps)
    for polynomial in polynomials:
        grams = [p.gram(x) for x, p in zip(xs, products, strict=True)]
        qs = _together(polynomial, grams)
        xs = [p.apply(q, x) for q, x, p in zip(qs, xs, products, strict=True)]
    return xs


def _together(function, xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Maps ``function`` over arrays, those of one shape and dtype as one stack."""
    alike: dict[tuple, list[int]] = {}
    for i, x in enumerate(xs):
        alike.setdefault((x.shape, x.dtype), []).append(i)
    results = list(xs)
    for indices in alike.values():
        stack = function(jnp.stack([xs[i] for i in indices]))
        for place, i in enumerate(indices):
            results[i] = stack[place]
    return results


def _normalized_polynomial(gram: jax.Array, coefficients: Coefficients, eps: float) -> jax.Array:
    """`gram_polynomial` for X / max(|X|, eps), from the Gram matrix of X itself.

    |X|² is the trace of it, so that the division by the norm costs no pass over X.
    """
    norm = jnp.maximum(jnp.sqrt(jnp.trace(gram, axis1=-2, axis2=-1)), eps)[..., None, None]
    return gram_polynomial(gram / norm**2, coefficients) / norm


def gram_polynomial(gram: jax.Array, coefficients: Coefficients) -> jax.Array:
    """Returns the Q (..., r, r) for which QX is ``coefficients`` steps of X, from G = XXᵀ alone."""
    product = functools.partial(jnp.matmul, precision="highest")
    identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    q = None
    for i, (a, b, c) in enumerate(coefficients):
        p = a * identity + b * gram + c * product(gram, gram)
        q = p if q is None else product(p, q)
        if i + 1 < len(coefficients):
            gram = product(product(p, gram), p)
    return q
