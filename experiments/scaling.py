"""``python -m experiments.scaling``: what a step communicates, computes and holds, by placement.

Formulas alone; ``--check`` compiles the step for simulated devices and compares the collectives
of the program with them, number by number.

Exit code 0: done, and with ``--check`` all agree; 1: they do not; 2: bad usage.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Annotated

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.table import Table

from experiments.workloads import LARGE, QWEN3_0_6B, Workload
from jax_impl import OptimizerConfig, SlotTrainState, multi_lora_optimizer
from jax_impl.collectives import collectives
from jax_impl.layerwise import by_layer, layerwise
from jax_impl.newton_schulz import gram_segments, step_coefficients
from jax_impl.ownership import balance, gram_products, update_cost
from jax_impl.placement import by_slot, by_tensor, on_own_slots
from jax_impl.sequence import TOGETHER

PLACEMENTS = ("slot", "layer", "tensor")
CONFIG = OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest")
COEFFICIENTS = step_coefficients(CONFIG.muon_num_ns_steps, CONFIG.muon_coefficient_type)
FLOAT = 4  # bytes


@dataclasses.dataclass(frozen=True)
class StepCost:
    """One step of all slots, on one of the devices.

    Attributes:
        messages: {kind: collectives of that kind}.
        results: {kind: bytes of their results}.
        flops: of the products of Muon's iteration.
        state: bytes of parameters, gradient sums and momentum.
        moved: bytes sent, by ring algorithms.
    """

    messages: Mapping[str, int]
    results: Mapping[str, int]
    flops: int
    state: int
    moved: float


def step_cost(pool: Workload, placement: str, devices: int, *, slot_devices: int = 1) -> StepCost:
    """The cost of one step by formula.

    Args:
        pool: what is stepped.
        placement: one of `PLACEMENTS`.
        devices: along the axis that the placement spreads over.
        slot_devices: along another axis, over which whole slots are spread first.
    """
    slots = _share(pool.n_slots, slot_devices)
    shapes = [shape[1:] for _, shape in sorted(pool.shapes().items())]
    sizes = [math.prod(shape) for shape in shapes]
    messages: dict[str, int] = {}
    results: dict[str, int] = {}
    if placement == "slot":
        slots = _share(slots, devices)
        numbers = slots * sum(sizes)
        flops, state = slots * sum(map(product_flops, shapes)), 3 * numbers
    elif placement == "layer":
        owners = balance([update_cost(shape) for shape in shapes], devices)
        chunk = max(_sums(owners, sizes))
        messages, results = {"all-gather": 1}, {"all-gather": FLOAT * slots * devices * chunk}
        flops = slots * max(_sums(owners, map(product_flops, shapes)))
        state = slots * (2 * sum(sizes) + chunk)
    else:
        segments = len(gram_segments(COEFFICIENTS))
        batches = math.ceil(len(shapes) / TOGETHER)
        grams = segments * sum(min(shape) ** 2 for shape in shapes)
        # The norm over a matrix is one of sums over its rows. Where A's rows are cut, each of
        # these is reduced; of B, whose rows are whole, only their sum.
        norms = sum(rows if rows <= columns else 1 for rows, columns in shapes)
        messages = {"all-reduce": batches * (segments + 1)}
        results = {"all-reduce": FLOAT * slots * (grams + norms + batches - 1)}
        flops = slots * sum(product_flops(shape, devices) for shape in shapes)
        state = 3 * slots * _share(sum(sizes), devices)
    if devices == 1:
        messages, results = {}, {}
    moved = sum(ring_bytes(kind, size, devices) for kind, size in results.items())
    return StepCost(messages, results, flops, FLOAT * state, moved)


def product_flops(shape: tuple[int, int], devices: int = 1) -> int:
    """Muon's products for one matrix whose long side is cut; those of r x r each device makes."""
    small, large = sorted(shape)
    with_long_side, cubes = gram_products(COEFFICIENTS)
    return 2 * small**2 * (with_long_side * large // devices + cubes * small)


def ring_bytes(kind: str, result: float, devices: int) -> float:
    """What each device sends in a ring of ``devices`` for a collective with such a result."""
    share = (devices - 1) / devices
    return {"all-reduce": 2 * share, "all-gather": share, "reduce-scatter": devices - 1.0}[
        kind
    ] * result


def reduction_bytes(pool: Workload, devices: int) -> float:
    """What each of so many data-parallel devices sends to reduce all gradient sums, once a step."""
    return ring_bytes("all-reduce", FLOAT * pool.n_parameters(), devices)


def compiled_step(
    pool: Workload, placement: str, devices: int, *, slot_devices: int = 1
) -> jax.stages.Compiled:
    """The program of the step that `step_cost` is about; only "tensor" has two axes."""
    mesh, axis = jax.make_mesh((slot_devices, devices), ("slots", "devices")), "devices"
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in pool.shapes().items()
    }
    tx, step = multi_lora_optimizer(CONFIG), SlotTrainState.step
    if placement == "layer":
        tx = layerwise(tx, params, mesh, axis)
    if placement == "slot":
        step = on_own_slots(step, mesh, axis)
    state = jax.eval_shape(functools.partial(SlotTrainState.create, tx, params, rank=pool.rank))
    place = {
        "slot": by_slot,
        "layer": by_layer,
        "tensor": lambda tree, *where: by_tensor(tree, params, *where, slot_axis="slots"),
    }[placement]
    shardings = place(state, mesh, axis)
    placed = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        shardings,
    )
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    return jitted.lower(placed).compile()


