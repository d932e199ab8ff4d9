"""Per-slot optimizers for multi-LoRA training, as Optax transforms."""

from jax_impl.adamw import AdamState, adamw
from jax_impl.adaptive_muon import adaptive_muon
from jax_impl.clip import ClipState, clip_by_total_norm
from jax_impl.config import OptimizerConfig
from jax_impl.families import FamilyState, by_family
from jax_impl.lion import LionState, lion
from jax_impl.lora_muon import LoRAMuonState, lora_muon
from jax_impl.multi_lora import multi_lora_optimizer
from jax_impl.muon import MuonState, muon
from jax_impl.newton_schulz import newton_schulz
from jax_impl.per_slot import pad_slots, per_slot, put_slot, reset_slots, take_slot
from jax_impl.pieces import Split
from jax_impl.schedule import ParamScheduleConfig, param_schedule, slot_schedule
from jax_impl.train_state import SlotTrainState, StepReport

__all__ = [
    "AdamState",
    "ClipState",
    "FamilyState",
    "LionState",
    "LoRAMuonState",
    "MuonState",
    "OptimizerConfig",
    "ParamScheduleConfig",
    "SlotTrainState",
    "Split",
    "StepReport",
    "adamw",
    "adaptive_muon",
    "by_family",
    "clip_by_total_norm",
    "lion",
    "lora_muon",
    "multi_lora_optimizer",
    "muon",
    "newton_schulz",
    "pad_slots",
    "param_schedule",
    "per_slot",
    "put_slot",
    "reset_slots",
    "slot_schedule",
    "take_slot",
]
