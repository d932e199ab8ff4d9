"""A pool of LoRA adapters on one frozen linear layer, routed by token."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

# How a LoRA pair follows its base layer over tensor-parallel ranks: a column-parallel layer
# partitions the outputs, a row-parallel one the inputs. What is not named every rank has whole.
PARTITION_DIM = {"column": {"linear_out": 0, "bias": 0}, "row": {"linear_in": 1}}


class LoRAAdapter(nn.Module):
    """One slot's low-rank pair, zero until a tenant is installed.

    Attributes:
        linear_in: (r, in), the LoRA literature's A.
        linear_out: (out, r), the LoRA literature's B.
        bias: (out,), or None.
    """

    def __init__(
        self, in_features: int, out_features: int, rank: int, *, bias: bool, dtype: torch.dtype
    ):
        super().__init__()
        self.linear_in = nn.Parameter(torch.zeros(rank, in_features, dtype=dtype))
        self.linear_out = nn.Parameter(torch.zeros(out_features, rank, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype)) if bias else None

    def forward(self, x: torch.Tensor, scaling: torch.Tensor) -> torch.Tensor:
        """`scaling * (x @ linear_inᵀ @ linear_outᵀ) + bias`: (tokens, in) -> (tokens, out)."""
        y = scaling * F.linear(F.linear(x, self.linear_in), self.linear_out)
        return y if self.bias is None else y + self.bias


class MultiLoRALinear(nn.Module):
    """A frozen linear layer with one adapter per slot.

    Args:
        weight: (out, in) base weight; its dtype is the adapters' too.
        n_slots: number of slots.
        rank: the pool's rank, to which narrower adapters are padded.
        bias: whether each adapter has a bias of its own.

    Attributes:
        weight: (out, in), frozen.
        rank: the pool's rank.
        adapters: one `LoRAAdapter` per slot, all of that rank.
        scaling: (n_slots,) float32, alpha / rank with each tenant's own rank; 0 in an empty slot.
    """

    def __init__(self, weight: torch.Tensor, n_slots: int, rank: int, *, bias: bool = False):
        super().__init__()
        out_features, in_features = weight.shape
        self.rank = rank
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.adapters = nn.ModuleList(
            LoRAAdapter(in_features, out_features, rank, bias=bias, dtype=weight.dtype)
            for _ in range(n_slots)
        )
        self.register_buffer("scaling", torch.zeros(n_slots))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Base output plus, for each token, its slot's adapter.

        Only the slots that occur take part, so the others' gradients are not even touched.

        Args:
            x: (..., in).
            slots: (...) int, each token's slot; -1 means the base alone.

        Returns:
            (..., out).
        """
        y = F.linear(x, self.weight)
        for slot in slots.unique().tolist():
            if slot < 0:
                continue
            tokens = (slots == slot).nonzero(as_tuple=True)
            y = y.index_put(tokens, self.adapters[slot](x[tokens], self.scaling[slot]), True)
        return y


def mark_partition(layer: MultiLoRALinear, parallel: str) -> None:
    """Tells Megatron which of the layer's parameters are one rank's part of a whole.

    Without the mark, norms would count a replica on every rank or a part on one rank only, and Muon
    would take a part for the whole.

    Args:
        layer: of one rank.
        parallel: "column" or "row", as its base is partitioned.
    """
    for adapter in layer.adapters:
        for name, dim in PARTITION_DIM[parallel].items():
            if (parameter := getattr(adapter, name)) is not None:
                set_tensor_model_parallel_attributes(parameter, True, dim, 1)


class LayerShape(NamedTuple):
    """One layer of a `MultiLoRAStack`, in whole sizes; `parallel` is None, "column" or "row"."""

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    parallel: str | None = None

    def on_one_rank(self) -> tuple[int, int]:
        """(in, out) of a tensor-parallel rank's part.

        Raises:
            ValueError: the ranks do not divide it.
        """
        if self.parallel is None:
            return self.in_features, self.out_features
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        field = "out_features" if self.parallel == "column" else "in_features"
        if getattr(self, field) % ranks:
            raise ValueError(
                f"{self.name}: {field}={getattr(self, field)} must be a multiple of {ranks} ranks"
            )
        part = self._replace(**{field: getattr(self, field) // ranks})
        return part.in_features, part.out_features


class MultiLoRAStack(MegatronModule):
    """Independent `MultiLoRALinear` layers of given names and shapes, for synthetic gradients.

    Parallel layers are this rank's part, their adapters' parameters marked as Megatron's are.
    The base weights are zero: nothing is ever forwarded, gradients are written to `main_grad`.
    """

    def __init__(
        self,
        layers: Iterable[LayerShape],
        n_slots: int,
        rank: int,
        *,
        params_dtype: torch.dtype = torch.float32,
    ):
        # Megatron's DDP and optimizer builder read a transformer's config; no size in it matters.
        super().__init__(TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1))
        for shape in (LayerShape(*layer) for layer in layers):
            in_features, out_features = shape.on_one_rank()
            weight = torch.zeros(out_features, in_features, dtype=params_dtype)
            layer = MultiLoRALinear(weight, n_slots, rank, bias=shape.bias)
            if shape.parallel is not None:
                mark_partition(layer, shape.parallel)
            self.add_module(shape.name, layer)


def pad_adapter_weight(
    name: str, weight: torch.Tensor, shape: Sequence[int], rank: int
) -> torch.Tensor:
    """Zero-pads one tensor of a rank-`rank` adapter to the pool's shape.

    Args:
        name: slot-free name; its last part says which dimension is the rank.
        weight: the tensor at the adapter's own rank, or already padded.
        shape: the pool's shape of it.
        rank: the adapter's rank.

    Returns:
        A new tensor of `shape`.

    Raises:
        ValueError: the shape fits neither, or the padding is not zero.
    """
    own_shape = list(shape)
    rank_dim = {"linear_in": 0, "linear_out": 1}.get(name.rpartition(".")[2])
    if rank_dim is not None:
        own_shape[rank_dim] = rank
    if list(weight.shape) not in (own_shape, list(shape)):
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}: must be {tuple(own_shape)} at the adapter's "
            f"rank {rank}, or {tuple(shape)} padded"
        )
    own = tuple(slice(size) for size in own_shape)
    padded = weight.new_zeros(tuple(shape))
    padded[own] = weight[own]
    if not torch.equal(padded[tuple(slice(size) for size in weight.shape)], weight):
        raise ValueError(f"{name} is not zero beyond the adapter's rank {rank}: pad with zeros")
    return padded