def program_collectives(program: jax.stages.Compiled) -> tuple[dict[str, int], dict[str, int]]:
    """{kind: how many}, {kind: bytes of their results} of a program."""
    messages: dict[str, int] = {}
    results: dict[str, int] = {}
    for found in collectives(program):
        messages[found.kind] = messages.get(found.kind, 0) + 1
        results[found.kind] = results.get(found.kind, 0) + found.bytes
    return messages, results


def cost_table(pool: Workload, devices: int) -> Table:
    """The placements beside each other."""
    table = Table("placement", *COLUMNS, title=f"{describe(pool)}, {devices} devices")
    for placement in PLACEMENTS:
        if placement != "slot" or pool.n_slots >= devices:
            table.add_row(placement, *_cells(step_cost(pool, placement, devices)))
    return table


def plan_table(pool: Workload, chips: int) -> Table:
    """Whole slots over groups of chips, within which tensors are cut, for groups of each size."""
    table = Table(
        "chips per group",
        "groups",
        "slots per group",
        *COLUMNS,
        title=f"{pool.n_slots} tenants on {chips} chips: {describe(pool)}",
    )
    for group in (1, 2, 4, 8, 16):
        if chips % group:
            continue
        groups = chips // group
        slots = math.ceil(pool.n_slots / groups)
        whole = dataclasses.replace(pool, n_slots=slots * groups)
        placement = "tensor" if group > 1 else "slot"
        cost = step_cost(whole, placement, group, slot_devices=groups)
        table.add_row(str(group), str(groups), str(slots), *_cells(cost))
    return table


COLUMNS = ("messages", "result bytes", "sent per device", "GFLOP per device", "state per device")


def describe(pool: Workload) -> str:
    """S, L, r and the parameters of one tenant."""
    each = pool.n_parameters() // pool.n_slots
    return (
        f"{pool.n_slots} slots, {pool.n_layers} layers of {len(pool.linears)} matrices, "
        f"rank {pool.rank}, {each / 1e6:.2f} M parameters per tenant"
    )


def main(
    slots: Annotated[int, typer.Option(min=1, help="S, slots of the pool.")] = LARGE.n_slots,
    layers: Annotated[int, typer.Option(min=1, help="L, layers.")] = LARGE.n_layers,
    rank: Annotated[int, typer.Option(min=1, help="r.")] = LARGE.rank,
    width: Annotated[
        int | None, typer.Option(min=1, help="d of square matrices; Qwen3-0.6B's if absent.")
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="How many.")] = 8,
    tenants: Annotated[int, typer.Option(min=1, help="Of the plan.")] = 1000,
    chips: Annotated[int, typer.Option(min=1, help="Of the plan.")] = 256,
    check: Annotated[bool, typer.Option(help="Compare with compiled programs.")] = False,
) -> None:
    """What a step communicates, computes and holds, by placement, and a plan for many tenants."""
    linears = QWEN3_0_6B if width is None else dict.fromkeys(QWEN3_0_6B, (width, width))
    pool = Workload("pool", linears, layers, rank, slots)
    console = Console(width=140)
    if check:
        jax.config.update("jax_num_cpu_devices", devices)
        axes = [(placement, devices, 1) for placement in PLACEMENTS]
        axes += [("tensor", devices // 2, 2)] if devices % 2 == 0 else []
        failed = [not _agrees(console, pool, *one) for one in axes]
        raise typer.Exit(int(any(failed)))
    console.print(cost_table(pool, devices))
    reduced = reduction_bytes(pool, devices)
    console.print(f"Gradient sums over {devices} data-parallel devices: {_size(reduced)} per step")
    console.print(plan_table(dataclasses.replace(pool, n_slots=tenants), chips))


def _agrees(
    console: Console, pool: Workload, placement: str, devices: int, slot_devices: int
) -> bool:
    """Prints the formula beside the program, and returns whether they agree."""
    cost = step_cost(pool, placement, devices, slot_devices=slot_devices)
    program = compiled_step(pool, placement, devices, slot_devices=slot_devices)
    messages, results = program_collectives(program)
    agrees = (messages, results) == (cost.messages, cost.results)
    console.print(
        f"{'ok  ' if agrees else 'FAIL'}  {placement} over {devices}, slots over {slot_devices}: "
        f"formula {cost.messages} {cost.results}, program {messages} {results}; "
        f"products {cost.flops}, all operations {program.cost_analysis()['flops']:.0f}",
        soft_wrap=True,
    )
    return agrees


def _cells(cost: StepCost) -> list[str]:
    messages = ", ".join(f"{n} {kind}" for kind, n in cost.messages.items()) or "none"
    flops = f"{cost.flops / 1e9:.2f}"
    return [
        messages,
        _size(sum(cost.results.values())),
        _size(cost.moved),
        flops,
        _size(cost.state),
    ]


def _size(n: float) -> str:
    power = min(3, int(math.log10(n)) // 3) if n >= 1 else 0
    return f"{n / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def _share(n: int, devices: int) -> int:
    if n % devices:
        raise ValueError(f"{n} cannot be spread evenly over {devices} devices")
    return n // devices


def _sums(owners: list[int], numbers) -> list[int]:
    """Each owner's total."""
    by_owner = sorted(zip(owners, numbers, strict=True))
    groups = itertools.groupby(by_owner, key=lambda pair: pair[0])
    return [sum(number for _, number in group) for _, group in groups]


if __name__ == "__main__":
    typer.run(main)
