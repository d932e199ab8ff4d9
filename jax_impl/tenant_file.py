"""One tenant as a safetensors file that other stacks read, too: see docs/tenants.md."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.adamw import AdamState
from jax_impl.clip import ClipState
from jax_impl.config import OptimizerConfig
from jax_impl.hyperparameters import parameter_name
from jax_impl.lion import LionState
from jax_impl.muon import MuonState
from jax_impl.per_slot import take_slot
from jax_impl.schedule import (
    LR_DECAY_STYLES,
    WD_INCR_STYLES,
    WSD_DECAY_STYLES,
    ParamScheduleConfig,
)
from jax_impl.tenant import check_configs, own_tree, tenant_from_arrays
from jax_impl.train_state import SlotTrainState, as_arrays
from tenant_format import TenantFileError, matching, read, training_settings, write

STYLES = {
    "lr_decay_style": LR_DECAY_STYLES,
    "wd_incr_style": WD_INCR_STYLES,
    "lr_wsd_decay_style": WSD_DECAY_STYLES,
}
# What our transforms call what they keep, see `AdamState`, `LionState`, `MuonState`, `ClipState`.
STATE_FIELDS = {
    field for state in (AdamState, LionState, MuonState, ClipState) for field in state._fields
}


def save_tenant(
    path: str | Path,
    state: SlotTrainState,
    slot: int,
    *configs: OptimizerConfig,
    alpha: float | None = None,
) -> None:
    """Writes the tenant in ``slot``, all at once or not at all.

    Args:
      path: a .safetensors file.
      state: a pool of ``multi_lora_optimizer(*configs)``.
      slot: the slot.
      *configs: what the pool was made with.
      alpha: of the adapter, whose scaling is alpha / rank; trainers in JAX keep it in the model.

    Raises:
      ValueError: the slot is free, or the pool was made with something else.
    """
    check_configs(state, configs)
    tenant = state.tenant(slot)
    config = configs[int(tenant.family)]
    arrays, clocks = {}, {}
    for path_in_tree, leaf in jax.tree_util.tree_leaves_with_path(own_tree(tenant)["opt_state"]):
        kind, name = state_field(path_in_tree)
        if kind == "step":
            names = clocked_names(own_tree(tenant)["opt_state"], path_in_tree)
            clocks |= dict.fromkeys(names, int(leaf))
        elif name:
            arrays[f"{name}/{kind}"] = np.asarray(leaf)
    sums = {"grad_sum": tenant.grad_buffer} if tenant.accumulated else {}
    for kind, tree in {"master": tenant.params, **sums}.items():
        for path_in_tree, leaf in jax.tree_util.tree_leaves_with_path(tree):
            key = f"{parameter_name(path_in_tree)}/{kind}"
            if key in arrays:
                raise ValueError(f"two parameters have the name {parameter_name(path_in_tree)}")
            arrays[key] = np.asarray(leaf)
    record = {
        "config": training_settings(dataclasses.asdict(config)),
        "rank": int(tenant.rank),
        "pool_rank": tenant.pool_rank,
        "alpha": alpha,
        "param_dtype": np.dtype(tenant.param_dtype).name,
        "batch_size": int(tenant.batch_size),
        "accumulated": int(tenant.accumulated),
        "samples": int(tenant.samples),
        "clocks": clocks,
        "schedule": schedule_record(tenant.schedule),
    }
    write(path, arrays, record)


def load_tenant(
    path: str | Path, state: SlotTrainState, slot: int, *configs: OptimizerConfig
) -> SlotTrainState:
    """Returns ``state`` with the tenant of the file in the free slot ``slot``.

    Args:
      path: as written by `save_tenant`, of this or of another stack.
      state: a pool of ``multi_lora_optimizer(*configs)``.
      slot: a free slot.
      *configs: what the pool was made with.

    Raises:
      TenantFileError: the file is damaged, of another configuration, or does not fit the pool; the
        message names the file and the field.
      ValueError: the slot is occupied, or the pool was made with something else.
    """
    check_configs(state, configs)
    arrays, record = read(path)
    if not 0 <= record["accumulated"] <= record["batch_size"]:
        raise TenantFileError(
            f"{path}: accumulated is {record['accumulated']} of {record['batch_size']} samples"
        )
    mine = [training_settings(dataclasses.asdict(config)) for config in configs]
    family = matching(mine, record["config"], path)
    here = dataclasses.replace(take_slot(state, 0), family=jnp.int32(family))
    opt_state = own_tree(here)["opt_state"]
    used = set()

    def array(name: str, kind: str, like: jax.Array) -> np.ndarray:
        key = f"{name}/{kind}"
        if key not in arrays:
            raise TenantFileError(f"{path}: {key} is not there")
        if arrays[key].dtype != like.dtype:
            raise TenantFileError(f"{path}: {key} is {arrays[key].dtype}, not {like.dtype}")
        used.add(key)
        return arrays[key]

    def moment(path_in_tree, leaf):
        kind, name = state_field(path_in_tree)
        if kind == "step":
            names = clocked_names(opt_state, path_in_tree)
            clocks = {record["clocks"].get(name) for name in names}
            if names and (len(clocks) != 1 or None in clocks):
                raise TenantFileError(f"{path}: clocks of {names} are {clocks}, not one number")
            return np.asarray(*clocks, leaf.dtype) if names else np.zeros_like(leaf)
        return array(name, kind, leaf) if name else np.zeros_like(leaf)

    def whole(kind: str):
        return jax.tree_util.tree_map_with_path(
            lambda p, x: array(parameter_name(p), kind, x), here.params
        )

    counts = {name: record[name] for name in ("accumulated", "samples", "batch_size", "rank")}
    tree = {
        "params": whole("master"),
        "grad_buffer": whole("grad_sum")
        if record["accumulated"]
        else jax.tree_util.tree_map_with_path(
            lambda p, x: np.zeros_like(array(parameter_name(p), "master", x)), here.params
        ),
        "schedule": as_arrays(ParamScheduleConfig(**record["schedule"])),
        "opt_state": jax.tree_util.tree_map_with_path(moment, opt_state),
        **{name: np.asarray(count, np.int32) for name, count in counts.items()},
    }
    if extra := sorted(arrays.keys() - used):
        raise TenantFileError(f"{path}: {extra[0]} is none of this pool's")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat = {jax.tree_util.keystr(p): np.asarray(leaf) for p, leaf in leaves}
    try:
        tenant = tenant_from_arrays(flat, state, family=family, pool_rank=record["pool_rank"])
        return state.place(slot, tenant)
    except ValueError as error:
        if bool(state.occupied[slot]):
            raise
        raise TenantFileError(f"{path}: {error}") from error


def state_field(path: tuple[Any, ...]) -> tuple[str, str]:
    """The field of an optimizer state that a leaf belongs to, and the parameter's name or ""."""
    for i, key in reversed(list(enumerate(path))):
        if isinstance(key, jax.tree_util.GetAttrKey) and key.name in STATE_FIELDS:
            return key.name, parameter_name(path[i + 1 :])
    return "", parameter_name(path)


def clocked_names(opt_state: Any, path: tuple[Any, ...]) -> list[str]:
    """The parameters whose moments are beside the "step" at ``path``."""
    fields = [
        (other, *state_field(other))
        for other, _ in jax.tree_util.tree_leaves_with_path(opt_state)
        if other[: len(path) - 1] == path[:-1]
    ]
    return [name for _, kind, name in fields if kind == "exp_avg_sq"]


def schedule_record(schedule: ParamScheduleConfig) -> dict[str, Any]:
    """A slot's schedule as Megatron's ``OptimizerParamScheduler`` takes it."""
    record = {field.name: getattr(schedule, field.name) for field in dataclasses.fields(schedule)}
    return {
        name: STYLES[name][int(value)] if name in STYLES else shortest(np.asarray(value))
        for name, value in record.items()
    }


def shortest(value: np.ndarray) -> int | float:
    """The number with the fewest digits that is ``value`` in its dtype.

    A rate that was 0.01 in float64, in another stack, is so again, to the last bit.
    """
    return float(str(value)) if value.dtype.kind == "f" else int(value)
