"""What the studies share: their base models, and sweeps of a whole pool."""

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.base import BaseConfig
from experiments.model import Llama, LlamaConfig
from experiments.pool import Tenant, full_pool, held_out, make_batch, slot_losses, train_step

SMALL_BASE = BaseConfig(
    LlamaConfig(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    steps=300,
    rows=24,
    length=32,
)
FULL_BASE = BaseConfig(
    LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    steps=1500,
    rows=32,
    length=64,
)


class Curves(NamedTuple):
    """What a pool did: held-out losses (n_points, S) after ``steps`` (n_points,) steps each.

    ``step_seconds`` is the median time of one step of the whole pool, compilation left out.
    """

    steps: list[int]
    losses: list[list[float]]
    step_seconds: float


def sweep(
    model: Llama,
    config: LlamaConfig,
    tenants: Sequence[Tenant],
    *,
    pool_rank: int,
    length: int,
    points: int,
    held_out_rows: int,
) -> Curves:
    """Trains tenants of equal batch sizes and lengths of stay side by side, one in each slot.

    A step is one micro-batch. The held-out loss is taken at the start and after each of ``points``
    equal parts of the way.
    """
    rows, n_steps = tenants[0].batch_size, tenants[0].num_steps
    state = full_pool(config, tenants, pool_rank)
    unseen = held_out(tenants, held_out_rows, length)
    marks = set(np.linspace(0, n_steps, points + 1).astype(int).tolist())
    steps, losses, times = [], [], []
    for i in range(n_steps + 1):
        if i in marks:
            steps.append(i)
            losses.append(slot_losses(model, state.model_params(), unseen).tolist())
        if i < n_steps:
            batch = make_batch(tenants, [i * rows] * len(tenants), rows, length)
            start = time.perf_counter()
            state, report, _ = jax.block_until_ready(train_step(model, state, batch))
            times.append(time.perf_counter() - start)
    return Curves(steps, losses, statistics.median(times[1:]))


def mean_and_sd(values) -> str:
    """``mean ± standard deviation`` over seeds."""
    values = np.asarray(values, float)
    return f"{values.mean():.3f} ± {values.std(ddof=1) if len(values) > 1 else 0:.3f}"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
