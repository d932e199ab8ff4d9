"""The reference on several ranks: local processes, one per rank, that are seen as one runner."""

import functools
import multiprocessing
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

import torch_ref
from parity import pieces
from parity.observation import Observation, SlotView, StepOutcome, same_bits
from parity.rank_worker import RanksError, serve
from parity.reference import Reference, to_numpy
from parity.scenario import Ranks, Scenario

TIMEOUT = 120.0  # seconds for one answer of all ranks; the first includes importing Megatron


def start_reference(scenario: Scenario) -> "Reference | RankedReference":
    """Returns the runner that has as many ranks as the scenario asks for."""
    several = rank_count(scenario.ranks) > 1
    return RankedReference(scenario) if several else Reference(scenario)


def rank_count(ranks: Ranks) -> int:
    """The number of processes."""
    return ranks.data_parallel * ranks.tensor_parallel


class RankReference(Reference):
    """What one rank does: its share of every event's samples, its part of every tensor."""

    def __init__(self, scenario: Scenario):
        super().__init__(scenario)
        self.data_parallel = parallel_state.get_data_parallel_world_size()
        self.share = slice(parallel_state.get_data_parallel_rank(), None, self.data_parallel)
        self.dims = pieces.partition_dims(scenario)

    def part(self, name: str, whole: np.ndarray) -> np.ndarray:
        rank, ranks = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        return pieces.shard(whole, self.dims.get(name), rank, ranks)

    def accumulate(self, slot: int, samples: int, index: int) -> dict[str, np.ndarray]:
        """Adds this rank's share and lets DDP average over the ranks; returns the share alone."""
        added = super().accumulate(slot, samples, index)
        for chunk in self.chunks:
            chunk.finish_grad_sync()
        return added

    def retire(self, slot: int) -> None:
        """Keeps the state of all data-parallel ranks: the tenant may come back anywhere."""
        tenant = self.occupants[slot]
        super().retire(slot)
        own, samples = self.retired[tenant]
        states: list[dict] = [{}] * self.data_parallel
        group = parallel_state.get_data_parallel_group()
        torch.distributed.all_gather_object(states, own, group=group)
        self.retired[tenant] = {k: v for state in states for k, v in state.items()}, samples

    def _view(self, slot: int) -> SlotView:
        """Moments and masters of what this rank updates; weights and gradient sums of all."""
        view = super()._view(slot)
        tensors = dict(view.tensors)
        for name, parameter in torch_ref.adapter_slot_parameters(self.chunks, slot):
            # DDP keeps the average over its ranks.
            grad_sum = self.data_parallel * to_numpy(parameter.main_grad)
            for kind, x in (("param", to_numpy(parameter)), ("grad_sum", grad_sum)):
                tensors[kind, name] = self._padded(name, x, parameter.shape)
        return replace(view, tensors=tensors)


class RankedReference:
    """All ranks of a scenario's reference as one: takes and shows whole tensors.

    What several ranks hold must be equal on all of them, bit for bit.

    Args:
        scenario: what to run.
        workers: its ranks' processes; by default those that earlier scenarios have left.

    Raises:
        RanksError: from every method: a rank died, did not answer, failed, or disagrees.
    """

    def __init__(self, scenario: Scenario, workers: "Workers | None" = None):
        self.name, self.ranks = scenario.name, scenario.ranks
        self.dims = pieces.partition_dims(scenario)
        self.workers = workers or standing_workers(rank_count(scenario.ranks))
        self.workers.serve(self)
        self._call("open", scenario, free_port())

    def install(self, tenant: str, slot: int, resume_step: int = 0) -> None:
        self._call("install", tenant, slot, resume_step)

    def accumulate(self, slot: int, samples: int, index: int) -> dict[str, np.ndarray]:
        """Returns the event's gradients: the data-parallel ranks' shares, added in float32."""
        shares = self._call("accumulate", slot, samples, index)[:: self.ranks.tensor_parallel]
        return {
            name: functools.reduce(np.add, [share[name] for share in shares]) for name in shares[0]
        }

    def step(self, slots: Iterable[int]) -> dict[int, StepOutcome]:
        return agreed("the outcome of a step", self._call("step", tuple(slots)))

    def discard(self, slots: Iterable[int]) -> None:
        self._call("discard", tuple(slots))

    def retire(self, slot: int) -> None:
        self._call("retire", slot)

    def resume(self, tenant: str, slot: int) -> None:
        self._call("resume", tenant, slot)

    def observe(self) -> Observation:
        observations = self._call("observe")
        return {
            slot: self._whole_view([observation[slot] for observation in observations])
            for slot in observations[0]
        }

    def _call(self, method: str, *arguments: Any) -> list:
        if self.workers.serving is not self:
            raise RanksError(f"{self.name}: a later scenario has taken over these ranks")
        try:
            return self.workers.call(method, *arguments)
        except RanksError as error:
            raise RanksError(f"{self.name}: {error}") from error

    def _whole_view(self, views: Sequence[SlotView]) -> SlotView:
        keys = dict.fromkeys(key for view in views for key in view.tensors)
        names = dict.fromkeys(name for view in views for name in view.clocks)
        return SlotView(
            tensors={key: self._whole_tensor(key, views) for key in keys},
            clocks={
                name: agreed(
                    f"the step of {name}", [v.clocks[name] for v in views if name in v.clocks]
                )
                for name in names
            },
            samples=agreed("samples", [view.samples for view in views]),
            lr=agreed("lr", [view.lr for view in views]),
            weight_decay=agreed("weight_decay", [view.weight_decay for view in views]),
        )

    def _whole_tensor(self, key: tuple[str, str], views: Sequence[SlotView]) -> np.ndarray:
        """Joins the tensor-parallel parts, each held by one or all data-parallel ranks."""
        tensor_parallel = self.ranks.tensor_parallel
        parts = []
        for rank in range(tensor_parallel):  # Megatron numbers tensor-parallel ranks first
            holders = [v for v in views[rank::tensor_parallel] if key in v.tensors]
            parts.append(agreed_tensor(key, [view.tensors[key] for view in holders]))
        dim = self.dims.get(key[1])
        return agreed_tensor(key, parts) if dim is None else np.concatenate(parts, axis=dim)


