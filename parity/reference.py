"""Runs a scenario's events on the real Megatron stack. Inside `torch_ref.start_megatron`."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torch_ref
from parity import gradients, pieces, text
from parity.observation import MOMENTS, Observation, SlotView, StepOutcome
from parity.scenario import OWN_FIELDS, Scenario, Stack, Tenant

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Reference:
    """The multi-LoRA pool of a scenario under Megatron.

    Attributes:
        share: which of every event's samples are this process's.
    """

    share = slice(None)

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.config = reference_config(scenario)
        model = build_model(scenario)
        tag_parameters(scenario, model)
        self.chunks, self.optimizer = torch_ref.setup_model_and_optimizer(model, self.config)
        self.occupants: dict[int, str] = {}
        self.retired: dict[str, tuple[dict[str, Any], int]] = {}

    def install(self, tenant: str, slot: int, resume_step: int = 0) -> None:
        weights = gradients.initial_weights(self.scenario, tenant)
        parts = {name: self.part(name, weight) for name, weight in weights.items()}
        self._install(tenant, slot, parts, resume_step)

    def part(self, name: str, whole: np.ndarray) -> np.ndarray:
        """What this process holds of a whole tensor."""
        return whole

    def accumulate(self, slot: int, samples: int, index: int) -> dict[str, np.ndarray]:
        """Adds one event's gradients to the slot's sum and returns them, float32."""
        parameters = dict(torch_ref.adapter_slot_parameters(self.chunks, slot))
        if self.scenario.gradients == "text":
            return self._backward(slot, samples, index, parameters)
        rank = self.scenario.tenants[self.occupants[slot]].rank
        shapes = gradients.adapter_shapes(self.scenario, self.scenario.pool.rank)
        added = {}
        for name, parameter in parameters.items():
            added[name] = gradients.gradient(
                self.scenario, shapes[name], rank, name, index, self.scenario.gradients, self.share
            )
            part = self.part(name, added[name])[tuple(map(slice, parameter.shape))]
            part = torch.from_numpy(part)
            parameter.main_grad.add_(part.to(parameter.device))
        return added

    def step(self, slots: Iterable[int]) -> dict[int, StepOutcome]:
        batch_sizes = {slot: self._tenant(slot).batch_size for slot in slots}
        rates = {slot: self._rates(slot) for slot in batch_sizes}
        norms = torch_ref.step_adapter_slots(self.optimizer, batch_sizes, self.config.clip_grad)
        torch_ref.step_slot_schedulers(self.optimizer, batch_sizes)
        return {slot: StepOutcome(norms[slot], *rates[slot]) for slot in batch_sizes}

    def discard(self, slots: Iterable[int]) -> None:
        """Drops gradient sums: Megatron's per-slot path has no steps that are skipped."""
        for slot in slots:
            torch_ref.zero_adapter_slot_grads(self.optimizer, slot)

    def retire(self, slot: int) -> None:
        tenant = self.occupants.pop(slot)
        state = torch_ref.adapter_slot_state(self.optimizer, self.chunks, slot)
        self.retired[tenant] = state, self._samples(slot)
        torch_ref.retire_adapter(self.chunks, self.optimizer, slot)

    def resume(self, tenant: str, slot: int) -> None:
        state, samples = self.retired.pop(tenant)
        weights = {name: values["param"] for name, values in state.items()}
        self._install(tenant, slot, weights, samples // self.scenario.tenants[tenant].batch_size)
        torch_ref.load_adapter_slot_state(self.optimizer, self.chunks, slot, state)

    def save(self, path: Path, slot: int) -> None:
        """Writes the slot's tenant for either stack."""
        tenant = self._tenant(slot)
        torch_ref.save_tenant(
            path,
            self.chunks,
            self.optimizer,
            slot,
            rank=tenant.rank,
            alpha=tenant.alpha,
            batch_size=tenant.batch_size,
        )

    def load(self, path: Path, tenant: str, slot: int) -> None:
        """Puts a retired tenant back, as either stack has written it."""
        del self.retired[tenant]
        torch_ref.load_tenant(path, self.chunks, self.optimizer, slot)
        self.occupants[slot] = tenant

    def observe(self) -> Observation:
        return {slot: self._view(slot) for slot in range(self.scenario.pool.n_slots)}

    def _install(self, tenant: str, slot: int, weights: Mapping[str, Any], resume_step: int):
        settings = self.scenario.tenants[tenant]
        torch_ref.install_adapter(
            self.chunks,
            self.optimizer,
            slot,
            {name: torch.as_tensor(weight) for name, weight in weights.items()},
            rank=settings.rank,
            alpha=settings.alpha,
            resume_step=resume_step,
            **settings.schedule_settings(),
        )
        self.occupants[slot] = tenant

    def _backward(self, slot, samples, index, parameters) -> dict[str, np.ndarray]:
        """Forward and backward of the transformer, through Megatron's own DDP hooks."""
        batch = text.batch(
            self.scenario.seed,
            index,
            samples,
            self.scenario.model.seq_length,
            self.occupants[slot],
        )
        tokens = torch.from_numpy(batch[self.share])
        device = next(iter(parameters.values())).device
        slots = torch.full(tokens.shape[:1], slot, device=device)
        (chunk,) = self.chunks
        torch_ref.reset_grad_metadata_keep_grads(self.chunks)
        with captured_gradients(parameters) as captured:
            if len(tokens):  # a small batch leaves a data-parallel rank without a sample
                chunk.module.sample_losses(tokens.to(device), slots).sum().backward()
        chunk.finish_grad_sync()
        return {name: to_numpy(captured[name]) for name in parameters}

    def _tenant(self, slot: int) -> Tenant:
        return self.scenario.tenants[self.occupants[slot]]

    def _samples(self, slot: int) -> int:
        scheduler = self.optimizer.adapter_slot_schedulers.get(slot)
        return scheduler.num_steps if scheduler else 0

    def _rates(self, slot: int) -> tuple[float, float]:
        """Learning rate and weight decay in the slot's groups, of the parameters that decay.

        Where all groups have a rate of their own, what the slot's schedule says.
        """
        groups = [
            group
            for child in torch_ref.adapter_slot_children(self.optimizer, slot)
            for group in child.param_groups
        ]
        usual = [group for group in groups if group["default_config"]]
        if not usual:  # every parameter has a learning rate of its own
            scheduler = self.optimizer.adapter_slot_schedulers[slot]
            return scheduler.get_lr({}), scheduler.get_wd()
        decayed = next((group for group in usual if group["wd_mult"] == 1.0), usual[0])
        return float(decayed["lr"]), float(decayed["weight_decay"])

    def _view(self, slot: int) -> SlotView:
        state = torch_ref.adapter_slot_state(self.optimizer, self.chunks, slot)
        lr, weight_decay = self._rates(slot) if slot in self.occupants else (None, None)
        return SlotView(
            tensors={
                (kind, name): self._padded(name, to_numpy(values[kind]), values["param"].shape)
                for name, values in state.items()
                for kind in ("param", "master", "grad_sum", *MOMENTS)
                if kind in values
            },
            clocks={name: values["step"] for name, values in state.items() if "step" in values},
            samples=self._samples(slot),
            lr=lr,
            weight_decay=weight_decay,
        )

    def _padded(self, name: str, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """What has the parameter's shape here, in the pool's: see `pool_rank`."""
        if self.scenario.pool.rank == pool_rank(self.scenario) or x.shape != shape:
            return x
        whole = gradients.adapter_shapes(self.scenario, self.scenario.pool.rank)[name]
        return gradients.pad(x, self.part(name, np.empty(whole)).shape)


def reference_config(scenario: Scenario) -> torch_ref.SlotOptimizerConfig:
    """What the reference knows of the scenario's settings; the rest is ours alone."""
    ours = (*OWN_FIELDS, "grad_norm_skip_threshold")
    known = {key: value for key, value in scenario.optimizer.items() if key not in ours}
    return torch_ref.SlotOptimizerConfig(**known, bf16=scenario.precision == "bf16")


def reference_name(scenario: Scenario) -> str:
    """Whose class updates the matrices: see `torch_ref.is_beyond_megatron`."""
    beyond = torch_ref.is_beyond_megatron(reference_config(scenario))
    return "emerging-optimizers" if beyond else "megatron"


def pool_rank(scenario: Scenario) -> int:
    """The rank of the reference's pool.

    Megatron's scale modes read the padded rank. Where JAX reads the adapter's own (``rank_aware``),
    the reference is a pool without padding.
    """
    if scenario.optimizer.get("rank_aware"):
        return max(tenant.rank for tenant in scenario.tenants.values())
    return scenario.pool.rank


def tag_parameters(scenario: Scenario, model: torch.nn.Module) -> None:
    """Sets the attributes by which Megatron knows embeddings, outputs and fused matrices."""
    outer = scenario.optimizer.get("embedding_or_output_parameters", [])
    for slot in range(scenario.pool.n_slots):
        for name, parameter in torch_ref.adapter_slot_parameters([model], slot):
            if any(fnmatchcase(name, pattern) for pattern in outer):
                parameter.is_embedding_or_output_parameter = True
            if shapes := pieces.qkv_split_shapes(scenario, name):
                parameter.is_qkv, parameter.qkv_split_shapes = True, list(shapes)


def build_model(scenario: Scenario) -> torch.nn.Module:
    """The scenario's model with an empty adapter in every slot."""
    pool = {"n_slots": scenario.pool.n_slots, "rank": pool_rank(scenario)}
    dtype = DTYPES[scenario.precision]
    if isinstance(scenario.model, Stack):
        layers = [dataclasses.astuple(layer) for layer in scenario.model.layers]
        model = torch_ref.MultiLoRAStack(layers, **pool, params_dtype=dtype)
    else:
        model = torch_ref.MultiLoRATransformer(
            **dataclasses.asdict(scenario.model),
            **pool,
            bias=True,
            params_dtype=dtype,
            seed=scenario.seed,
        )
    return model.cuda() if torch.cuda.is_available() else model


@contextmanager
def captured_gradients(
    parameters: Mapping[str, torch.nn.Parameter],
) -> Iterator[dict[str, torch.Tensor]]:
    """Collects each parameter's gradient as autograd hands it to DDP, zeros where it does not."""
    captured = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    hooks = [
        parameter.register_hook(lambda grad, name=name: captured.update({name: grad.clone()}))
        for name, parameter in parameters.items()
    ]
    try:
        yield captured
    finally:
        for hook in hooks:
            hook.remove()


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """float32 NumPy copy; exact for bf16."""
    return tensor.detach().float().cpu().numpy().copy()
