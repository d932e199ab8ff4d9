"""One optimizer per slot, out of Megatron's own parts."""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.emerging_optimizers import (
    HAVE_EMERGING_OPTIMIZERS,
    TensorParallelMuon,
)
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_pg_size

from torch_ref.emerging import check_beyond_megatron, emerging_muon, is_beyond_megatron
from torch_ref.slots import adapter_slot_children, adapter_slot_parameters


def resolve_dist_muon(config: OptimizerConfig) -> OptimizerConfig:
    """Reads `optimizer="dist_muon"` as "muon".

    Megatron's own reading of the name would shard each slot's children apart from the others';
    here the sharding is applied once over all of them.
    """
    if config.optimizer != "dist_muon":
        return config
    warnings.warn('optimizer="dist_muon" means "muon" here', DeprecationWarning, stacklevel=3)
    return dataclasses.replace(config, optimizer="muon")


def check_config(config: OptimizerConfig) -> None:
    """Refuses what per-slot optimizers cannot do.

    Raises:
        ValueError: an unknown optimizer, the distributed optimizer, or fp16.
        ImportError: Muon without emerging-optimizers.
    """
    if config.optimizer not in ("adam", "muon", "adaptive_muon"):
        raise ValueError(
            f"optimizer={config.optimizer!r}: must be 'adam', 'muon' or 'adaptive_muon'"
        )
    if config.muon_scalar_optimizer not in ("adam", "lion"):
        raise ValueError(
            f"muon_scalar_optimizer={config.muon_scalar_optimizer!r}: must be 'adam' or 'lion'"
        )
    if math.isfinite(config.grad_norm_skip_threshold):
        raise ValueError(
            f"grad_norm_skip_threshold={config.grad_norm_skip_threshold}: must be infinite, slots "
            "are stepped one by one and Megatron's check is not on that path"
        )
    if config.use_distributed_optimizer:
        raise ValueError(
            "use_distributed_optimizer=True: must be False, per-slot optimizers shard whole "
            "parameters layer-wise instead"
        )
    if config.fp16:
        raise ValueError("fp16=True: must be False, use bf16 or float32")
    if config.optimizer != "adam" and not HAVE_EMERGING_OPTIMIZERS:
        raise ImportError(
            f"optimizer={config.optimizer!r} needs the package emerging-optimizers: pip install "
            "emerging-optimizers==0.3.0"
        )


def check_ddp(model_chunks: Sequence[DistributedDataParallel]) -> None:
    """Refuses DDP settings under which a slot's gradient sum would not survive other slots' steps.

    Raises:
        ValueError: naming the setting and what is right.
    """
    for chunk in model_chunks:
        for setting, value, right in (
            ("grad_reduce_in_fp32", chunk.ddp_config.grad_reduce_in_fp32, True),
            ("use_distributed_optimizer", chunk.ddp_config.use_distributed_optimizer, False),
            # A slot without tokens in a batch has no gradient that the overlap could wait for.
            ("overlap_grad_reduce", chunk.ddp_config.overlap_grad_reduce, False),
            # A repeated sync changes nothing in an average; a sum would grow.
            ("calculate_per_token_loss", chunk.config.calculate_per_token_loss, False),
        ):
            if value != right:
                raise ValueError(f"{setting}={value}: must be {right}")


def check_model(model_chunks: Sequence[DistributedDataParallel], n_slots: int) -> None:
    """Refuses a model whose trainable parameters are not exactly the slots' adapters.

    Raises:
        ValueError: a slot without parameters, an expert-parallel adapter, or a trainable parameter
            outside the slots.
    """
    if n_slots < 1:
        raise ValueError(f"n_slots={n_slots}: must be at least 1")
    adapters = [
        named for slot in range(n_slots) for named in adapter_slot_parameters(model_chunks, slot)
    ]
    for name, parameter in adapters:
        if not getattr(parameter, "allreduce", True):
            raise ValueError(f"{name} is an expert-parallel adapter: these are not supported")
    owned = {id(parameter) for _, parameter in adapters}
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad and id(parameter) not in owned:
                raise ValueError(f"{name} belongs to none of the {n_slots} slots: freeze it")


