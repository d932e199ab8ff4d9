"""A small pool, synthetic gradients and bitwise comparison for tests."""

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig

from torch_ref.multi_lora import LayerShape, MultiLoRAStack
from torch_ref.setup import setup_model_and_optimizer
from torch_ref.slot_state import adapter_slot_state
from torch_ref.slots import adapter_slot_parameters
from torch_ref.tenant import install_adapter

LAYERS = (LayerShape("wide", 24, 8, True), LayerShape("tall", 8, 24, True))
RANK = 4


def pool_config(optimizer: str, *, bf16: bool = False, **settings: Any) -> OptimizerConfig:
    """A config whose Newton-Schulz iteration runs in float32."""
    settings = {"lr": 1e-2, "min_lr": 0.0, "muon_fp32_matmul_prec": "highest"} | settings
    return OptimizerConfig(optimizer=optimizer, bf16=bf16, **settings)


def make_stack(*, bf16: bool = False, n_slots: int = 3) -> MultiLoRAStack:
    """An unwrapped stack of two layers with biases."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    return MultiLoRAStack(LAYERS, n_slots, RANK, params_dtype=dtype)


def make_pool(optimizer: str, *, bf16: bool = False, n_slots: int = 3, **settings: Any):
    """(wrapped chunks, optimizer) of `make_stack`."""
    return setup_model_and_optimizer(
        make_stack(bf16=bf16, n_slots=n_slots), pool_config(optimizer, bf16=bf16, **settings)
    )


def random_weights(chunks, seed: int, rank: int = RANK) -> dict[str, torch.Tensor]:
    """Random adapter weights at rank `rank`, bf16-representable."""
    generator = torch.Generator().manual_seed(seed)
    own = {"linear_in": (slice(rank), slice(None)), "linear_out": (slice(None), slice(rank))}
    return {
        name: torch.randn(parameter.shape, generator=generator)[
            own.get(name.rpartition(".")[2], slice(None))
        ]
        .bfloat16()
        .float()
        for name, parameter in adapter_slot_parameters(chunks, 0)
    }


def install(chunks, optimizer, slot: int, *, seed: int = 0, **schedule: Any) -> None:
    """Installs a random full-rank tenant."""
    schedule = {"lr": 1e-2, "batch_size": 4} | schedule
    weights = random_weights(chunks, seed)
    install_adapter(chunks, optimizer, slot, weights, rank=RANK, alpha=8.0, **schedule)


def accumulate(chunks, slot: int, seed: int) -> None:
    """Adds random gradients to one slot's sum."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in adapter_slot_parameters(chunks, slot):
        parameter.main_grad.add_(
            torch.randn(parameter.shape, generator=generator).to(parameter.device)
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, so that signs of zeros and NaNs count."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_bits_equal(actual: dict[str, dict], expected: dict[str, dict]) -> None:
    """Two slot states agree in every bit."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert actual[name].keys() == expected[name].keys()
        for key, value in expected[name].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(bits(actual[name][key]), bits(value)), (name, key)
            else:
                assert actual[name][key] == value, (name, key)


def slot_states(chunks, optimizer, slots) -> dict[int, dict]:
    """{slot: its state} of several slots."""
    return {slot: adapter_slot_state(optimizer, chunks, slot) for slot in slots}
