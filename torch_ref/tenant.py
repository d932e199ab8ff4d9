"""Puts a tenant into a slot and takes it out again."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

from torch_ref.multi_lora import pad_adapter_weight
from torch_ref.optimizer import zero_adapter_slot_grads
from torch_ref.scheduler import SlotSchedule, drop_slot_scheduler, install_slot_scheduler
from torch_ref.slot_state import reload_adapter_slot_model_params, zero_optimizer_state_for_adapter
from torch_ref.slots import adapter_slot_parameters, multi_lora_layers


@torch.no_grad()
def write_adapter(
    model_chunks: Sequence[DistributedDataParallel],
    slot: int,
    weights: Mapping[str, torch.Tensor],
    scaling: float,
) -> None:
    """Writes one slot's weights, padded and by slot-free name, and its scaling into the model."""
    for name, parameter in adapter_slot_parameters(model_chunks, slot):
        parameter.copy_(weights[name])
    for _, layer in multi_lora_layers(model_chunks):
        layer.scaling[slot] = scaling


def reset_slot(
    model_chunks: Sequence[DistributedDataParallel],
    optimizer: LayerWiseDistributedOptimizer,
    slot: int,
    weights: Mapping[str, torch.Tensor],
    scaling: float,
) -> None:
    """Gives a slot new weights and the state of an optimizer that has never stepped."""
    write_adapter(model_chunks, slot, weights, scaling)
    zero_optimizer_state_for_adapter(optimizer, slot)
    zero_adapter_slot_grads(optimizer, slot)
    reload_adapter_slot_model_params(optimizer, slot)


def install_adapter(
    model_chunks: Sequence[DistributedDataParallel],
    optimizer: LayerWiseDistributedOptimizer,
    slot: int,
    weights: Mapping[str, torch.Tensor],
    *,
    rank: int,
    alpha: float,
    **schedule: Any,
) -> None:
    """Puts a tenant into an empty slot, with a cold optimizer and its own schedule.

    A bf16 model rounds the weights, and the masters begin at the rounded values. To go on exactly
    where a tenant stopped, follow up with `load_adapter_slot_state`.

    Args:
        model_chunks: the wrapped model.
        optimizer: as built by `build_multi_lora_optimizer`.
        slot: an empty slot.
        weights: {slot-free name: tensor}, at the tenant's own rank or padded with zeros to the
            pool's.
        rank: the tenant's own rank, at most the pool's.
        alpha: the adapter's scaling is alpha / rank.
        **schedule: the fields of `SlotSchedule`; `lr` and `batch_size` are required.

    Raises:
        ValueError: an unknown or occupied slot, weights that do not fit, or a bad schedule; nothing
            changed.
    """
    SlotSchedule(**schedule)
    if slot in optimizer.adapter_slot_schedulers:
        raise ValueError(f"slot={slot}: must be empty, retire its tenant first")
    parameters = dict(adapter_slot_parameters(model_chunks, slot))
    pool_rank = min(layer.rank for _, layer in multi_lora_layers(model_chunks))
    if not 1 <= rank <= pool_rank:
        raise ValueError(f"rank={rank}: must be from 1 to the pool's {pool_rank}")
    if parameters.keys() != weights.keys():
        raise ValueError(
            f"weights: must name the slot's parameters, differs in "
            f"{sorted(parameters.keys() ^ weights.keys())}"
        )
    padded = {
        name: pad_adapter_weight(name, weights[name], parameter.shape, rank)
        for name, parameter in parameters.items()
    }
    reset_slot(model_chunks, optimizer, slot, padded, alpha / rank)
    install_slot_scheduler(optimizer, slot, **schedule)


def retire_adapter(
    model_chunks: Sequence[DistributedDataParallel],
    optimizer: LayerWiseDistributedOptimizer,
    slot: int,
) -> None:
    """Takes a slot's tenant out and leaves nothing of it behind.

    Weights and moments become exact zeros, clocks 0; gradient sum and schedule are dropped; the
    masters of this slot alone are re-read from the model. Co-tenants stay bit-identical.

    Raises:
        ValueError: an unknown slot.
    """
    zeros = {
        name: torch.zeros_like(parameter)
        for name, parameter in adapter_slot_parameters(model_chunks, slot)
    }
    reset_slot(model_chunks, optimizer, slot, zeros, 0.0)
    drop_slot_scheduler(optimizer, slot)
