"""AdamW beside PyTorch's."""

import numpy as np
import optax
import pytest

from jax_impl.adamw import adamw
from jax_impl.adamw_test import EPS, tree


@pytest.mark.parametrize("weight_decay", [0.0, 0.9])
def test_follows_torch_in_float64(weight_decay):
    import torch

    weights = {
        k: torch.nn.Parameter(torch.tensor(np.asarray(v, np.float64))) for k, v in tree(0).items()
    }
    settings = dict(betas=(0.8, 0.99), eps=1e-6, weight_decay=weight_decay)
    reference = torch.optim.AdamW(list(weights.values()), lr=0.3, **settings)
    tx = adamw(0.3, b1=0.8, b2=0.99, eps=1e-6, weight_decay=weight_decay)
    params = tree(0)
    state = tx.init(params)
    for t in range(1, 6):
        for k, g in tree(t).items():
            weights[k].grad = torch.tensor(np.asarray(g, np.float64))
        reference.step()
        updates, state = tx.update(tree(t), state, params)
        params = optax.apply_updates(params, updates)
        for k, w in weights.items():
            # lr 0.3 moves by about 0.3 a step; the errors of t steps of size 1 add up.
            np.testing.assert_allclose(params[k], w.detach().numpy(), rtol=0, atol=8 * t * EPS)
            torch_state = reference.state[w]
            assert torch_state["step"].item() == state.step
            np.testing.assert_allclose(state.exp_avg[k], torch_state["exp_avg"], atol=4 * t * EPS)
