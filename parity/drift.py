"""How far apart two runs drift that go on by themselves, beside what rounding alone does.

Three run on the same gradients: Megatron, JAX, and Megatron again with each batch's four sums added
up in the opposite order. The last two differ from the first by rounding and by nothing else that
is meant to. The distances from the float64 oracle tell which of two is the one that is off.
"""

import json
from pathlib import Path

import numpy as np
from rich.table import Table

from parity import policy
from parity.candidate import MODES, Candidate
from parity.observation import SlotView
from parity.reference import Reference
from parity.scenario import Accumulate, Install, Layer, Pool, Scenario, Stack, Step, Tenant
from parity.truth import Judge, SlotTruth

PARTS = 4  # of a batch, one sample each
CURVES = (
    "JAX from Megatron",
    "Megatron, sums reordered, from Megatron",
    "JAX from the oracle",
    "Megatron from the oracle",
)

# Okabe and Ito's colours, which all can tell apart.
LINES = (("#0072B2", "-"), ("#E69F00", "-"), ("#56B4E9", "--"), ("#D55E00", "--"))

Runs = dict[str, dict[str, list[float]]]  # by optimizer and curve: the gap after each step


def measure_all(steps: int) -> Runs:
    """The gaps of Muon and of Adam. Call it inside `torch_ref.start_megatron`."""
    return {optimizer: measure(scenario(optimizer, steps)) for optimizer in ("muon", "adam")}


def scenario(optimizer: str, steps: int) -> Scenario:
    """One tenant for ``steps`` steps, each on a batch in four parts."""
    batch = (*[Accumulate(slot=0, samples=1)] * PARTS, Step((0,)))
    return Scenario(
        name=f"drift_{optimizer}",
        description="One tenant, left to run.",
        seed=0,
        precision="fp32",
        gradients="gaussian",
        pool=Pool(n_slots=1, rank=8),
        model=Stack((Layer("q", 64, 96, bias=True),)),
        optimizer={"optimizer": optimizer, "muon_fp32_matmul_prec": "highest"},
        tenants={
            "alice": Tenant(
                rank=8, alpha=16.0, batch_size=PARTS, lr=0.01, weight_decay=0.1, init="random"
            )
        },
        events=(Install("alice", 0), *batch * steps),
    )


def measure(scenario: Scenario) -> dict[str, list[float]]:
    """The largest relative distance of any weight, after each step."""
    free = next(mode for mode in MODES if not mode.locked)
    reference, reordered = Reference(scenario), Reference(scenario)
    candidate = Candidate(scenario, free)
    judge = Judge(scenario)
    truth = judge.install("alice")
    for player in (reference, reordered, candidate):
        player.install("alice", 0)
    gaps: dict[str, list[float]] = {name: [] for name in CURVES}
    for first in range(1, len(scenario.events), PARTS + 1):
        parts = range(first, first + PARTS)
        for index in parts:
            candidate.accumulate(0, 1, reference.accumulate(0, 1, index))
        for index in reversed(parts):
            reordered.accumulate(0, 1, index)
        (before,) = reference.observe().values()
        truth = judge.step(truth, before.all_of("grad_sum"), "alice", before.samples)
        for player in (reference, reordered, candidate):
            player.step((0,))
        megatron, other, jax = (p.observe()[0] for p in (reference, reordered, candidate))
        pairs = ((jax, megatron), (other, megatron), (jax, truth), (megatron, truth))
        for name, (a, b) in zip(CURVES, pairs, strict=True):
            gaps[name].append(distance(weights(a), weights(b)))
    return gaps


def weights(of: SlotView | SlotTruth) -> dict[str, np.ndarray]:
    """Master weights by name."""
    return of.params if isinstance(of, SlotTruth) else of.all_of("master")


def distance(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest relative distance of any weight."""
    return max(policy.relative_error(got[name], x, x) for name, x in expected.items())


def table(runs: Runs) -> Table:
    """The gaps after 1, 10, 100 and all steps."""
    length = len(next(iter(runs["muon"].values())))
    shown = sorted({1, min(10, length), min(100, length), length})
    heads = (f"after {n}" for n in shown)
    result = Table("optimizer", "distance", *heads, title="Largest relative distance of weights")
    for optimizer, curves in runs.items():
        for name, gaps in curves.items():
            result.add_row(optimizer, name, *(f"{gaps[n - 1]:.1e}" for n in shown))
    return result


def write_json(path: Path, runs: Runs) -> None:
    """Writes every gap."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(runs) + "\n", encoding="utf-8")


def write_plot(path: Path, runs: Runs) -> None:
    """Draws the gaps, one panel for each optimizer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axes, (optimizer, curves) in zip(
        figure.subplots(1, len(runs), sharey=True), runs.items(), strict=True
    ):
        for (name, gaps), (color, style) in zip(curves.items(), LINES, strict=True):
            axes.semilogy(range(1, len(gaps) + 1), gaps, style, color=color, label=name)
        axes.set(title=optimizer.capitalize(), xlabel="step")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("largest relative distance of weights")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
