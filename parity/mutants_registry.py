"""How a fault gets into `jax_impl`, and out again."""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

import jax_impl


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A named fault.

    Attributes:
        name: of the function that makes it.
        killer: the shipped scenario that is to catch it.
        applied: a context in which the JAX side has the fault.
    """

    name: str
    killer: str
    applied: Callable[[], AbstractContextManager[None]]


MUTANTS: dict[str, Mutant] = {}


def mutant(killer: str) -> Callable[[Callable[[], AbstractContextManager[None]]], Mutant]:
    """Registers a function that returns a fault's context; programs do not outlive it."""

    def register(fault: Callable[[], AbstractContextManager[None]]) -> Mutant:
        @contextlib.contextmanager
        def applied() -> Iterator[None]:
            forget_programs()
            try:
                with fault():
                    yield
            finally:
                forget_programs()

        MUTANTS[fault.__name__] = Mutant(fault.__name__, killer, applied)
        return MUTANTS[fault.__name__]

    return register


def forget_programs() -> None:
    """Makes JAX and us trace everything anew."""
    jax_impl.multi_lora_optimizer.cache_clear()
    jax.clear_caches()


@contextlib.contextmanager
def replaced(place: str, value: Any) -> Iterator[None]:
    """Replaces ``jax_impl.<place>``, e.g. ``"muon.lerp"``."""
    module, *path, name = place.split(".")
    owner: Any = importlib.import_module(f"jax_impl.{module}")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def wrapped(place: str, faulty: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replaces the function at ``place`` by ``faulty(original, *arguments)``."""
    module, *path = place.split(".")
    original: Any = importlib.import_module(f"jax_impl.{module}")
    for part in path:
        original = getattr(original, part)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return faulty(original, *args, **kwargs)

    return replaced(place, function)
