"""The settings of a pool's optimizer, under the names of Megatron-Core's ``OptimizerConfig``."""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """What `multi_lora_optimizer` builds.

    Fields and defaults are Megatron-Core's; the last group is ours. Hashable, so that equal
    configurations can share one compiled program.

    Attributes:
      optimizer: "muon" or "adaptive_muon" for matrices with ``muon_scalar_optimizer`` for the
        rest, or "adam". "dist_muon" is Megatron's deprecated name for "muon".
      lr: learning rate where the caller gives none with the update.
      weight_decay: weight decay where the caller gives none with the update. Vectors and
        parameters named "bias" are never decayed (Megatron's ``wd_mult = 0``).
      decoupled_lr, decoupled_min_lr: learning rate and its smallest value in the schedule, for
        ``embedding_or_output_parameters`` alone; None: as all others.
      clip_grad: largest L2 norm of one slot's gradients; 0 turns clipping off.
      grad_norm_skip_threshold: a slot whose gradients have a larger norm is skipped, see
        `SlotTrainState`.
      muon_split_qkv: whether ``qkv_split_shapes`` counts.
      weight_decay_method: "decoupled", "independent", "l2" or "palm", as in emerging-optimizers.
      custom_coefficients: (a, b, c) of each Newton–Schulz step, for the type "custom".
      ns_method: "gram" or "standard", see `newton_schulz`.
      muon_tp_mode: what Muon sees of a matrix that Megatron partitions: its shards, each alone
        ("blockwise"), or the whole ("duplicated" and "distributed", equal but for rounding).
      tensor_model_parallel_size: number of shards.
      partition_dim: by parameter name, the axis along which Megatron partitions it.
      rank_aware: ``muon_scale_mode`` reads the adapter's own rank, not the pool's.
      embedding_or_output_parameters: patterns of the names (paths joined by dots, as `fnmatch`
        matches them) that Megatron's attribute ``is_embedding_or_output_parameter`` would mark:
        the scalar optimizer owns them, at ``decoupled_lr``.
      qkv_split_shapes: by such a pattern, the rows of query, (gate,) key and value in each group
        of a fused matrix; Muon orthogonalises every projection alone.
    """

    optimizer: str = "adam"
    lr: float | None = None
    weight_decay: float = 0.01
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None
    clip_grad: float = 1.0
    grad_norm_skip_threshold: float = math.inf
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    decoupled_weight_decay: bool = True
    lion_beta1: float = 0.95
    lion_beta2: float = 0.98
    muon_momentum: float = 0.95
    muon_split_qkv: bool = True
    muon_nesterov: bool = False
    muon_scale_mode: str = "spectral"
    muon_extra_scale_factor: float = 1.0
    muon_coefficient_type: str = "quintic"
    muon_num_ns_steps: int = 5
    muon_fp32_matmul_prec: str = "medium"
    muon_scalar_optimizer: str = "adam"
    muon_tp_mode: str = "blockwise"
    adaptive_muon_moment2_method: str = "adamuon"
    adaptive_muon_beta2: float = 0.95
    adaptive_muon_eps: float = 1e-8

    weight_decay_method: str = "decoupled"
    custom_coefficients: tuple[tuple[float, float, float], ...] | None = None
    ns_method: str = "gram"
    rank_aware: bool = False
    embedding_or_output_parameters: tuple[str, ...] = ()
    qkv_split_shapes: Mapping[str, tuple[int, ...]] = ()
    tensor_model_parallel_size: int = 1
    partition_dim: Mapping[str, int] = ()

    def __post_init__(self):
        if self.optimizer == "dist_muon":
            warnings.warn(
                "optimizer='dist_muon' is Megatron's deprecated name; use 'muon'",
                DeprecationWarning,
                stacklevel=3,
            )
            object.__setattr__(self, "optimizer", "muon")
        one_of("optimizer", self.optimizer, ("adam", "muon", "adaptive_muon"))
        one_of("muon_scalar_optimizer", self.muon_scalar_optimizer, ("adam", "lion"))
        one_of("muon_tp_mode", self.muon_tp_mode, ("blockwise", "duplicated", "distributed"))
        object.__setattr__(self, "partition_dim", frozen(self.partition_dim))
        shapes = {name: tuple(sizes) for name, sizes in dict(self.qkv_split_shapes).items()}
        object.__setattr__(self, "qkv_split_shapes", frozen(shapes))
        patterns = tuple(self.embedding_or_output_parameters)
        object.__setattr__(self, "embedding_or_output_parameters", patterns)
        if self.custom_coefficients is not None:
            sets = tuple(tuple(map(float, c)) for c in self.custom_coefficients)
            object.__setattr__(self, "custom_coefficients", sets)
        if self.optimizer == "adaptive_muon" and (self.qkv_split_shapes or self.partition_dim):
            raise ValueError(
                "optimizer is 'adaptive_muon', which normalises whole matrices; give it neither "
                "qkv_split_shapes nor partition_dim"
            )


def frozen(mapping: Any) -> tuple[tuple[str, Any], ...]:
    """The hashable form of a mapping, which ``dict`` turns back."""
    return tuple(sorted(dict(mapping).items()))


def one_of(name: str, value: str, choices) -> None:
    """Raises ValueError unless ``value`` is among ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, choices))}")
