"""Starts and stops Megatron's process groups, on CUDA or, unmodified, on a CPU."""

import contextlib
import os
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from torch.overrides import TorchFunctionMode


class CudaOnCpu(TorchFunctionMode):
    """Answers Megatron's requests for CUDA tensors with CPU tensors.

    megatron-core asks for `device="cuda"` in a few places and compares tensor type strings. None of
    its code changes: the request is answered differently. Every torch call pays for the detour in
    Python time, so never time the reference inside this mode.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


@contextlib.contextmanager
def _cuda_on_cpu() -> Iterator[None]:
    """`CudaOnCpu` plus stand-ins for the two CUDA queries of Megatron's DDP.

    Torch-compiled functions (Lion's update) run as written: to compile, a CPU needs a C++ compiler.
    """
    current_device, current_stream = torch.cuda.current_device, torch.cuda.current_stream
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda device=None: None
    try:
        with CudaOnCpu(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.cuda.current_device, torch.cuda.current_stream = current_device, current_stream


@contextlib.contextmanager
def _process_group(device: torch.device) -> Iterator[None]:
    """The default process group: one process, or RANK of WORLD_SIZE from the environment."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group(backend)
    else:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def start_megatron(*, tensor_model_parallel_size: int = 1) -> Iterator[torch.device]:
    """Runs its body with Megatron's parallel state up, and tears it down afterwards.

    A single process unless WORLD_SIZE says otherwise (then RANK, MASTER_ADDR and MASTER_PORT are
    read as torch's launcher sets them). May be entered again after it was left.

    Args:
        tensor_model_parallel_size: ranks that share one tensor; must divide WORLD_SIZE.

    Yields:
        The device that models belong on.

    Raises:
        RuntimeError: a process group is up already.
    """
    if torch.distributed.is_initialized():
        raise RuntimeError("a process group is up already: leave it before start_megatron")
    with contextlib.ExitStack() as stack:
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
            stack.enter_context(_cuda_on_cpu())
        stack.enter_context(_process_group(device))
        parallel_state.initialize_model_parallel(tensor_model_parallel_size)
        stack.callback(parallel_state.destroy_model_parallel)
        yield device
