"""What the tests on several devices share: a pool, its life, and the placements it lives in."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_impl.config import OptimizerConfig
from jax_impl.layerwise import LayerwiseState, by_layer, layerwise
from jax_impl.multi_lora import multi_lora_optimizer
from jax_impl.per_slot import take_slot
from jax_impl.placement import automatic, by_slot, by_tensor, create, on_own_slots
from jax_impl.schedule import ParamScheduleConfig, slot_schedule
from jax_impl.train_state import SlotTrainState

AXIS = "devices"
N_SLOTS, RANK, WIDTH = 8, 4, 64
PLACEMENTS = ("slot", "layer", "tensor")
OPTIMIZER = OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest")


class Pool(NamedTuple):
    """A pool, and its operations, which keep it where it is.

    ``programs`` are those of its steps so far, by how slots were named: "all", "mask", "index".
    """

    state: SlotTrainState
    shardings: Any
    install: Any
    resume: Any
    accumulate: Any
    step: Any
    retire: Any
    programs: dict[str, jax.stages.Compiled]


def mesh_of(devices: int) -> Mesh:
    return jax.make_mesh((devices,), (AXIS,))


def shapes(n_layers: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Matrices of both kinds in every layer, and one vector."""
    one = {"linear_in": (RANK, WIDTH), "linear_out": (WIDTH, RANK)}
    each = {f"{layer}.{name}": shape for layer in range(n_layers) for name, shape in one.items()}
    return {
        name: jax.ShapeDtypeStruct((N_SLOTS, *shape), jnp.float32)
        for name, shape in (each | {"bias": (8,)}).items()
    }


def pool_on(
    mesh: Mesh | None,
    placement: str = "none",
    *,
    n_layers: int,
    config: OptimizerConfig = OPTIMIZER,
    **by: Any,
) -> Pool:
    """A pool so placed; without a mesh, on one device. ``by`` goes to `by_tensor`."""
    params, tx = shapes(n_layers), multi_lora_optimizer(config)
    if placement == "layer":
        tx = layerwise(tx, params, mesh, AXIS)
    place = {
        "none": lambda tree: None,
        "slot": lambda tree: by_slot(tree, mesh, AXIS),
        "layer": lambda tree: by_layer(tree, mesh, AXIS),
        "tensor": lambda tree: by_tensor(tree, tree.params, mesh, AXIS, **by),
    }[placement]
    make = functools.partial(SlotTrainState.create, tx, params, rank=RANK)
    shardings = place(jax.eval_shape(make))
    step = SlotTrainState.step
    if placement == "slot":
        step = on_own_slots(step, mesh, AXIS)
    jit = functools.partial(jax.jit, donate_argnums=0)
    jitted, programs = jit(step, out_shardings=(shardings, None)), {}

    def step_once_compiled(state, slots=None):
        kind = "all" if slots is None else "mask" if slots.dtype == bool else "index"
        if kind not in programs:
            programs[kind] = jitted.lower(state, slots).compile()
        return programs[kind](state, slots)

    return Pool(
        create(make, place),
        shardings,
        jit(_install, out_shardings=shardings),
        jit(resume, out_shardings=shardings),
        jit(SlotTrainState.accumulate, out_shardings=shardings),
        step_once_compiled,
        jit(SlotTrainState.retire, out_shardings=shardings),
        programs,
    )


def _install(state, slot, params):
    schedule = slot_schedule(lr=0.02, batch_size=2, num_step=10, lr_decay_style="cosine")
    return state.install(slot, params, rank=RANK, batch_size=2, schedule=schedule)


def tenant_of(state: SlotTrainState, slot: Any) -> dict[str, Any]:
    """All that a tenant takes along, in the form that it has without `layerwise`."""
    whole = whole_state(state)
    names = ("params", "opt_state", "samples", "batch_size")
    kept = {name: getattr(whole, name) for name in names}
    # Orbax puts names in place of a tree's leaves, and a schedule's styles are no such names.
    return take_slot(kept | {"schedule": vars(whole.schedule)}, slot)


def resume(state: SlotTrainState, slot: Any, tenant: dict[str, Any]) -> SlotTrainState:
    """Puts a tenant as `tenant_of` gave it into a slot of any pool."""
    opt_state = tenant["opt_state"]
    if isinstance(state.opt_state, LayerwiseState):
        one_slot = jax.tree.map(lambda x: x[None], opt_state)
        opt_state = jax.tree.map(lambda x: x[0], state.tx.owned(one_slot))
    schedule = ParamScheduleConfig(**tenant["schedule"])
    kept = tenant | {"opt_state": opt_state, "schedule": schedule}
    return state.install(slot, rank=RANK, **kept)


