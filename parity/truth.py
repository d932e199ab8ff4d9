"""What the float64 oracle says of a scenario, one step at a time or all along."""

import dataclasses
import functools
from typing import Any

import numpy as np
from emerging_optimizers.orthogonalized_optimizers import muon_utils

from parity import gradients, oracle, policy
from parity.observation import MOMENTS, SlotView
from parity.pieces import muon_pieces
from parity.scenario import OWN_FIELDS, Scenario
from torch_ref import SlotOptimizerConfig


@dataclasses.dataclass
class SlotTruth:
    """One slot in float64.

    Attributes:
        params: by slot-free name, padded.
        state: as in `oracle.init_state`.
        origin: the parameters that errors are measured from: those before the step of a locked
            run, those at installation of a free one.
        norm: of the last step's mean gradient.
        stepped: whether the last step took place, or was skipped for that norm.
        doubts: of the tensors that Lion updates, the elements in which rounding may have decided a
            sign since the origin.
    """

    params: dict[str, np.ndarray]
    state: dict[str, dict[str, Any]]
    origin: dict[str, np.ndarray]
    norm: float = 0.0
    stepped: bool = True
    doubts: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


class Judge:
    """Steps slots of one scenario in float64."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        # Our own fields have their defaults in one place, Megatron's in another.
        known = {k: v for k, v in scenario.optimizer.items() if k not in OWN_FIELDS}
        own = {k: scenario.optimizer.get(k, default) for k, default in OWN_FIELDS.items()}
        self.optimizer = vars(SlotOptimizerConfig(**known)) | own
        sets = muon_utils._COEFFICIENT_SETS | {"custom": self.optimizer["custom_coefficients"]}
        self.coefficients = sets[self.optimizer["muon_coefficient_type"]]

    def install(self, tenant: str) -> SlotTruth:
        """A tenant's slot right after its installation."""
        shapes = gradients.adapter_shapes(self.scenario, self.scenario.pool.rank)
        weights = gradients.initial_weights(self.scenario, tenant)
        params = {
            name: gradients.pad(weights[name].astype(np.float64), shape)
            for name, shape in shapes.items()
        }
        return SlotTruth(params, oracle.init_state(params, self.optimizer), origin=params)

    def adopt(self, view: SlotView) -> SlotTruth:
        """The slot as a runner shows it."""
        params = {
            name: x.astype(np.float64)
            for (kind, name), x in view.tensors.items()
            if kind == "master"
        }
        state: dict[str, dict[str, Any]] = {name: {} for name in params}
        for (kind, name), x in view.tensors.items():
            if kind in MOMENTS:
                state[name][kind] = x.astype(np.float64)
        for name, clock in view.clocks.items():
            state[name]["step"] = clock
        return SlotTruth(params, state, origin=params)

    def step(
        self,
        slot: SlotTruth,
        grad_sums: dict[str, np.ndarray],
        tenant: str,
        samples: int,
        **options,
    ) -> SlotTruth:
        """The slot after a step at schedule position ``samples``."""
        settings = self.scenario.tenants[tenant]
        sums = {name: g.astype(np.float64) for name, g in grad_sums.items()}
        grads, norm = oracle.clipped_gradients(sums, settings.batch_size, self.optimizer)
        if oracle.is_skipped(norm, self.optimizer):
            return dataclasses.replace(slot, norm=norm, stepped=False)
        params, state, _ = oracle.step(
            slot.params,
            slot.state,
            sums,
            batch_size=settings.batch_size,
            rates=functools.partial(
                oracle.group_rates,
                samples=samples,
                plan=settings.schedule(),
                optimizer=self.optimizer,
            ),
            optimizer=self.optimizer,
            coefficients=self.coefficients,
            pieces=functools.partial(muon_pieces, self.scenario),
            own_shape=functools.partial(gradients.own_shape, rank=settings.rank),
            **options,
        )
        doubts = {name: self._doubts(slot, name, grads[name]) for name in params}
        return SlotTruth(params, state, slot.origin, norm, True, doubts)

    def _doubts(self, slot: SlotTruth, name: str, grad: np.ndarray) -> np.ndarray:
        """Where rounding may have decided the sign of an update, in this step or before it."""
        before = slot.doubts.get(name, np.zeros(grad.shape, bool))
        if oracle.owner(name, grad, self.optimizer) != "lion":
            return before
        beta1, moment = self.optimizer["lion_beta1"], slot.state[name]["exp_avg"]
        return before | oracle.lion_doubts(moment, grad, beta1, policy.SIGN_PRECISION)

    def rates(self, tenant: str, samples: int) -> tuple[float, float]:
        """Learning rate and weight decay at schedule position ``samples``."""
        return oracle.schedule(samples, **self.scenario.tenants[tenant].schedule())
