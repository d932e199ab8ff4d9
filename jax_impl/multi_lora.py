"""The optimizer of a multi-LoRA pool, put together from a configuration."""

import functools
from typing import Any

import jax
import optax

from jax_impl.adamw import adamw
from jax_impl.clip import clip_by_total_norm
from jax_impl.config import OptimizerConfig
from jax_impl.muon import muon
from jax_impl.per_slot import per_slot


@functools.cache
def multi_lora_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Returns the per-slot optimizer that Megatron would build for each adapter.

    In each slot: clip by the norm over all its gradients, then Muon on matrices and Adam on the
    rest, or Adam on everything; parameters that are not matrices are not decayed. Already lifted
    by `per_slot`; ``update`` takes ``learning_rate``, ``weight_decay`` and the other floats of
    `muon`, `adamw` and `clip_by_total_norm` anew, as scalars or (S,). Equal configurations give
    the same transform.
    """
    matrices = muon_from(config) if config.optimizer == "muon" else adamw_from(config)
    scalars = multiply_weight_decay(adamw_from(config), config.weight_decay, wd_mult=0.0)
    return per_slot(
        optax.chain(
            clip_by_total_norm(config.clip_grad),
            optax.partition({"matrix": matrices, "scalar": scalars}, label_parameters),
        )
    )


def label_parameters(params: Any) -> Any:
    """Labels each parameter of one adapter "matrix" if it is one, else "scalar"."""
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "scalar", params)


def muon_from(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """`muon` with the settings of ``config``."""
    return muon(
        config.lr,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        weight_decay=config.weight_decay,
        weight_decay_method=config.weight_decay_method,
        coefficient_type=config.muon_coefficient_type,
        custom_coefficients=config.custom_coefficients,
        num_ns_steps=config.muon_num_ns_steps,
        scale_mode=config.muon_scale_mode,
        extra_scale_factor=config.muon_extra_scale_factor,
        fp32_matmul_prec=config.muon_fp32_matmul_prec,
        ns_method=config.ns_method,
        rank_aware=config.rank_aware,
    )


def adamw_from(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """`adamw` with the settings of ``config``."""
    return adamw(
        config.lr,
        b1=config.adam_beta1,
        b2=config.adam_beta2,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        decoupled_weight_decay=config.decoupled_weight_decay,
    )


def multiply_weight_decay(
    inner: optax.GradientTransformationExtraArgs, weight_decay: float, *, wd_mult: float
) -> optax.GradientTransformationExtraArgs:
    """Multiplies the weight decay of ``inner`` by ``wd_mult``, Megatron's option of that name.

    ``weight_decay`` is what counts where the update brings none.
    """

    def update_fn(updates, state, params=None, *, weight_decay=weight_decay, **extra):
        return inner.update(updates, state, params, weight_decay=wd_mult * weight_decay, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)
