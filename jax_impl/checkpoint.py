"""Checkpoints of single tenants, with Orbax: one folder each, whole or not there at all."""

import dataclasses
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jax_impl.config import OptimizerConfig
from jax_impl.hyperparameters import parameter_name
from jax_impl.tenant import check_configs, tenant_arrays, tenant_from_arrays
from jax_impl.train_state import SlotTrainState
from tenant_format import array_digest, digest, training_settings

FORMAT = "perslot-checkpoint"
VERSION = 1
ITEMS = ("arrays", "metadata")
# Old checkpoints are moved here, at once and whole, before their files are deleted one by one.
REMOVED = "removed"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why: it names the folder and the field."""


class TenantCheckpoints:
    """The checkpoints of a pool's tenants: ``directory/<name>/<number>``.

    A checkpoint holds everything that a tenant's training depends on, and can be restored into
    any slot of any pool whose rank suffices, where training goes on bit for bit. Writing is atomic:
    whenever the process dies, the last complete checkpoint is the one that is found. ``save``
    returns once the arrays are copied to the host, so the state may be donated at once; the files
    are written meanwhile, until `wait`. Use it as a context manager, or `close` it.

    Every array has its SHA-256 in the metadata, and so have the metadata: damaged files are
    refused.
    """

    def __init__(
        self, directory: str | Path, *configs: OptimizerConfig, max_to_keep: int | None = 3
    ):
        """
        Args:
          directory: made if it does not exist.
          *configs: what `multi_lora_optimizer` was given, to be recorded and compared; none for
            other optimizers.
          max_to_keep: so many checkpoints of each tenant, the newest; None keeps all.
        """
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep is {max_to_keep}; it must be at least 1, or None")
        self.directory = Path(directory).absolute()
        self.configs = configs
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep, create=True, todelete_subdir=REMOVED
        )
        self._managers: dict[str, ocp.CheckpointManager] = {}

    def save(self, name: str, state: SlotTrainState, slot: int) -> int:
        """Begins to write the tenant in ``slot`` as the next checkpoint of ``name``.

        Returns its number.

        Raises:
          ValueError: the slot is free, ``name`` is no plain file name, or the pool was made with
            other configurations.
        """
        self._check_configs(state)
        tenant = state.tenant(slot)
        arrays = tenant_arrays(tenant)
        manager = self._manager(name)
        manager.wait_until_finished()
        self._sweep(name)
        number = (manager.latest_step() or 0) + 1
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "name": name,
            "samples": int(tenant.samples),
            "rank": int(tenant.rank),
            "pool_rank": tenant.pool_rank,
            "shapes": {
                parameter_name(path): list(p.shape)
                for path, p in jax.tree_util.tree_leaves_with_path(tenant.params)
            },
            "param_dtype": np.dtype(tenant.param_dtype).name,
            "config": as_json(self.configs[int(tenant.family)]) if self.configs else None,
            "family": int(tenant.family),
            "arrays": {key: array_digest(x) for key, x in arrays.items()},
        }
        manager.save(
            number,
            args=ocp.args.Composite(
                arrays=ocp.args.PyTreeSave(arrays),
                metadata=ocp.args.JsonSave({"metadata": metadata, "sha256": digest(metadata)}),
            ),
        )
        return number

    def restore(
        self, name: str, state: SlotTrainState, slot: int, *, number: int | None = None
    ) -> SlotTrainState:
        """Returns ``state`` with the tenant ``name`` in the free slot ``slot``.

        Args:
          name: the tenant's.
          state: the pool.
          slot: a free slot.
          number: of the checkpoint; None for the newest.

        Raises:
          CheckpointError: there is none, or it is damaged, of another configuration, or does not
            fit the pool; the message names the folder and the field.
          ValueError: the slot is occupied, or the pool was made with other configurations.
        """
        self._check_configs(state)
        number, where = self._find(name, number)
        metadata, arrays = self._read(name, number, where)
        family = self._family(metadata, where, state.n_families)
        try:
            tenant = tenant_from_arrays(
                arrays, state, family=family, pool_rank=metadata["pool_rank"]
            )
            return state.place(slot, tenant)
        except ValueError as error:
            if bool(state.occupied[slot]):
                raise
            raise CheckpointError(f"{where}: {error}") from error

    def metadata(self, name: str, *, number: int | None = None) -> dict[str, Any]:
        """What a checkpoint says of its tenant: samples, rank, shapes, configuration.

        Raises:
          CheckpointError: there is none, or it is damaged.
        """
        return self._read_metadata(name, *self._find(name, number))

    def numbers(self, name: str) -> list[int]:
        """The complete checkpoints of ``name``, oldest first, when what is being saved is, too."""
        if not (self._folder(name)).is_dir():
            return []
        manager = self._manager(name)
        manager.wait_until_finished()
        manager.reload()
        return sorted(manager.all_steps())

    def wait(self) -> None:
        """Returns when everything that was saved is on disk."""
        for name, manager in self._managers.items():
            manager.wait_until_finished()
            self._sweep(name)

    def close(self) -> None:
        """Waits, and frees the threads."""
        self.wait()
        for manager in self._managers.values():
            manager.close()
        self._managers.clear()

    def __enter__(self) -> "TenantCheckpoints":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _find(self, name: str, number: int | None) -> tuple[int, Path]:
        """The number of a checkpoint, the newest for None, and where it is."""
        steps = self.numbers(name)
        if not steps or number not in (None, *steps):
            wanted = "no checkpoint" if number is None else f"no checkpoint {number}"
            raise CheckpointError(f"{self.directory / name}: {wanted}; there are {steps}")
        number = number or steps[-1]
        return number, self.directory / name / str(number)

    def _check_configs(self, state: SlotTrainState) -> None:
        if self.configs:
            check_configs(state, self.configs)

    def _folder(self, name: str) -> Path:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"name is {name!r}; give letters, digits, '_', '-' and '.' only")
        return self.directory / name

    def _sweep(self, name: str) -> None:
        """Deletes what was moved away."""
        shutil.rmtree(self.directory / name / REMOVED, ignore_errors=True)

    def _manager(self, name: str) -> ocp.CheckpointManager:
        if name not in self._managers:
            self._managers[name] = ocp.CheckpointManager(
                self._folder(name), options=self._options, item_names=ITEMS
            )
        return self._managers[name]

    def _read(
        self, name: str, number: int, where: Path
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The metadata and the arrays of one checkpoint, both as they were written."""
        metadata = self._read_metadata(name, number, where)
        as_numpy = {key: ocp.RestoreArgs(restore_type=np.ndarray) for key in metadata["arrays"]}
        args = ocp.args.PyTreeRestore(restore_args=as_numpy)
        arrays = self._read_item(name, number, where, "arrays", args)
        for key, expected in metadata["arrays"].items():
            if key not in arrays or array_digest(np.asarray(arrays[key])) != expected:
                raise CheckpointError(
                    f"{where}/arrays: {key} is damaged: its sha256 is not the recorded one"
                )
        return metadata, {key: np.asarray(arrays[key]) for key in as_numpy}

    def _read_metadata(self, name: str, number: int, where: Path) -> dict[str, Any]:
        wrapped = self._read_item(name, number, where, "metadata", ocp.args.JsonRestore())
        try:
            metadata, written = wrapped["metadata"], wrapped["sha256"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{where}/metadata: damaged: {error!r}") from error
        if digest(metadata) != written:
            raise CheckpointError(f"{where}/metadata: damaged: its sha256 is not the recorded one")
        if (metadata["format"], metadata["version"]) != (FORMAT, VERSION):
            raise CheckpointError(
                f"{where}/metadata: format is {metadata['format']!r} version "
                f"{metadata['version']}; this is {FORMAT!r} version {VERSION}"
            )
        if metadata["name"] != name:
            raise CheckpointError(f"{where}/metadata: name is {metadata['name']!r}, not {name!r}")
        return metadata

    def _read_item(self, name: str, number: int, where: Path, item: str, args: Any) -> Any:
        wanted = ocp.args.Composite(**{item: args})
        try:
            return self._manager(name).restore(number, args=wanted)[item]
        except Exception as error:  # Orbax and TensorStore raise all kinds on damaged files
            raise CheckpointError(f"{where / item}: cannot be read: {error}") from error

    def _family(self, metadata: Mapping[str, Any], where: Path, n_families: int) -> int:
        """Which of our configurations the checkpoint was trained with."""
        mine, theirs = list(map(as_json, self.configs)), metadata["config"]
        if theirs in mine:
            return mine.index(theirs)
        if not mine and theirs is None:
            if metadata["family"] < n_families:
                return metadata["family"]
            raise CheckpointError(
                f"{where}/metadata: family is {metadata['family']}; this pool has {n_families}"
            )
        if theirs is None or not mine:
            raise CheckpointError(
                f"{where}/metadata: config is {theirs}; these checkpoints have {mine or None}"
            )
        closest = min(mine, key=lambda own: len(differing(own, theirs)))
        field = differing(closest, theirs)[0]
        raise CheckpointError(
            f"{where}/metadata: config.{field} is {theirs.get(field)!r}; "
            f"this pool has {closest.get(field)!r}"
        )


def as_json(config: OptimizerConfig) -> dict[str, Any]:
    """How a configuration trains a tenant, as JSON gives it back."""
    return training_settings(dataclasses.asdict(config))


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names under which two mappings differ."""
    return [key for key in {**one, **other} if one.get(key, ...) != other.get(key, ...)]
