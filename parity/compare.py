"""Compares the two stacks after every event and says what disagrees, where and by how much."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from parity import oracle, policy
from parity.checks import Check, Where
from parity.observation import (
    MOMENTS,
    Observation,
    SlotView,
    StepOutcome,
    first_difference,
    same_numbers,
)
from parity.shadow import Shadowed
from parity.truth import Judge, SlotTruth


def untouched(where: Where, before: SlotView, after: SlotView) -> Iterator[Check]:
    """A slot that no event named: every bit as it was. One check, or one for each difference."""
    checks = [
        *equal_views(where, before, after, before.tensors),
        where.exact("lr, weight_decay", _unequal(_rates(before), _rates(after))),
    ]
    failed = [check for check in checks if not check.passed]
    yield from failed or [where.exact(f"co-tenant, all {len(checks)} values")]


def equal_views(
    where: Where, expected: SlotView, got: SlotView, keys: Iterable[tuple[str, str]]
) -> Iterator[Check]:
    """Tensors, clocks and samples of two views, bit for bit."""
    for key in keys:
        problem = "missing" if key not in got.tensors else ""
        if not problem and not same_numbers(expected.tensors[key], got.tensors[key]):
            problem = first_difference(expected.tensors[key], got.tensors[key])
        yield where.exact(" ".join(key), problem)
    yield where.exact("step", _unequal(expected.clocks, got.clocks))
    yield where.exact("samples", _unequal(expected.samples, got.samples))


def near_sums(where: Where, expected: SlotView, got: SlotView) -> Iterator[Check]:
    """Gradient sums that data-parallel ranks have added up in another order."""
    for key, x in expected.tensors.items():
        if key[0] == "grad_sum":
            differ = got.tensors[key] != x  # infinities must not
            pair = got.tensors[key][differ], x[differ]
            error = policy.relative_error(*pair, scale=x[np.isfinite(x)])
            yield where.check(" ".join(key), "grad_sum", error, policy.SUM_ERROR)


def scrubbed(where: Where, view: SlotView) -> Iterator[Check]:
    """A retired slot: zeros in every tensor, clocks and samples at 0."""
    for key, x in view.tensors.items():
        yield where.exact(" ".join(key), _nonzero(x))
    yield where.exact("step", _unequal(dict.fromkeys(view.clocks, 0), view.clocks))
    yield where.exact("samples", _unequal(0, view.samples))


def schedule(where: Where, got: SlotView, reference: SlotView, judge: Judge, tenant: str):
    """Learning rate and weight decay that the slot will step with next."""
    truth = judge.rates(tenant, got.samples)
    yield from _rate_checks(where, "next ", _rates(got), _rates(reference), truth)


@dataclass(frozen=True)
class SteppedSlot:
    """All that a step of one slot is judged by.

    Attributes:
        tenant: who stepped.
        samples: the schedule's position before the step.
        grad_sums: what it stepped on, by slot-free name.
        truth, after: the oracle's slot before and after the step.
        got, outcome: JAX's slot after the step, and its report.
        reference, reference_outcome: the reference's.
    """

    tenant: str
    samples: int
    grad_sums: dict[str, np.ndarray]
    truth: SlotTruth
    after: Shadowed
    got: SlotView
    outcome: StepOutcome
    reference: SlotView
    reference_outcome: StepOutcome

    def pair(self, key: tuple[str, str]) -> list[np.ndarray]:
        """A tensor of both stacks."""
        return [self.got.tensors[key], self.reference.tensors[key]]

    def oracle_in_bf16(self, judge: Judge) -> Shadowed:
        """The slot after the step, by an oracle that rounds to bf16 where the reference does."""
        arguments = self.grad_sums, self.tenant, self.samples
        return Shadowed.around(self.truth).step(judge, *arguments, in_bf16=True)


def stepped(where: Where, step: SteppedSlot, judge: Judge) -> Iterator[Check]:
    """A slot after its step."""
    yield from step_bookkeeping(where, step, judge)
    after = step.after.truth
    outcomes = (step.outcome, step.reference_outcome)
    norms = [np.asarray([outcome.norm]) for outcome in outcomes]
    yield from _judged(where, "grad_norm", "norm", norms, *[np.asarray([after.norm])] * 2)
    for key in step.got.tensors:
        kind, name = key
        if kind == "master":
            yield from step_update(where, step, judge, name)
        elif kind in MOMENTS:
            yield from step_moment(where, step, kind, name)


def step_moment(where: Where, step: SteppedSlot, kind: str, name: str) -> Iterator[Check]:
    """A moment after its step. What Newton-Schulz gave may be in it."""
    tensor, pair = f"{kind} {name}", step.pair((kind, name))
    moment, spread = step.after.truth.state[name][kind], step.after.moment_spread(kind, name)
    if unreachable := _unreachable(where, tensor, spread, moment, pair[1]):
        yield unreachable
        return
    floor = policy.relative_floor(moment, spread)
    yield from _judged(where, tensor, kind, pair, moment, moment, floor)


def skipped(
    where: Where, before: SlotView, after: SlotView, outcome: StepOutcome, norm: float
) -> Iterator[Check]:
    """A slot that its step left out: only its gradient sum is gone, and its norm is reported."""
    yield where.exact("skipped", "the slot stepped" if outcome.stepped else "")
    empty = {key: np.zeros_like(x) for key, x in before.tensors.items() if key[0] == "grad_sum"}
    expected = replace(before, tensors=before.tensors | empty)
    yield from equal_views(where, expected, after, expected.tensors)
    if np.isfinite(norm):
        error = policy.relative_error(np.asarray(outcome.norm), np.asarray(norm), np.asarray(norm))
        yield where.check("grad_norm", "norm of a skipped step", error, policy.STATE_FLOOR)
    else:
        yield where.exact("grad_norm", f"{outcome.norm}" if np.isfinite(outcome.norm) else "")


def step_bookkeeping(where: Where, step: SteppedSlot, judge: Judge) -> Iterator[Check]:
    """What a step leaves exactly so: clocks, samples, an empty sum, the model's copy, its rates."""
    got, reference = step.got, step.reference
    yield where.exact("stepped", "" if step.outcome.stepped else "the slot did not step")
    yield where.exact("step", _unequal(reference.clocks, got.clocks))
    yield where.exact("samples", _unequal(reference.samples, got.samples))
    for (kind, name), x in got.tensors.items():
        if kind == "grad_sum":
            yield where.exact(f"{kind} {name}", _nonzero(x))
        elif kind == "param":
            master = got.tensors["master", name]
            is_bf16 = judge.scenario.precision == "bf16"
            copy = oracle.round_to_bfloat16(master) if is_bf16 else master
            problem = "" if np.array_equal(x, copy, equal_nan=True) else first_difference(x, copy)
            yield where.exact(f"{kind} {name}", problem)
    used = [(o.lr, o.weight_decay) for o in (step.outcome, step.reference_outcome)]
    yield from _rate_checks(where, "used ", *used, judge.rates(step.tenant, step.samples))


