"""The step is made for TPU and GPU too: it lowers for them, on a machine that has neither."""

import jax
import jax.export
import jax.numpy as jnp
import pytest

from jax_impl.config import OptimizerConfig
from jax_impl.multi_lora import multi_lora_optimizer
from jax_impl.train_state import SlotTrainState

SLOTS, RANK = 4, 8
POOL = {
    "q.linear_in": jax.ShapeDtypeStruct((SLOTS, RANK, 32), jnp.bfloat16),
    "q.linear_out": jax.ShapeDtypeStruct((SLOTS, 48, RANK), jnp.bfloat16),
    "q.bias": jax.ShapeDtypeStruct((SLOTS, 48), jnp.bfloat16),
}
NAMED = {
    "ready": (),
    "mask": (jax.ShapeDtypeStruct((SLOTS,), jnp.bool_),),
    "index": (jax.ShapeDtypeStruct((2,), jnp.int32),),
}


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("optimizer", ["muon", "adam"])
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_step_lowers_for_tpu_and_cuda(named, optimizer, precision):
    config = OptimizerConfig(optimizer=optimizer, muon_fp32_matmul_prec=precision)
    tx = multi_lora_optimizer(config)
    state = jax.eval_shape(lambda: SlotTrainState.create(tx, POOL, rank=RANK))
    step = jax.jit(SlotTrainState.step, donate_argnums=0)
    exported = jax.export.export(step, platforms=("tpu", "cuda"))(state, *NAMED[named])
    assert exported.platforms == ("tpu", "cuda")
    program = exported.mlir_module()
    assert "callback" not in program, "a host callback stops the accelerator"
    assert "?x" not in program and "tensor<?" not in program, "a shape depends on data"
