"""A pool of tenants in training: who they are, their batches, one program for a step of all."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import data
from experiments.model import (
    Adapters,
    Llama,
    LlamaConfig,
    LoRA,
    init_adapter,
    pool_shapes,
    sample_losses,
)
from experiments.optimizers import assigned
from jax_impl import ParamScheduleConfig, SlotTrainState, StepReport, slot_schedule


@dataclasses.dataclass(frozen=True)
class Tenant:
    """One adapter's task and settings.

    Attributes:
      name: what reports call it.
      domain: a key of `data.DOMAINS`.
      optimizer: a key of `optimizers.OPTIMIZERS`.
      lr, weight_decay, lr_decay_style, lr_warmup_fraction: see `jax_impl.slot_schedule`.
      rank: its own rank.
      alpha: its output is scaled by alpha / rank; None: not scaled.
      batch_size: samples per step, a multiple of the rows that a slot has in a micro-batch.
      num_steps: how long it stays.
      dropout: share of the adapter's inputs that is dropped in training.
      seed: of its weights, its batches and its dropout.
    """

    name: str = "tenant"
    domain: str = "characters"
    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    lr_decay_style: str = "cosine"
    lr_warmup_fraction: float = 0.1
    rank: int = 8
    alpha: float | None = None
    batch_size: int = 8
    num_steps: int = 100
    dropout: float = 0.0
    seed: int = 0

    @property
    def scaling(self) -> float:
        """What the adapter's output is multiplied by."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def schedule(self) -> ParamScheduleConfig:
        """Its schedule, in samples."""
        return slot_schedule(
            lr=self.lr,
            batch_size=self.batch_size,
            num_step=self.num_steps,
            lr_decay_style=self.lr_decay_style,
            lr_warmup_fraction=self.lr_warmup_fraction,
            weight_decay=self.weight_decay,
        )

    def adapter(self, config: LlamaConfig) -> Adapters:
        """Its weights before training, at its own rank."""
        return init_adapter(config, self.rank, jax.random.key(self.seed))


class Batch(NamedTuple):
    """A micro-batch of the pool: the same number of rows for every slot, in the slots' order.

    Attributes:
      tokens: int32 (B, T + 1).
      slots: int32 (B,), each row's slot, -1 where it is free.
      samples: int32 (S,), rows of each slot.
      scaling, dropout: float32 (S,), as in `LoRA`.
      keys: PRNG keys (B,), None where no tenant drops anything.
    """

    tokens: np.ndarray
    slots: np.ndarray
    samples: np.ndarray
    scaling: np.ndarray
    dropout: np.ndarray
    keys: jax.Array | None = None

    def lora(self, adapters: Adapters) -> LoRA:
        """The adapters as this batch uses them."""
        return LoRA(adapters, self.slots, self.scaling, self.dropout, self.keys)


def make_batch(
    tenants: Sequence[Tenant | None], positions: Sequence[int], rows: int, length: int
) -> Batch:
    """Returns the samples at which each tenant is: the next ``rows`` windows of ``length``.

    What a tenant gets depends on itself and its own position alone.

    Args:
      tenants: (S,), None for a free slot.
      positions: (S,), how many samples each has had.
      rows, length: of every slot.
    """
    tokens = [
        np.zeros((rows, length + 1), np.int32)
        if t is None
        else data.batch(t.domain, rows, length + 1, seed=t.seed, first=p)
        for t, p in zip(tenants, positions, strict=True)
    ]
    return _batch(tenants, tokens, _dropout_keys(tenants, positions, rows))


def held_out(tenants: Sequence[Tenant | None], rows: int, length: int) -> Batch:
    """Returns held-out rows for every tenant, the same each time."""
    tokens = [
        np.zeros((rows, length + 1), np.int32)
        if t is None
        else data.held_out_batch(t.domain, rows, length + 1)
        for t in tenants
    ]
    return _batch(tenants, tokens, None)


def empty_pool(config: LlamaConfig, owners: Sequence[str], rank: int) -> SlotTrainState:
    """Returns a pool without tenants, ``owners`` (S,) naming the optimizer of each slot."""
    shapes = pool_shapes(config, len(owners), rank)
    return SlotTrainState.create(assigned(tuple(owners)), shapes, rank=rank)


def full_pool(config: LlamaConfig, tenants: Sequence[Tenant], rank: int) -> SlotTrainState:
    """Returns a pool with a tenant in every slot."""
    state = empty_pool(config, [t.optimizer for t in tenants], rank)
    for slot, tenant in enumerate(tenants):
        state = install(config, state, slot, tenant)
    return state


def install(
    config: LlamaConfig, state: SlotTrainState, slot: int, tenant: Tenant
) -> SlotTrainState:
    """Puts a tenant that has not trained yet into a free slot."""
    return state.install(
        slot,
        tenant.adapter(config),
        rank=tenant.rank,
        batch_size=tenant.batch_size,
        schedule=tenant.schedule(),
    )


@functools.partial(jax.jit, donate_argnums=1)
def train_step(
    model: Llama, state: SlotTrainState, batch: Batch
) -> tuple[SlotTrainState, StepReport, jax.Array]:
    """One micro-batch of all tenants: gradients, accumulate, and step whose batch is full.

    Returns:
      The new state, the report, and the mean loss of each slot's rows, (S,).
    """

    def total(adapters):
        losses = sample_losses(model, batch.tokens, batch.lora(adapters))
        return jnp.sum(losses), losses

    grads, losses = jax.grad(total, has_aux=True)(state.model_params())
    state, report = state.accumulate(grads, batch.samples).step()
    return state, report, slot_means(losses, batch)


@jax.jit
def slot_losses(model: Llama, adapters: Adapters, batch: Batch) -> jax.Array:
    """Each slot's mean loss in nats per byte, (S,), 0 where it is free."""
    return slot_means(sample_losses(model, batch.tokens, batch.lora(adapters)), batch)


def slot_means(losses: jax.Array, batch: Batch) -> jax.Array:
    """The mean over each slot's rows: (B,) -> (S,)."""
    by_slot = losses.reshape(len(batch.samples), -1)
    return jnp.where(batch.samples > 0, jnp.mean(by_slot, axis=1), 0)


def _batch(tenants, tokens, keys) -> Batch:
    taken = np.asarray([t is not None for t in tenants])
    rows = len(tokens[0])
    return Batch(
        tokens=np.concatenate(tokens),
        slots=np.repeat(np.where(taken, np.arange(len(tenants)), -1), rows).astype(np.int32),
        samples=np.where(taken, rows, 0).astype(np.int32),
        scaling=np.asarray([t.scaling if t else 0 for t in tenants], np.float32),
        dropout=np.asarray([t.dropout if t else 0 for t in tenants], np.float32),
        keys=keys,
    )


def _dropout_keys(tenants, positions, rows) -> jax.Array | None:
    """A key for each row, from its tenant's seed and the number of its sample."""
    if not any(t and t.dropout for t in tenants):
        return None
    words = [
        np.random.SeedSequence([t.seed if t else 0, p + row]).generate_state(2)
        for t, p in zip(tenants, positions, strict=True)
        for row in range(rows)
    ]
    return jax.random.wrap_key_data(jnp.asarray(np.stack(words), jnp.uint32))