class Workers:
    """One process per rank, started here and ended here, however it goes.

    Args:
        ranks: how many.
        timeout: seconds within which all ranks must have answered.

    Attributes:
        serving: the runner that they work for.
    """

    def __init__(self, ranks: int, timeout: float = TIMEOUT):
        self.timeout, self.serving = timeout, None
        self.processes, self.connections = [], []
        context = multiprocessing.get_context("spawn")
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, ranks), daemon=True)
            process.start()
            theirs.close()  # so that the process's end is the end of the pipe
            self.processes.append(process)
            self.connections.append(ours)

    @property
    def running(self) -> bool:
        return bool(self.processes)

    def serve(self, runner: RankedReference) -> None:
        """Turns to another runner; the one before gets no more answers."""
        self.serving = runner

    def call(self, method: str, *arguments: Any) -> list:
        """Calls a method on all ranks; their answers in order.

        Raises:
            RanksError: a rank died, failed or did not answer in time; none is left running.
        """
        if not self.running:
            raise RanksError("these ranks have ended")
        try:
            for connection in self.connections:
                connection.send((method, arguments))
            return self._answers(method)
        except BaseException as problem:
            codes = [process.exitcode for process in self.processes]
            self.stop()
            # One that dies takes its peers out of their collective: name the cause.
            for rank, code in enumerate(codes):
                if code:
                    raise RanksError(
                        f"rank {rank} died in {method!r}, exit code {code}"
                    ) from problem
            raise

    def stop(self) -> None:
        """Ends all processes, busy or not."""
        for process in self.processes:
            process.kill()
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.join()
            connection.close()
        self.processes, self.connections = [], []

    def _answers(self, method: str) -> list:
        deadline = time.monotonic() + self.timeout
        answers = {}
        while len(answers) < len(self.connections):
            waiting = [c for rank, c in enumerate(self.connections) if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [rank for rank in range(len(self.connections)) if rank not in answers]
                raise RanksError(f"ranks {late} gave no answer to {method!r} in {self.timeout:g} s")
            for connection in ready:
                rank = self.connections.index(connection)
                try:
                    succeeded, answers[rank] = connection.recv()
                except (EOFError, ConnectionError) as end:
                    self.processes[rank].join()
                    raise RanksError(f"rank {rank} ended in {method!r}") from end
                if not succeeded:
                    raise RanksError(f"rank {rank} failed in {method!r}:\n{answers[rank]}")
        return [answers[rank] for rank in range(len(self.connections))]


_standing: dict[int, Workers] = {}


def standing_workers(ranks: int) -> Workers:
    """Workers that outlive a scenario: to import Megatron takes longer than most scenarios."""
    if ranks not in _standing or not _standing[ranks].running:
        _standing[ranks] = Workers(ranks)
    return _standing[ranks]


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def agreed(what: str, values: Sequence[Any]) -> Any:
    """The value that all ranks have.

    Raises:
        RanksError: they differ.
    """
    if any(value != values[0] for value in values):
        raise RanksError(f"ranks disagree on {what}: {', '.join(map(str, values))}")
    return values[0]


def agreed_tensor(key: tuple[str, str], tensors: Sequence[np.ndarray]) -> np.ndarray:
    """The tensor that all its holders have, bit for bit.

    Raises:
        RanksError: they differ.
    """
    if any(not same_bits(tensor, tensors[0]) for tensor in tensors):
        raise RanksError(f"ranks hold different copies of {' '.join(key)}")
    return tensors[0]
