"""Runs the JAX side of a scenario on several devices, the reference as ever."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jax_impl.layerwise import LayerwiseState, by_layer, layerwise
from jax_impl.placement import by_slot, by_tensor, on_own_slots
from jax_impl.train_state import SlotTrainState
from parity.candidate import MODES, Candidate, Mode
from parity.checks import Result
from parity.observation import Observation, StepOutcome
from parity.pieces import partition_dims
from parity.run import run
from parity.scenario import Scenario

AXIS = "devices"


def run_on_mesh(scenario: Scenario, placement: str, modes: Sequence[Mode] = MODES) -> Result:
    """`parity.run.run` with every JAX pool on all devices, by "slot", "layer" or "tensor"."""
    result = run(scenario, modes, functools.partial(MeshCandidate, placement=placement))
    named = dataclasses.replace(scenario, name=f"{scenario.name} by {placement}")
    return dataclasses.replace(result, scenario=named)


def mesh_for(scenario: Scenario, placement: str) -> jax.sharding.Mesh:
    """All devices along one axis; by slot only as many as divide the slots, and copies beside."""
    devices = jax.device_count()
    along = math.gcd(devices, scenario.pool.n_slots) if placement == "slot" else devices
    return jax.make_mesh((along, devices // along), (AXIS, "copies"))


class MeshCandidate(Candidate):
    """The pool of a scenario in JAX, placed on a mesh before and after every operation."""

    def __init__(self, scenario: Scenario, mode: Mode, placement: str):
        super().__init__(scenario, mode)
        mesh, step, state = mesh_for(scenario, placement), SlotTrainState.step, self.state
        if placement == "slot":
            step = on_own_slots(step, mesh, AXIS)
            self.shardings = by_slot(state, mesh, AXIS)
        elif placement == "layer":
            tx = layerwise(state.tx, state.params, mesh, AXIS)
            self.state = dataclasses.replace(state, tx=tx, opt_state=tx.init(state.params))
            self.shardings = by_layer(self.state, mesh, AXIS)
        else:
            # What the scenario cuts, or, where it cuts nothing, every long side.
            dims = partition_dims(scenario) or None
            self.shardings = by_tensor(state, state.params, mesh, AXIS, partition_dim=dims)
        jit = functools.partial(jax.jit, donate_argnums=0)
        self._placed_step = jit(step, out_shardings=(self.shardings, None))
        self._placed_accumulate = jit(SlotTrainState.accumulate, out_shardings=self.shardings)
        self._place()

    def accumulate(self, slot: int, samples: int, grads: dict[str, Any]) -> None:
        self.state = self._placed_accumulate(self.state, *self._pool_grads(slot, samples, grads))

    def step(self, slots: Iterable[int]) -> dict[int, StepOutcome]:
        self.state, report = self._placed_step(self.state, self._named(slots))
        return self._outcomes(slots, report)

    def retire(self, slot: int) -> None:
        super().retire(slot)
        self._place()

    def observe(self) -> Observation:
        placed = self.state
        self.state = self._whole(placed)
        try:
            return super().observe()
        finally:
            self.state = placed

    def adopt(self, observation: Observation) -> None:
        spread = isinstance(self.state.opt_state, LayerwiseState)
        self.state = self._whole(self.state)
        super().adopt(observation)
        if spread:
            opt_state = self.state.tx.owned(self.state.opt_state)
            self.state = dataclasses.replace(self.state, opt_state=opt_state)
        self._place()

    def _install(self, tenant: str, slot: int, **kept: Any) -> None:
        super()._install(tenant, slot, **kept)
        self._place()

    def _place(self) -> None:
        self.state = jax.device_put(self.state, self.shardings)

    def _whole(self, state: SlotTrainState) -> SlotTrainState:
        if not isinstance(state.opt_state, LayerwiseState):
            return state
        return dataclasses.replace(state, opt_state=state.tx.whole(state.opt_state))
