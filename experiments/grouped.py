"""Ways to multiply every row of a batch with its own adapter, timed: forward and backward.

``python -m experiments.grouped`` prints a markdown table of medians. `experiments.model` uses the
fastest that takes any number of rows per slot.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import typer

from experiments.model import lora_product


def by_gather(x, a, b, slots):
    """Gathers each row's pair: what the model does."""
    return lora_product(x, a, b, slots, jnp.ones(a.shape[0]))


def by_ragged_dot(x, a, b, slots):
    """`jax.lax.ragged_dot` over the tokens of rows that are sorted by slot."""
    rows, length, n_in = x.shape
    sizes = jnp.bincount(slots, length=a.shape[0]) * length
    flat = x.reshape(rows * length, n_in)
    hidden = jax.lax.ragged_dot(flat, a.mT, sizes)
    return jax.lax.ragged_dot(hidden, b.mT, sizes).reshape(rows, length, -1)


def by_block(x, a, b, slots):
    """One product per slot, all slots having equally many rows, in order."""
    grouped = x.reshape(a.shape[0], -1, x.shape[-1])
    y = jnp.einsum("sti,sri,sor->sto", grouped, a, b, optimize=[(0, 1), (0, 1)])
    return y.reshape(*x.shape[:2], -1)


def by_mask(x, a, b, slots):
    """All adapters as one wide one, the hidden features of other slots zeroed."""
    size, rank = a.shape[:2]
    hidden = x @ a.reshape(size * rank, -1).T
    own = (jnp.arange(size * rank) // rank)[None] == slots[:, None]
    return (hidden * own[:, None]) @ jnp.moveaxis(b, 1, 2).reshape(size * rank, -1)


WAYS: dict[str, Callable] = {
    "gather": by_gather,
    "ragged_dot": by_ragged_dot,
    "block": by_block,
    "mask": by_mask,
}


def inputs(n_slots: int, rows: int, length: int, size: int, rank: int):
    """Random x (S * rows, T, size), a, b and the slots of the rows, in order."""
    rng = np.random.default_rng(0)
    shapes = (n_slots * rows, length, size), (n_slots, rank, size), (n_slots, size, rank)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    return *arrays, jnp.repeat(jnp.arange(n_slots), rows)


def median_ms(way: Callable, args, repetitions: int) -> float:
    """Milliseconds of the gradient by x, a and b."""
    step = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.square(way(*args))), argnums=(0, 1, 2)))
    jax.block_until_ready(step(*args))
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        jax.block_until_ready(step(*args))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main(repetitions: int = 20, length: int = 64, size: int = 128) -> None:
    """Prints the table."""
    print("| slots | rows per slot | rank |", *(f"{name} |" for name in WAYS))
    print("| --- |" + " --- |" * (2 + len(WAYS)))
    for n_slots, rows, rank in [(4, 4, 8), (16, 4, 8), (16, 4, 64), (16, 1, 16)]:
        args = inputs(n_slots, rows, length, size, rank)
        cells = [f"{median_ms(way, args, repetitions):.1f} ms |" for way in WAYS.values()]
        print(f"| {n_slots} | {rows} | {rank} |", *cells)


if __name__ == "__main__":
    typer.run(main)
