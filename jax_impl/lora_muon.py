"""LoRA-Muon: Muon's spectral steepest descent, of the product of an adapter's two factors."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_impl.config import OptimizerConfig, one_of
from jax_impl.hyperparameters import (
    hyperparameters,
    lerp,
    parameter_name,
    require_params,
    zeros_like_master,
)
from jax_impl.newton_schulz import (
    MATMUL_PRECISIONS,
    METHODS,
    newton_schulz_all,
    step_coefficients,
)

# What a Gram matrix of trace 1 gets added to its diagonal before it is inverted.
DAMPING = 1e-6


class LoRAMuonState(NamedTuple):
    """Momentum of every factor, in its shape and in float32 at least."""

    momentum_buffer: Any


def lora_muon(
    learning_rate: float | jax.Array | None = None,
    *,
    momentum: float | jax.Array = OptimizerConfig.muon_momentum,
    weight_decay: float | jax.Array = OptimizerConfig.weight_decay,
    coefficient_type: str = OptimizerConfig.muon_coefficient_type,
    custom_coefficients: Any = OptimizerConfig.custom_coefficients,
    num_ns_steps: int = OptimizerConfig.muon_num_ns_steps,
    fp32_matmul_prec: str = OptimizerConfig.muon_fp32_matmul_prec,
    ns_method: str = OptimizerConfig.ns_method,
    damping: float = DAMPING,
) -> optax.GradientTransformationExtraArgs:
    """LoRA-Muon (https://arxiv.org/abs/2606.12921) for the pairs A (r, n), B (m, r) of an adapter.

    Steepest descent of W = BA in the spectral norm, half of the step in either factor, each
    whitened by the other's Gram matrix:

        m_A <- lerp(m_A, g_A, 1 - momentum);  m_B likewise
        R_A = (AAᵀ)^(-1/2);  R_B = (BᵀB)^(-1/2);  s = sqrt(1 - lr * wd)
        B <- s * B - lr / (2s) * newton_schulz(m_B R_A) R_A
        A <- s * A - lr / (2s) * R_B newton_schulz(R_B m_A)

    so that W decays by lr * wd, and its update does not depend on how W is split into factors:
    neither scaling A up and B down nor any other change of basis between them alters it. ``update``
    takes ``learning_rate``, ``weight_decay`` and ``momentum`` anew. Lift it with `per_slot`.

    Where we go beyond the paper's equations: any R with R Rᵀ = (AAᵀ)^-1 gives the same update, so
    ours is the inverse Cholesky factor, which needs no eigenvectors; the Gram matrix of a factor
    of norm 1 gets ``damping`` on its diagonal, for it is singular where the adapter is padded or
    not yet of full rank; and a factor that is zero, as B is at first, whitens to zero: what it
    multiplies cannot move W.

    Args:
      learning_rate: lr, where the caller gives none with the update; the spectral norm that one
        step may give to W, without alpha / rank.
      momentum: decay of the running mean of gradients.
      weight_decay: wd; lr * wd must be below 1.
      coefficient_type, custom_coefficients, num_ns_steps, fp32_matmul_prec, ns_method: see
        `newton_schulz`.
      damping: as above, relative to the factor's squared Frobenius norm.

    Raises:
      ValueError: an unknown name; on ``init`` a leaf whose name does not end in ``linear_in`` or
        ``linear_out``, or without its partner; on ``update`` no parameters, or no learning rate
        from either side.
    """
    step_coefficients(num_ns_steps, coefficient_type, custom_coefficients)
    one_of("fp32_matmul_prec", fp32_matmul_prec, MATMUL_PRECISIONS)
    one_of("ns_method", ns_method, METHODS)
    defaults = dict(learning_rate=learning_rate, weight_decay=weight_decay, momentum=momentum)

    def orthogonalize(xs):
        return newton_schulz_all(
            xs,
            num_ns_steps,
            coefficient_type,
            custom_coefficients=custom_coefficients,
            method=ns_method,
            fp32_matmul_prec=fp32_matmul_prec,
        )

    def init_fn(params):
        lora_pairs(params)
        return LoRAMuonState(jax.tree.map(zeros_like_master, params))

    def update_fn(updates, state, params=None, **extra):
        lr, wd, momentum = hyperparameters(defaults, extra)
        require_params(params)
        buffer = jax.tree.map(lambda m, g: lerp(m, g, 1 - momentum), state.momentum_buffer, updates)
        leaves, treedef = jax.tree.flatten(params)
        momenta = treedef.flatten_up_to(buffer)
        whitening, tall = {}, set()
        for a, b in lora_pairs(params):
            whitening |= {a: whiten(leaves[b].T, damping), b: whiten(leaves[a], damping)}
            tall.add(b)

        def along_rank(i, w, x):
            return product(x, w.T) if i in tall else product(w, x)

        order = range(len(leaves))
        directions = orthogonalize([along_rank(i, whitening[i], momenta[i]) for i in order])
        keep = jnp.sqrt(1 - lr * wd)

        def new_update(i):
            change = along_rank(i, whitening[i].T, directions[i])
            decay = lr * wd / (1 + keep)  # 1 - keep without cancellation
            return (-decay * leaves[i] - lr / (2 * keep) * change).astype(leaves[i].dtype)

        return treedef.unflatten([new_update(i) for i in order]), LoRAMuonState(buffer)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def lora_pairs(params: Any) -> list[tuple[int, int]]:
    """Returns (A, B) of each layer as indices into the leaves, by ``linear_in`` and ``linear_out``.

    Raises:
      ValueError: a leaf with another name, or without its partner.
    """
    names = [parameter_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    places = {name: i for i, name in enumerate(names)}
    other = {"linear_in": "linear_out", "linear_out": "linear_in"}
    for name in names:
        last = name.rpartition(".")[2]
        if name.removesuffix(last) + other.get(last, "") not in places:
            raise ValueError(
                f"{name} has no partner; lora_muon needs pairs NAME.linear_in (r, in) and "
                "NAME.linear_out (out, r), and other parameters an optimizer of their own"
            )
    firsts = [name for name in names if name.endswith("linear_in")]
    return [(places[a], places[a.removesuffix("in") + "out"]) for a in firsts]


def whiten(factor: jax.Array, damping: float) -> jax.Array:
    """Returns the W (r, r) for which W F has orthonormal rows, F (r, n) being the factor.

    The inverse Cholesky factor of the Gram matrix FFᵀ, of which ``damping`` times the trace has
    been added to the diagonal; zero where F is zero.
    """
    factor = factor.astype(jnp.promote_types(factor.dtype, jnp.float32))
    norm = jnp.sqrt(jnp.sum(jnp.square(factor)))
    unit = factor / jnp.where(norm > 0, norm, 1)
    identity = jnp.eye(len(factor), dtype=factor.dtype)
    gram = product(unit, unit.T) + jnp.where(norm > 0, damping, 1) * identity
    lower = jnp.linalg.cholesky(gram, symmetrize_input=False)
    inverse = jax.scipy.linalg.solve_triangular(lower, identity, lower=True)
    return jnp.where(norm > 0, inverse / jnp.where(norm > 0, norm, 1), 0)


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """The matrix product in full float32."""
    return jnp.matmul(x, y, precision="highest")
