"""The order that XLA is given, and that it changes no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.config import OptimizerConfig
from jax_impl.multi_lora import multi_lora_optimizer
from jax_impl.sequence import TOGETHER, after


@pytest.mark.parametrize("earlier", [0.0, -1.0, 3.0, jnp.inf, -jnp.inf, jnp.nan])
def test_after_adds_nothing(earlier):
    x = jnp.float32(0.05)
    result = jax.jit(after)(x, jnp.full((2, 3), earlier))
    assert result.dtype == x.dtype and np.asarray(result).tobytes() == np.asarray(x).tobytes()


def test_xla_cannot_tell_that_it_adds_nothing():
    compiled = jax.jit(after).lower(1.0, jax.ShapeDtypeStruct((2, 3), jnp.float32)).compile()
    entry = compiled.as_text().split("ENTRY")[1]
    assert "fusion(" in entry, entry  # else the sum is gone and with it the order


def test_intermediate_results_of_only_a_few_matrices_exist_at_once():
    """The memory that a step needs beside its arguments does not grow with the tree."""

    def temporary_bytes(n_matrices):
        tx = multi_lora_optimizer(
            OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest")
        )
        params = {
            f"{i:02d}": jax.ShapeDtypeStruct((2, 8, 256), jnp.float32) for i in range(n_matrices)
        }
        state = jax.eval_shape(tx.init, params)
        rates = {"learning_rate": jnp.ones(2), "weight_decay": jnp.ones(2)}
        step = jax.jit(lambda g, s, p: tx.update(g, s, p, **rates), donate_argnums=(0, 1))
        memory = step.lower(params, state, params).compile().memory_analysis()
        return memory.temp_size_in_bytes

    one = 2 * 8 * 256 * 4
    few, many = temporary_bytes(2 * TOGETHER), temporary_bytes(6 * TOGETHER)
    # The small r x r matrices of each leaf are still there; the large ones are not.
    assert many - few < TOGETHER * one
