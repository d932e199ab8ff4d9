"""A small Llama in Flax NNX, frozen, whose linear layers take their adapters as an argument.

The adapters belong to the pool, not to the model: a flat dictionary of stacked arrays,
``{"layers.0.self_attn.q_proj.linear_in": (S, r, in), "...linear_out": (S, out, r)}``, which is what
`jax_impl.SlotTrainState` keeps. Modules carry the names of Hugging Face's Llama.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

Adapters = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes, under the names of ``transformers.LlamaConfig``."""

    vocab_size: int = 256
    hidden_size: int = 128
    intermediate_size: int = 352
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.hidden_size // self.num_attention_heads


class LoRA(NamedTuple):
    """A pool of adapters and which row of a batch uses which of them.

    Attributes:
      adapters: leaves (S, r, in) and (S, out, r), by the layer's name.
      slots: int (B,), each row's slot; -1 means the base alone.
      scaling: (S,), alpha / rank with each adapter's own rank.
      dropout: (S,), the share of each adapter's inputs that is dropped.
      keys: PRNG keys (B,) that decide what is dropped; None drops nothing. A key of its own for
        each row makes a tenant's noise independent of who else is in the batch.
    """

    adapters: Adapters
    slots: jax.Array
    scaling: jax.Array
    dropout: jax.Array | None = None
    keys: jax.Array | None = None

    def delta(self, name: str, layer: int, x: jax.Array) -> jax.Array:
        """What the adapters of the layer ``name`` add to its output: (B, T, in) -> (B, T, out)."""
        if self.keys is not None:
            keys = jax.vmap(jax.random.fold_in, (0, None))(self.keys, layer)
            x = drop(x, _rows(self.dropout, self.slots), keys)
        a, b = self.adapters[f"{name}.linear_in"], self.adapters[f"{name}.linear_out"]
        return lora_product(x, a, b, self.slots, self.scaling)


def lora_product(
    x: jax.Array, a: jax.Array, b: jax.Array, slots: jax.Array, scaling: jax.Array
) -> jax.Array:
    """Returns ``scaling * x Aᵀ Bᵀ`` with each row's own adapter: (B, T, in) -> (B, T, out).

    Each row's pair is gathered and multiplied in one batch. `experiments.grouped` times this
    against ``jax.lax.ragged_dot`` and others; on a CPU it is the fastest that takes any number of
    rows per slot.

    Args:
      x: (B, T, in).
      a, b: (S, r, in) and (S, out, r).
      slots: int (B,); a row outside [0, S) gets zeros, and gives no gradient.
      scaling: (S,).
    """
    hidden = jnp.einsum("bti,bri->btr", x, _rows(a, slots))
    hidden = hidden * _rows(scaling, slots)[:, None, None]
    return jnp.einsum("btr,bor->bto", hidden, _rows(b, slots))


def drop(x: jax.Array, rate: jax.Array, keys: jax.Array) -> jax.Array:
    """Zeroes a share ``rate`` (B,) of each row of x (B, ...) and scales up what is left."""
    uniform = jax.vmap(lambda key: jax.random.uniform(key, x.shape[1:]))(keys)
    rate = rate.reshape((-1,) + (1,) * (x.ndim - 1))
    return jnp.where(uniform < rate, 0, x / (1 - rate))


class Linear(nnx.Module):
    """A frozen linear layer (out, in), plus whatever adapters it is called with."""

    def __init__(self, weight: jax.Array, name: str, layer: int):
        self.weight, self.name, self.layer = nnx.Param(weight), name, layer

    def __call__(self, x: jax.Array, lora: LoRA | None = None) -> jax.Array:
        """(B, T, in) -> (B, T, out)."""
        y = x @ self.weight.T
        return y if lora is None else y + lora.delta(self.name, self.layer, x)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, with a gain."""

    def __init__(self, size: int, eps: float):
        self.weight, self.eps = nnx.Param(jnp.ones(size)), eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., size) -> (..., size)."""
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return self.weight * (x * jax.lax.rsqrt(mean_square + self.eps))


class Attention(nnx.Module):
    """Causal self-attention with rotary positions; several query heads may share a key head."""

    def __init__(self, config: LlamaConfig, linear: Callable[..., Linear]):
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = linear("self_attn.q_proj", config.hidden_size, config.hidden_size)
        self.k_proj = linear("self_attn.k_proj", config.hidden_size, kv_size)
        self.v_proj = linear("self_attn.v_proj", config.hidden_size, kv_size)
        self.o_proj = linear("self_attn.o_proj", config.hidden_size, config.hidden_size)
        self.head_dim, self.theta = config.head_dim, config.rope_theta

    def __call__(self, x: jax.Array, lora: LoRA | None) -> jax.Array:
        """(B, T, hidden) -> (B, T, hidden)."""
        rows, length, _ = x.shape

        def heads(y):
            return y.reshape(rows, length, -1, self.head_dim)

        q = rotate(heads(self.q_proj(x, lora)), self.theta)
        k = rotate(heads(self.k_proj(x, lora)), self.theta)
        v = heads(self.v_proj(x, lora))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.reshape(rows, length, -1), lora)


