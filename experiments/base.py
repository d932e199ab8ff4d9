"""The frozen base model: trained once on a mix of domains, then kept under ``build/``."""

import dataclasses
import hashlib
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments import data
from experiments.model import Llama, LlamaConfig, flat_weights, sample_losses, with_weights

MIX = ("prose", "docstrings", "source")


@dataclasses.dataclass(frozen=True)
class BaseConfig:
    """A base model and how it is trained: ``rows`` windows of ``length`` bytes, ``steps`` times."""

    model: LlamaConfig = LlamaConfig()
    steps: int = 1000
    rows: int = 32
    length: int = 64
    lr: float = 3e-3
    seed: int = 0


def base_model(config: BaseConfig, cache: str | pathlib.Path = "build/base") -> Llama:
    """Returns the trained base, from the cache where it has been trained before.

    Its name there comes from the configuration and from what decides the data.
    """
    what = [dataclasses.asdict(config), MIX, sys.version_info[:3], data.BLOCK_BYTES]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    path = pathlib.Path(cache) / f"{digest}.npz"
    if path.exists():
        with np.load(path) as weights:
            return with_weights(Llama(config.model, jax.random.key(config.seed)), dict(weights))
    model = train_base(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **flat_weights(nnx.state(model)))
    partial.replace(path)
    return model


def train_base(config: BaseConfig) -> Llama:
    """Trains a base on `MIX` by AdamW with a warm-up and a cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.lr, config.steps // 20, config.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
    graph, weights = nnx.split(Llama(config.model, jax.random.key(config.seed)))

    @jax.jit
    def step(weights, opt_state, tokens):
        def loss(weights):
            return jnp.mean(sample_losses(nnx.merge(graph, weights), tokens))

        updates, opt_state = tx.update(jax.grad(loss)(weights), opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state

    opt_state = tx.init(weights)
    for i in range(config.steps):
        weights, opt_state = step(weights, opt_state, mixed_batch(config, i))
    return nnx.merge(graph, weights)


def mixed_batch(config: BaseConfig, step: int) -> np.ndarray:
    """Rows of all the mix's domains by turns: int32 (rows, length + 1)."""
    shares = np.array_split(np.arange(config.rows), len(MIX))
    return np.concatenate(
        [
            data.batch(
                name, len(share), config.length + 1, seed=config.seed, first=step * len(share)
            )
            for name, share in zip(MIX, shares, strict=True)
        ]
    )
