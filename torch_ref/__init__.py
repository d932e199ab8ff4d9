"""The Megatron reference: per-slot optimizers for multi-LoRA out of Megatron's own parts."""

from torch_ref.emerging import SlotOptimizerConfig, is_beyond_megatron
from torch_ref.megatron import start_megatron
from torch_ref.multi_lora import (
    PARTITION_DIM,
    LayerShape,
    LoRAAdapter,
    MultiLoRALinear,
    MultiLoRAStack,
    pad_adapter_weight,
)
from torch_ref.optimizer import (
    build_multi_lora_optimizer,
    reset_grad_metadata_keep_grads,
    step_adapter_slots,
    zero_adapter_slot_grads,
)
from torch_ref.scheduler import (
    SlotSchedule,
    drop_slot_scheduler,
    install_slot_scheduler,
    step_slot_schedulers,
)
from torch_ref.setup import setup_model_and_optimizer
from torch_ref.slot_state import (
    adapter_slot_state,
    load_adapter_slot_state,
    reload_adapter_slot_model_params,
    zero_optimizer_state_for_adapter,
)
from torch_ref.slots import adapter_slot_children, adapter_slot_parameters, count_adapter_slots
from torch_ref.tenant import install_adapter, retire_adapter
from torch_ref.tenant_file import load_tenant, save_tenant
from torch_ref.transformer import MultiLoRATransformer

__all__ = [
    "PARTITION_DIM",
    "LayerShape",
    "LoRAAdapter",
    "MultiLoRALinear",
    "MultiLoRAStack",
    "MultiLoRATransformer",
    "SlotOptimizerConfig",
    "SlotSchedule",
    "adapter_slot_children",
    "adapter_slot_parameters",
    "adapter_slot_state",
    "build_multi_lora_optimizer",
    "count_adapter_slots",
    "drop_slot_scheduler",
    "install_adapter",
    "install_slot_scheduler",
    "is_beyond_megatron",
    "load_adapter_slot_state",
    "load_tenant",
    "pad_adapter_weight",
    "reload_adapter_slot_model_params",
    "reset_grad_metadata_keep_grads",
    "retire_adapter",
    "save_tenant",
    "setup_model_and_optimizer",
    "start_megatron",
    "step_adapter_slots",
    "step_slot_schedulers",
    "zero_adapter_slot_grads",
    "zero_optimizer_state_for_adapter",
]
