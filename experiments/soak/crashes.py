"""Kills processes that write checkpoints, and damages checkpoints: all are whole or refused."""

import multiprocessing
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.progress import track

from experiments.soak.life import CONFIGS, RANK, SHAPES, Life, empty_pool, install, slot_bits
from jax_impl import SlotTrainState
from jax_impl.checkpoint import CheckpointError, TenantCheckpoints
from jax_impl.testing import damage_a_file


def marked_pool(number: int) -> SlotTrainState:
    """A pool whose slot 0 holds a tenant with ``number`` in all its weights."""
    life = Life(seed=1, rank=RANK, family=0)
    weights = {n: np.full(s, number, np.float32) for n, s in SHAPES.items()}
    return install(empty_pool(), 0, weights, life.schedule(), 0, rank=RANK)


def write_forever(directory: str, done: Any) -> None:
    """Saves checkpoint after checkpoint, each marked by its number; tells which are complete."""
    with TenantCheckpoints(directory, *CONFIGS) as checkpoints:
        number = (checkpoints.numbers("alice") or [0])[-1]
        while True:
            number += 1
            assert checkpoints.save("alice", marked_pool(number), 0) == number
            checkpoints.wait()
            done.value = number


def kill_writers(kills: int, seed: int, directory: Path) -> dict[str, Any]:
    """Kills a writer ``kills`` times; what it said was complete, and what is found, must be whole.

    Raises:
        AssertionError: a checkpoint was lost or cannot be read.
    """
    rng = random.Random(seed)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["experiments.soak.crashes"])
    newest = 0
    for _ in track(range(kills), "kills", transient=True):
        done = context.Value("i", newest)
        writer = context.Process(target=write_forever, args=(str(directory), done), daemon=True)
        writer.start()
        while done.value == newest and writer.is_alive():  # until it writes
            time.sleep(0.01)
        assert writer.is_alive(), f"the writer ended by itself: {writer.exitcode}"
        time.sleep(rng.uniform(0, 0.3))
        writer.kill()
        writer.join()
        with TenantCheckpoints(directory, *CONFIGS) as checkpoints:
            newest = checkpoints.numbers("alice")[-1]
            assert newest >= done.value, f"checkpoint {done.value} was lost"
            for number in checkpoints.numbers("alice"):
                state = checkpoints.restore("alice", empty_pool(), 3, number=number)
                found = {float(x) for p in jax.tree.leaves(state.params) for x in np.unique(p[3])}
                assert found == {float(number)}, f"checkpoint {number} holds {found}"
    return {"kills": kills, "checkpoints written": newest, "unreadable": 0}


def damage_checkpoints(count: int, seed: int, directory: Path) -> dict[str, Any]:
    """Damages ``count`` copies of a checkpoint: each is refused, or restored exactly.

    Raises:
        AssertionError: something else happened.
    """
    original = marked_pool(7)
    with TenantCheckpoints(directory / "whole", *CONFIGS) as checkpoints:
        checkpoints.save("alice", original, 0)
    expected = slot_bits(original)[0]
    busy = Life(seed=3, rank=RANK, family=1).begin(empty_pool(), 5)
    before = slot_bits(busy)
    outcome: Counter[str] = Counter()
    for index in track(range(count), "damaged", transient=True):
        copy = directory / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(directory / "whole", copy)
        kind = damage_a_file(copy, random.Random(seed + index))
        with TenantCheckpoints(copy, *CONFIGS) as checkpoints:
            try:
                state = checkpoints.restore("alice", busy, 0)
            except CheckpointError as error:
                assert str(copy) in str(error), error
                outcome[f"{kind}: refused"] += 1
                assert slot_bits(busy) == before
                continue
        after = slot_bits(state)
        assert after[0] == expected, f"{kind}, seed {seed + index}: restored otherwise"
        assert after[1:] == before[1:], "a co-tenant changed"
        outcome[f"{kind}: restored exactly"] += 1
    return dict(sorted(outcome.items()))