def qkv_parameters(model_chunks: Sequence[DistributedDataParallel], n_slots: int) -> list[str]:
    """Names of the fused matrices that Muon splits: those tagged `is_qkv`, as Megatron tags them.

    Raises:
        ValueError: one whose rows are no multiple of the sum of its `qkv_split_shapes`. Megatron
            would silently orthogonalise it as a whole.
    """
    names = []
    for slot in range(n_slots):
        for name, parameter in adapter_slot_parameters(model_chunks, slot):
            if not getattr(parameter, "is_qkv", False):
                continue
            names.append(name)
            shapes = getattr(parameter, "qkv_split_shapes", None)
            if not shapes or parameter.shape[0] % sum(shapes):
                raise ValueError(
                    f"{name} is tagged is_qkv: its {parameter.shape[0]} rows must be a multiple of "
                    f"the sum of its qkv_split_shapes={shapes}"
                )
    return names


@contextlib.contextmanager
def only_slot_trainable(
    model_chunks: Sequence[DistributedDataParallel], slot: int
) -> Iterator[None]:
    """Freezes every parameter but one slot's, and unfreezes them afterwards."""
    own = {id(parameter) for _, parameter in adapter_slot_parameters(model_chunks, slot)}
    others = [
        parameter
        for chunk in model_chunks
        for parameter in chunk.parameters()
        if parameter.requires_grad and id(parameter) not in own
    ]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def tag_param_groups(
    children: Sequence[MegatronOptimizer], slot: int, explicit_lr: frozenset[str]
) -> None:
    """Marks the groups as the slot's, and which of their learning rates a tenant may set.

    A group's own `max_lr` and `min_lr` beat the scheduler's. Megatron fills them from the config,
    except where an override (a decoupled learning rate) set them explicitly.
    """
    for child in children:
        for group in child.param_groups:
            explicit = frozenset() if group["default_config"] else explicit_lr
            group["adapter_slot"] = slot
            group["tenant_lr_keys"] = tuple(sorted({"max_lr", "min_lr"} - explicit))


def build_slot_children(
    config: OptimizerConfig, model_chunks: Sequence[DistributedDataParallel], slot: int
) -> list[MegatronOptimizer]:
    """The optimizers that Megatron builds for one slot's adapter alone.

    Where it cannot, its Muon gives way to Emerging-Optimizers' on the same parameter groups.
    """
    overrides = get_standard_config_overrides(config)  # fresh: Megatron adds its own entries to it
    explicit_lr = frozenset(key for override in overrides.values() for key in override)
    with only_slot_trainable(model_chunks, slot):
        built = get_megatron_optimizer(config, list(model_chunks), overrides)
    children = [child for child in built.chained_optimizers if child.get_parameters()]
    if is_beyond_megatron(config):
        for child in children:
            if isinstance(child.optimizer, TensorParallelMuon):
                child.optimizer = emerging_muon(config, child.optimizer.param_groups)
    tag_param_groups(children, slot, explicit_lr)
    return children


def build_multi_lora_optimizer(
    config: OptimizerConfig, model_chunks: Sequence[DistributedDataParallel], n_slots: int
) -> LayerWiseDistributedOptimizer:
    """Builds every slot's optimizers and shards them once, layer-wise, over data-parallel ranks.

    Args:
        config: `optimizer` is "adam", "muon", "adaptive_muon" or the deprecated "dist_muon". Its
            `lr` and `min_lr` serve only until a tenant's schedule is installed. See
            `SlotOptimizerConfig` for more settings than Megatron's.
        model_chunks: DDP-wrapped chunks whose only trainable parameters are the adapters.
        n_slots: number of slots.

    Returns:
        The chained optimizer; its `adapter_slot_schedulers` holds the installed schedules by slot.

    Raises:
        ValueError: see `check_config`, `check_ddp`, `check_model`, `qkv_parameters` and
            `check_beyond_megatron`.
        ImportError: Muon without emerging-optimizers.
    """
    config = resolve_dist_muon(config)
    check_config(config)
    check_ddp(model_chunks)
    check_model(model_chunks, n_slots)
    check_beyond_megatron(config, qkv_parameters(model_chunks, n_slots))
    config = dataclasses.replace(
        config,
        lr=0.0 if config.lr is None else config.lr,
        use_layer_wise_distributed_optimizer=False,
    )
    # Layer-wise makes the bf16 masters itself, after sharding, so its children must not have any.
    child_config = dataclasses.replace(config, bf16=False)
    children = [
        child
        for slot in range(n_slots)
        for child in build_slot_children(child_config, model_chunks, slot)
    ]
    optimizer = LayerWiseDistributedOptimizer(
        [child.optimizer for child in children] if config.bf16 else children,
        config,
        ProcessGroupCollection.use_mpu_process_groups(),
        [child.init_state_fn for child in children],
        list(model_chunks),
    )
    for child in optimizer.chained_optimizers:
        child.grad_stats_parallel_group = None  # each parameter has one owner in the whole world
    optimizer.adapter_slot_schedulers = {}
    return optimizer


