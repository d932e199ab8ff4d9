"""Writes a slot's tenant into a file that JAX reads, too, and reads it: see docs/tenants.md."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

from tenant_format import TenantFileError, matching, read, training_settings, write
from torch_ref.scheduler import start_slot_scheduler
from torch_ref.slot_state import (
    MOMENTS,
    adapter_slot_state,
    check_adapter_slot_state,
    load_adapter_slot_state,
)
from torch_ref.slots import adapter_slot_parameters, multi_lora_layers
from torch_ref.tenant import reset_slot

SCHEDULE = (
    *("init_lr", "max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style"),
    *("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style"),
    *("wsd_decay_steps", "lr_wsd_decay_style"),
)


def save_tenant(
    path: str | Path,
    model_chunks: Sequence[DistributedDataParallel],
    optimizer: LayerWiseDistributedOptimizer,
    slot: int,
    *,
    rank: int,
    alpha: float,
    batch_size: int,
    accumulated: int = 0,
) -> None:
    """Writes a slot's tenant, all at once or not at all.

    Args:
        path: a .safetensors file.
        model_chunks: the wrapped model, in one process.
        optimizer: as built by `build_multi_lora_optimizer`.
        slot: an occupied slot.
        rank: the tenant's own rank.
        alpha: the adapter's scaling is alpha / rank.
        batch_size: samples per step.
        accumulated: samples in the slot's gradient sum, which is written unless there are none.

    Raises:
        ValueError: an empty or unknown slot, a bad number, or several processes.
    """
    require_one_process()
    scheduler = optimizer.adapter_slot_schedulers.get(slot)
    if scheduler is None:
        raise ValueError(f"slot={slot}: must be occupied")
    if not 1 <= rank <= pool_rank(model_chunks):
        raise ValueError(f"rank={rank}: must be from 1 to the pool's {pool_rank(model_chunks)}")
    if not batch_size >= 1:
        raise ValueError(f"batch_size={batch_size}: must be at least 1")
    if not 0 <= accumulated <= batch_size:
        raise ValueError(f"accumulated={accumulated}: must be from 0 to batch_size={batch_size}")
    state = adapter_slot_state(optimizer, model_chunks, slot)
    kinds = ("master", *MOMENTS, *(("grad_sum",) if accumulated else ()))
    arrays = {
        f"{name}/{kind}": values[kind].float().cpu().numpy()
        for name, values in state.items()
        for kind in kinds
        if kind in values
    }
    schedule = {name: getattr(scheduler, name) for name in SCHEDULE}
    parameter = next(iter(state.values()))["param"]
    record = {
        "config": training_settings(dataclasses.asdict(optimizer.config)),
        "rank": rank,
        "pool_rank": pool_rank(model_chunks),
        "alpha": alpha,
        "param_dtype": str(parameter.dtype).removeprefix("torch."),
        "batch_size": batch_size,
        "accumulated": accumulated,
        "samples": scheduler.num_steps,
        "clocks": {name: values["step"] for name, values in state.items() if "step" in values},
        "schedule": schedule | {"wsd_decay_steps": schedule["wsd_decay_steps"] or 1},
    }
    write(path, arrays, record)


@torch.no_grad()
def load_tenant(
    path: str | Path,
    model_chunks: Sequence[DistributedDataParallel],
    optimizer: LayerWiseDistributedOptimizer,
    slot: int,
    *,
    alpha: float | None = None,
) -> dict[str, Any]:
    """Puts the tenant of a file into an empty slot, where it goes on bit for bit.

    Args:
        path: as written by `save_tenant`, of this or of another stack.
        model_chunks: the wrapped model, in one process.
        optimizer: as built by `build_multi_lora_optimizer`.
        slot: an empty slot.
        alpha: where the file has none.

    Returns:
        The file's record: "rank", "alpha", "batch_size", "accumulated" and "samples" are what a
        trainer has to know.

    Raises:
        TenantFileError: the file is damaged, of another configuration, or does not fit; it names
            the file and the field, and nothing changed.
        ValueError: the slot is occupied, several processes, or no alpha.
    """
    require_one_process()
    arrays, record = read(path)
    matching([training_settings(dataclasses.asdict(optimizer.config))], record["config"], path)
    if slot in optimizer.adapter_slot_schedulers:
        raise ValueError(f"slot={slot}: must be empty, retire its tenant first")
    alpha = record["alpha"] if alpha is None else alpha
    if alpha is None:
        raise ValueError(f"alpha=None: must be given, {path} has none")
    if record["rank"] > pool_rank(model_chunks):
        raise TenantFileError(f"{path}: rank is {record['rank']}, over the pool's")
    parameters = dict(adapter_slot_parameters(model_chunks, slot))
    state: dict[str, dict[str, Any]] = {}
    for key, x in arrays.items():
        name, _, kind = key.rpartition("/")
        if name not in parameters:
            raise TenantFileError(f"{path}: {key} is none of this model's")
        like = parameters[name]
        fitted = fit(torch.from_numpy(x), like, record["pool_rank"], pool_rank(model_chunks))
        if fitted.count_nonzero() != np.count_nonzero(x):
            raise TenantFileError(f"{path}: {key} is not zero beyond its rank {record['rank']}")
        state.setdefault(name, {})[kind] = fitted.to(like.device)
    for name, values in state.items():
        if "master" not in values:
            raise TenantFileError(f"{path}: {name}/master is not there")
        values["param"] = values["master"].to(parameters[name].dtype)
        if name in record["clocks"]:
            values["step"] = record["clocks"][name]
    try:
        check_adapter_slot_state(optimizer, model_chunks, slot, state)
    except ValueError as error:
        raise TenantFileError(f"{path}: {error}") from error
    weights = {name: values["param"] for name, values in state.items()}
    reset_slot(model_chunks, optimizer, slot, weights, alpha / record["rank"])
    start_slot_scheduler(optimizer, slot, record["schedule"], record["samples"])
    load_adapter_slot_state(optimizer, model_chunks, slot, state)
    for name, values in state.items():
        if "grad_sum" in values:
            parameters[name].main_grad.copy_(values["grad_sum"])
    return record


def fit(x: torch.Tensor, like: torch.Tensor, from_rank: int, to_rank: int) -> torch.Tensor:
    """Cuts or pads with zeros the axes that are ``from_rank`` long where ``like`` has ``to_rank``.

    What is cut is padding: the tenant's own rank fits.
    """
    if x.ndim != like.ndim:
        return x
    sizes = [
        to_rank if (have, want) == (from_rank, to_rank) else have
        for have, want in zip(x.shape, like.shape, strict=True)
    ]
    fitted = x.new_zeros(sizes)
    common = tuple(slice(min(have, size)) for have, size in zip(x.shape, sizes, strict=True))
    fitted[common] = x[common]
    return fitted


def pool_rank(model_chunks: Sequence[DistributedDataParallel]) -> int:
    """The rank that adapters are padded to."""
    return min(layer.rank for _, layer in multi_lora_layers(model_chunks))


def require_one_process() -> None:
    """Refuses several ranks, of which each has a part only."""
    if parallel_state.get_tensor_and_data_parallel_group().size() > 1:
        raise ValueError("tenant files are written and read by a single process")
