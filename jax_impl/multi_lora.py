"""The optimizer of a multi-LoRA pool, put together from a configuration."""

import dataclasses
import fnmatch
import functools
from collections.abc import Iterable
from typing import Any

import jax
import optax

from jax_impl.adamw import adamw
from jax_impl.adaptive_muon import adaptive_muon
from jax_impl.clip import clip_by_total_norm
from jax_impl.config import OptimizerConfig
from jax_impl.families import by_family
from jax_impl.hyperparameters import parameter_name
from jax_impl.lion import lion
from jax_impl.muon import muon
from jax_impl.per_slot import per_slot
from jax_impl.pieces import Blocks, Split
from jax_impl.schedule import param_schedule


@functools.cache
def multi_lora_optimizer(*configs: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Returns the per-slot optimizer that Megatron would build for each adapter.

    In each slot: clip by the norm over all its gradients, then Muon on matrices and Adam or Lion
    on the rest, or Adam on everything; vectors and biases are not decayed, and embedding and
    output parameters may have a learning rate of their own. Already lifted by `per_slot`;
    ``update`` takes ``learning_rate``, ``weight_decay`` and the other floats of the transforms
    anew, as scalars or (S,). Equal configurations give the same transform.

    Args:
      *configs: one, or several for a pool whose adapters have different optimizers: ``update``
        takes ``family``, int (S,), the place in ``configs`` of each slot's; see `by_family`.
    """
    families = [adapter_optimizer(config) for config in configs]
    return refuse_unknown(per_slot(by_family(families) if len(families) > 1 else families[0]))


# What `update` takes beside gradients, state, parameters and ``slots``.
EXTRA = {
    *("learning_rate", "weight_decay", "momentum", "b1", "b2", "eps", "beta2", "moment2_eps"),
    *("max_norm", "total_norm", "rank", "family", "schedule", "samples"),
    "grad_norm_skip_threshold",  # of `SlotTrainState`
}


def refuse_unknown(
    tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Raises TypeError on extra arguments that no transform of ours has: they would be ignored."""

    def update_fn(updates, state, params=None, *, slots=None, **extra):
        if unknown := sorted(extra.keys() - EXTRA):
            raise TypeError(f"{unknown[0]} is none of {', '.join(sorted(EXTRA))}")
        return tx.update(updates, state, params, slots=slots, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update_fn)


def adapter_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """The optimizer of one adapter, with the settings of ``config``."""
    owners = {"matrix": matrix_optimizer(config), "scalar": scalar_optimizer(config)}
    groups = {
        kind + decays: multiply_weight_decay(owner, config.weight_decay, wd_mult=wd_mult)
        for kind, owner in owners.items()
        for decays, wd_mult in (("", 1.0), (" undecayed", 0.0))
    }
    if config.decoupled_lr is not None:
        own_lr = functools.partial(
            decouple_learning_rate, max_lr=config.decoupled_lr, min_lr=config.decoupled_min_lr
        )
        groups |= {label + " decoupled": own_lr(inner) for label, inner in groups.items()}
    return optax.chain(
        clip_by_total_norm(config.clip_grad),
        optax.partition(groups, functools.partial(label_parameters, config)),
    )


def label_parameters(config: OptimizerConfig, params: Any) -> Any:
    """Labels each parameter of one adapter with its group: Megatron's parameter groups."""

    def label(path, p):
        name = parameter_name(path)
        outer = matches_any(name, config.embedding_or_output_parameters)
        kind = "matrix" if p.ndim == 2 and not outer else "scalar"
        undecayed = " undecayed" if p.ndim == 1 or name.endswith(".bias") else ""
        decoupled = " decoupled" if outer and config.decoupled_lr is not None else ""
        return kind + undecayed + decoupled

    return jax.tree_util.tree_map_with_path(label, params)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether a parameter's name is among those that the patterns stand for."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def matrix_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """What ``optimizer`` names, with the settings of ``config``."""
    make = {"adam": adamw_from, "muon": muon_from, "adaptive_muon": adaptive_muon_from}
    return make[config.optimizer](config)


def scalar_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """What owns the parameters that Muon does not, with the settings of ``config``."""
    if config.optimizer != "adam" and config.muon_scalar_optimizer == "lion":
        return lion_from(config)
    return adamw_from(config)


def muon_from(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """`muon` with the settings of ``config``."""
    return muon(**muon_settings(config), splits=functools.partial(matrix_splits, config))


def adaptive_muon_from(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """`adaptive_muon` with the settings of ``config``."""
    return adaptive_muon(
        **muon_settings(config),
        moment2_method=config.adaptive_muon_moment2_method,
        beta2=config.adaptive_muon_beta2,
        moment2_eps=config.adaptive_muon_eps,
    )


def muon_settings(config: OptimizerConfig) -> dict[str, Any]:
    """The settings that `muon` and `adaptive_muon` share."""
    return dict(
        learning_rate=config.lr,
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


def matrix_splits(
    config: OptimizerConfig, name: str, shape: tuple[int, int]
) -> tuple[Split | Blocks, ...]:
    """How Megatron's Muon would cut a matrix before it orthogonalises."""
    splits: tuple[Split | Blocks, ...] = ()
    axis = dict(config.partition_dim).get(name)
    if axis is not None and config.muon_tp_mode == "blockwise":
        splits += (Blocks(axis, config.tensor_model_parallel_size),)
    if config.muon_split_qkv:
        fused = [
            sizes for pattern, sizes in config.qkv_split_shapes if matches_any(name, [pattern])
        ]
        splits += tuple(Split(0, sizes) for sizes in fused[:1])
    return splits


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


def lion_from(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """`lion` with the settings of ``config``."""
    return lion(
        config.lr, b1=config.lion_beta1, b2=config.lion_beta2, weight_decay=config.weight_decay
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


def decouple_learning_rate(
    inner: optax.GradientTransformationExtraArgs, *, max_lr: float, min_lr: float | None
) -> optax.GradientTransformationExtraArgs:
    """Gives ``inner`` a learning rate of its own, Megatron's ``decoupled_lr``.

    It follows the ``schedule`` at ``samples`` of the update, as the slot's own rate does, between
    other bounds (with ``min_lr`` None, only from another height); without them it is ``max_lr``.
    """

    def update_fn(updates, state, params=None, *, schedule=None, samples=None, **extra):
        learning_rate = max_lr
        if schedule is not None:
            lowest = schedule.min_lr if min_lr is None else min_lr
            own = dataclasses.replace(schedule, max_lr=max_lr, min_lr=lowest)
            learning_rate, _ = param_schedule(own)(samples)
        return inner.update(updates, state, params, **{**extra, "learning_rate": learning_rate})

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)