def scale_to_mean(
    children: Sequence[MegatronOptimizer], batch_size: int, n_data_parallel: int
) -> None:
    """Turns a sum over samples, which DDP divided by its ranks, into the mean over the batch."""
    for child in children:
        for parameter in child.get_parameters():
            parameter.grad.mul_(n_data_parallel / batch_size)


def clip_slot_grads(children: Sequence[MegatronOptimizer], clip_grad: float) -> float:
    """Clips by the L2 norm over all of the slot's children; returns the norm before clipping."""
    norm = get_grad_norm_fp32([g for child in children for g in child.get_grads_for_grad_norm()])
    if clip_grad > 0:
        parameters = [p for child in children for p in child.get_parameters()]
        clip_grad_by_total_norm_fp32(parameters, clip_grad, norm)
    return float(norm)


@torch.no_grad()
def step_adapter_slots(
    optimizer: LayerWiseDistributedOptimizer,
    batch_sizes: Mapping[int, int],
    clip_grad: float,
) -> dict[int, float]:
    """Steps the named slots, each on the mean gradient of its own batch.

    Every other slot keeps its gradient sum, clock, moments and weights bit for bit. With several
    data-parallel ranks, finish DDP's gradient sync first.

    Args:
        optimizer: as built by `build_multi_lora_optimizer`.
        batch_sizes: {slot: samples in its gradient sum, over all ranks}.
        clip_grad: largest norm of a slot's mean gradient; 0 or less means no clipping.

    Returns:
        {slot: norm of the mean gradient before clipping}.

    Raises:
        ValueError: an unknown slot or a batch size below 1, before any slot is stepped.
    """
    slot_children = {slot: adapter_slot_children(optimizer, slot) for slot in batch_sizes}
    for slot, batch_size in batch_sizes.items():
        if batch_size < 1:
            raise ValueError(f"batch_sizes[{slot}]={batch_size}: must be at least 1")
    norms = {}
    for slot, children in slot_children.items():
        for child in children:
            child.prepare_grads()
        scale_to_mean(children, batch_sizes[slot], get_pg_size(optimizer.dp_cp))
        norms[slot] = clip_slot_grads(children, clip_grad)
        for child in children:
            child.step_with_ready_grads()
        zero_adapter_slot_grads(optimizer, slot)
    optimizer.broadcast_params()
    return norms


@torch.no_grad()
def zero_adapter_slot_grads(optimizer: LayerWiseDistributedOptimizer, slot: int) -> None:
    """Drops one slot's gradients everywhere they live: DDP's buffer, parameters and masters."""
    for child in adapter_slot_children(optimizer, slot):
        child.zero_grad()
    # This rank's children own a shard of the slot; DDP's buffer holds all of it on every rank.
    for _, parameter in adapter_slot_parameters(optimizer.model_chunks, slot):
        parameter.main_grad.zero_()


def reset_grad_metadata_keep_grads(model_chunks: Sequence[DistributedDataParallel]) -> None:
    """Readies DDP for the next batch as its `zero_grad_buffer` does, but keeps the buffers."""
    for chunk in model_chunks:
        for parameter in chunk.params_with_grad:
            parameter.grad_added_to_main_grad = False
        for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            bucket_group.reset()