def tenant(number: int, pool: Pool) -> dict[str, np.ndarray]:
    """A tenant's weights."""
    rng = np.random.default_rng([1, number])
    return {
        name: rng.standard_normal(p.shape[1:], np.float32) * np.float32(0.1)
        for name, p in pool.state.params.items()
    }


def gradients(step: int, tenants: Sequence[int], pool: Pool) -> dict[str, np.ndarray]:
    """Gradients (S, ...) of these tenants, each of its own size."""
    rngs = [np.random.default_rng([2, step, number]) for number in tenants]
    return {
        name: np.stack(
            [
                np.float32(number + 1) * rng.standard_normal(p.shape[1:], np.float32)
                for number, rng in zip(tenants, rngs, strict=True)
            ]
        )
        for name, p in pool.state.params.items()
    }


class Life(NamedTuple):
    """What `live` saw.

    Attributes:
      events: (what, slots that it changes, leaves of the state after it, leaves of the report).
      state: the last one.
    """

    events: list[tuple[str, list[int], Any, Any]]
    state: SlotTrainState


def live(pool: Pool, mesh: Mesh | None = None) -> Life:
    """Installs a tenant in each slot and steps them all, some by index, and those that are full.

    Slot 1 gets a new tenant on the way.
    """
    every = np.full(N_SLOTS, 2, np.int32)
    odd = np.flatnonzero(np.arange(N_SLOTS) % 2)
    index = np.asarray([odd[1], 1, -1, 1], np.int32)
    state, events = pool.state, []

    def see(what, slots, *report):
        changed = sorted(set(map(int, slots)))
        events.append((what, changed, on_host(state, mesh), on_host(report, mesh)))

    def accumulate(samples):
        grads = gradients(len(events), range(N_SLOTS), pool)
        return pool.accumulate(state, grads, samples)

    for slot in range(N_SLOTS):
        state = pool.install(state, slot, tenant(slot, pool))
    see("install", range(N_SLOTS))
    state = accumulate(every)
    see("accumulate", range(N_SLOTS))
    state, report = pool.step(state)
    see("step", range(N_SLOTS), report)
    state = accumulate(np.where(np.isin(np.arange(N_SLOTS), odd), 2, 1).astype(np.int32))
    see("accumulate", range(N_SLOTS))
    state, report = pool.step(state, index)
    see("step", index[index >= 0], report)
    state = pool.retire(state, 1)
    see("retire", [1])
    state = pool.install(state, 1, tenant(99, pool))
    see("install", [1])
    state, report = pool.step(state)
    see("step", [slot for slot in odd if slot not in index], report)
    return Life(events, state)


def live_briefly(pool: Pool, mesh: Mesh | None = None) -> tuple[list[np.ndarray], SlotTrainState]:
    """Installs a tenant in each slot and steps all twice: the leaves of what came out, the state.

    Those of the state come first, those of the last step's report after them.
    """
    state = pool.state
    for slot in range(N_SLOTS):
        state = pool.install(state, slot, tenant(slot, pool))
    for event in range(2):
        grads = gradients(event, range(N_SLOTS), pool)
        state = pool.accumulate(state, grads, np.full(N_SLOTS, 2, np.int32))
        state, report = pool.step(state)
    return on_host(state, mesh) + on_host(report, mesh), state


def on_host(tree: Any, mesh: Mesh | None = None) -> list[np.ndarray]:
    """The leaves in NumPy, in the order of a pool on one device, wherever they are."""
    return jax.device_get(_everywhere(mesh)(tree))


def whole_state(state: SlotTrainState) -> SlotTrainState:
    """The state as it is without `layerwise`."""
    if not isinstance(state.opt_state, LayerwiseState):
        return state
    return dataclasses.replace(state, opt_state=state.tx.whole(state.opt_state))


@functools.cache
def _everywhere(mesh: Mesh | None):
    def leaves(tree):
        return jax.tree.leaves(whole_state(tree) if isinstance(tree, SlotTrainState) else tree)

    return jax.jit(leaves, out_shardings=mesh and NamedSharding(automatic(mesh), PartitionSpec()))
