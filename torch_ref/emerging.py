"""Emerging-Optimizers' own Muon, where Megatron's does not pass an option on."""

import dataclasses
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig


@dataclasses.dataclass
class SlotOptimizerConfig(OptimizerConfig):
    """Megatron's config, and what its Muon does not take of Emerging-Optimizers' one.

    Attributes:
        weight_decay_method: "decoupled" as in Megatron, "independent", "l2" or "palm"; of Muon.
        custom_coefficients: (a, b, c) of each Newton-Schulz step, for `muon_coefficient_type`
            "custom".
    """

    weight_decay_method: str = "decoupled"
    custom_coefficients: tuple[tuple[float, float, float], ...] | None = None


def is_beyond_megatron(config: OptimizerConfig) -> bool:
    """Whether Megatron cannot do what the config asks, so that Emerging-Optimizers' class does.

    Megatron-Core 0.19.2 builds an adaptive Muon of Emerging-Optimizers 0.3.0 that fails at its
    first step: it never sets the `scale_mode` that the step reads.
    """
    return config.optimizer == "adaptive_muon" or (
        config.optimizer == "muon"
        and (
            getattr(config, "weight_decay_method", "decoupled") != "decoupled"
            or config.muon_coefficient_type == "custom"
        )
    )


def check_beyond_megatron(config: OptimizerConfig, qkv_parameters: list[str]) -> None:
    """Refuses what Emerging-Optimizers' classes cannot do either.

    Raises:
        ValueError: custom coefficients that are missing or for adaptive Muon, fused matrices to
            be split, or tensor parallelism.
    """
    is_custom = config.muon_coefficient_type == "custom"
    if is_custom != bool(getattr(config, "custom_coefficients", None)):
        raise ValueError(
            "custom_coefficients: must be given exactly for muon_coefficient_type='custom'"
        )
    if not is_beyond_megatron(config):
        return
    if is_custom and config.optimizer == "adaptive_muon":
        raise ValueError("muon_coefficient_type='custom': adaptive_muon takes no custom sets")
    if qkv_parameters and config.muon_split_qkv:
        raise ValueError(
            f"{qkv_parameters[0]} is fused, and Emerging-Optimizers' Muon, which the config needs, "
            "does not split: set muon_split_qkv=False"
        )
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        raise ValueError("Emerging-Optimizers' Muon, which the config needs, knows no shards")


def emerging_muon(
    config: OptimizerConfig, param_groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Emerging-Optimizers' `Muon` or `AdaptiveMuon` on Megatron's parameter groups."""
    from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon, Muon

    settings = {
        "lr": config.lr,
        "momentum": config.muon_momentum,
        "weight_decay": config.weight_decay,
        "nesterov": config.muon_nesterov,
        "weight_decay_method": getattr(config, "weight_decay_method", "decoupled"),
        "fp32_matmul_prec": config.muon_fp32_matmul_prec,
        "coefficient_type": config.muon_coefficient_type,
        "num_ns_steps": config.muon_num_ns_steps,
        "scale_mode": config.muon_scale_mode,
        "extra_scale_factor": config.muon_extra_scale_factor,
    }
    if config.optimizer == "adaptive_muon":
        return AdaptiveMuon(
            param_groups,
            **settings,
            moment2_method=config.adaptive_muon_moment2_method,
            beta2=config.adaptive_muon_beta2,
            eps=config.adaptive_muon_eps,
        )
    muon = Muon(param_groups, **settings)
    if config.muon_coefficient_type == "custom":
        muon.scaled_orthogonalize_fn = custom_orthogonalize(config)
    return muon


def custom_orthogonalize(config: OptimizerConfig):
    """`Muon`'s scaled orthogonalization with the custom sets that its constructor does not take."""
    from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    def scaled_orthogonalize(grad: torch.Tensor) -> torch.Tensor:
        orthogonal = newton_schulz(
            grad,
            steps=config.muon_num_ns_steps,
            coefficient_type="custom",
            custom_coefficient_sets=list(config.custom_coefficients),
        )
        scale = get_muon_scale_factor(*grad.shape, mode=config.muon_scale_mode)
        return orthogonal * scale * config.muon_extra_scale_factor

    return scaled_orthogonalize
