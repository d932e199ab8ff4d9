import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import pool
from experiments.model import Llama, LlamaConfig, sample_losses
from experiments.pool import Tenant
from jax_impl.testing import assert_same_bits, relative_error

CONFIG = LlamaConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
TENANTS = (
    Tenant("a", "source", "adamw", lr=0.05, rank=2, batch_size=4, num_steps=9, seed=1),
    Tenant("b", "entities", "muon", lr=0.01, rank=4, alpha=8, batch_size=2, num_steps=9, seed=2),
    None,
)
ROWS, LENGTH = 2, 12


@pytest.fixture(scope="module")
def model():
    return Llama(CONFIG, jax.random.key(0))


def start(tenants=TENANTS):
    state = pool.empty_pool(CONFIG, ("adamw", "muon", "adamw"), rank=4)
    for slot, tenant in enumerate(tenants):
        if tenant is not None:
            state = pool.install(CONFIG, state, slot, tenant)
    return state


def train(model, tenants=TENANTS, steps=4):
    state, reports = start(tenants), []
    for i in range(steps):
        batch = pool.make_batch(tenants, [i * ROWS] * len(tenants), ROWS, LENGTH)
        state, report, losses = pool.train_step(model, state, batch)
        reports.append((report, losses))
    return state, reports


def test_each_tenant_steps_when_its_own_batch_is_full(model):
    _, reports = train(model)
    stepped = np.stack([report.stepped for report, _ in reports])
    np.testing.assert_array_equal(stepped.T, [[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert reports[-1][0].samples.tolist() == [8, 8, 0]
    for _, losses in reports:
        assert (losses[:2] > 0).all() and losses[2] == 0


def test_gradient_sums_are_sums_over_samples(model):
    batch = pool.make_batch(TENANTS, [0, 0, 0], ROWS, LENGTH)
    state, _, losses = pool.train_step(model, start(), batch)
    adapters = start().model_params()

    def loss_of_a(adapters):
        lora = batch.lora(adapters)
        return jnp.sum(sample_losses(model, batch.tokens, lora)[:ROWS])

    expected, grads = jax.value_and_grad(loss_of_a)(adapters)
    assert relative_error(losses[0] * ROWS, expected) < 1e-6
    for name, g in grads.items():
        if g[0].any():
            assert relative_error(state.grad_sum[name][0], g[0]) < 1e-5


def test_a_co_tenant_changes_no_bit(model):
    alone, _ = train(model, (TENANTS[0], None, None))
    together, _ = train(model)
    for tree in ("params", "opt_state"):
        assert_same_bits(
            jax.tree.map(lambda x: x[0], getattr(together, tree)),
            jax.tree.map(lambda x: x[0], getattr(alone, tree)),
        )


def test_dropout_is_a_tenants_own(model):
    noisy = dataclasses.replace(TENANTS[0], dropout=0.3)
    losses = [
        train(model, tenants, steps=6)[1][-1][1]
        for tenants in ((noisy, TENANTS[1], None), (noisy, None, None), TENANTS)
    ]
    assert losses[0][0] == losses[1][0] != losses[2][0]
    # A tenant that drops nothing is not disturbed, but for the rounding of another program.
    assert relative_error(losses[0][1], losses[2][1]) < 1e-6


def test_training_lowers_the_held_out_loss(model):
    tenants = [dataclasses.replace(t, lr=0.03, num_steps=40) if t else None for t in TENANTS]
    held_out = pool.held_out(tenants, 8, LENGTH)
    before = pool.slot_losses(model, start(tenants).model_params(), held_out)
    state, _ = train(model, tenants, steps=40)
    after = pool.slot_losses(model, state.model_params(), held_out)
    assert (after[:2] < before[:2] - 0.3).all() and after[2] == 0
