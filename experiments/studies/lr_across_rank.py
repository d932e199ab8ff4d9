"""Does the best learning rate transfer across rank?

The LoRA-Muon paper (https://arxiv.org/abs/2606.12921) claims that its own does, where that of
AdamW on the factors does not. Adapters are not scaled (alpha = rank), so that only the rank varies.
"""

import dataclasses
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import plots
from experiments.base import BaseConfig, base_model
from experiments.pool import Tenant
from experiments.studies.common import FULL_BASE, SMALL_BASE, markdown_table, sweep


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the study; rates as in `muon_against_adam`."""

    base: BaseConfig
    first_lr: dict[str, float]
    n_lrs: int
    factor: float
    ranks: tuple[int, ...]
    seeds: int
    n_steps: int
    rows: int
    domain: str = "characters"
    held_out_rows: int = 16


FIRST_LR = {"adamw": 1e-3, "muon": 3e-3, "lora_muon": 1e-2}
SETTINGS = {
    "small": Config(
        SMALL_BASE, FIRST_LR, n_lrs=3, factor=10.0, ranks=(2, 16), seeds=2, n_steps=20, rows=2
    ),
    "full": Config(
        FULL_BASE,
        FIRST_LR,
        n_lrs=6,
        factor=10**0.5,
        ranks=(2, 8, 32, 64),
        seeds=3,
        n_steps=60,
        rows=4,
    ),
}


def run(config: Config) -> dict[str, Any]:
    """{optimizer: {lrs, ranks, losses (n_ranks, n_lrs, seeds) at the end}}."""
    model = base_model(config.base)
    results = {}
    for name, first in config.first_lr.items():
        lrs = [first * config.factor**k for k in range(config.n_lrs)]
        losses = [final_losses(config, model, name, lrs, rank) for rank in config.ranks]
        results[name] = {"lrs": lrs, "ranks": list(config.ranks), "losses": losses}
    return results


def final_losses(config: Config, model, name: str, lrs: list[float], rank: int) -> list:
    """Held-out losses at the end, (n_lrs, seeds), of one optimizer at one rank: one pool."""
    tenants = [
        Tenant(
            domain=config.domain,
            optimizer=name,
            lr=lr,
            rank=rank,
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
        pool_rank=rank,
        length=config.base.length,
        points=1,
        held_out_rows=config.held_out_rows,
    )
    return np.asarray(curves.losses[-1]).reshape(len(lrs), config.seeds).tolist()


def best_lr(lrs: list[float], losses: np.ndarray) -> float:
    """The minimum of the parabola in log lr through the best rate and its neighbours.

    Args:
      lrs: (n,), a geometric sequence.
      losses: (n,); where the best is at the edge, or flat, it is that rate itself.
    """
    i = int(np.argmin(losses))
    if not 0 < i < len(lrs) - 1:
        return lrs[i]
    below, at, above = losses[i - 1 : i + 2]
    curvature = below - 2 * at + above
    shift = 0.5 * (below - above) / curvature if curvature > 0 else 0.0
    return lrs[i] * (lrs[1] / lrs[0]) ** shift


def analyse(result: dict[str, Any]) -> dict[str, Any]:
    """What the sweep of one optimizer says about transfer.

    Returns:
      best: (ranks, seeds) best rates, seed by seed; slope: of log best lr over log rank, (seeds,);
      cost: (ranks,), the loss that the smallest rank's best rate adds to the best tested one.
    """
    losses, lrs = np.asarray(result["losses"]), result["lrs"]
    best = np.asarray([[best_lr(lrs, column) for column in rank.T] for rank in losses])
    slope = np.polyfit(np.log(result["ranks"]), np.log(best), 1)[0]
    mean = losses.mean(axis=2)
    cost = mean[:, int(np.argmin(mean[0]))] - mean.min(axis=1)
    return {"best": best, "slope": slope, "cost": cost}


def table(results: dict[str, Any]) -> str:
    """One line per optimizer: the best rate at each rank, its slope, what transfer would cost."""
    ranks = next(iter(results.values()))["ranks"]
    rows = []
    for name, result in results.items():
        found = analyse(result)
        slope = found["slope"]
        geometric_mean = np.exp(np.log(found["best"]).mean(axis=1))
        spread = f"{slope.mean():+.2f} ± {slope.std(ddof=1) if len(slope) > 1 else 0:.2f}"
        worst = int(np.argmax(found["cost"]))
        cost = f"{found['cost'][worst]:.3f} (rank {ranks[worst]})"
        low = np.asarray(result["losses"]).mean(axis=2).min(axis=1)
        rows.append(
            [
                name,
                *(f"{x:.2g}" for x in geometric_mean),
                spread,
                cost,
                f"{low[0]:.3f}",
                f"{low[-1]:.3f}",
            ]
        )
    head = [
        "optimizer",
        *(f"best lr, rank {rank}" for rank in ranks),
        "exponent of rank",
        f"largest loss from using rank {ranks[0]}'s",
        f"best loss, rank {ranks[0]}",
        f"rank {ranks[-1]}",
    ]
    return markdown_table(head, rows)


def figures(results: dict[str, Any]) -> dict[str, Figure]:
    """Loss over learning rate, a line per rank, and the best rate over rank."""
    figure, panels = plots.panels(len(results) + 1, width=3.2)
    for k, (axes, (name, result)) in enumerate(zip(panels, results.items(), strict=False)):
        losses = np.asarray(result["losses"])
        for i, rank in enumerate(result["ranks"]):
            plots.curve(axes, result["lrs"], losses[i].T, i, f"rank {rank}")
        axes.set(xscale="log", xlabel="learning rate", title=name)
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.5 * np.median(losses)))
        best = analyse(result)["best"]
        plots.curve(panels[-1], result["ranks"], best.T / best[0].mean(), k, name)
    panels[0].set_ylabel("held-out loss (nats per byte)")
    panels[0].legend(title="range over seeds", fontsize=7, title_fontsize=7, frameon=False)
    panels[-1].set(
        xscale="log", yscale="log", xlabel="rank", ylabel="best lr, relative to the lowest rank's"
    )
    panels[-1].set_xticks(result["ranks"], [str(rank) for rank in result["ranks"]], minor=False)
    halves = [2.0**-k for k in range(5)]
    panels[-1].set_yticks(halves, ["1", *(f"1/{2**k}" for k in range(1, 5))], minor=False)
    panels[-1].minorticks_off()
    panels[-1].legend(fontsize=7, frameon=False)
    return {"loss_and_best_lr": figure}
