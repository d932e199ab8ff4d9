"""Drives both stacks through a scenario's events and collects what they disagree on."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from parity import compare
from parity.candidate import MODES, Candidate, Mode
from parity.checks import Check, Rates, Result, Where
from parity.observation import Observation, StepOutcome
from parity.ranks import start_reference
from parity.reference import reference_name
from parity.scenario import Accumulate, Event, Install, Resume, Retire, Scenario, Step
from parity.shadow import Shadowed
from parity.truth import Judge


def run(
    scenario: Scenario,
    modes: Sequence[Mode] = MODES,
    make_candidate: Callable[[Scenario, Mode], Candidate] = Candidate,
) -> Result:
    """Runs a scenario on both stacks. Call it inside `torch_ref.start_megatron`.

    ``modes`` may be fewer than all, but one of them must be free.
    """
    players = Players(scenario, modes, make_candidate)
    checks: list[Check] = []
    free_gap = []
    for index, event in enumerate(scenario.events):
        checks += players.play(index, event)
        free_gap.append(players.free_gap())
    checks += compare.scenario_ratios(checks)
    return Result(scenario, checks, free_gap, players.rates, reference_name(scenario))


Outcomes = dict[int, StepOutcome]


class Players:
    """The reference, the JAX side in its modes, and the oracle, all at the same event."""

    def __init__(
        self,
        scenario: Scenario,
        modes: Sequence[Mode],
        make_candidate: Callable[[Scenario, Mode], Candidate],
    ):
        self.scenario = scenario
        self.judge = Judge(scenario)
        self.reference = start_reference(scenario)
        self.candidates = [make_candidate(scenario, mode) for mode in modes]
        self.seen = self.reference.observe()
        self.candidates_seen = [candidate.observe() for candidate in self.candidates]
        self.free_truth: dict[int, Shadowed] = {}
        self.retired_truth: dict[str, Shadowed] = {}
        self.occupants: dict[int, str] = {}
        self.steps: dict[int, int] = {}
        self.rates: list[Rates] = []
        self.files = tempfile.TemporaryDirectory(prefix="perslot-")

    def play(self, index: int, event: Event) -> list[Check]:
        """Applies one event everywhere and compares."""
        label = f"{index} {type(event).__name__.lower()}"
        before, candidates_before = self.seen, self.candidates_seen
        retiring = self.occupants.get(event.slot) if isinstance(event, Retire) else None
        true_steps = self._true_steps(event, before)
        skipped = {slot for (_, slot), (_, after) in true_steps.items() if not after.truth.stepped}
        outcomes = self._apply(index, event, skipped)
        if isinstance(event, Step):
            self.rates += self._used_rates(index, *outcomes[:2])
        self.seen = self.reference.observe()
        touched = event.slots if isinstance(event, Step) else (event.slot,)

        checks = self._reference_promises(label, event, before)
        self.candidates_seen = []
        for candidate, was, outcome in zip(
            self.candidates, candidates_before, outcomes[1:], strict=True
        ):
            now = candidate.observe()
            for slot in range(self.scenario.pool.n_slots):
                where = Where(label, slot, self.steps.get(slot, 0), candidate.mode.name)
                if slot not in touched:
                    checks += compare.untouched(where, was[slot], now[slot])
                    continue
                checks += self._touched(where, event, candidate, was, now)
                if slot in skipped:
                    _, after = true_steps[candidate.mode.locked, slot]
                    views = was[slot], now[slot]
                    checks += compare.skipped(where, *views, outcome[slot], after.truth.norm)
                elif isinstance(event, Step):
                    true_step = true_steps[candidate.mode.locked, slot]
                    outcome_pair = outcome[slot], outcomes[0][slot]
                    checks += self._stepped(where, true_step, before, now, *outcome_pair)
                if slot in self.occupants:
                    tenant = self.occupants[slot]
                    checks += compare.schedule(
                        where, now[slot], self.seen[slot], self.judge, tenant
                    )
            if candidate.mode.locked and isinstance(event, Step):
                candidate.adopt(self.seen)
                now = candidate.observe()
            self.candidates_seen.append(now)
        self._advance_free_truth(event, true_steps, retiring)
        return checks

    def free_gap(self) -> float:
        free = next(
            now
            for candidate, now in zip(self.candidates, self.candidates_seen, strict=True)
            if not candidate.mode.locked
        )
        return compare.gap(free, self.seen, self.occupants)

    def _apply(self, index: int, event: Event, skipped: set[int]) -> list:
        """Applies the event to the reference and each candidate; returns their step outcomes.

        Which slots the reference skips is the oracle's to say: Megatron's per-slot path cannot.
        """
        everyone = (self.reference, *self.candidates)
        match event:
            case Install(tenant, slot, resume_step):
                for player in everyone:
                    player.install(tenant, slot, resume_step)
                self.occupants[slot], self.steps[slot] = tenant, 0
            case Resume(tenant, slot, source):
                for player in everyone:
                    if source is None:
                        player.resume(tenant, slot)
                    else:
                        player.load(self._file(tenant, source), tenant, slot)
                self.occupants[slot], self.steps[slot] = tenant, 0
            case Accumulate(slot, samples):
                grads = self.reference.accumulate(slot, samples, index)
                for candidate in self.candidates:
                    candidate.accumulate(slot, samples, grads)
            case Step(slots):
                for slot in slots:
                    self.steps[slot] += 1
                self.reference.discard(sorted(skipped))
                outcome = self.reference.step([slot for slot in slots if slot not in skipped])
                return [outcome, *(candidate.step(slots) for candidate in self.candidates)]
            case Retire(slot):
                self._write_files(index, slot)
                for player in everyone:
                    player.retire(slot)
                del self.occupants[slot], self.steps[slot]
        return [None for _ in everyone]

    def _write_files(self, index: int, slot: int) -> None:
        """Writes what is about to retire, if it will be resumed from a file.

        On the JAX side it is the free candidate that does, which owes nothing to the reference.
        """
        tenant = self.occupants[slot]
        returns = (
            event
            for event in self.scenario.events[index + 1 :]
            if isinstance(event, Install | Resume) and event.tenant == tenant
        )
        source = getattr(next(returns, None), "source", None)
        free = next(candidate for candidate in self.candidates if not candidate.mode.locked)
        if source is not None:
            writer = {"megatron": self.reference, "jax": free}[source]
            writer.save(self._file(tenant, source), slot)

    def _file(self, tenant: str, source: str) -> Path:
        return Path(self.files.name) / f"{tenant}.{source}.safetensors"

    def _used_rates(self, index: int, reference: Outcomes, jax: Outcomes) -> Iterator[Rates]:
        """What the slots were stepped with that did step."""
        for slot, outcome in reference.items():
            pair = [(x.lr, x.weight_decay) for x in (jax[slot], outcome)]
            yield Rates(index, slot, self.occupants[slot], *pair)

    def _reference_promises(self, label: str, event: Event, before: Observation) -> list[Check]:
        """The reference itself leaves co-tenants alone and scrubs what retires."""
        touched = event.slots if isinstance(event, Step) else (event.slot,)
        checks: list[Check] = []
        for slot, view in self.seen.items():
            where = Where(label, slot, self.steps.get(slot, 0), "reference")
            if slot not in touched:
                checks += compare.untouched(where, before[slot], view)
            elif isinstance(event, Retire):
                checks += compare.scrubbed(where, view)
        return checks

    def _touched(
        self, where: Where, event: Event, candidate: Candidate, was: Observation, now: Observation
    ) -> Iterator[Check]:
        """A slot that the event named, for every event but the step."""
        slot = where.slot
        if isinstance(event, Step):
            return
        if isinstance(event, Retire):
            yield from compare.scrubbed(where, now[slot])
            return
        reference, keys = self.seen[slot], self.seen[slot].tensors.keys()
        adopted = isinstance(event, Install) or getattr(event, "source", None)
        if not candidate.mode.locked and not adopted:
            keys = [key for key in keys if key[0] == "grad_sum"]
        if isinstance(event, Accumulate) and self.scenario.ranks.data_parallel > 1:
            keys = [key for key in keys if key[0] != "grad_sum"]
            yield from compare.near_sums(where, reference, now[slot])
        yield from compare.equal_views(where, reference, now[slot], keys)

    def _true_steps(
        self, event: Event, before: Observation
    ) -> dict[tuple[bool, int], tuple[Shadowed, Shadowed]]:
        """The oracle before and after the event, if it is a step, by locked or free and slot."""
        truths = {}
        for slot in event.slots if isinstance(event, Step) else ():
            arguments = grad_sums(before, slot), self.occupants[slot], before[slot].samples
            for locked, truth in (
                (True, Shadowed.around(self.judge.adopt(before[slot]))),
                (False, self.free_truth[slot]),
            ):
                truths[locked, slot] = truth, truth.step(self.judge, *arguments)
        return truths

    def _stepped(self, where, true_step, before, now, outcome, reference_outcome):
        slot = where.slot
        truth, after = true_step
        step = compare.SteppedSlot(
            self.occupants[slot],
            before[slot].samples,
            grad_sums(before, slot),
            truth.truth,
            after,
            now[slot],
            outcome,
            self.seen[slot],
            reference_outcome,
        )
        return compare.stepped(where, step, self.judge)

    def _advance_free_truth(self, event: Event, true_steps, retiring: str | None) -> None:
        """Moves the oracle that runs on freely past the event."""
        match event:
            case Install(tenant, slot):
                self.free_truth[slot] = Shadowed.around(self.judge.install(tenant))
            case Resume(tenant, slot):
                self.free_truth[slot] = self.retired_truth.pop(tenant)
            case Retire(slot):
                self.retired_truth[retiring] = self.free_truth.pop(slot)
            case Step(slots):
                for slot in slots:
                    _, self.free_truth[slot] = true_steps[False, slot]


def grad_sums(observation: Observation, slot: int):
    """A slot's gradient sums by slot-free name."""
    tensors = observation[slot].tensors
    return {name: x for (kind, name), x in tensors.items() if kind == "grad_sum"}
