import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from torch_ref.setup import setup_model_and_optimizer
from torch_ref.testing import make_stack, pool_config


class PlainModel(MegatronModule):
    """A model without adapters."""

    def __init__(self):
        super().__init__(TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1))
        self.linear = torch.nn.Linear(4, 3)


def test_a_provider_may_make_the_model(device):
    chunks, optimizer = setup_model_and_optimizer(make_stack, pool_config("adam"))
    assert len(chunks) == 1
    assert len(optimizer.chained_optimizers) == 3


def test_gradients_are_kept_in_float32(device):
    chunks, _ = setup_model_and_optimizer(make_stack(bf16=True), pool_config("adam", bf16=True))
    parameter = chunks[0].module.wide.adapters[0].linear_in
    assert parameter.dtype == torch.bfloat16
    assert parameter.main_grad.dtype == torch.float32


def test_adapters_choose_the_multi_lora_builder_before_plain_muon(device):
    _, pool = setup_model_and_optimizer(make_stack(n_slots=2), pool_config("muon"))
    _, plain = setup_model_and_optimizer(PlainModel(), pool_config("muon"))
    assert [group.get("adapter_slot") for group in pool.param_groups] == [0, 0, 1, 1]
    assert [group.get("adapter_slot") for group in plain.param_groups] == [None, None]
