"""Random operations on a pool of 16 slots with real steps, as weeks of tenants would do them.

After each of them every co-tenant must have kept its every bit; at the end every tenant must equal
its twin, which did the same steps in a pool of its own.
"""

import dataclasses
import functools
import random
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from jax_impl import (
    OptimizerConfig,
    SlotTrainState,
    multi_lora_optimizer,
    pad_slots,
    slot_schedule,
)
from jax_impl.checkpoint import TenantCheckpoints
from jax_impl.testing import bits

N_SLOTS, RANK, BATCH_SIZE = 16, 8, 4
CONFIGS = (
    OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest"),
    OptimizerConfig(optimizer="adam"),
)
SHAPES = {
    "q.linear_in": (RANK, 24),
    "q.linear_out": (20, RANK),
    "q.bias": (20,),
    "k.linear_in": (RANK, 40),
    "k.linear_out": (24, RANK),
}
RANKS = (2, 5, RANK)

# In two thirds of the operations; states are copied to the host and back all the time.
MAX_GROWTH = 64  # MiB
# One per operation, rank and length of an index.
MAX_PROGRAMS = len(RANKS) + 5 + 5

# --- the pool, every operation one program ------------------------------------------------------


def empty_pool() -> SlotTrainState:
    pool = {n: jax.ShapeDtypeStruct((N_SLOTS, *s), jnp.float32) for n, s in SHAPES.items()}
    return SlotTrainState.create(multi_lora_optimizer(*CONFIGS), pool, rank=RANK)


@functools.partial(jax.jit, static_argnames="rank", donate_argnums=0)
def install(state, slot, params, schedule, family, *, rank):
    return state.install(
        slot, params, rank=rank, batch_size=BATCH_SIZE, schedule=schedule, family=family
    )


accumulate = jax.jit(SlotTrainState.accumulate, donate_argnums=0)
step = jax.jit(lambda state, slots, lr: state.step(slots, learning_rate=lr), donate_argnums=0)
discard = jax.jit(SlotTrainState.discard, donate_argnums=0)
retire = jax.jit(SlotTrainState.retire, donate_argnums=0)
move = jax.jit(SlotTrainState.move, donate_argnums=0)
clone = jax.jit(SlotTrainState.clone, donate_argnums=0)
PROGRAMS = (install, accumulate, step, discard, retire, move, clone)


def adapter(seed: int, rank: int) -> dict[str, np.ndarray]:
    """Random arrays of one slot, zero beyond the rank."""
    rng = np.random.default_rng(seed)
    arrays = {n: rng.standard_normal(s, np.float32) for n, s in SHAPES.items()}
    for name, x in arrays.items():
        if name.endswith("linear_in"):
            x[rank:] = 0
        if name.endswith("linear_out"):
            x[:, rank:] = 0
    return arrays


# --- lives --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Life:
    """What has happened to one tenant since its installation, enough to do it all again.

    Attributes:
        seed, rank, family: of its installation.
        steps: (seed of the gradients, learning rate, bucket) of each.
        pending: seed of the gradients of a full batch that waits for its step.
    """

    seed: int
    rank: int
    family: int
    steps: list[tuple[int, float, int]] = dataclasses.field(default_factory=list)
    pending: int | None = None

    def schedule(self):
        return slot_schedule(
            lr=0.01 * (1 + self.seed % 5),
            batch_size=BATCH_SIZE,
            num_step=40,
            lr_decay_style=("cosine", "linear")[self.seed % 2],
            weight_decay=0.1,
        )

    def begin(self, state: SlotTrainState, slot: int) -> SlotTrainState:
        params = adapter(self.seed, self.rank)
        own = {
            n: x[: self.rank] if n.endswith("in") else x[:, : self.rank] if x.ndim == 2 else x
            for n, x in params.items()
        }
        schedule = jax.tree.map(np.float32, self.schedule())
        return install(state, slot, own, schedule, self.family, rank=self.rank)

    def copy(self) -> "Life":
        return dataclasses.replace(self, steps=list(self.steps))


