"""The optimizers that the studies compare, each of one adapter, and pools that mix them."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_impl import adamw, adaptive_muon, clip_by_total_norm, lion, lora_muon, muon, per_slot

# float32 products throughout: on a CPU bfloat16 ones are emulated.
PRECISE = dict(fp32_matmul_prec="highest")
# Muon's update with this factor is of AdamW's size, so that both can share a learning rate
# (https://arxiv.org/abs/2502.16982).
LIKE_ADAM = dict(extra_scale_factor=0.2, **PRECISE)


def muon_on_b() -> optax.GradientTransformationExtraArgs:
    """Muon on B, AdamW on A."""

    def label(params):
        return {name: "muon" if name.endswith("linear_out") else "adamw" for name in params}

    return optax.partition({"muon": muon(**LIKE_ADAM), "adamw": adamw()}, label)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": adamw,
    "muon": functools.partial(muon, **LIKE_ADAM),
    "muon_on_b": muon_on_b,
    "adamuon": functools.partial(adaptive_muon, moment2_method="adamuon", **LIKE_ADAM),
    "normuon": functools.partial(adaptive_muon, moment2_method="normuon", **LIKE_ADAM),
    "lora_muon": functools.partial(lora_muon, **PRECISE),
    "lion": lion,
}


def optimizer(name: str) -> optax.GradientTransformationExtraArgs:
    """One adapter's optimizer: clip at norm 1, then what ``name`` says, with its defaults.

    Raises:
      ValueError: an unknown name.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer is {name!r}; choose one of {', '.join(OPTIMIZERS)}")
    return optax.chain(clip_by_total_norm(1.0), OPTIMIZERS[name]())


@functools.cache
def assigned(owners: Sequence[str]) -> optax.GradientTransformationExtraArgs:
    """Returns a lifted transform that gives each slot the optimizer of its own.

    ``owners`` (S,) names them, as a tuple. Every optimizer computes its own slots alone; its state
    has all S slots, so that installing and scrubbing one is a slice as always, but those of other
    owners stay as they are. ``slots`` of an update is None or a mask.
    """
    lifted = {name: per_slot(optimizer(name)) for name in sorted(set(owners))}
    places = {name: np.flatnonzero(np.asarray(owners) == name) for name in lifted}

    def init_fn(params):
        return {name: tx.init(params) for name, tx in lifted.items()}

    def update_fn(updates, state, params=None, *, slots=None, **extra):
        named = jnp.ones(len(owners), bool) if slots is None else jnp.asarray(slots)
        if named.shape != (len(owners),) or named.dtype != bool:
            raise ValueError(f"slots must be None or a mask over the {len(owners)} slots")
        total, new_state = None, {}
        for name, tx in lifted.items():
            own = jnp.where(named[places[name]], places[name], len(owners))
            change, new_state[name] = tx.update(updates, state[name], params, slots=own, **extra)
            # A slot's update is -0.0 from all but its owner, and -0.0 + x is x.
            total = change if total is None else jax.tree.map(jnp.add, total, change)
        return total, new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