class MLP(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig, linear: Callable[..., Linear]):
        self.gate_proj = linear("mlp.gate_proj", config.hidden_size, config.intermediate_size)
        self.up_proj = linear("mlp.up_proj", config.hidden_size, config.intermediate_size)
        self.down_proj = linear("mlp.down_proj", config.intermediate_size, config.hidden_size)

    def __call__(self, x: jax.Array, lora: LoRA | None) -> jax.Array:
        """(B, T, hidden) -> (B, T, hidden)."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x, lora)) * self.up_proj(x, lora), lora)


class Layer(nnx.Module):
    """Attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: LlamaConfig, linear: Callable[..., Linear]):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, linear)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, linear)

    def __call__(self, x: jax.Array, lora: LoRA | None) -> jax.Array:
        """(B, T, hidden) -> (B, T, hidden)."""
        x = x + self.self_attn(self.input_layernorm(x), lora)
        return x + self.mlp(self.post_attention_layernorm(x), lora)


class Llama(nnx.Module):
    """A causal language model with random weights, the same for the same key."""

    def __init__(self, config: LlamaConfig, key: jax.Array):
        keys = iter(jax.random.split(key, 2 + 7 * config.num_hidden_layers))

        def normal(rows, columns, std):
            return nnx.Param(jax.random.normal(next(keys), (rows, columns)) * std)

        def linear_of(layer):
            def linear(name, n_in, n_out):
                weight = normal(n_out, n_in, n_in**-0.5).get_value()
                return Linear(weight, f"layers.{layer}.{name}", layer)

            return linear

        self.embed_tokens = normal(config.vocab_size, config.hidden_size, 1.0)
        self.layers = nnx.List(Layer(config, linear_of(i)) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = normal(config.vocab_size, config.hidden_size, config.hidden_size**-0.5)

    def __call__(self, tokens: jax.Array, lora: LoRA | None = None) -> jax.Array:
        """Next-token logits: int (B, T) -> (B, T, vocab)."""
        x = self.embed_tokens[tokens]
        for layer in self.layers:
            x = layer(x, lora)
        return self.norm(x) @ self.lm_head.T


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of (B, T, heads, d).

    Feature i turns with feature i + d/2, as in Hugging Face's Llama.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half) / half)
    angle = (jnp.arange(x.shape[1])[:, None] * frequency)[:, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def sample_losses(model: Llama, tokens: jax.Array, lora: LoRA | None = None) -> jax.Array:
    """Each row's mean cross-entropy, in nats, of every token after its first: (B, T+1) -> (B,)."""
    logits = jax.nn.log_softmax(model(tokens[:, :-1], lora))
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return -jnp.mean(chosen, axis=-1)


def adapted_layers(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """{name: (in, out)} of every linear layer, all of which take adapters."""
    model = jax.eval_shape(lambda: nnx.split(Llama(config, jax.random.key(0)))[1])
    shapes = {name: x.shape for name, x in flat_weights(model).items()}
    return {
        name.removesuffix(".weight"): shape[::-1]
        for name, shape in shapes.items()
        if name.endswith("_proj.weight")
    }


def init_adapter(config: LlamaConfig, rank: int, key: jax.Array) -> Adapters:
    """Returns one adapter at its own rank: A normal with variance 1 / in, B zero."""
    adapter = {}
    for name, (n_in, n_out) in adapted_layers(config).items():
        key, own = jax.random.split(key)
        adapter[f"{name}.linear_in"] = jax.random.normal(own, (rank, n_in)) * n_in**-0.5
        adapter[f"{name}.linear_out"] = jnp.zeros((n_out, rank))
    return adapter


def pool_shapes(config: LlamaConfig, n_slots: int, rank: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a pool's adapters, for `SlotTrainState.create`."""
    one = jax.eval_shape(lambda: init_adapter(config, rank, jax.random.key(0)))
    return {k: jax.ShapeDtypeStruct((n_slots, *x.shape), x.dtype) for k, x in one.items()}


def flat_weights(state: nnx.State) -> dict[str, jax.Array]:
    """The arrays of a module's state by their path, joined by dots."""
    return {
        ".".join(map(str, path)): variable.get_value()
        for path, variable in nnx.to_flat_state(state)
    }


def with_weights(model: Llama, weights: Mapping[str, jax.Array]) -> Llama:
    """Returns the model with other weights, by the names of `flat_weights`.

    Hugging Face's are the same names but for a leading "model." and ".weight" after embeddings.

    Raises:
      ValueError: a weight is absent or of another shape.
    """
    graph, state = nnx.split(model)
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        names = [name, f"model.{name}", f"{name}.weight", f"model.{name}.weight"]
        found = [weights[n] for n in names if n in weights]
        if not found or found[0].shape != variable.shape:
            raise ValueError(f"{name} needs a weight of shape {variable.shape}")
        variable.set_value(jnp.asarray(found[0]))
    return nnx.merge(graph, state)


def _rows(x: jax.Array, slots: jax.Array) -> jax.Array:
    """x (S, ...) of each row's slot, zeros for none: (B, ...)."""
    slots = jnp.where(slots < 0, x.shape[0], slots)
    return jnp.take(x, slots, axis=0, mode="fill", fill_value=0)