def add_batch(state: SlotTrainState, slot: int, life: Life, seed: int) -> SlotTrainState:
    """Fills the slot's batch with the gradients of ``seed``."""
    own = adapter(seed, life.rank)
    grads = {n: np.zeros((N_SLOTS, *s), np.float32) for n, s in SHAPES.items()}
    for name, x in own.items():
        grads[name][slot] = x
    samples = np.zeros(N_SLOTS, np.int32)
    samples[slot] = BATCH_SIZE
    return accumulate(state, grads, samples)


def rates(lr: float) -> np.ndarray:
    return np.full(N_SLOTS, lr, np.float32)


def twin(life: Life, slot: int) -> SlotTrainState:
    """The same life in a pool of its own."""
    state = life.begin(empty_pool(), slot)
    for seed, lr, bucket in life.steps:
        state = add_batch(state, slot, life, seed)
        padded = np.full(bucket, -1, np.int32)
        padded[0] = slot
        state, _ = step(state, padded, rates(lr))
    if life.pending is not None:
        state = add_batch(state, slot, life, life.pending)
    return state


class Soak:
    """A pool and the lives in it."""

    def __init__(self, seed: int, directory: Path):
        self.rng = random.Random(seed)
        self.state = empty_pool()
        self.lives: dict[int, Life] = {}
        self.saved: dict[str, Life] = {}
        self.checkpoints = TenantCheckpoints(directory, *CONFIGS, max_to_keep=1)
        self.counts: Counter[str] = Counter()
        self.next_seed = 0

    def fresh_seed(self) -> int:
        self.next_seed += 1
        return self.next_seed

    def possible(self) -> dict[str, float]:
        """Operations that can happen now, with their weights."""
        waiting = [slot for slot, life in self.lives.items() if life.pending is not None]
        free = len(self.lives) < N_SLOTS
        return {
            name: weight
            for name, weight, can in (
                ("install", 2.0, free),
                ("accumulate", 8.0, len(waiting) < len(self.lives)),
                ("step", 8.0, waiting),
                ("discard", 0.5, waiting),
                ("retire", 0.7, len(self.lives) > 4),
                ("move", 0.5, self.lives and free),
                ("clone", 0.3, self.lives and free),
                ("save", 0.4, self.lives),
                ("restore", 0.4, self.saved and free),
            )
            if can
        }

    def operate(self) -> None:
        """One operation, after which the slots that it names may have changed, and no others."""
        weights = self.possible()
        (name,) = self.rng.choices(list(weights), list(weights.values()))
        before = slot_bits(self.state)
        touched = getattr(self, name)()
        self.counts[name] += 1
        after = slot_bits(self.state)
        for slot in range(N_SLOTS):
            if slot not in touched and before[slot] != after[slot]:
                raise AssertionError(f"{name} of {touched} changed slot {slot}")
        self.check_invariants()

    def check_invariants(self) -> None:
        """Free slots are scrubbed, padding is zero, and positions are what was stepped."""
        occupied, samples = jax.device_get((self.state.occupied, self.state.samples))
        params = jax.device_get(self.state.params)
        for slot in range(N_SLOTS):
            life = self.lives.get(slot)
            assert occupied[slot] == (life is not None), f"slot {slot} is occupied"
            assert samples[slot] == (BATCH_SIZE * len(life.steps) if life else 0)
            rank = life.rank if life else 0
            for name, x in params.items():
                if name.endswith("linear_in"):
                    assert not x[slot, rank:].any(), f"slot {slot}: {name} beyond its rank"
                elif not life:
                    assert not x[slot].any(), f"free slot {slot}: {name}"

    # Each operation returns the slots that it names.

    def _free(self) -> int:
        return self.rng.choice([s for s in range(N_SLOTS) if s not in self.lives])

    def _taken(self, pending: bool | None = None) -> int:
        slots = [
            slot
            for slot, life in self.lives.items()
            if pending is None or (life.pending is not None) == pending
        ]
        return self.rng.choice(slots)

    def install(self) -> list[int]:
        slot = self._free()
        life = Life(self.fresh_seed(), self.rng.choice(RANKS), self.rng.randrange(len(CONFIGS)))
        self.state, self.lives[slot] = life.begin(self.state, slot), life
        return [slot]

    def accumulate(self) -> list[int]:
        slot = self._taken(pending=False)
        life = self.lives[slot]
        life.pending = self.fresh_seed()
        self.state = add_batch(self.state, slot, life, life.pending)
        return [slot]

    def step(self) -> list[int]:
        waiting = [slot for slot, life in self.lives.items() if life.pending is not None]
        slots = self.rng.sample(waiting, self.rng.randint(1, len(waiting)))
        padded, lr = pad_slots(slots, N_SLOTS), self.rng.choice((0.003, 0.02))
        self.state, report = step(self.state, padded, rates(lr))
        assert np.array_equal(np.flatnonzero(report.stepped), sorted(slots))
        for slot in slots:
            life = self.lives[slot]
            life.steps.append((life.pending, lr, len(padded)))
            life.pending = None
        return slots

    def discard(self) -> list[int]:
        slot = self._taken(pending=True)
        self.state = discard(self.state, np.array([slot]))
        self.lives[slot].pending = None
        return [slot]

    def retire(self) -> list[int]:
        slot = self._taken()
        self.state = retire(self.state, slot)
        del self.lives[slot]
        return [slot]

    def move(self) -> list[int]:
        source, target = self._taken(), self._free()
        self.state = move(self.state, source, target)
        self.lives[target] = self.lives.pop(source)
        return [source, target]

    def clone(self) -> list[int]:
        source, target = self._taken(), self._free()
        self.state = clone(self.state, source, target)
        self.lives[target] = self.lives[source].copy()
        return [target]

    def save(self) -> list[int]:
        slot, name = self._taken(), f"tenant{self.rng.randrange(8)}"
        self.checkpoints.save(name, self.state, slot)
        self.saved[name] = self.lives[slot].copy()
        return []

    def restore(self) -> list[int]:
        slot, name = self._free(), self.rng.choice(sorted(self.saved))
        self.checkpoints.wait()
        self.state = self.checkpoints.restore(name, self.state, slot)
        self.lives[slot] = self.saved[name].copy()
        return [slot]


