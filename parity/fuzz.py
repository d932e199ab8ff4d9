"""Random pools, tenants, options and lives, through both stacks; a failure becomes a small TOML.

Compiling takes much longer than running, so examples come in rounds that share their programs:
the pool, the model and the optimizer's options are drawn once a round, the tenants, gradients and
events by hypothesis for each example.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import hypothesis
from hypothesis import strategies as st

from parity.scenario import (
    INITS,
    LR_DECAY_STYLES,
    OPTIMIZER_CHOICES,
    OPTIMIZER_FIELDS,
    PRECISIONS,
    SYNTHETIC_GRADIENTS,
    WD_INCR_STYLES,
    WSD_DECAY_STYLES,
    Event,
    Install,
    Layer,
    Pool,
    Scenario,
    Stack,
    Tenant,
    random_walk,
    validate,
)

EXAMPLES_PER_ROUND = 8
GIVEN = 0.7  # the share of options that are not left to their defaults
EVENTS = (6, 14)
TENANTS = ("alice", "bob", "carol")

# Few shapes, because every new one compiles anew: wide, tall and square matrices, ranks that exceed
# a side, with and without biases.
SHAPES = (
    (Pool(n_slots=2, rank=4), Stack((Layer("q", 12, 16, bias=True),))),
    (Pool(n_slots=3, rank=4), Stack((Layer("q", 4, 10, bias=True), Layer("k", 10, 3)))),
)

# What options that are numbers are drawn from.
VALUES: dict[str, tuple[Any, ...]] = {
    "optimizer": ("muon", "muon", "muon", "adam", "adaptive_muon"),
    "clip_grad": (1.0, 0.0, 1e-3, 30.0),
    "grad_norm_skip_threshold": (1e30, 1e30, 3.0),
    "decoupled_lr": (0.01,),
    "decoupled_min_lr": (0.0, 0.001),
    "embedding_or_output_parameters": ([], ["q.linear_out"]),
    "lion_beta1": (0.95, 0.0, 0.6),
    "lion_beta2": (0.98, 0.0, 0.7),
    "adaptive_muon_beta2": (0.95, 0.0, 0.5),
    "adaptive_muon_eps": (1e-8, 1e-3),
    "custom_coefficients": ([], [[3.0, -3.2, 1.2], [2.0, -1.5, 0.5]]),
    "qkv_split_shapes": ({}, {"q.linear_out": [2, 1, 1]}),
    "adam_beta1": (0.9, 0.0, 0.99),
    "adam_beta2": (0.999, 0.0, 0.95),
    "adam_eps": (1e-8, 1e-3, 1e-15),
    "muon_momentum": (0.95, 0.0, 0.5, 0.99),
    "muon_extra_scale_factor": (1.0, 0.2, 3.0),
    "muon_num_ns_steps": (5, 1, 2, 3, 8, 12),
}

SETTINGS = hypothesis.settings(
    database=None,
    deadline=None,
    print_blob=False,
    phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    suppress_health_check=list(hypothesis.HealthCheck),
    report_multiple_bugs=False,
)


@dataclasses.dataclass(frozen=True)
class Program:
    """What a compiled program depends on; ``variant`` counts the rounds."""

    variant: int
    precision: str
    pool: Pool
    model: Stack
    optimizer: dict[str, Any]


@dataclasses.dataclass
class Outcome:
    """Attributes:
    coverage: how often each value of an option, each way of a tenant and each event was met.
    failing: the smallest scenario found that fails, if any.
    """

    examples: int
    coverage: Counter[tuple[str, str]]
    failing: Scenario | None = None


def fuzz(examples: int, seed: int, passes: Callable[[Scenario, int], bool]) -> Outcome:
    """Runs random scenarios until one does not pass, and shrinks that.

    ``passes`` is given a scenario and its round; an error in it counts as a failure too.
    """
    outcome = Outcome(0, Counter())
    while outcome.examples < examples and outcome.failing is None:
        program = draw_program(seed, variant=outcome.examples // EXAMPLES_PER_ROUND)
        count = min(EXAMPLES_PER_ROUND, examples - outcome.examples)
        _run_round(program, count, seed, passes, outcome)
    return outcome


def _run_round(program: Program, count: int, seed: int, passes, outcome: Outcome) -> None:
    failing: list[Scenario] = []

    def fails(scenario: Scenario) -> bool:
        try:
            return not passes(scenario, program.variant)
        except Exception:  # whatever it is, the file that we write shows it again
            return True

    def example(scenario: Scenario) -> None:
        if not failing:
            outcome.examples += 1
            outcome.coverage.update(features(scenario))
        if fails(scenario):
            failing.append(scenario)
            raise AssertionError

    test = hypothesis.given(lives(program))(example)
    test = hypothesis.settings(SETTINGS, max_examples=count)(test)
    try:
        hypothesis.seed(seed * 1_000_003 + program.variant)(test)()
    except AssertionError:
        # Hypothesis ends on its smallest example; the options it did not draw are ours to shrink.
        outcome.failing = simplest(failing[-1], fails)


# --- drawing ----------------------------------------------------------------------------------


def option_values(field: str) -> tuple[Any, ...]:
    """What a field of the optimizer may be drawn as."""
    if field in VALUES:
        return VALUES[field]
    return (False, True) if OPTIMIZER_FIELDS[field] is bool else OPTIMIZER_CHOICES[field]


def draw_program(seed: int, variant: int) -> Program:
    """Draws what one round shares."""
    rng = random.Random(f"{seed}/{variant}")
    pool, model = rng.choice(SHAPES)
    while True:
        optimizer = {
            field: rng.choice(option_values(field))
            for field in OPTIMIZER_FIELDS
            if field == "optimizer" or rng.random() < GIVEN
        }
        program = Program(variant, rng.choice(PRECISIONS), pool, model, optimizer)
        if is_valid(life_of(program, seed=0, gradients="zero", tenants={"alice": PLAIN})):
            return program


PLAIN = Tenant(rank=1, alpha=1.0, batch_size=1, lr=0.01, weight_decay=0.0)


@st.composite
def lives(draw, program: Program) -> Scenario:
    """Tenants, gradients and events for a program."""
    names = TENANTS[: draw(st.integers(1, len(TENANTS)))]
    ranks = st.integers(1, program.pool.rank)
    if program.optimizer.get("rank_aware"):  # the reference then is a pool of the tenants' rank
        ranks = st.just(draw(ranks))
    scenario = life_of(
        program,
        seed=draw(st.integers(0, 999)),
        gradients=draw(st.sampled_from(SYNTHETIC_GRADIENTS)),
        tenants={name: draw(tenants(ranks)) for name in names},
    )
    # An even walk: hypothesis's own draws favour few and small numbers, and then nothing steps.
    # `simplest` shrinks the events.
    rng = random.Random(draw(st.integers(0, 2**32)))
    events = random_walk(scenario, rng.randint(*EVENTS), rng)
    return dataclasses.replace(scenario, events=tuple(_resumed(event, rng) for event in events))


def _resumed(event: Event, rng: random.Random) -> Event:
    """Lets some installations start in the middle of their schedule."""
    if type(event) is not Install:
        return event
    return dataclasses.replace(event, resume_step=rng.choice((0, 0, 1, 5)))


def life_of(program: Program, **fields: Any) -> Scenario:
    """A scenario of a program, without events."""
    shared = {key: getattr(program, key) for key in ("precision", "pool", "model", "optimizer")}
    name = "fuzz" if program.precision == "fp32" else f"fuzz[{program.precision}]"
    return Scenario(name=name, description="Found by fuzzing.", events=(), **shared, **fields)


@st.composite
def tenants(draw, ranks: st.SearchStrategy[int]) -> Tenant:
    """Any adapter with any schedule."""
    num_step = draw(st.none() | st.integers(1, 6))
    lr = draw(st.sampled_from((0.01, 1e-5, 0.3, 1.0)))
    share = st.sampled_from((0.0, 0.1, 1.0))
    return Tenant(
        rank=draw(ranks),
        alpha=8.0,
        batch_size=draw(st.integers(1, 4)),
        lr=lr,
        num_step=num_step,
        min_lr=lr * draw(share),
        lr_warmup_init=lr * draw(share),
        init=draw(st.sampled_from(INITS)),
        **draw(warmups(num_step)),
        **draw(decays(num_step)),
        **draw(weight_decays(num_step)),
    )


@st.composite
def warmups(draw, num_step: int | None) -> dict[str, Any]:
    """Of no length, in iterations, or a fraction of the horizon."""
    iters = st.integers(0, 3 if num_step is None else num_step - 1)
    kinds = [st.just({}), st.builds(lambda n: {"lr_warmup_iters": n}, iters)]
    if num_step is not None:
        fractions = st.sampled_from((0.1, 0.5, 0.77))
        kinds.append(st.builds(lambda x: {"lr_warmup_fraction": x}, fractions))
    return draw(st.one_of(kinds))


@st.composite
def decays(draw, num_step: int | None) -> dict[str, Any]:
    """Any style of decay that the horizon allows."""
    style = draw(st.sampled_from(LR_DECAY_STYLES if num_step else LR_DECAY_STYLES[:-1]))
    if style != "WSD":
        return {"lr_decay_style": style}
    return {
        "lr_decay_style": style,
        "lr_wsd_decay_iters": draw(st.integers(1, num_step)),
        "lr_wsd_decay_style": draw(st.sampled_from(WSD_DECAY_STYLES)),
    }


@st.composite
def weight_decays(draw, num_step: int | None) -> dict[str, Any]:
    """A constant one, or one that rises up to the horizon."""
    style = draw(st.sampled_from(WD_INCR_STYLES if num_step else WD_INCR_STYLES[:1]))
    value = draw(st.sampled_from((0.1, 0.0, 1.0)))
    if style == "constant":
        return {"weight_decay": value}
    rates = {"start_weight_decay": value, "end_weight_decay": value + 0.5}
    return rates | {"weight_decay_incr_style": style}


# --- counting ---------------------------------------------------------------------------------


def features(scenario: Scenario) -> set[tuple[str, str]]:
    """What a scenario meets: (field, value) of options and of tenants, and each kind of event."""
    met = {("precision", scenario.precision), ("gradients", scenario.gradients)}
    met |= {(field, str(value)) for field, value in scenario.optimizer.items()}
    met |= {("event", type(event).__name__.lower()) for event in scenario.events}
    named = ("lr_decay_style", "lr_wsd_decay_style", "weight_decay_incr_style", "init")
    for tenant in scenario.tenants.values():
        met |= {(field, str(getattr(tenant, field))) for field in named}
    return met


# --- shrinking --------------------------------------------------------------------------------


def simplest(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """Takes things out for as long as the rest still fails."""
    while smaller := next(filter(fails, simpler(scenario)), None):
        scenario = smaller
    return scenario


def simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with one thing less: an event, a tenant, a layer, an option."""
    for events in _without_one(scenario.events):
        yield from _valid(scenario, events=events)
    for tenant in scenario.tenants:
        yield from _valid(scenario, tenants=_without(scenario.tenants, tenant))
    for layers in _without_one(scenario.model.layers):
        yield from _valid(scenario, model=Stack(layers))
    for option in scenario.optimizer:
        yield from _valid(scenario, optimizer=_without(scenario.optimizer, option))
    for name, tenant in scenario.tenants.items():
        for plainer in _plainer(tenant):
            yield from _valid(scenario, tenants=scenario.tenants | {name: plainer})


def _plainer(tenant: Tenant) -> Iterator[Tenant]:
    """Tenants with one setting at its default."""
    for field in dataclasses.fields(tenant):
        if getattr(tenant, field.name) != field.default is not dataclasses.MISSING:
            yield dataclasses.replace(tenant, **{field.name: field.default})


def is_valid(scenario: Scenario) -> bool:
    """Whether its values and events are possible."""
    try:
        validate(scenario)
    except (KeyError, ValueError):
        return False
    return True


def _valid(scenario: Scenario, **fields: Any) -> Iterator[Scenario]:
    changed = dataclasses.replace(scenario, **fields)
    if is_valid(changed):
        yield changed


def _without_one(items: tuple) -> Iterable[tuple]:
    return (items[:i] + items[i + 1 :] for i in range(len(items)))


def _without(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in table.items() if k != key}
