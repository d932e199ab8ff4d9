"""Adapters in the files of Hugging Face's PEFT: ``adapter_model.safetensors`` and its config."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.flax import load_file, save_file

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# PEFT's names, ours, and the axis that is the rank.
MATRICES = {"lora_A": ("linear_in", 0), "lora_B": ("linear_out", 1)}
PREFIX = "base_model.model."
# What PEFT's LoRA can be beside two matrices of one rank.
MORE_THAN_PLAIN = (
    *("use_dora", "use_rslora", "use_qalora", "lora_bias", "rank_pattern", "alpha_pattern"),
    *("modules_to_save", "layer_replication", "target_parameters", "trainable_token_indices"),
    "alora_invocation_tokens",
)


def export_adapter(
    directory: str | Path,
    adapter: Mapping[str, Any],
    *,
    rank: int,
    alpha: float,
    base_model: str | None = None,
    target_modules: Sequence[str] | None = None,
    task_type: str | None = "CAUSAL_LM",
) -> None:
    """Writes one adapter for ``peft.PeftModel.from_pretrained``.

    Args:
      directory: made if it does not exist.
      adapter: {"<module>.linear_in": (r, in), "<module>.linear_out": (out, r)} of one slot, as
        ``state.tenant(slot).params``, where <module> is the module's name in the base model; padded
        ranks are cut.
      rank: the adapter's own rank.
      alpha: its scaling is alpha / rank.
      base_model: where the base model is, for the reader.
      target_modules: which of PEFT's modules are adapted; by default those that are here.
      task_type: PEFT's.

    Raises:
      ValueError: a name that is neither, a module with one of both only, or a matrix narrower than
        the rank.
    """
    if not rank >= 1:
        raise ValueError(f"rank is {rank}; it must be at least 1")
    ours = {name: (peft, axis) for peft, (name, axis) in MATRICES.items()}
    arrays, modules = {}, {}
    for path, x in adapter.items():
        module, _, name = path.rpartition(".")
        if name not in ours or not module:
            raise ValueError(f"{path} is not <module>.linear_in or <module>.linear_out")
        peft, axis = ours[name]
        if np.ndim(x) != 2 or np.shape(x)[axis] < rank:
            raise ValueError(f"{path} has shape {np.shape(x)}, too small for rank {rank}")
        cut = jnp.asarray(x)[(slice(None),) * axis + (slice(rank),)]
        arrays[f"{PREFIX}{module}.{peft}.weight"] = cut
        modules.setdefault(module, set()).add(name)
    for module, names in modules.items():
        if len(names) < len(MATRICES):
            raise ValueError(f"{module} has {', '.join(names)} only")
    config = {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(target_modules or modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(arrays, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def import_adapter(directory: str | Path) -> tuple[dict[str, jax.Array], int, float]:
    """Returns an adapter, its rank and its alpha, from PEFT's files.

    The adapter is what `SlotTrainState.install` takes, under the names of `export_adapter`, at
    its own rank and in its own dtype.

    Raises:
      ValueError: files that are missing or damaged, or an adapter that is more than plain LoRA; the
        message names the file and the field.
    """
    directory = Path(directory)
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory / CONFIG}: cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("r"), int):
        raise ValueError(f"{directory / CONFIG}: r is not a number")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        raise ValueError(
            f"{directory / CONFIG}: peft_type is {config.get('peft_type')!r} with bias "
            f"{config.get('bias')!r}, not 'LORA' with 'none'"
        )
    for field in MORE_THAN_PLAIN:
        if config.get(field):
            raise ValueError(
                f"{directory / CONFIG}: {field} is {config[field]!r}; plain LoRA has none"
            )
    if not isinstance(config.get("lora_alpha"), int | float):
        raise ValueError(f"{directory / CONFIG}: lora_alpha is {config.get('lora_alpha')!r}")
    try:
        stored = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{directory / WEIGHTS}: cannot be read: {error}") from error
    adapter, rank = {}, config["r"]
    for path, x in stored.items():
        module, _, peft = path.removesuffix(".weight").removeprefix(PREFIX).rpartition(".")
        is_matrix = x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating)
        if peft not in MATRICES or not path.endswith(".weight") or not is_matrix:
            raise ValueError(f"{directory / WEIGHTS}: {path} is no matrix of plain LoRA")
        name, axis = MATRICES[peft]
        if x.shape[axis] != rank:
            raise ValueError(f"{directory / WEIGHTS}: {path} has shape {x.shape}, but r is {rank}")
        adapter[f"{module}.{name}"] = x
    for name in adapter:
        module = name.rpartition(".")[0]
        if not {f"{module}.{ours}" for ours, _ in MATRICES.values()} <= adapter.keys():
            raise ValueError(f"{directory / WEIGHTS}: {module} has one of its two matrices only")
    return adapter, rank, config["lora_alpha"]