def slot_bits(state: SlotTrainState) -> list[tuple[bytes, ...]]:
    """Every bit of each slot, but for gradient sums that count for nothing."""
    state = dataclasses.replace(state, grad_buffer=state.grad_sum)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(state))]
    return [tuple(bits(leaf[slot]).tobytes() for leaf in leaves) for slot in range(N_SLOTS)]


def resident_mebibytes() -> float:
    """What this process holds of the machine's memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def soak(operations: int, seed: int, directory: Path) -> dict[str, Any]:
    """Lives ``operations`` operations and compares every tenant with its twin.

    Raises:
        AssertionError: a co-tenant changed, an invariant broke, or a twin differs.
    """
    pool, before = Soak(seed, directory), programs()
    third = operations // 3
    compiled, memory = 0, 0.0
    for index in track(range(operations), "operations", transient=True):
        if index == third:
            compiled, memory = programs(), resident_mebibytes()
        pool.operate()
    grown = resident_mebibytes() - memory
    new_programs = programs() - compiled
    assert grown < MAX_GROWTH, f"grew by {grown:.0f} MiB since a third of the operations"
    compiled_here = programs() - before
    assert compiled_here <= MAX_PROGRAMS, f"{compiled_here} programs were compiled"
    mine = slot_bits(pool.state)
    for slot, life in pool.lives.items():
        if slot_bits(twin(life, slot))[slot] != mine[slot]:
            raise AssertionError(f"slot {slot} differs from its twin after {len(life.steps)} steps")
    pool.checkpoints.close()
    return {
        "operations": dict(sorted(pool.counts.items())),
        "twins": len(pool.lives),
        "steps of the oldest": max((len(life.steps) for life in pool.lives.values()), default=0),
        "programs": compiled_here,
        "programs since a third": new_programs,
        "MiB grown since a third": round(grown, 1),
    }


def programs() -> int:
    """How many programs the operations have compiled."""
    return sum(program._cache_size() for program in PROGRAMS)
