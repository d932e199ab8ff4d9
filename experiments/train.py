"""Trains a pool of one's own: ``python -m experiments.train CONFIG.toml``.

See example.toml for what a configuration says. Progress is shown as bars and logged per tenant
for TensorBoard. A run that was killed goes on from its last checkpoint when it is started again,
and ends with the weights that it would have had. Each tenant's adapter is written when it leaves.
"""

import dataclasses
import json
import pathlib
import tomllib
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from experiments.base import BaseConfig, base_model
from experiments.model import Adapters, LlamaConfig
from experiments.pool import (
    Tenant,
    empty_pool,
    held_out,
    install,
    slot_losses,
    train_step,
)
from experiments.roster import Roster
from jax_impl import SlotTrainState
from jax_impl.peft import export_adapter


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """The pool and its rhythm.

    Attributes:
      slots: the optimizer of each slot.
      rank: what adapters are padded to.
      rows, length: windows that a slot has in each micro-batch, and their bytes.
      held_out_every, held_out_rows: micro-batches between held-out losses, and their rows.
      checkpoint_every: micro-batches between checkpoints.
    """

    slots: tuple[str, ...]
    rank: int = 16
    rows: int = 4
    length: int = 64
    held_out_every: int = 25
    held_out_rows: int = 16
    checkpoint_every: int = 25


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """All that a configuration file says."""

    out: pathlib.Path
    base: BaseConfig
    pool: PoolConfig
    tenants: tuple[Tenant, ...]


def read_config(path: pathlib.Path) -> RunConfig:
    """Reads a TOML file.

    Raises:
      ValueError: a key that is not known, or two tenants of one name.
    """
    table = tomllib.loads(path.read_text())
    known = {"out", "model", "base", "pool", "defaults", "tenants"}
    if unknown := set(table) - known:
        raise ValueError(f"{path}: unknown {sorted(unknown)}; known are {sorted(known)}")
    model = build(LlamaConfig, table.get("model", {}))
    pool = build(PoolConfig, table["pool"] | {"slots": tuple(table["pool"]["slots"])})
    defaults = table.get("defaults", {})
    tenants = tuple(build(Tenant, defaults | tenant) for tenant in table["tenants"])
    names = [tenant.name for tenant in tenants]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: tenants need names of their own, not {names}")
    if odd := [t.name for t in tenants if t.batch_size % pool.rows]:
        raise ValueError(f"{path}: batch_size of {odd} must be a multiple of rows = {pool.rows}")
    base = build(BaseConfig, table.get("base", {}) | {"model": model})
    return RunConfig(pathlib.Path(table["out"]), base, pool, tenants)


def build(cls: type, table: dict[str, Any]) -> Any:
    """An instance of a dataclass from a table.

    Raises:
      ValueError: a key that the class does not have.
    """
    fields = {field.name for field in dataclasses.fields(cls)}
    if unknown := set(table) - fields:
        raise ValueError(f"{cls.__name__}: unknown {sorted(unknown)}; known are {sorted(fields)}")
    return cls(**table)


def train(config: RunConfig, console: Console | None = None) -> None:
    """Trains all tenants, from the last checkpoint where there is one."""
    model = base_model(config.base)
    roster = Roster(config.tenants, config.pool.slots)
    state = empty_pool(config.base.model, config.pool.slots, config.pool.rank)
    state, step = restore(config.out / "checkpoint.npz", state, roster)
    bars, logs = Bars(console), Logs(config.out / "logs")
    with bars, logs:
        while not roster.done:
            for slot, tenant in roster.arrivals():
                state = install(config.base.model, state, slot, tenant)
            batch = roster.batch(config.pool.rows, config.pool.length)
            state, report, losses = train_step(model, state, batch)
            finished = roster.advance(config.pool.rows)
            step += 1
            logs.step(roster, report, losses)
            if finished or step % config.pool.held_out_every == 0:
                unseen = held_out(roster.seated, config.pool.held_out_rows, config.pool.length)
                logs.held_out(roster, slot_losses(model, state.model_params(), unseen))
            bars.show(roster, losses)
            for slot in finished:
                tenant = roster.seated[slot]
                export(
                    config.out / "adapters" / tenant.name, tenant, adapter_of(state, slot, tenant)
                )
                state = state.retire(slot)
                roster.leave(slot)
            if step % config.pool.checkpoint_every == 0 or roster.done:
                save(config.out / "checkpoint.npz", state, roster, step)


def adapter_of(state: SlotTrainState, slot: int, tenant: Tenant) -> Adapters:
    """A slot's adapter without its padding."""
    params = {k: np.asarray(x[slot]) for k, x in state.model_params().items()}
    return {
        k: x[: tenant.rank] if k.endswith("linear_in") else x[:, : tenant.rank]
        for k, x in params.items()
    }


