"""A tenant as named arrays, and back: what checkpoints and files are made of."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.config import OptimizerConfig
from jax_impl.families import FamilyState
from jax_impl.multi_lora import multi_lora_optimizer
from jax_impl.per_slot import take_slot
from jax_impl.train_state import SlotTrainState

FIELDS = ("params", "grad_buffer", "accumulated", "samples", "batch_size", "rank", "schedule")


def tenant_arrays(tenant: SlotTrainState) -> dict[str, np.ndarray]:
    """Returns every array of a tenant by its path in the tree.

    The names hold neither slot nor family, and of the optimizer state only the tenant's own
    family is there, so that pools with other families can take it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(own_tree(tenant))
    return {
        jax.tree_util.keystr(path): np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for path, leaf in leaves
    }


def tenant_from_arrays(
    arrays: Mapping[str, np.ndarray], pool: SlotTrainState, *, family: int = 0, pool_rank: int
) -> SlotTrainState:
    """Returns the tenant of `tenant_arrays`, to be put into ``pool`` by its ``place``.

    Args:
      arrays: by path.
      pool: where it is to live; tells the structure.
      family: the tenant's family there.
      pool_rank: the rank that the arrays are padded to.

    Raises:
      ValueError: an array that is missing or not the pool's.
    """
    here = take_slot(pool, 0)
    tree = own_tree(dataclasses.replace(here, family=jnp.int32(family)))
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    if different := sorted(set(names) ^ arrays.keys()):
        whose = "is not there" if different[0] in names else "is none of this pool's"
        raise ValueError(f"{different[0]} {whose}")
    own = treedef.unflatten(
        [
            jax.random.wrap_key_data(arrays[name], impl=jax.random.key_impl(leaf))
            if is_key(leaf)
            else jnp.asarray(arrays[name])
            for name, (_, leaf) in zip(names, paths, strict=True)
        ]
    )
    opt_state = own.pop("opt_state")
    if isinstance(here.opt_state, FamilyState):
        one_slot = jax.tree.map(lambda p: jnp.zeros_like(p)[None], own["params"])
        families = list(take_slot(pool.tx.init(one_slot), 0).families)
        families[family] = opt_state
        opt_state = FamilyState(tuple(families))
    return dataclasses.replace(
        here, **own, opt_state=opt_state, family=jnp.int32(family), pool_rank=pool_rank
    )


def is_key(leaf: jax.Array) -> bool:
    """Whether a leaf holds random keys, which NumPy does not know."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def check_configs(state: SlotTrainState, configs: tuple[OptimizerConfig, ...]) -> None:
    """Refuses configurations that are not what the pool's optimizer was made with.

    Raises:
      ValueError: they are not.
    """
    if multi_lora_optimizer(*configs) is not state.tx:
        raise ValueError(
            f"configs are {configs}; this pool's optimizer is not multi_lora_optimizer of them"
        )


def own_tree(tenant: SlotTrainState) -> dict[str, Any]:
    """The fields of a tenant, with the optimizer state of its own family alone."""
    opt_state = tenant.opt_state
    if isinstance(opt_state, FamilyState):
        opt_state = opt_state.families[int(tenant.family)]
    return {name: getattr(tenant, name) for name in FIELDS} | {"opt_state": opt_state}
