"""Muon beside emerging-optimizers'."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from jax_impl.muon import muon
from jax_impl.muon_test import matrices
from jax_impl.testing import relative_error
from jax_impl.weight_decay import METHODS


@functools.cache
def torch_muon():
    import torch
    from emerging_optimizers.orthogonalized_optimizers import Muon

    return torch, Muon


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_follows_emerging_optimizers(method, precision):
    torch, Muon = torch_muon()
    settings = dict(
        momentum=0.8,
        nesterov=True,
        weight_decay=0.3,
        weight_decay_method=method,
        coefficient_type="polar_express",
        num_ns_steps=6,
        scale_mode="shape_scaling",
        extra_scale_factor=0.3,
        fp32_matmul_prec=precision,
    )
    weights = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in matrices(0).items()}
    reference = Muon(list(weights.values()), lr=0.5, **settings)
    params = jax.tree.map(jnp.asarray, matrices(0))
    tx = muon(0.5, **settings)
    state = tx.init(params)
    # In bfloat16 (2**-9) a flipped rounding shows; elsewhere the iteration's hundredfold of 6e-8.
    limit = 2e-2 if precision == "medium" else 5e-5
    for t in range(2):
        for k, g in matrices(t + 1).items():
            weights[k].grad = torch.tensor(g)
        reference.step()
        updates, state = tx.update(matrices(t + 1), state, params)
        params = optax.apply_updates(params, updates)
        for k, w in weights.items():
            assert relative_error(params[k], w.detach().numpy()) < limit
            buffer = reference.state[w]["momentum_buffer"].numpy()
            if method != "l2":  # whose gradient the parameters' own difference enters
                assert relative_error(state.momentum_buffer[k], buffer) < 2e-7
