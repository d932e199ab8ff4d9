"""What the tests on several devices share: a pool, its life, and the placements it lives in."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_impl.config import OptimizerConfig
from jax_impl.layerwise import LayerwiseState, by_layer, layerwise
from jax_impl.multi_lora import multi_lora_optimizer
from jax_impl.placement import by_slot, by_tensor, create, on_own_slots, replicated
from jax_impl.schedule import slot_schedule
from jax_impl.train_state import SlotTrainState

AXIS = "devices"
N_SLOTS, N_LAYERS, RANK, WIDTH = 8, 8, 4, 64
PLACEMENTS = ("slot", "layer", "tensor")
OPTIMIZER = OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest")


class Pool(NamedTuple):
    """A pool, and its operations, which keep it where it is.

    ``programs`` are those of its steps so far, by how slots were named: "all", "mask", "index".
    """

    state: SlotTrainState
    shardings: Any
    install: Any
    accumulate: Any
    step: Any
    retire: Any
    programs: dict[str, jax.stages.Compiled]


def mesh_of(devices: int) -> Mesh:
    return jax.make_mesh((devices,), (AXIS,))


def shapes(n_slots: int = N_SLOTS) -> dict[str, jax.ShapeDtypeStruct]:
    """Matrices of both kinds in every layer, and one vector."""
    one = {"linear_in": (RANK, WIDTH), "linear_out": (WIDTH, RANK)}
    each = {f"{layer}.{name}": shape for layer in range(N_LAYERS) for name, shape in one.items()}
    return {
        name: jax.ShapeDtypeStruct((n_slots, *shape), jnp.float32)
        for name, shape in (each | {"bias": (8,)}).items()
    }


def pool_on(
    mesh: Mesh | None,
    placement: str = "none",
    *,
    n_slots: int = N_SLOTS,
    config: OptimizerConfig = OPTIMIZER,
    **by: Any,
) -> Pool:
    """A pool so placed; without a mesh, on one device. ``by`` goes to `by_tensor`."""
    params, tx = shapes(n_slots), multi_lora_optimizer(config)
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
        jit(SlotTrainState.accumulate, out_shardings=shardings),
        step_once_compiled,
        jit(SlotTrainState.retire, out_shardings=shardings),
        programs,
    )


def _install(state, slot, params):
    schedule = slot_schedule(lr=0.02, batch_size=2, num_step=10, lr_decay_style="cosine")
    return state.install(slot, params, rank=RANK, batch_size=2, schedule=schedule)


def tenant(number: int) -> dict[str, np.ndarray]:
    """A tenant's weights."""
    rng = np.random.default_rng([1, number])
    return {
        name: rng.standard_normal(p.shape[1:], np.float32) * np.float32(0.1)
        for name, p in shapes().items()
    }


def gradients(step: int, tenants: list[int]) -> dict[str, np.ndarray]:
    """Gradients (S, ...) of these tenants, each of its own size."""

    def one(number):
        rng = np.random.default_rng([2, step, number])
        return [
            (number + 1) * rng.standard_normal(p.shape[1:], np.float32) for p in shapes().values()
        ]

    return dict(zip(shapes(), map(np.stack, zip(*map(one, tenants), strict=True)), strict=True))


class Life(NamedTuple):
    """What `live` saw.

    Attributes:
      events: (what, slots that it changes, leaves of the state after it, leaves of the report).
      state: the last one.
    """

    events: list[tuple[str, list[int], Any, Any]]
    state: SlotTrainState


def live(pool: Pool, mesh: Mesh | None = None) -> Life:
    """Installs a tenant in each slot and steps them by mask, by index, and with nothing named.

    Slot 1 gets a new tenant on the way.
    """
    every = np.full(N_SLOTS, 2, np.int32)
    odd = np.flatnonzero(np.arange(N_SLOTS) % 2)
    index = np.asarray([odd[1], 1, -1, 1], np.int32)
    state, events = pool.state, []

    def see(what, slots, *report):
        whole = state
        if isinstance(state.opt_state, LayerwiseState):
            whole = dataclasses.replace(state, opt_state=state.tx.whole(state.opt_state))
        changed = sorted(set(map(int, slots)))
        events.append((what, changed, on_host(whole, mesh), on_host(report, mesh)))

    def accumulate(samples):
        return pool.accumulate(state, gradients(len(events), range(N_SLOTS)), samples)

    for slot in range(N_SLOTS):
        state = pool.install(state, slot, tenant(slot))
    see("install", range(N_SLOTS))
    state = accumulate(every)
    see("accumulate", range(N_SLOTS))
    state, report = pool.step(state, every > 0)
    see("step", range(N_SLOTS), report)
    state = accumulate(np.where(np.isin(np.arange(N_SLOTS), odd), 2, 1).astype(np.int32))
    see("accumulate", range(N_SLOTS))
    state, report = pool.step(state, index)
    see("step", index[index >= 0], report)
    state = pool.retire(state, 1)
    see("retire", [1])
    state = pool.install(state, 1, tenant(99))
    see("install", [1])
    state, report = pool.step(state)
    see("step", [slot for slot in odd if slot not in index], report)
    return Life(events, state)


def on_host(tree: Any, mesh: Mesh | None = None) -> Any:
    """The leaves in NumPy, wherever they are."""
    leaves, _ = jax.tree.flatten(tree)
    if mesh is not None:
        leaves = jax.jit(lambda x: x, out_shardings=replicated(leaves, mesh))(leaves)
    return jax.device_get(leaves)
