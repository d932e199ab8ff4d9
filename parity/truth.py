"""What the float64 oracle says of a scenario, one step at a time or all along."""

import dataclasses
from typing import Any

import numpy as np
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from megatron.core.optimizer import OptimizerConfig

from parity import gradients, oracle
from parity.observation import MOMENTS, SlotView
from parity.scenario import Scenario


@dataclasses.dataclass
class SlotTruth:
    """One slot in float64.

    Attributes:
        params: by slot-free name, padded.
        state: as in `oracle.init_state`.
        origin: the parameters that errors are measured from: those before the step of a locked
            run, those at installation of a free one.
        norm: of the last step's mean gradient.
    """

    params: dict[str, np.ndarray]
    state: dict[str, dict[str, Any]]
    origin: dict[str, np.ndarray]
    norm: float = 0.0


class Judge:
    """Steps slots of one scenario in float64."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.optimizer = vars(OptimizerConfig(**scenario.optimizer))
        self.coefficients = muon_utils._COEFFICIENT_SETS[self.optimizer["muon_coefficient_type"]]

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
        lr, wd = self.rates(tenant, samples)
        params, state, norm = oracle.step(
            slot.params,
            slot.state,
            {name: g.astype(np.float64) for name, g in grad_sums.items()},
            batch_size=self.scenario.tenants[tenant].batch_size,
            lr=lr,
            wd=wd,
            optimizer=self.optimizer,
            coefficients=self.coefficients,
            **options,
        )
        return SlotTruth(params, state, slot.origin, norm)

    def rates(self, tenant: str, samples: int) -> tuple[float, float]:
        """Learning rate and weight decay at schedule position ``samples``."""
        return oracle.schedule(samples, **self.scenario.tenants[tenant].schedule())
