"""Turns a tenant's file into another kind: tenant file, Orbax checkpoint, PEFT adapter."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tenant_format
from jax_impl import OptimizerConfig, SlotTrainState, multi_lora_optimizer
from jax_impl.checkpoint import TenantCheckpoints
from jax_impl.peft import export_adapter
from jax_impl.tenant_file import load_tenant, save_tenant

KINDS = ("tenant", "checkpoint", "peft")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A tenant in slot 0 of a pool of its own, with what the pool does not know.

    Attributes:
        alpha: of the adapter, None where the file has none.
    """

    state: SlotTrainState
    config: OptimizerConfig
    alpha: float | None


def convert(source: Path, target: Path, kind: str, *, alpha: float | None = None) -> None:
    """Reads a tenant file or a checkpoint folder and writes ``target``.

    Args:
        source: a .safetensors tenant file, or ``<directory>/<name>`` of `TenantCheckpoints`.
        target: a .safetensors file for "tenant", ``<directory>/<name>`` for "checkpoint", a folder
            for "peft".
        kind: one of `KINDS`.
        alpha: of the adapter, where the source has none.

    Raises:
        ValueError: a source that cannot be used, or no alpha for PEFT.
    """
    if not source.exists():
        raise ValueError(f"there is no {source}")
    loaded = read_tenant(source) if source.is_file() else read_checkpoint(source)
    alpha = loaded.alpha if alpha is None else alpha
    if kind == "tenant":
        save_tenant(target, loaded.state, 0, loaded.config, alpha=alpha)
    elif kind == "checkpoint":
        with TenantCheckpoints(target.parent, loaded.config) as checkpoints:
            checkpoints.save(target.name, loaded.state, 0)
    else:
        if alpha is None:
            raise ValueError(f"{source} has no alpha, which PEFT needs: give it")
        tenant = loaded.state.tenant(0)
        export_adapter(target, tenant.params, rank=int(tenant.rank), alpha=alpha)


def read_tenant(path: Path) -> Loaded:
    """Reads a tenant file into a pool made for it."""
    arrays, record = tenant_format.read(path)
    names = {key.removesuffix("/master"): x for key, x in arrays.items() if key.endswith("/master")}
    shapes = {name: x.shape for name, x in names.items()}
    config = config_from(record["config"], scalar_matrices(arrays, shapes))
    state = pool_of_one(shapes, config, record["pool_rank"], record["param_dtype"])
    return Loaded(load_tenant(path, state, 0, config), config, record["alpha"])


def read_checkpoint(path: Path) -> Loaded:
    """Reads the newest checkpoint of ``<directory>/<name>`` into a pool made for it."""
    with TenantCheckpoints(path.parent) as checkpoints:
        metadata = checkpoints.metadata(path.name)
    if metadata["config"] is None:
        raise ValueError(f"{path} was saved without a configuration")
    config = config_from(metadata["config"])
    shapes = {name: tuple(shape) for name, shape in metadata["shapes"].items()}
    state = pool_of_one(shapes, config, metadata["pool_rank"], metadata["param_dtype"])
    with TenantCheckpoints(path.parent, config) as checkpoints:
        return Loaded(checkpoints.restore(path.name, state, 0), config, None)


def config_from(settings: Mapping[str, Any], scalar: Iterable[str] = ()) -> OptimizerConfig:
    """The configuration of recorded settings; of Megatron's, those that ours has."""
    names = {field.name for field in dataclasses.fields(OptimizerConfig)}
    own = {name: value for name, value in settings.items() if name in names}
    if (scalar := tuple(scalar)) and not own.get("embedding_or_output_parameters"):
        own["embedding_or_output_parameters"] = scalar
    return OptimizerConfig(**own)


def scalar_matrices(
    arrays: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """The matrices whose state is not Muon's though others' is: embeddings and outputs."""
    by_muon = {name for name in shapes if f"{name}/momentum_buffer" in arrays}
    matrices = {name for name, shape in shapes.items() if len(shape) == 2}
    return sorted(matrices - by_muon) if by_muon else []


def pool_of_one(
    shapes: Mapping[str, tuple[int, ...]], config: OptimizerConfig, rank: int, dtype: str
) -> SlotTrainState:
    """An empty pool of one slot."""
    pool = {name: jax.ShapeDtypeStruct((1, *s), np.dtype(dtype)) for name, s in shapes.items()}
    return SlotTrainState.create(multi_lora_optimizer(config), pool, rank=rank)
