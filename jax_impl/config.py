"""The settings of a pool's optimizer, under the names of Megatron-Core's ``OptimizerConfig``."""

import dataclasses
import warnings


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """What `multi_lora_optimizer` builds.

    Fields and defaults are Megatron-Core's; the last group is ours. Hashable, so that equal
    configurations can share one compiled program.

    Attributes:
      optimizer: "muon" for matrices with ``muon_scalar_optimizer`` for the rest, or "adam".
        "dist_muon" is Megatron's deprecated name for "muon".
      lr: learning rate where the caller gives none with the update.
      weight_decay: weight decay where the caller gives none with the update. Parameters that are
        not matrices are never decayed (Megatron's ``wd_mult = 0``).
      clip_grad: largest L2 norm of one slot's gradients; 0 turns clipping off.
      weight_decay_method: "decoupled", "independent", "l2" or "palm", as in emerging-optimizers.
      custom_coefficients: (a, b, c) of each Newton–Schulz step, for the type "custom".
      ns_method: "gram" or "standard", see `newton_schulz`.
      rank_aware: ``muon_scale_mode`` reads the adapter's own rank, not the pool's.
    """

    optimizer: str = "adam"
    lr: float | None = None
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    decoupled_weight_decay: bool = True
    muon_momentum: float = 0.95
    muon_nesterov: bool = False
    muon_scale_mode: str = "spectral"
    muon_extra_scale_factor: float = 1.0
    muon_coefficient_type: str = "quintic"
    muon_num_ns_steps: int = 5
    muon_fp32_matmul_prec: str = "medium"
    muon_scalar_optimizer: str = "adam"

    weight_decay_method: str = "decoupled"
    custom_coefficients: tuple[tuple[float, float, float], ...] | None = None
    ns_method: str = "gram"
    rank_aware: bool = False

    def __post_init__(self):
        if self.optimizer == "dist_muon":
            warnings.warn(
                "optimizer='dist_muon' is Megatron's deprecated name; use 'muon'",
                DeprecationWarning,
                stacklevel=3,
            )
            object.__setattr__(self, "optimizer", "muon")
        one_of("optimizer", self.optimizer, ("adam", "muon"))
        one_of("muon_scalar_optimizer", self.muon_scalar_optimizer, ("adam",))
        if self.custom_coefficients is not None:
            sets = tuple(tuple(map(float, c)) for c in self.custom_coefficients)
            object.__setattr__(self, "custom_coefficients", sets)


def one_of(name: str, value: str, choices) -> None:
    """Raises ValueError unless ``value`` is among ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, choices))}")
