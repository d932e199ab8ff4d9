"""Runs a scenario's events on the JAX side."""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_impl
from jax_impl.tenant_file import clocked_names, load_tenant, save_tenant, state_field
from parity import gradients
from parity.observation import MOMENTS, Observation, SlotView, StepOutcome
from parity.pieces import partition_dims
from parity.scenario import Scenario

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way of running the JAX side beside the reference.

    Attributes:
        name: "gram", "standard" or "free".
        ns_method: the form of Newton–Schulz.
        locked: before each event the state is overwritten with the reference's, so that an error
            is one step's.
        by_index: slots are named by padded index rather than by mask.
    """

    name: str
    ns_method: str
    locked: bool
    by_index: bool


MODES = (
    Mode("gram", "gram", locked=True, by_index=False),
    Mode("standard", "standard", locked=True, by_index=True),
    Mode("free", "gram", locked=False, by_index=True),
)


@functools.partial(jax.jit, donate_argnums=0)
def _accumulate(state, grads, samples):
    return state.accumulate(grads, samples)


@functools.partial(jax.jit, donate_argnums=0)
def _step(state, slots):
    return state.step(slots)


@jax.jit
def _rates(schedule, samples):
    return jax_impl.param_schedule(schedule)(samples)


class Candidate:
    """The multi-LoRA pool of a scenario in JAX."""

    def __init__(self, scenario: Scenario, mode: Mode):
        self.scenario, self.mode = scenario, mode
        self.config = config = jax_impl.OptimizerConfig(
            **scenario.optimizer,
            ns_method=mode.ns_method,
            tensor_model_parallel_size=scenario.ranks.tensor_parallel,
            partition_dim=partition_dims(scenario),
        )
        size, dtype = scenario.pool.n_slots, DTYPES[scenario.precision]
        shapes = gradients.adapter_shapes(scenario, scenario.pool.rank)
        pool = {name: jax.ShapeDtypeStruct((size, *shape), dtype) for name, shape in shapes.items()}
        self.state = jax_impl.SlotTrainState.create(
            jax_impl.multi_lora_optimizer(config),
            pool,
            rank=scenario.pool.rank,
            grad_norm_skip_threshold=config.grad_norm_skip_threshold,
        )
        self.occupants: dict[int, str] = {}
        self.retired: dict[str, dict[str, Any]] = {}

    def install(self, tenant: str, slot: int, resume_step: int = 0) -> None:
        weights = gradients.initial_weights(self.scenario, tenant)
        samples = resume_step * self.scenario.tenants[tenant].batch_size
        self._install(tenant, slot, params=weights, samples=samples)

    def accumulate(self, slot: int, samples: int, grads: dict[str, np.ndarray]) -> None:
        self.state = _accumulate(self.state, *self._pool_grads(slot, samples, grads))

    def step(self, slots: Iterable[int]) -> dict[int, StepOutcome]:
        self.state, report = _step(self.state, self._named(slots))
        return self._outcomes(slots, report)

    def retire(self, slot: int) -> None:
        kept = {
            "params": self.state.params,
            "opt_state": self.state.opt_state,
            "samples": self.state.samples,
        }
        self.retired[self.occupants.pop(slot)] = jax_impl.take_slot(kept, slot)
        self.state = self.state.retire(slot)

    def resume(self, tenant: str, slot: int) -> None:
        self._install(tenant, slot, **self.retired.pop(tenant))

    def save(self, path: Path, slot: int) -> None:
        """Writes the slot's tenant for either stack."""
        alpha = self.scenario.tenants[self.occupants[slot]].alpha
        save_tenant(path, self.state, slot, self.config, alpha=alpha)

    def load(self, path: Path, tenant: str, slot: int) -> None:
        """Puts a retired tenant back, as either stack has written it."""
        del self.retired[tenant]
        self.state = load_tenant(path, self.state, slot, self.config)
        self.occupants[slot] = tenant

    def observe(self) -> Observation:
        state = jax.device_get(self.state)
        params = jax.device_get(
            {name: p.astype(jnp.float32) for name, p in self.state.model_params().items()}
        )
        lr, weight_decay = map(np.asarray, _rates(self.state.schedule, self.state.samples))
        pool = {("param", name): p for name, p in params.items()}
        pool |= {("master", name): p for name, p in state.params.items()}
        pool |= {("grad_sum", name): p for name, p in jax.device_get(self.state.grad_sum).items()}
        clocks: dict[str, np.ndarray] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
            kind, name = state_field(path)
            if kind in MOMENTS:
                pool[kind, name] = leaf
            if kind == "exp_avg_sq":
                clocks[name] = clock_beside(state.opt_state, path)
        return {
            slot: SlotView(
                tensors={key: np.array(leaf[slot]) for key, leaf in pool.items()},
                clocks={name: int(clock[slot]) for name, clock in clocks.items()},
                samples=int(state.samples[slot]),
                lr=float(lr[slot]) if slot in self.occupants else None,
                weight_decay=float(weight_decay[slot]) if slot in self.occupants else None,
            )
            for slot in range(self.scenario.pool.n_slots)
        }

    def adopt(self, observation: Observation) -> None:
        """Overwrites parameters, moments and clocks with those of an observation."""
        size = self.scenario.pool.n_slots

        def stack(kind, name):
            return jnp.stack([observation[slot].tensors[kind, name] for slot in range(size)])

        def adopted(path, leaf):
            kind, name = state_field(path)
            if kind in MOMENTS:
                return stack(kind, name)
            if kind == "step" and (owned := clocked_names(self.state.opt_state, path)):
                clocks = [observation[slot].clocks[owned[0]] for slot in range(size)]
                return jnp.asarray(clocks, leaf.dtype)
            return leaf

        self.state = dataclasses.replace(
            self.state,
            params={name: stack("master", name) for name in self.state.params},
            opt_state=jax.tree_util.tree_map_with_path(adopted, self.state.opt_state),
        )

    def _install(self, tenant: str, slot: int, **kept: Any) -> None:
        settings = self.scenario.tenants[tenant]
        self.state = self.state.install(
            slot,
            rank=settings.rank,
            batch_size=settings.batch_size,
            schedule=jax_impl.slot_schedule(**settings.schedule_settings()),
            **kept,
        )
        self.occupants[slot] = tenant

    def _pool_grads(self, slot: int, samples: int, grads: dict[str, np.ndarray]):
        """Gradients and samples of one slot as those of the pool, zero elsewhere."""
        size = self.scenario.pool.n_slots
        pool_grads = {
            name: np.zeros((size, *grad.shape), np.float32) for name, grad in grads.items()
        }
        for name, grad in grads.items():
            pool_grads[name][slot] = grad
        counts = np.zeros(size, np.int32)
        counts[slot] = samples
        return pool_grads, counts

    def _outcomes(self, slots: Iterable[int], report: Any) -> dict[int, StepOutcome]:
        report = jax.device_get(report)
        return {
            slot: StepOutcome(
                float(report.grad_norm[slot]),
                float(report.learning_rate[slot]),
                float(report.weight_decay[slot]),
                bool(report.stepped[slot]),
            )
            for slot in slots
        }

    def _named(self, slots: Iterable[int]) -> np.ndarray:
        size = self.scenario.pool.n_slots
        if self.mode.by_index:
            # Padded by entries that name no slot, and by repetitions.
            return np.resize(np.asarray([*slots, -1], np.int32), size)
        return np.isin(np.arange(size), tuple(slots))


def clock_beside(opt_state: Any, path: tuple[Any, ...]) -> np.ndarray:
    """The "step" of the Adam state that holds the moment at ``path``."""
    return next(
        leaf
        for other, leaf in jax.tree_util.tree_leaves_with_path(opt_state)
        if state_field(other)[0] == "step" and other[:-1] == path[:-2]
    )
