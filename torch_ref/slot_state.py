"""Reads, writes and scrubs one slot's optimizer state."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer

from torch_ref.slots import adapter_slot_children, adapter_slot_parameters

MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "moment2_buffer")


def clock_of(state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any] | None:
    """Where a parameter's clock lives: its state, its group, or nowhere."""
    return next((holder for holder in (state, group) if "step" in holder), None)


def set_clock(holder: dict[str, Any], step: int) -> None:
    """Sets "step", a number or a tensor, of a parameter's state or of a parameter group."""
    if isinstance(holder["step"], torch.Tensor):
        holder["step"].fill_(step)
    else:
        holder["step"] = step


@torch.no_grad()
def zero_optimizer_state_for_adapter(optimizer: ChainedOptimizer, slot: int) -> None:
    """Sets one slot's moments to exact zeros and its clocks to 0, wherever they live.

    A state that torch has not made yet stays unmade: it means the same.

    Raises:
        ValueError: an unknown slot.
    """
    for child in adapter_slot_children(optimizer, slot):
        states = [child.optimizer.state.get(p, {}) for p in child.get_parameters()]
        for holder in [*child.param_groups, *states]:
            if "step" in holder:
                set_clock(holder, 0)
        for state in states:
            for moment in MOMENTS:
                if moment in state:
                    state[moment].zero_()


def reload_adapter_slot_model_params(optimizer: ChainedOptimizer, slot: int) -> None:
    """Re-reads one slot's master weights from the model; float32 models have none.

    The co-tenants' masters keep the low mantissa bits that their bf16 weights do not show.

    Raises:
        ValueError: an unknown slot.
    """
    for child in adapter_slot_children(optimizer, slot):
        child.reload_model_params()


def materialize_state(child: MegatronOptimizer) -> None:
    """Makes the zero state that torch would otherwise make at the first step."""
    child.init_state_fn(child.optimizer, child.config)
    if isinstance(child.optimizer, torch.optim.Adam):
        # Megatron makes the two moments only; without its clock torch's Adam raises KeyError.
        for group in child.param_groups:
            for parameter in group["params"]:
                clock_device = parameter.device if group["capturable"] else "cpu"
                clock = torch.zeros((), dtype=torch.float32, device=clock_device)
                child.optimizer.state[parameter].setdefault("step", clock)


def owned_parameters(
    optimizer: ChainedOptimizer, model_chunks: Sequence[DistributedDataParallel], slot: int
) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor, dict[str, Any], dict[str, Any]]]:
    """(name, parameter, master, its state, its group) of the parameters this rank updates."""
    owners = {}
    for child in adapter_slot_children(optimizer, slot):
        materialize_state(child)
        for group in child.param_groups:
            for master in group["params"]:
                owners[id(master)] = (child.optimizer.state[master], group)
    for name, parameter in adapter_slot_parameters(model_chunks, slot):
        master = getattr(parameter, "main_param", parameter)
        if id(master) in owners:
            yield name, parameter, master, *owners[id(master)]


@torch.no_grad()
def adapter_slot_state(
    optimizer: ChainedOptimizer, model_chunks: Sequence[DistributedDataParallel], slot: int
) -> dict[str, dict[str, Any]]:
    """Copies everything one slot's training depends on.

    Args:
        optimizer: as built by `build_multi_lora_optimizer`.
        model_chunks: the chunks it was built on.
        slot: the slot to read.

    Returns:
        {slot-free name: {"param", "master" (float32), "grad_sum" (float32, DDP's `main_grad`),
        the moments by their names ("momentum_buffer"; or "exp_avg", "exp_avg_sq"), "step" (int, if
        the optimizer has a clock), "lr", "weight_decay"}}, for the parameters whose state this
        rank owns: all of them, unless there are several data-parallel ranks.

    Raises:
        ValueError: an unknown slot.
    """
    result = {}
    for name, parameter, master, state, group in owned_parameters(optimizer, model_chunks, slot):
        result[name] = {
            "param": parameter.detach().clone(),
            "master": master.detach().clone(),
            "grad_sum": parameter.main_grad.clone(),
            **{moment: state[moment].clone() for moment in MOMENTS if moment in state},
            **({"step": int(clock["step"])} if (clock := clock_of(state, group)) else {}),
            "lr": float(group["lr"]),
            "weight_decay": float(group["weight_decay"]),
        }
    return result


def check_adapter_slot_state(
    optimizer: ChainedOptimizer,
    model_chunks: Sequence[DistributedDataParallel],
    slot: int,
    state: Mapping[str, Mapping[str, Any]],
) -> None:
    """Refuses a state that is not of this slot's parameters and optimizer.

    Raises:
        ValueError: an unknown slot, or other names, state or shapes than the slot's.
    """
    parameters = dict(adapter_slot_parameters(model_chunks, slot))
    if parameters.keys() != state.keys():
        raise ValueError(
            f"state: must name the slot's parameters, differs in "
            f"{sorted(parameters.keys() ^ state.keys())}"
        )
    for name, _, master, own_state, group in owned_parameters(optimizer, model_chunks, slot):
        missing = (own_state | group).keys() & {*MOMENTS, "step"} - state[name].keys()
        if missing:
            raise ValueError(f"state[{name!r}]: must have {sorted(missing)}")
        for kind in own_state.keys() & set(MOMENTS) | {"master"}:
            here = master if kind == "master" else own_state[kind]
            if state[name][kind].shape != here.shape:
                raise ValueError(
                    f"state[{name!r}][{kind!r}]: must have the shape {tuple(here.shape)}, not "
                    f"{tuple(state[name][kind].shape)}"
                )


@torch.no_grad()
def load_adapter_slot_state(
    optimizer: ChainedOptimizer,
    model_chunks: Sequence[DistributedDataParallel],
    slot: int,
    state: Mapping[str, Mapping[str, Any]],
) -> None:
    """Writes weights, masters, moments and clocks as `adapter_slot_state` read them.

    The gradient sum is not written, and learning rate and weight decay are left to the slot's
    schedule. The slot may be another than the one that was read: the tenant goes on bit for bit.

    Args:
        optimizer: as built by `build_multi_lora_optimizer`.
        model_chunks: the chunks it was built on.
        slot: the slot to write.
        state: of all the slot's parameters; several data-parallel ranks merge theirs first.

    Raises:
        ValueError: an unknown slot, or other names or state than the slot's; nothing was written.
    """
    parameters = dict(adapter_slot_parameters(model_chunks, slot))
    owned = list(owned_parameters(optimizer, model_chunks, slot))
    check_adapter_slot_state(optimizer, model_chunks, slot, state)
    for name, parameter in parameters.items():
        parameter.copy_(state[name]["param"])
    for name, _, master, own_state, group in owned:
        master.copy_(state[name]["master"])
        for moment in own_state.keys() & set(MOMENTS):
            own_state[moment].copy_(state[name][moment])
        if clock := clock_of(own_state, group):
            set_clock(clock, state[name]["step"])
