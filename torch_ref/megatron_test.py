import pytest
import torch
from megatron.core import parallel_state

from torch_ref.megatron import start_megatron


def test_start_again_after_stop():
    current_device, current_stream = torch.cuda.current_device, torch.cuda.current_stream
    for _ in range(2):
        with start_megatron():
            assert torch.distributed.get_world_size() == 1
            assert parallel_state.get_data_parallel_world_size() == 1
        assert not torch.distributed.is_initialized()
        assert not parallel_state.is_initialized()
    assert torch.cuda.current_device is current_device
    assert torch.cuda.current_stream is current_stream


def test_stops_on_error():
    with pytest.raises(ZeroDivisionError), start_megatron():
        raise ZeroDivisionError
    assert not torch.distributed.is_initialized()
    assert not parallel_state.is_initialized()


def test_nested_start_is_refused():
    with start_megatron():
        with pytest.raises(RuntimeError, match="up already"), start_megatron():
            pass
        assert torch.distributed.is_initialized()


def test_cuda_requests_are_answered():
    with start_megatron() as device:
        x = torch.zeros(2, device="cuda")
        assert x.device.type == device.type
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert x.cuda().device == x.device
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == device.type