def step_update(where: Where, step: SteppedSlot, judge: Judge, name: str) -> Iterator[Check]:
    """A parameter after its step. Where bf16 puts the truth out of reach, a bf16 oracle judges."""
    origin, pair = step.truth.origin[name], step.pair(("master", name))
    p = step.after.truth.params[name]
    spread = step.after.spread(name)
    if unreachable := _unreachable(where, name, spread, p - origin, pair[1]):
        yield unreachable
        return
    floor = policy.update_floor(origin, p - origin, spread)
    # Where rounding may have decided a sign, neither stack can be wrong.
    pair = [np.where(step.after.truth.doubts[name], p, x) for x in pair]
    owner = oracle.owner(name, origin, judge.optimizer)
    if owner == "muon" and judge.optimizer["muon_fp32_matmul_prec"] == "medium":
        if policy.relative_error(pair[1], p, p - origin) > policy.REFERENCE_REACH:
            in_bf16 = step.oracle_in_bf16(judge)
            p = in_bf16.truth.params[name]
            floor = policy.ROUNDED_FLOOR + policy.relative_floor(p - origin, in_bf16.spread(name))
    yield from _judged(where, name, f"{owner} update", pair, p, p - origin, floor)


def _unreachable(
    where: Where, tensor: str, spread: float, size: np.ndarray, reference: np.ndarray
) -> Check | None:
    """Says so, where no program, or not even the reference, comes near the truth."""
    if spread <= np.linalg.norm(size) and np.isfinite(reference).all():
        return None
    detail = f"rounding alone moves it by {spread:.1e}"
    return where.check(tensor, "unjudged", 0.0, math.inf, detail=detail)


