"""Named faults on the JAX side. Each must make the harness fail: it is how we know that it can.

A fault is a small replacement of one function of `jax_impl`, undone afterwards.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_impl

MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {}


def mutant(fault: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Registers a generator as the fault of its name; compiled programs do not outlive it."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        forget_programs()
        try:
            with contextlib.contextmanager(fault)():
                yield
        finally:
            forget_programs()

    MUTANTS[fault.__name__] = context
    return context


def forget_programs() -> None:
    """Makes JAX and us trace everything anew."""
    jax_impl.multi_lora_optimizer.cache_clear()
    jax.clear_caches()


@contextlib.contextmanager
def replaced(module: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces ``jax_impl.<module>.<name>`` by what ``make`` makes of it."""
    owner: Any = importlib.import_module(f"jax_impl.{module}")
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def keep_on_reset(field: str) -> AbstractContextManager[None]:
    """Lets one field of optimizer state survive the reset of a slot."""

    def make(reset_slots):
        def faulty(tx, state, params, slots):
            return jax.tree_util.tree_map_with_path(
                lambda path, new, old: old if field in jax.tree_util.keystr(path) else new,
                reset_slots(tx, state, params, slots),
                state,
            )

        return faulty

    return replaced("train_state", "reset_slots", make)


@mutant
def momentum_not_zeroed_on_retire():
    with keep_on_reset("momentum_buffer"):
        yield


@mutant
def adam_clock_not_reset():
    with keep_on_reset(".step"):
        yield


@mutant
def weight_decay_of_updated_parameter():
    def make(muon_from):
        def faulty(config):
            inner = muon_from(config)

            def update(updates, state, params, *, learning_rate, weight_decay, **extra):
                rates = {"learning_rate": learning_rate, "weight_decay": 0.0}
                updates, state = inner.update(updates, state, params, **rates, **extra)
                shrink = 1 - learning_rate * weight_decay
                return jax.tree.map(lambda u, p: (p + u) * shrink - p, updates, params), state

            return optax.GradientTransformationExtraArgs(inner.init, update)

        return faulty

    with replaced("multi_lora", "muon_from", make):
        yield


@mutant
def clip_over_whole_pool():
    def make(slot_norms):
        def faulty(grads):
            norms = slot_norms(grads)
            return jnp.full_like(norms, jnp.linalg.norm(norms))

        return faulty

    with replaced("train_state", "slot_norms", make):
        yield


@mutant
def schedule_counted_in_steps():
    def make(step):
        def faulty(state, named, hyperparameters):
            after, report = step(state, named, hyperparameters)
            return dataclasses.replace(after, samples=state.samples + report.stepped), report

        return faulty

    with replaced("train_state", "SlotTrainState._step", make):
        yield


@mutant
def sum_not_divided_by_batch_size():
    with replaced("train_state", "mean_gradients", lambda _: lambda grad_sum, _: grad_sum):
        yield


@mutant
def nesterov_on():
    def make(muon_from):
        return lambda config: muon_from(dataclasses.replace(config, muon_nesterov=True))

    with replaced("multi_lora", "muon_from", make):
        yield
