"""A small causal byte-level transformer, every linear layer of it a multi-LoRA layer."""

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from torch_ref.multi_lora import MultiLoRALinear

VOCAB_SIZE = 256


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """Root-mean-square normalization over the last dimension, without a gain."""
    return F.rms_norm(x, x.shape[-1:])


class Attention(nn.Module):
    """Causal self-attention with one fused projection of query, key and value."""

    def __init__(self, qkv: MultiLoRALinear, proj: MultiLoRALinear, n_heads: int):
        super().__init__()
        self.fused_qkv, self.linear_proj, self.n_heads = qkv, proj, n_heads

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """(B, T, hidden), (B, T) -> (B, T, hidden)."""
        b, t, hidden = x.shape
        q, k, v = self.fused_qkv(x, slots).view(b, t, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear_proj(y.transpose(1, 2).reshape(b, t, hidden), slots)


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, fc1: MultiLoRALinear, fc2: MultiLoRALinear):
        super().__init__()
        self.linear_fc1, self.linear_fc2 = fc1, fc2

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """(B, T, hidden), (B, T) -> (B, T, hidden)."""
        return self.linear_fc2(F.gelu(self.linear_fc1(x, slots)), slots)


class Layer(nn.Module):
    """Attention and MLP, each normalized before and added to the residual stream."""

    def __init__(self, attention: Attention, mlp: MLP):
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """(B, T, hidden), (B, T) -> (B, T, hidden)."""
        x = x + self.attention(rms_norm(x), slots)
        return x + self.mlp(rms_norm(x), slots)


class MultiLoRATransformer(MegatronModule):
    """A frozen random base with adapters on all its linear layers.

    The base depends on `seed` and the sizes alone, not on slots, rank or device.
    """

    def __init__(
        self,
        *,
        n_layers: int,
        hidden_size: int,
        ffn_hidden_size: int,
        n_heads: int,
        seq_length: int,
        n_slots: int,
        rank: int,
        bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ):
        super().__init__(
            TransformerConfig(
                num_layers=n_layers,
                hidden_size=hidden_size,
                ffn_hidden_size=ffn_hidden_size,
                num_attention_heads=n_heads,
            )
        )
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int, columns: int, std: float) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator) * std).to(params_dtype)

        def linear(in_features: int, out_features: int) -> MultiLoRALinear:
            weight = normal(out_features, in_features, in_features**-0.5)
            return MultiLoRALinear(weight, n_slots, rank, bias=bias)

        def embedding(size: int) -> nn.Parameter:
            return nn.Parameter(normal(size, hidden_size, 1.0), requires_grad=False)

        self.embedding = embedding(VOCAB_SIZE)
        self.position_embedding = embedding(seq_length)
        self.layers = nn.ModuleList(
            Layer(
                Attention(
                    linear(hidden_size, 3 * hidden_size), linear(hidden_size, hidden_size), n_heads
                ),
                MLP(linear(hidden_size, ffn_hidden_size), linear(ffn_hidden_size, hidden_size)),
            )
            for _ in range(n_layers)
        )
        self.output = linear(hidden_size, VOCAB_SIZE)

    def forward(self, tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Next-byte logits.

        Args:
            tokens: (B, T) int, T at most `seq_length`.
            slots: (B,) int, each sample's slot; -1 means the base alone.

        Returns:
            (B, T, 256).
        """
        slots = slots[:, None].expand_as(tokens)
        x = self.embedding[tokens] + self.position_embedding[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, slots)
        return self.output(rms_norm(x), slots)

    def sample_losses(self, tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """(B,) float32: each sample's mean cross-entropy of every token after its first.

        Args:
            tokens: (B, T) int, T - 1 at most `seq_length`.
            slots: (B,) int.
        """
        logits = self(tokens[:, :-1], slots).float()
        return F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none").mean(dim=1)
