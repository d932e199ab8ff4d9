"""Several optimizers side by side, of which each adapter has one."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class FamilyState(NamedTuple):
    """The state of every family; those that an adapter does not have stay as initialised."""

    families: tuple[Any, ...]


def by_family(
    families: Sequence[optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Updates by the one of ``families`` that ``update``'s extra argument ``family`` names.

    Lifted by `per_slot`, with ``family`` an int (S,), the slots of one pool can have different
    optimizers in one program: every family is computed for every slot, and one is kept, so that
    a step costs what the families cost together.

    Args:
      families: transforms for one adapter, with updates of the same structure and dtypes.

    ``family`` counts from 0; one outside the range counts as 0.
    """
    families = tuple(map(optax.with_extra_args_support, families))

    def init_fn(params):
        return FamilyState(tuple(tx.init(params) for tx in families))

    def update_fn(updates, state, params=None, *, family=0, **extra):
        found = [
            tx.update(updates, own, params, **extra)
            for tx, own in zip(families, state.families, strict=True)
        ]
        chosen = found[0][0]
        for i, (new, _) in enumerate(found[1:], start=1):
            chosen = _where(family == i, new, chosen)
        in_range = (family > 0) & (family < len(families))
        states = [
            _where(family == i if i else ~in_range, new, old)
            for i, ((_, new), old) in enumerate(zip(found, state.families, strict=True))
        ]
        return chosen, FamilyState(tuple(states))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _where(condition, new, old):
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