def scenario_ratios(checks: list[Check]) -> list[Check]:
    """The root mean square of each mode's and class's ratios."""
    groups: dict[tuple[str, str], list[Check]] = {}
    for check in checks:
        if check.limit == policy.SINGLE_RATIO:
            groups.setdefault((check.mode, check.kind), []).append(check)
    return [
        Check(
            event="all",
            step=None,
            slot=None,
            tensor=f"{len(group)} tensors",
            mode=mode,
            kind=f"rms {kind}",
            value=policy.root_mean_square(check.value for check in group),
            limit=policy.rms_limit(mode, len(group)),
            jax_error=policy.root_mean_square(check.jax_error for check in group),
            reference_error=policy.root_mean_square(check.reference_error for check in group),
        )
        for (mode, kind), group in groups.items()
    ]


def gap(got: Observation, reference: Observation, slots: Iterable[int]) -> float:
    """The largest relative distance between both stacks' master weights of the slots."""
    distances = [0.0]
    for slot in slots:
        for key, x in reference[slot].tensors.items():
            if key[0] == "master" and np.linalg.norm(x) > 0:
                distances.append(policy.relative_error(got[slot].tensors[key], x, x))
    return max(distances)


def _judged(
    where: Where,
    tensor: str,
    kind: str,
    pair: list[np.ndarray],
    truth: np.ndarray,
    scale: np.ndarray,
    floor: float = policy.STATE_FLOOR,
) -> Iterator[Check]:
    """The ratio of both stacks' distances from the truth, relative to ``scale``.

    In the standard form, which the reference runs too, also the reference's over JAX's.
    """
    jax_error, reference_error = (policy.relative_error(x, truth, scale) for x in pair)
    errors = {"jax_error": jax_error, "reference_error": reference_error}
    floor += policy.flush_floor(scale)
    value = policy.ratio(jax_error, reference_error, floor)
    yield where.check(tensor, kind, value, policy.SINGLE_RATIO, **errors)
    if where.mode == "standard":
        value = policy.ratio(reference_error, jax_error, floor)
        reference = replace(where, mode="reference")
        yield reference.check(tensor, kind, value, policy.SINGLE_RATIO, **errors)


def _rate_checks(where, prefix, got, reference, truth) -> Iterator[Check]:
    for name, value, other, exact in zip(
        ("lr", "weight_decay"), got, reference, truth, strict=True
    ):
        yield where.check(
            prefix + name,
            "schedule",
            policy.ulps(value, exact),
            policy.SCHEDULE_ULP,
            jax_error=policy.ulps(value, exact),
            reference_error=policy.ulps(other, exact),
            detail=f"{value!r} against {other!r}, truth {exact!r}",
        )


def _rates(view: SlotView) -> tuple[float | None, float | None]:
    return view.lr, view.weight_decay


def _unequal(expected, got) -> str:
    return "" if expected == got else f"{got!r} against {expected!r}"


def _nonzero(x: np.ndarray) -> str:
    where = np.argwhere(x != 0)
    if not len(where):
        return ""
    index = tuple(map(int, where[0]))
    return f"{len(where)} entries, first at {list(index)}: {x[index]!r} against 0"
