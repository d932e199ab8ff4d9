"""Fixtures of the reference's tests."""

import pytest

from torch_ref.megatron import start_megatron


@pytest.fixture(scope="module")
def device():
    """Megatron's device, its process groups up for one file's tests."""
    with start_megatron() as device:
        yield device
