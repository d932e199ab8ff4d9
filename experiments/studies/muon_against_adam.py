"""Muon against Adam per adapter: every learning rate and seed of an optimizer in one pool.

Each slot of a pool is one (learning rate, seed), so a whole sweep costs one run per optimizer.
"""

import dataclasses
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import plots
from experiments.base import BaseConfig, base_model
from experiments.pool import Tenant
from experiments.studies.common import (
    FULL_BASE,
    SMALL_BASE,
    markdown_table,
    mean_and_sd,
    sweep,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the study.

    ``first_lr`` is the lowest rate of each optimizer; ``n_lrs`` follow each other by ``factor``.
    """

    base: BaseConfig
    first_lr: dict[str, float]
    n_lrs: int
    factor: float
    seeds: int
    n_steps: int
    rows: int
    rank: int
    domain: str = "characters"
    points: int = 10
    held_out_rows: int = 16


FIRST_LR = {
    "adamw": 1e-3,
    "muon": 3e-3,
    "muon_on_b": 1e-3,
    "adamuon": 1e-4,
    "lora_muon": 1e-2,
    "lion": 1e-4,
}
SETTINGS = {
    "small": Config(
        SMALL_BASE,
        {name: FIRST_LR[name] for name in ("adamw", "muon", "lora_muon")},
        n_lrs=3,
        factor=10.0,
        seeds=3,
        n_steps=30,
        rows=2,
        rank=4,
    ),
    "full": Config(
        FULL_BASE, FIRST_LR, n_lrs=6, factor=10**0.5, seeds=3, n_steps=150, rows=4, rank=8
    ),
}


def run(config: Config) -> dict[str, Any]:
    """{optimizer: {lrs, steps, losses (n_lrs, seeds, n_points), step_seconds}}."""
    model = base_model(config.base)
    return {name: run_optimizer(config, model, name) for name in config.first_lr}


def run_optimizer(config: Config, model, name: str) -> dict[str, Any]:
    """The sweep of one optimizer, a pool of n_lrs * seeds slots."""
    lrs = [config.first_lr[name] * config.factor**k for k in range(config.n_lrs)]
    tenants = [
        Tenant(
            domain=config.domain,
            optimizer=name,
            lr=lr,
            rank=config.rank,
            batch_size=config.rows,
            num_steps=config.n_steps,
            seed=seed,
        )
        for lr in lrs
        for seed in range(config.seeds)
    ]
    curves = sweep(
        model,
        config.base.model,
        tenants,
        pool_rank=config.rank,
        length=config.base.length,
        points=config.points,
        held_out_rows=config.held_out_rows,
    )
    losses = np.asarray(curves.losses).T.reshape(config.n_lrs, config.seeds, -1)
    return {
        "lrs": lrs,
        "steps": curves.steps,
        "losses": losses.tolist(),
        "step_seconds": curves.step_seconds,
    }


def best(result: dict[str, Any]) -> tuple[int, np.ndarray]:
    """The rate with the lowest final mean loss, by index, and all losses (lrs, seeds, points)."""
    losses = np.asarray(result["losses"])
    return int(np.argmin(losses[:, :, -1].mean(axis=1))), losses


def table(results: dict[str, Any]) -> str:
    """One line per optimizer: its best rate, what it reaches there, what a step costs."""
    rows = []
    for name, result in results.items():
        i, losses = best(result)
        final = losses[:, :, -1].mean(axis=1)
        good = int((final <= final[i] * 1.05).sum())
        at = " (at the edge)" if i in (0, len(final) - 1) else ""
        rows.append(
            [
                name,
                f"{result['lrs'][i]:.2g}{at}",
                mean_and_sd(losses[i, :, -1]),
                mean_and_sd(losses[i, :, losses.shape[2] // 2]),
                f"{good} of {len(final)}",
                f"{1e3 * result['step_seconds']:.0f}",
            ]
        )
    head = ["optimizer", "best lr", "held-out loss at the end", "half-way"]
    return markdown_table([*head, "rates within 5%", "ms per step of the pool"], rows)


def figures(results: dict[str, Any]) -> dict[str, Figure]:
    """Final loss over learning rate; loss at the best rate over steps and over time."""
    by_lr, (axes,) = plots.panels(width=5.2, height=3.8)
    over, (by_step, by_time) = plots.panels(2)
    for k, (name, result) in enumerate(results.items()):
        i, losses = best(result)
        plots.curve(axes, result["lrs"], losses[:, :, -1].T, k, name)
        plots.curve(by_step, result["steps"], losses[i], k, name)
        seconds = np.asarray(result["steps"]) * result["step_seconds"]
        plots.curve(by_time, seconds, losses[i], k, name)
    start = max(np.asarray(r["losses"])[:, :, 0].mean() for r in results.values())
    axes.axhline(start, color="gray", ls=":", lw=1)
    across = dict(transform=axes.get_yaxis_transform(), ha="right", va="top", fontsize=8)
    axes.text(0.99, start, "before training", color="gray", **across)
    axes.set(xscale="log", xlabel="learning rate", ylabel="held-out loss (nats per byte)")
    axes.set_ylim(top=min(axes.get_ylim()[1], 1.1 * start))
    plots.legend_above(by_lr, axes, "mean and range over seeds", columns=3)
    by_step.set(xlabel="step", ylabel="held-out loss (nats per byte)")
    plots.legend_above(over, by_step, "each at its best lr; mean and range over seeds")
    by_time.set(
        xlabel="wall time of the whole pool (s)",
        ylabel="held-out loss (nats per byte)",
    )
    return {"loss_over_lr": by_lr, "loss_over_steps_and_time": over}