def export(folder: pathlib.Path, tenant: Tenant, adapter: Adapters) -> None:
    """Writes a finished adapter for PEFT, its modules named as in Hugging Face's Llama."""
    export_adapter(
        folder,
        {f"model.{name}": x for name, x in adapter.items()},
        rank=tenant.rank,
        alpha=tenant.scaling * tenant.rank,
    )


def save(path: pathlib.Path, state: SlotTrainState, roster: Roster, step: int) -> None:
    """Writes a checkpoint, whole or not at all."""
    host = {"step": step} | dataclasses.asdict(roster)
    leaves = {str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, host=json.dumps(host), **leaves)
    partial.replace(path)


def restore(
    path: pathlib.Path, state: SlotTrainState, roster: Roster
) -> tuple[SlotTrainState, int]:
    """Reads a checkpoint into a state like ``state`` and into the roster; returns its step, too.

    Raises:
      ValueError: the checkpoint is of other tenants or of another pool.
    """
    if not path.exists():
        return state, 0
    leaves, treedef = jax.tree.flatten(state)
    with np.load(path) as file:
        host = json.loads(str(file["host"]))
        saved = [file[str(i)] for i in range(len(file.files) - 1)]
    same_pool = [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in leaves]
    here = json.loads(json.dumps(dataclasses.asdict(roster)))
    if not same_pool or any(host[k] != here[k] for k in ("tenants", "owners")):
        raise ValueError(f"{path} is of another configuration; remove it to start anew")
    for name in ("seats", "positions", "waiting"):
        setattr(roster, name, host[name])
    return treedef.unflatten(map(jax.numpy.asarray, saved)), host["step"]


class Logs:
    """TensorBoard logs, a folder for each tenant, over the samples that it has trained on."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.writers = folder, {}

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *_) -> None:
        for writer in self.writers.values():
            writer.close()

    def writer(self, name: str, samples: int) -> SummaryWriter:
        """The tenant's writer; what an interrupted run wrote from ``samples`` on is hidden."""
        if name not in self.writers:
            self.writers[name] = SummaryWriter(str(self.folder / name), purge_step=samples)
        return self.writers[name]

    def write(self, roster: Roster, slot: int, tag: str, value: Any) -> None:
        """Writes one number of the tenant in a slot."""
        samples = roster.positions[slot]
        self.writer(roster.seated[slot].name, samples).add_scalar(tag, float(value), samples)

    def step(self, roster: Roster, report: Any, losses: jax.Array) -> None:
        """Writes the training loss of every tenant, and what the step did for those it stepped."""
        report = jax.tree.map(np.asarray, report)
        for slot, tenant in enumerate(roster.seated):
            if tenant is None:
                continue
            self.write(roster, slot, "loss/train", losses[slot])
            if report.stepped[slot] or report.skipped[slot]:
                self.write(roster, slot, "learning_rate", report.learning_rate[slot])
                self.write(roster, slot, "gradient_norm", report.grad_norm[slot])
                self.write(roster, slot, "skipped", report.skipped[slot])

    def held_out(self, roster: Roster, losses: jax.Array) -> None:
        """Writes the held-out loss of every tenant."""
        for slot, tenant in enumerate(roster.seated):
            if tenant is not None:
                self.write(roster, slot, "loss/held_out", losses[slot])


class Bars:
    """A progress bar for each tenant that has arrived, in samples."""

    def __init__(self, console: Console | None = None):
        columns = [TextColumn("{task.description:>16}"), BarColumn(), MofNCompleteColumn()]
        columns += [TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn()]
        self.progress, self.tasks = Progress(*columns, console=console), {}

    def __enter__(self) -> "Bars":
        self.progress.start()
        return self

    def __exit__(self, *_) -> None:
        self.progress.stop()

    def show(self, roster: Roster, losses: jax.Array) -> None:
        """Moves the bars to where the tenants are."""
        for slot, tenant in enumerate(roster.seated):
            if tenant is None:
                continue
            if tenant.name not in self.tasks:
                total = tenant.num_steps * tenant.batch_size
                self.tasks[tenant.name] = self.progress.add_task(tenant.name, total=total, loss=0.0)
            self.progress.update(
                self.tasks[tenant.name],
                completed=roster.positions[slot],
                loss=float(losses[slot]),
            )


def main(
    config: Annotated[pathlib.Path, typer.Argument(help="A TOML file; see example.toml.")],
) -> None:
    """Trains the pool that CONFIG describes, or goes on where it stopped."""
    console = Console()
    run = read_config(config)
    train(run, console)
    console.print(
        f"adapters: {run.out / 'adapters'}; logs: tensorboard --logdir {run.out / 'logs'}"
    )


if __name__ == "__main__":
    typer.run(main)
