"""Alone or together: does a tenant in a busy pool end with the weights that it would have alone?

Some tenants train in a pool whose other slots are free, and again while those other slots fill,
empty and fill. The program is the same, so every bit should be. Then in another slot of the
busy pool, and quite alone, in a pool of one slot at its own rank, which is another program: there
sums may be rounded in another order. What rounding alone does is measured beside it, by a run
that starts with one last bit of each weight changed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments import plots
from experiments.base import BaseConfig, base_model
from experiments.pool import Tenant, empty_pool, held_out, install, slot_losses, train_step
from experiments.roster import Roster
from experiments.studies.common import FULL_BASE, SMALL_BASE, markdown_table
from jax_impl.testing import bits


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the study; ``lrs`` names the optimizers of the tenants that are looked at."""

    base: BaseConfig
    lrs: dict[str, float]
    n_steps: int
    rows: int
    ranks: tuple[int, ...]
    every: int
    domain: str = "characters"
    held_out_rows: int = 16


LRS = {"adamw": 0.01, "muon": 0.01, "lora_muon": 0.1, "lion": 0.001}
SETTINGS = {
    "small": Config(
        SMALL_BASE,
        {name: LRS[name] for name in ("adamw", "muon", "lora_muon")},
        n_steps=24,
        rows=2,
        ranks=(2, 4, 3),
        every=4,
    ),
    "full": Config(FULL_BASE, LRS, n_steps=100, rows=4, ranks=(4, 8, 6, 8), every=10),
}


