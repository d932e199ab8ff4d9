"""A mixed pool: tenants of all families, ranks, batch sizes, schedules and lengths of stay.

They share a pool with fewer slots than tenants, and then train one after another, each in a pool
of one slot at its own rank and with its whole batch at once. Tokens are counted where they train a
tenant; compilation is left out of the times and reported beside them.
"""

import dataclasses
import itertools
import time
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments import plots
from experiments.base import BaseConfig, base_model
from experiments.pool import Tenant, empty_pool, held_out, install, slot_losses, train_step
from experiments.roster import Roster
from experiments.studies.common import FULL_BASE, SMALL_BASE, markdown_table


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the study. ``owners`` are the slots; ``rows`` what each has in a micro-batch."""

    base: BaseConfig
    owners: tuple[str, ...]
    tenants: int
    ranks: tuple[int, ...]
    n_steps: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    rows: int
    held_out_rows: int = 16


LRS = {"adamw": 0.01, "muon": 0.01, "lora_muon": 0.1, "lion": 0.001}
DOMAINS = ("characters", "code_pages", "entities", "source")
STYLES = ("cosine", "constant", "linear")
SETTINGS = {
    "small": Config(
        SMALL_BASE,
        ("adamw", "muon", "lora_muon"),
        tenants=6,
        ranks=(2, 4),
        n_steps=(12, 20),
        batch_sizes=(2, 4),
        rows=2,
    ),
    "full": Config(
        FULL_BASE,
        ("adamw", "adamw", "muon", "muon", "lora_muon", "lora_muon", "lion", "lion"),
        tenants=16,
        ranks=(4, 16),
        n_steps=(40, 60, 80, 50),
        batch_sizes=(4, 8),
        rows=4,
    ),
}


def make_tenants(config: Config) -> list[Tenant]:
    """Tenants whose settings go round at different paces, so that no two are alike."""
    families = list(dict.fromkeys(config.owners))
    tenants = []
    for i in range(config.tenants):
        name, lap = families[i % len(families)], i // len(families)
        tenants.append(
            Tenant(
                f"t{i:02d}",
                DOMAINS[(i + lap) % len(DOMAINS)],
                name,
                lr=LRS[name],
                rank=config.ranks[lap % len(config.ranks)],
                batch_size=config.batch_sizes[(i + lap) % len(config.batch_sizes)],
                num_steps=config.n_steps[(i + 3 * lap) % len(config.n_steps)],
                lr_decay_style=STYLES[i % len(STYLES)],
                seed=i,
            )
        )
    return tenants


def run(config: Config) -> dict[str, Any]:
    """Spans, losses and times of the pool and of its tenants one after another."""
    model, tenants = base_model(config.base), make_tenants(config)
    together = train(config, model, tenants, config.owners, max(config.ranks), config.rows)
    programs, one_by_one = {}, []
    for tenant in tenants:
        alone = train(config, model, [tenant], (tenant.optimizer,), tenant.rank, tenant.batch_size)
        kind = (tenant.optimizer, tenant.rank, tenant.batch_size)
        programs.setdefault(kind, alone["compile_seconds"])
        one_by_one.append(alone)
    tokens = sum(t.num_steps * t.batch_size for t in tenants) * config.base.length
    return {
        "tenants": [dataclasses.asdict(t) for t in tenants],
        "owners": list(config.owners),
        "rows": config.rows,
        "tokens": tokens,
        "together": together,
        "alone": {
            "seconds": sum(alone["seconds"] for alone in one_by_one),
            "cpu_seconds": sum(alone["cpu_seconds"] for alone in one_by_one),
            "compile_seconds": sum(programs.values()),
            "programs": len(programs),
            "losses": [alone["losses"][0] for alone in one_by_one],
        },
    }


def train(config: Config, model, tenants, owners, pool_rank: int, rows: int) -> dict[str, Any]:
    """Trains tenants as slots become free.

    Returns:
      seconds of everything but compilation, and cpu_seconds of them; compile_seconds of the
      first step; losses (tenants,) held out, at the end of each stay; spans [slot, tenant,
      first, end) in micro-batches.
    """
    compile_seconds = compile_step(config, model, tenants, owners, pool_rank, rows)
    roster, losses, spans = Roster(tuple(tenants), tuple(owners)), {}, []
    arrived, seconds, cpu_seconds = {}, 0.0, 0.0
    state = empty_pool(config.base.model, owners, pool_rank)
    for i in itertools.count():
        start, cpu_start = time.perf_counter(), time.process_time()
        for slot, tenant in roster.arrivals():
            state = install(config.base.model, state, slot, tenant)
            arrived[slot] = i
        batch = roster.batch(rows, config.base.length)
        state, *_ = jax.block_until_ready(train_step(model, state, batch))
        finished = roster.advance(rows)
        seconds += time.perf_counter() - start
        cpu_seconds += time.process_time() - cpu_start
        for slot in finished:
            tenant = roster.seated[slot]
            spans.append([slot, tenants.index(tenant), arrived[slot], i + 1])
            losses[tenant] = loss(config, model, tenant, state, slot)
            state = state.retire(slot)
            roster.leave(slot)
        if roster.done:
            break
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "compile_seconds": compile_seconds,
        "losses": [losses[t] for t in tenants],
        "spans": spans,
    }


def compile_step(config: Config, model, tenants, owners, pool_rank: int, rows: int) -> float:
    """Makes JAX compile what `train` runs; returns the seconds, near 0 where it had been."""
    roster = Roster(tuple(tenants), tuple(owners))
    start = time.perf_counter()
    state = empty_pool(config.base.model, owners, pool_rank)
    for slot, tenant in roster.arrivals():
        state = install(config.base.model, state, slot, tenant)
    batch = roster.batch(rows, config.base.length)
    jax.block_until_ready(train_step(model, state, batch))
    return time.perf_counter() - start


def loss(config: Config, model, tenant: Tenant, state, slot: int) -> float:
    """Held-out loss of the tenant in a slot."""
    batch = held_out([tenant], config.held_out_rows, config.base.length)
    adapter = {k: x[slot : slot + 1] for k, x in state.model_params().items()}
    return float(slot_losses(model, adapter, batch)[0])


def speeds(results: dict[str, Any], clock: str = "seconds") -> tuple[float, float]:
    """Tokens per second, together and one after another; by wall time or ``cpu_seconds``."""
    return tuple(results["tokens"] / results[k][clock] for k in ("together", "alone"))


def table(results: dict[str, Any]) -> str:
    """Throughput, and how far the held-out losses are apart."""
    wall, cpu = speeds(results), speeds(results, "cpu_seconds")
    labels = (f"together, {len(results['owners'])} slots", "one after another")
    rows = [
        [
            label,
            f"{wall[i]:,.0f}",
            f"{cpu[i]:,.0f}",
            f"{r['seconds']:.1f}",
            r.get("programs", 1),
            f"{r['compile_seconds']:.1f}",
        ]
        for i, (label, r) in enumerate(
            zip(labels, (results["together"], results["alone"]), strict=True)
        )
    ]
    rows.append(["ratio", f"{wall[0] / wall[1]:.2f}", f"{cpu[0] / cpu[1]:.2f}", "", "", ""])
    head = [f"{len(results['tenants'])} tenants", "tokens/s", "tokens per CPU second", "s"]
    losses = [np.asarray(results[k]["losses"]) for k in ("together", "alone")]
    lines = markdown_table([*head, "programs", "s to compile and fill"], rows)
    apart = np.abs(losses[0] - losses[1]).max()
    return f"{lines}\n\nLargest difference of a tenant's held-out loss: {apart:.1e}."


def figures(results: dict[str, Any]) -> dict[str, Figure]:
    """Who sat where and when, and the throughput."""
    figure, (axes,) = plots.panels(width=8.0, height=3.2)
    families = list(dict.fromkeys(results["owners"]))
    for slot, tenant, first, end in results["together"]["spans"]:
        t = results["tenants"][tenant]
        color = plots.COLORS[families.index(t["optimizer"])]
        axes.barh(slot, end - first, left=first, color=color, edgecolor="white", alpha=0.85)
        label = f"{t['name']} {t['domain']}\nr {t['rank']}, batch {t['batch_size']}"
        axes.text(
            (first + end) / 2, slot, label, ha="center", va="center", fontsize=5.5, color="white"
        )
    axes.set(xlabel=f"micro-batch ({results['rows']} rows per slot)", ylabel="slot")
    axes.set_yticks(range(len(results["owners"])))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    patches = [Patch(color=plots.COLORS[i], label=name) for i, name in enumerate(families)]
    axes.legend(
        handles=patches, ncols=len(families), loc="upper center", bbox_to_anchor=(0.5, 1.15)
    )

    bars, (axes,) = plots.panels(width=3.2)
    for i, (label, speed) in enumerate(
        zip(("together", "one after another"), speeds(results), strict=True)
    ):
        axes.bar(label, speed, color=plots.COLORS[i], width=0.6)
        axes.text(i, speed, f"{speed:,.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_ylabel("training throughput (tokens/s)")
    axes.grid(axis="x", visible=False)
    return {"timeline": figure, "throughput": bars}
