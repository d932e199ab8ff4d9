"""Finds what belongs to one slot: parameters in the model, children in the optimizer."""

from collections.abc import Iterator, Sequence

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer

from torch_ref.multi_lora import MultiLoRALinear


def multi_lora_layers(
    model_chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, MultiLoRALinear]]:
    """(name, layer) of every multi-LoRA layer, named as in the unwrapped model.

    Names of a model of several chunks begin with "chunks.<index>.", since chunks number their
    layers independently.
    """
    for index, chunk in enumerate(model_chunks):
        prefix = f"chunks.{index}." if len(model_chunks) > 1 else ""
        for name, module in chunk.named_modules():
            if isinstance(module, MultiLoRALinear):
                while name.startswith("module."):
                    name = name.removeprefix("module.")
                yield prefix + name, module


def count_adapter_slots(model_chunks: Sequence[torch.nn.Module]) -> int:
    """The number of slots that the model's layers have; 0 for a model without adapters."""
    return max((len(layer.adapters) for _, layer in multi_lora_layers(model_chunks)), default=0)


def adapter_slot_parameters(
    model_chunks: Sequence[torch.nn.Module], slot: int
) -> list[tuple[str, torch.nn.Parameter]]:
    """(slot-free name, parameter) of one slot's adapter, in the model's order.

    A slot-free name is the parameter's name without "adapters.<slot>.", for example
    "layers.0.mlp.linear_fc1.linear_in".

    Raises:
        ValueError: the slot has no parameters.
    """
    parameters = [
        (f"{layer_name}.{name}", parameter)
        for layer_name, layer in multi_lora_layers(model_chunks)
        if 0 <= slot < len(layer.adapters)
        for name, parameter in layer.adapters[slot].named_parameters()
    ]
    if not parameters:
        raise ValueError(
            f"slot={slot} has no parameters: the model has {count_adapter_slots(model_chunks)} "
            "adapter slots"
        )
    return parameters


def adapter_slot_children(optimizer: ChainedOptimizer, slot: int) -> list[MegatronOptimizer]:
    """The chained optimizers that update one slot.

    Raises:
        ValueError: no child's parameter groups are tagged with the slot.
    """
    children = [
        child
        for child in optimizer.chained_optimizers
        if any(group.get("adapter_slot") == slot for group in child.param_groups)
    ]
    if not children:
        raise ValueError(f"slot={slot}: must be a slot that the optimizer was built with")
    return children