def run(config: Config) -> dict[str, Any]:
    """{optimizer: what `compare` says, and the held-out losses}, and the steps of the gaps."""
    model = base_model(config.base)
    watched = [
        Tenant(
            name,
            config.domain,
            name,
            lr=lr,
            rank=rank,
            batch_size=config.rows,
            num_steps=config.n_steps,
            seed=seed,
        )
        for seed, ((name, lr), rank) in enumerate(
            zip(config.lrs.items(), config.ranks, strict=True)
        )
    ]
    others = [
        dataclasses.replace(t, domain="source", num_steps=steps, seed=10 + i)
        for i, t in enumerate(watched)
        for steps in (config.n_steps // 3, config.n_steps // 2)
    ]
    # Slots by turns, so that in reversed order each tenant takes another slot of its optimizer's.
    owners = tuple(config.lrs) * 2
    alone = train(config, model, watched, owners)
    together = train(config, model, [*watched, *others], owners)
    elsewhere = train(config, model, [*others[::2], *watched, *others[1::2]], owners)
    results = {"steps": list(range(0, config.n_steps + 1, config.every)), "tenants": {}}
    for tenant in watched:
        own = dataclasses.replace(config, ranks=(tenant.rank,))
        solo = train(own, model, [tenant], (tenant.optimizer,))
        nudged = train(config, model, [tenant], owners, nudge=True)
        runs = [run[tenant] for run in (alone, together, elsewhere, solo, nudged)]
        results["tenants"][tenant.name] = compare(config, model, tenant, *runs)
    return results


def train(
    config: Config, model, tenants: Sequence[Tenant], owners: Sequence[str], nudge: bool = False
) -> dict[Tenant, list[dict[str, np.ndarray]]]:
    """Trains tenants as they come and go; returns each one's weights every few steps.

    ``nudge`` changes the last bit of every weight of A at the start.
    """
    state = empty_pool(config.base.model, owners, max(config.ranks))
    roster, weights = Roster(tuple(tenants), tuple(owners)), {}

    def note(slot, tenant):
        adapter = {k: np.asarray(x[slot]) for k, x in state.params.items()}
        weights.setdefault(tenant, []).append(adapter)

    while not roster.done:
        for slot, tenant in roster.arrivals():
            state = install(config.base.model, state, slot, tenant)
            if nudge:
                state = dataclasses.replace(state, params=jax.tree.map(next_float, state.params))
            note(slot, tenant)
        batch = roster.batch(config.rows, config.base.length)
        state, *_ = train_step(model, state, batch)
        finished = roster.advance(config.rows)
        for slot, tenant in enumerate(roster.seated):
            if tenant is not None and roster.positions[slot] % (config.every * config.rows) == 0:
                note(slot, tenant)
        for slot in finished:
            state = state.retire(slot)
            roster.leave(slot)
    return weights


def next_float(x: jax.Array) -> jax.Array:
    """The next float32 after every x that is not zero, away from it."""
    return jnp.where(x == 0, x, jnp.nextafter(x, x * 2))


def compare(config: Config, model, tenant: Tenant, alone, together, elsewhere, solo, nudged):
    """What differs between the runs of a tenant, each its weights at the steps of the gaps."""
    return {
        "rank": tenant.rank,
        "parameters": sum(x.size for x in own_part(alone[-1], tenant.rank).values()),
        "differing_together": sum(map(differing, alone, together)),
        "differing_elsewhere": sum(map(differing, alone, elsewhere)),
        "gap_solo": [gap(a, s, tenant.rank) for a, s in zip(alone, solo, strict=True)],
        "gap_nudged": [gap(a, n, tenant.rank) for a, n in zip(alone, nudged, strict=True)],
        "gap_elsewhere": [gap(a, e, tenant.rank) for a, e in zip(alone, elsewhere, strict=True)],
        "loss_together": loss(config, model, tenant, together[-1]),
        "loss_solo": loss(config, model, tenant, solo[-1]),
    }


def own_part(adapter: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    """The adapter without its padding."""
    return {k: x[:rank] if k.endswith("in") else x[:, :rank] for k, x in adapter.items()}


def differing(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> int:
    """How many bytes of two adapters' weights are not the same."""
    return sum(int((bits(one[k]) != bits(other[k])).sum()) for k in one)


def gap(one: dict[str, np.ndarray], other: dict[str, np.ndarray], rank: int) -> float:
    """The distance of two adapters' weights over their size, in the Frobenius norm."""
    a, b = (
        np.concatenate([x.astype(np.float64).ravel() for x in own_part(part, rank).values()])
        for part in (one, other)
    )
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def loss(config: Config, model, tenant: Tenant, adapter: dict[str, np.ndarray]) -> float:
    """Held-out loss of a trained adapter."""
    batch = held_out([tenant], config.held_out_rows, config.base.length)
    return float(slot_losses(model, {k: x[None] for k, x in adapter.items()}, batch)[0])


def table(results: dict[str, Any]) -> str:
    """One line per tenant."""
    rows = [
        [
            name,
            r["rank"],
            f"{r['parameters']:,}",
            r["differing_together"],
            r["differing_elsewhere"],
            f"{r['gap_solo'][-1]:.1e}",
            f"{r['gap_nudged'][-1]:.1e}",
            f"{r['loss_together']:.4f}",
            f"{r['loss_solo']:.4f}",
        ]
        for name, r in results["tenants"].items()
    ]
    head = ["tenant", "rank", "weights", "bytes that differ, busy pool", "in another slot of it"]
    head += ["gap to a pool of one slot", "gap from one last bit"]
    return markdown_table([*head, "held-out loss, busy", "one slot"], rows)


def figures(results: dict[str, Any]) -> dict[str, Figure]:
    """How the gaps to a pool of one slot, and from one last bit, grow."""
    figure, panels = plots.panels(len(results["tenants"]), width=3.0)
    kinds = [
        ("gap_solo", "pool of one slot, own rank"),
        ("gap_nudged", "one last bit changed at the start"),
        ("gap_elsewhere", "busy pool"),
    ]
    for axes, (name, r) in zip(panels, results["tenants"].items(), strict=True):
        for i, (key, label) in enumerate(kinds):
            axes.plot(results["steps"], r[key], label=label, **plots.style(i))
        axes.set(title=name, xlabel="step")
        axes.set_yscale("symlog", linthresh=1e-9, linscale=0.5)
        axes.set_ylim(bottom=-1e-10)
    panels[0].set_ylabel("distance of the weights from\nthe run alone, relative")
    plots.legend_above(figure, panels[0])
    return {"gaps": figure}
