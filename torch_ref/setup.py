"""Wraps a model for Megatron and builds the optimizer that fits it."""

from collections.abc import Callable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer

from torch_ref.optimizer import build_multi_lora_optimizer
from torch_ref.slots import count_adapter_slots

Model = torch.nn.Module | Sequence[torch.nn.Module]


def setup_model_and_optimizer(
    model_chunks_or_provider: Model | Callable[[], Model],
    config: OptimizerConfig,
    ddp_config: DistributedDataParallelConfig | None = None,
    *,
    n_slots: int | None = None,
) -> tuple[list[DistributedDataParallel], ChainedOptimizer]:
    """Moves the model to Megatron's device, wraps it in Megatron's DDP, builds its optimizer.

    A model with adapters gets one optimizer per slot, whichever optimizer the config names; any
    other gets Megatron's own.

    Args:
        model_chunks_or_provider: a module with Megatron's `config`, a sequence of them, or a
            function that makes either.
        config: the optimizer's.
        ddp_config: DDP's; by default gradients are reduced and kept in float32.
        n_slots: number of slots; by default as many as the model's layers have, if any.

    Returns:
        (wrapped chunks, optimizer).

    Raises:
        ValueError: see `build_multi_lora_optimizer`.
        ImportError: Muon without emerging-optimizers.
    """
    model = model_chunks_or_provider
    if not isinstance(model, torch.nn.Module | Sequence):
        model = model()
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    ddp_config = ddp_config or DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [
        DistributedDataParallel(chunk.config, ddp_config, chunk.cuda(), disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    n_slots = count_adapter_slots(wrapped) if n_slots is None else n_slots
    if n_slots:
        return wrapped, build_multi_lora_optimizer(config, wrapped, n_slots)
    return wrapped, get_megatron_optimizer(config, wrapped)
