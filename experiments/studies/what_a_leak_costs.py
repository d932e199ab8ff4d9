"""What a leak costs: a slot that is not scrubbed, seen by its next tenant.

Every slot of a pool first trains a tenant on one domain, then retires it and trains another on
another domain. In some slots a part of the first tenant's state is put back: its moments, its step
clock, its place in the schedule, or all of them. The slots are otherwise equal, seed by seed.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments import plots
from experiments.base import BaseConfig, base_model
from experiments.pool import (
    Tenant,
    full_pool,
    held_out,
    install,
    make_batch,
    slot_losses,
    train_step,
)
from experiments.studies.common import FULL_BASE, SMALL_BASE, markdown_table, mean_and_sd
from jax_impl import SlotTrainState
from jax_impl.hyperparameters import parameter_name
from jax_impl.per_slot import select_slots

# What is put back: words in the names of the optimizer's state, and whether the schedule's place.
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
LEAKS: dict[str, tuple[tuple[str, ...], bool]] = {
    "clean": ((), False),
    "moments": (MOMENTS, False),
    "clock": (("step",), False),
    "schedule": ((), True),
    "everything": ((*MOMENTS, "step"), True),
}
WITHOUT_CLOCK = ("muon", "lora_muon")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the study; ``lrs`` names the optimizers."""

    base: BaseConfig
    lrs: dict[str, float]
    seeds: int
    first_steps: int
    n_steps: int
    rows: int
    rank: int
    first_domain: str = "entities"
    domain: str = "characters"
    points: int = 20
    held_out_rows: int = 16


LRS = {"adamw": 0.01, "muon": 0.01}
SETTINGS = {
    "small": Config(SMALL_BASE, LRS, seeds=2, first_steps=20, n_steps=40, rows=2, rank=4, points=8),
    "full": Config(FULL_BASE, LRS, seeds=3, first_steps=60, n_steps=150, rows=4, rank=8),
}


def run(config: Config) -> dict[str, Any]:
    """{optimizer: {leaks, steps (n,), losses (n_leaks, seeds, n)}}, held-out, second tenant's."""
    model = base_model(config.base)
    return {name: run_optimizer(config, model, name, lr) for name, lr in config.lrs.items()}


def run_optimizer(config: Config, model, name: str, lr: float) -> dict[str, Any]:
    """Both tenants of every slot, one slot for each (leak, seed)."""
    leaks = [leak for leak in LEAKS if not (leak == "clock" and name in WITHOUT_CLOCK)]
    shared = dict(optimizer=name, lr=lr, rank=config.rank, batch_size=config.rows)
    seeds = [seed for _ in leaks for seed in range(config.seeds)]
    first = [
        Tenant(domain=config.first_domain, num_steps=config.first_steps, seed=100 + seed, **shared)
        for seed in seeds
    ]
    second = [
        Tenant(domain=config.domain, num_steps=config.n_steps, seed=seed, **shared)
        for seed in seeds
    ]
    before = full_pool(config.base.model, first, config.rank)
    for i in range(config.first_steps):
        batch = make_batch(first, [i * config.rows] * len(first), config.rows, config.base.length)
        before, *_ = train_step(model, before, batch)

    state = before
    for slot, tenant in enumerate(second):
        state = install(config.base.model, state.retire(slot), slot, tenant)
    of_slot = np.repeat(leaks, config.seeds)
    for leak in leaks:
        state = put_back(state, before, of_slot == leak, *LEAKS[leak])

    unseen = held_out(second, config.held_out_rows, config.base.length)
    steps, losses = [], []
    marks = set(np.linspace(0, config.n_steps, config.points + 1).astype(int).tolist())
    for i in range(config.n_steps + 1):
        if i in marks:
            steps.append(i)
            losses.append(slot_losses(model, state.model_params(), unseen))
        if i < config.n_steps:
            batch = make_batch(
                second, [i * config.rows] * len(second), config.rows, config.base.length
            )
            state, *_ = train_step(model, state, batch)
    by_leak = np.asarray(losses, float).T.reshape(len(leaks), config.seeds, -1)
    return {"leaks": leaks, "steps": steps, "losses": by_leak.tolist()}


def put_back(
    state: SlotTrainState, before: SlotTrainState, slots: np.ndarray, words, samples: bool
) -> SlotTrainState:
    """Returns ``state`` with parts of what the mask ``slots`` (S,) held ``before`` put back.

    Args:
      words: parts of the names of the optimizer state's leaves that leak.
      samples: whether the place in the schedule does.
    """

    def leak(path, fresh, old):
        leaks = any(word in parameter_name(path).split(".") for word in words)
        return select_slots(slots, old, fresh) if leaks else fresh

    opt_state = jax.tree_util.tree_map_with_path(leak, state.opt_state, before.opt_state)
    place = np.where(slots, before.samples, state.samples) if samples else state.samples
    return dataclasses.replace(state, opt_state=opt_state, samples=jax.numpy.asarray(place))


def gaps(result: dict[str, Any]) -> np.ndarray:
    """Loss over that of the clean slot with the same seed: (n_leaks, seeds, n_points)."""
    losses = np.asarray(result["losses"])
    return losses - losses[result["leaks"].index("clean")]


def table(results: dict[str, Any]) -> str:
    """One line per optimizer and leak: losses, and the gaps to the clean slot."""
    rows = []
    for name, result in results.items():
        losses, gap = np.asarray(result["losses"]), gaps(result)
        early = int(np.searchsorted(result["steps"], result["steps"][-1] / 5))
        for k, leak in enumerate(result["leaks"]):
            cells = [mean_and_sd(x) for x in (losses[k, :, -1], gap[k, :, early], gap[k, :, -1])]
            rows.append([name, leak, *cells])
    steps = next(iter(results.values()))["steps"]
    early = steps[int(np.searchsorted(steps, steps[-1] / 5))]
    head = ["optimizer", "what leaks", "held-out loss at the end"]
    head += [f"more than clean after {early} steps", f"after {steps[-1]}"]
    return markdown_table(head, rows)


def figures(results: dict[str, Any]) -> dict[str, Figure]:
    """The second tenant's held-out loss and its gap to the clean slot, per optimizer."""
    figure, panels = plots.panels(2 * len(results), width=3.4)
    for k, (name, result) in enumerate(results.items()):
        curves, differences = panels[2 * k : 2 * k + 2]
        for i, leak in enumerate(result["leaks"]):
            look = list(LEAKS).index(leak)
            plots.curve(curves, result["steps"], result["losses"][i], look, leak)
            plots.curve(differences, result["steps"], gaps(result)[i], look, leak)
        curves.set(title=name, xlabel="step", ylabel="held-out loss (nats per byte)")
        differences.set(title=name, xlabel="step", ylabel="loss more than clean (nats per byte)")
    plots.legend_above(figure, panels[0], "what leaks; mean and range over seeds")
    return {"leaks": figure}
