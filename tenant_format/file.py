"""A safetensors file of named arrays and a JSON record, in which nothing can change unseen.

Arrays are named ``<parameter>/<kind>``: "master" (the float32 weights), "grad_sum" where a batch
is half full, and the optimizer's moments by torch's names. The record is in the header.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from tenant_format.digest import array_digest, digest

FORMAT = "perslot-tenant"
VERSION = 1

# The fields of a configuration that say how a tenant is trained; the rest says where.
TRAINING = (
    *("optimizer", "clip_grad", "decoupled_lr", "decoupled_min_lr", "decoupled_weight_decay"),
    *("weight_decay_method", "custom_coefficients", "rank_aware", "qkv_split_shapes"),
    *("embedding_or_output_parameters", "tensor_model_parallel_size", "partition_dim"),
)
TRAINING_PREFIXES = ("adam_", "muon_", "lion_", "adaptive_muon_")


class TenantFileError(ValueError):
    """A file that cannot be used, and why: it names the file and the field."""


def training_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those fields of a configuration that say how a tenant is trained, as JSON has them."""
    settings = {
        name: value
        for name, value in config.items()
        if name in TRAINING or name.startswith(TRAINING_PREFIXES)
    }
    return json.loads(json.dumps(settings))


def matching(mine: Sequence[Mapping[str, Any]], theirs: Mapping[str, Any], path: Any) -> int:
    """Which of our settings are the file's, where both have them.

    Raises:
      TenantFileError: none; the message names a field of the closest.
    """

    def differing(own):
        return [name for name in own.keys() & theirs.keys() if own[name] != theirs[name]]

    for family, own in enumerate(mine):
        if not differing(own):
            return family
    closest = min(mine, key=lambda own: len(differing(own)))
    field = sorted(differing(closest))[0]
    raise TenantFileError(
        f"{path}: config.{field} is {theirs[field]!r}; this pool has {closest[field]!r}"
    )


def write(path: str | Path, arrays: Mapping[str, np.ndarray], record: dict[str, Any]) -> None:
    """Writes arrays and their record, with the SHA-256 of each and of all, or nothing at all."""
    digests = {name: array_digest(x) for name, x in arrays.items()}
    record = record | {"version": VERSION, "arrays": digests}
    contiguous = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    data = save(contiguous, {FORMAT: json.dumps(record), "sha256": digest(record)})
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the record of a file, both as they were written.

    Raises:
      TenantFileError: it cannot be read, or something in it is not what was written.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        record = json.loads(header[FORMAT])
        written = header["sha256"]
    except KeyError as error:
        raise TenantFileError(f"{path}: is no {FORMAT} file: it has no {error}") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise TenantFileError(f"{path}: cannot be read: {error}") from error
    if digest(record) != written:
        raise TenantFileError(f"{path}: {FORMAT} is damaged: its sha256 is not the recorded one")
    if record["version"] != VERSION:
        raise TenantFileError(f"{path}: version is {record['version']}; this reads {VERSION}")
    for name in sorted(record["arrays"].keys() | arrays.keys()):
        if name not in arrays or array_digest(arrays[name]) != record["arrays"].get(name):
            raise TenantFileError(f"{path}: {name} is damaged: its sha256 is not the recorded one")
    return arrays, record
