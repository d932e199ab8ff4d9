import pytest
import torch

from torch_ref.megatron import start_megatron
from torch_ref.multi_lora import (
    LayerShape,
    MultiLoRALinear,
    MultiLoRAStack,
    pad_adapter_weight,
)


def random_layer(n_slots=3, rank=4, bias=True):
    generator = torch.Generator().manual_seed(0)
    layer = MultiLoRALinear(torch.randn(7, 5, generator=generator), n_slots, rank, bias=bias)
    for parameter in layer.adapters.parameters():
        parameter.data.normal_(generator=generator)
    layer.scaling.copy_(torch.arange(1.0, n_slots + 1) / 3)
    return layer


def test_matches_explicit_computation_per_sample():
    layer = random_layer()
    x, slots = torch.randn(6, 2, 5), torch.tensor([2, 0, -1, 2, 1, -1])
    y = layer(x, slots[:, None].expand(6, 2))
    for sample, slot in enumerate(slots.tolist()):
        expected = x[sample] @ layer.weight.T
        if slot >= 0:
            adapter = layer.adapters[slot]
            low_rank = x[sample] @ adapter.linear_in.T @ adapter.linear_out.T
            expected = expected + layer.scaling[slot] * low_rank + adapter.bias
        torch.testing.assert_close(y[sample], expected)


def test_slots_that_do_not_occur_get_no_gradient():
    layer = random_layer()
    layer(torch.randn(4, 5), torch.tensor([1, -1, 1, -1])).sum().backward()
    assert layer.weight.grad is None
    for slot, adapter in enumerate(layer.adapters):
        for parameter in adapter.parameters():
            assert (parameter.grad is not None) == (slot == 1)


@pytest.mark.parametrize("name", ["linear_in", "linear_out"])
def test_padded_adapter_equals_unpadded(name):
    narrow, wide = random_layer(n_slots=1, rank=2), random_layer(n_slots=1, rank=4)
    wide.load_state_dict(
        {
            key: pad_adapter_weight(key, value, wide.state_dict()[key].shape, 2)
            for key, value in narrow.state_dict().items()
        }
    )
    x, slots = torch.randn(6, 5), torch.zeros(6, dtype=torch.int64)
    outputs = [layer(x, slots) for layer in (narrow, wide)]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.square().sum().backward()
    grads = [getattr(layer.adapters[0], name).grad for layer in (narrow, wide)]
    torch.testing.assert_close(pad_adapter_weight(name, grads[0], grads[1].shape, 2), grads[1])


def test_padding_beyond_the_rank_is_exactly_zero():
    padded = pad_adapter_weight("q.linear_out", torch.ones(7, 2), (7, 4), 2)
    assert torch.equal(padded[:, 2:], torch.zeros(7, 2))
    assert torch.equal(pad_adapter_weight("q.linear_out", padded, (7, 4), 2), padded)


@pytest.mark.parametrize(
    ("weight", "message"),
    [(torch.ones(3, 5), "must be"), (torch.ones(4, 5), "not zero beyond the adapter's rank 2")],
)
def test_weights_that_do_not_fit_are_refused(weight, message):
    with pytest.raises(ValueError, match=message):
        pad_adapter_weight("q.linear_in", weight, (4, 5), 2)


@pytest.mark.parametrize(
    ("parallel", "dims"),
    [
        ("column", {"linear_in": None, "linear_out": 0, "bias": 0}),
        ("row", {"linear_in": 1, "linear_out": None, "bias": None}),
        (None, {"linear_in": None, "linear_out": None, "bias": None}),
    ],
)
def test_partitioned_parameters_are_marked_as_megatron_marks_its_own(parallel, dims):
    with start_megatron():
        stack = MultiLoRAStack([LayerShape("q", 6, 8, True, parallel)], n_slots=2, rank=4)
    for adapter in stack.q.adapters:
        for name, parameter in adapter.named_parameters():
            assert getattr(parameter, "tensor_model_parallel", False) == (dims[name] is not None)
            assert getattr(parameter, "partition_dim", None) == dims[name]
