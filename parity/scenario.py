"""Scenarios: what both stacks run, read from TOML into frozen dataclasses.

A scenario is a pool, a model, the tenants and the events of their lives. Loading replays the
events over slot occupancy and sample counts, so a runner never meets an impossible event.
"""

import dataclasses
import difflib
import json
import math
import random
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, get_args

PRECISIONS = ("fp32", "bf16")
SYNTHETIC_GRADIENTS = (
    *("gaussian", "low_rank", "ill_conditioned", "zero", "tiny", "huge"),
    *("spikes", "non_finite"),
)
GRADIENTS = (*SYNTHETIC_GRADIENTS, "text")
INITS = ("lora", "random")
LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WD_INCR_STYLES = ("constant", "linear", "cosine")
PARALLELISMS = ("column", "row")
SOURCES = ("megatron", "jax")
OPTIMIZER_CHOICES = {
    "optimizer": ("adam", "muon", "adaptive_muon"),
    "muon_scalar_optimizer": ("adam", "lion"),
    "adaptive_muon_moment2_method": ("adamuon", "normuon", "namo"),
    "weight_decay_method": ("decoupled", "independent", "l2", "palm"),
    "muon_scale_mode": ("spectral", "unit_rms_norm", "shape_scaling"),
    "muon_coefficient_type": (
        *("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4", "custom"),
    ),
    "muon_fp32_matmul_prec": ("highest", "high", "medium"),
    "muon_tp_mode": ("blockwise", "duplicated", "distributed"),
}

# Our own settings, which Megatron has not, and what they are if not given.
OWN_FIELDS: dict[str, Any] = {
    "rank_aware": False,
    "embedding_or_output_parameters": [],
    "qkv_split_shapes": {},
}

# The fields of JAX's OptimizerConfig that a scenario may set, and their types: Megatron's fields,
# two settings of emerging-optimizers', and our own.
OPTIMIZER_FIELDS: dict[str, type] = {
    "optimizer": str,
    "clip_grad": float,
    "grad_norm_skip_threshold": float,
    "decoupled_lr": float,
    "decoupled_min_lr": float,
    "adam_beta1": float,
    "adam_beta2": float,
    "adam_eps": float,
    "decoupled_weight_decay": bool,
    "lion_beta1": float,
    "lion_beta2": float,
    "muon_momentum": float,
    "muon_nesterov": bool,
    "muon_scale_mode": str,
    "muon_extra_scale_factor": float,
    "muon_coefficient_type": str,
    "muon_num_ns_steps": int,
    "muon_fp32_matmul_prec": str,
    "muon_tp_mode": str,
    "muon_scalar_optimizer": str,
    "muon_split_qkv": bool,
    "adaptive_muon_moment2_method": str,
    "adaptive_muon_beta2": float,
    "adaptive_muon_eps": float,
    "weight_decay_method": str,
    "custom_coefficients": list,
    **{name: type(default) for name, default in OWN_FIELDS.items()},
}

_RANDOM_ATTEMPTS = 1000


@dataclass(frozen=True)
class Pool:
    """The slots: how many, and the rank that each is padded to."""

    n_slots: int
    rank: int


@dataclass(frozen=True)
class Layer:
    """One adapted linear layer, ``in_features -> out_features``.

    ``parallel`` is how its base is partitioned over tensor-parallel ranks: by "column" partitions
    the outputs, by "row" the inputs.
    """

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    parallel: str | None = None


@dataclass(frozen=True)
class Stack:
    """Adapted layers without a model around them, for synthetic gradients."""

    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Transformer:
    """A small frozen byte-level language model whose linear layers are adapted."""

    n_layers: int
    hidden_size: int
    ffn_hidden_size: int
    n_heads: int
    seq_length: int


@dataclass(frozen=True)
class Ranks:
    """How many processes the reference runs in: their product."""

    data_parallel: int = 1
    tensor_parallel: int = 1


@dataclass(frozen=True)
class Tenant:
    """One adapter and the way it is trained. Lengths are in optimizer steps, as a user thinks."""

    rank: int
    alpha: float
    batch_size: int
    lr: float
    num_step: int | None = None
    min_lr: float = 0.0
    lr_warmup_fraction: float | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_init: float = 0.0
    lr_decay_style: str = "constant"
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_style: str | None = None
    weight_decay: float | None = None
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    weight_decay_incr_style: str = "constant"
    init: str = "lora"

    def schedule_settings(self) -> dict[str, Any]:
        """Returns what was given of the schedule; both stacks take it under these names."""
        fields = dataclasses.asdict(self)
        others = ("rank", "alpha", "init")
        return {k: v for k, v in fields.items() if k not in others and v is not None}

    def schedule(self) -> dict[str, Any]:
        """Returns the tenant's schedule as OptimizerParamScheduler's keyword arguments.

        Lengths are in samples. Without ``num_step`` there is no horizon: warm up, then hold.
        """
        if self.num_step is None:
            warmup = (self.lr_warmup_iters or 0) * self.batch_size
            # Never reached by the constant style; the constructor wants it above the warm-up.
            horizon = warmup + self.batch_size
            lr_decay_style = "constant"
        else:
            horizon = self.num_step * self.batch_size
            if self.lr_warmup_fraction is not None:
                warmup = self.lr_warmup_fraction * horizon
            else:
                warmup = (self.lr_warmup_iters or 0) * self.batch_size
            lr_decay_style = self.lr_decay_style
        wsd = lr_decay_style == "WSD"
        constant_wd = self.weight_decay is not None
        return {
            "init_lr": self.lr_warmup_init,
            "max_lr": self.lr,
            "min_lr": self.min_lr,
            "lr_warmup_steps": warmup,
            "lr_decay_steps": horizon,
            "lr_decay_style": lr_decay_style,
            "start_wd": self.weight_decay if constant_wd else self.start_weight_decay,
            "end_wd": self.weight_decay if constant_wd else self.end_weight_decay,
            "wd_incr_steps": horizon,
            "wd_incr_style": self.weight_decay_incr_style,
            "wsd_decay_steps": self.lr_wsd_decay_iters * self.batch_size if wsd else None,
            "lr_wsd_decay_style": self.lr_wsd_decay_style if wsd else None,
        }


@dataclass(frozen=True)
class Install:
    """Puts a fresh tenant into an empty slot, its schedule at ``resume_step`` steps."""

    tenant: str
    slot: int
    resume_step: int = 0


@dataclass(frozen=True)
class Accumulate:
    """Adds the gradients of ``samples`` samples, as a sum, to the slot's gradient sum."""

    slot: int
    samples: int


@dataclass(frozen=True)
class Step:
    """Updates exactly these slots."""

    slots: tuple[int, ...]


@dataclass(frozen=True)
class Retire:
    """Takes the slot's tenant out and scrubs the slot."""

    slot: int


@dataclass(frozen=True)
class Resume:
    """Puts a retired tenant back, with everything it had when it retired.

    Both stacks go on from what each of them had; with a ``source``, one of `SOURCES`, both go on
    from the tenant file which that one wrote.
    """

    tenant: str
    slot: int
    source: str | None = None


Event = Install | Accumulate | Step | Retire | Resume


@dataclass(frozen=True)
class Scenario:
    """One run of both stacks, in one precision."""

    name: str
    description: str
    seed: int
    precision: str
    gradients: str
    pool: Pool
    model: Stack | Transformer
    optimizer: dict[str, Any]
    tenants: dict[str, Tenant]
    events: tuple[Event, ...]
    ranks: Ranks = Ranks()


def load_scenarios(path: str | Path) -> list[Scenario]:
    """Reads a scenario file: one scenario per variant and precision that it names.

    ``[variants]`` gives further settings of the optimizer by name: ``name[variant]``.

    Raises:
        ValueError: the file is malformed; one line naming file, key, value and what is right.
    """
    path = Path(path)
    return parse(path.read_text(encoding="utf-8"), path.name)


def shipped() -> dict[str, Scenario]:
    """Returns the scenarios that come with the package, by name (``name`` or ``name[bf16]``)."""
    folder = resources.files("parity") / "scenarios"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    scenarios = (s for f in files for s in parse(f.read_text(encoding="utf-8"), f.name))
    return {scenario.name: scenario for scenario in scenarios}


def parse(text: str, source: str) -> list[Scenario]:
    """Reads a scenario's TOML text; ``source`` is the file name that errors give.

    Raises:
        ValueError: as for `load_scenarios`.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: not valid TOML: {error}") from error
    try:
        return _read(document, source.removesuffix(".toml"))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def validate(scenario: Scenario) -> None:
    """Checks every value and replays the events.

    Raises:
        ValueError: one line naming key, value and what is right.
    """
    _check_values(scenario)
    replay = _Replay(scenario)
    for index, event in enumerate(scenario.events):
        replay.apply(event, index)


# --- reading ---------------------------------------------------------------------------------


def _refuse(key: str, value: Any, right: str) -> NoReturn:
    raise ValueError(f"{key} = {_toml(value)}: {right}")


def _read(document: dict, stem: str) -> list[Scenario]:
    top = _take(
        document,
        "",
        required={
            "pool": dict,
            "model": dict,
            "optimizer": dict,
            "tenants": dict,
            "lifecycle": dict,
        },
        optional={
            "name": str,
            "description": str,
            "seed": int,
            "precisions": list,
            "gradients": str,
            "ranks": dict,
            "variants": dict,
        },
    )
    name = top.get("name", stem)
    variants = {
        f"{name}[{variant}]": _typed(f"variants.{variant}", settings, dict)
        for variant, settings in top.get("variants", {}).items()
    }
    return [
        scenario
        for variant, settings in (variants or {name: {}}).items()
        for scenario in _read_variant(top, variant, settings)
    ]


def _read_variant(top: dict, name: str, settings: dict) -> list[Scenario]:
    """Returns the scenarios, one per precision, of these more settings of the optimizer."""
    optimizer = _read_optimizer({**top["optimizer"], **settings})
    tenants = {
        tenant: _read_tenant(table, f"tenants.{tenant}", optimizer)
        for tenant, table in top["tenants"].items()
    }
    precisions = top.get("precisions", [PRECISIONS[0]])
    if not precisions or len(set(map(str, precisions))) < len(precisions):
        _refuse("precisions", precisions, "must name each precision once, and at least one")
    scenarios = []
    for precision in precisions:
        _check_choice("precisions", precision, PRECISIONS)
        scenario = Scenario(
            name=name if precision == "fp32" else f"{name}[{precision}]",
            description=top.get("description", ""),
            seed=top.get("seed", 0),
            precision=precision,
            gradients=top.get("gradients", "gaussian"),
            pool=_build(Pool, top["pool"], "pool"),
            model=_read_model(top["model"]),
            optimizer=optimizer,
            tenants=tenants,
            events=(),
            ranks=_build(Ranks, top.get("ranks", {}), "ranks"),
        )
        _check_values(scenario)
        scenario = dataclasses.replace(scenario, events=_read_events(top["lifecycle"], scenario))
        validate(scenario)
        scenarios.append(scenario)
    return scenarios


def _take(table: dict, where: str, required: dict, optional: Mapping[str, Any]) -> dict:
    """Returns `table` with its keys and types checked; an int where a float belongs becomes one."""
    known = {**required, **optional}
    prefix = f"{where}." if where else ""
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            _refuse(prefix + key, table[key], f"unknown key; {hint}")
    for key in required:
        if key not in table:
            raise ValueError(f"{prefix}{key} is missing: give a {_type_name(required[key])}")
    return {key: _typed(prefix + key, value, known[key]) for key, value in table.items()}


def _typed(key: str, value: Any, kind: Any) -> Any:
    if kind in (float, float | None) and type(value) is int:
        value = float(value)
    # A bool is an int to isinstance.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        _refuse(key, value, f"must be a {_type_name(kind)}")
    return value


def _type_name(kind: Any) -> str:
    names = {dict: "table", list: "list", str: "string", bool: "boolean", float: "number"}
    names |= {int: "whole number", int | None: "whole number", float | None: "number"}
    return names.get(kind, "string")


def _build(cls: type, table: dict, where: str) -> Any:
    """Makes a dataclass from a table that has its field names."""
    fields = dataclasses.fields(cls)
    required = {f.name: f.type for f in fields if f.default is dataclasses.MISSING}
    optional = {f.name: f.type for f in fields if f.default is not dataclasses.MISSING}
    return cls(**_take(table, where, required, optional))


def _read_model(table: dict) -> Stack | Transformer:
    table = _take(table, "model", {}, {"layers": list, "transformer": dict})
    if len(table) != 1:
        raise ValueError("model: give either layers or transformer")
    if "transformer" in table:
        return _build(Transformer, table["transformer"], "model.transformer")
    layers = []
    for index, layer in enumerate(table["layers"]):
        key = f"model.layers[{index}]"
        layers.append(_build(Layer, _typed(key, layer, dict), key))
    return Stack(tuple(layers))


def _read_optimizer(table: dict) -> dict[str, Any]:
    optional = {key: kind for key, kind in OPTIMIZER_FIELDS.items() if key != "optimizer"}
    return _take(table, "optimizer", {"optimizer": str}, optional)


def _read_tenant(table: Any, key: str, optimizer: dict[str, Any]) -> Tenant:
    table = dict(_typed(key, table, dict))
    pools = optimizer["optimizer"]
    own = table.pop("optimizer", pools)
    if own != pools:
        _refuse(f"{key}.optimizer", own, f'a tenant trains with the pool\'s optimizer, "{pools}"')
    return _build(Tenant, table, key)


def _read_events(table: dict, scenario: Scenario) -> tuple[Event, ...]:
    table = _take(table, "lifecycle", {}, {"events": list, "random": int})
    if len(table) != 1:
        raise ValueError("lifecycle: give either events or random")
    if "random" in table:
        return random_events(scenario, table["random"])
    return tuple(_expand(table["events"], "lifecycle.events"))


def _expand(tables: list, where: str) -> Iterator[Event]:
    for index, table in enumerate(tables):
        key = f"{where}[{index}]"
        table = _typed(key, table, dict)
        if "repeat" in table:
            table = _take(table, key, {"repeat": int, "events": list}, {})
            _check_at_least(f"{key}.repeat", table["repeat"], 1)
            for _ in range(table["repeat"]):
                yield from _expand(table["events"], f"{key}.events")
        else:
            yield _read_event(table, key)


def _read_event(table: dict, key: str) -> Event:
    if "install" in table:
        table = _take(table, key, {"install": str, "slot": int}, {"resume_step": int})
        return Install(table["install"], table["slot"], table.get("resume_step", 0))
    if "accumulate" in table:
        table = _take(table, key, {"accumulate": int, "slot": int}, {})
        return Accumulate(table["slot"], table["accumulate"])
    if "step" in table:
        slots = _take(table, key, {"step": list}, {})["step"]
        return Step(tuple(_typed(f"{key}.step", slot, int) for slot in slots))
    if "retire" in table:
        return Retire(_take(table, key, {"retire": int}, {})["retire"])
    if "resume" in table:
        table = _take(table, key, {"resume": str, "slot": int}, {"source": str})
        return Resume(table["resume"], table["slot"], table.get("source"))
    _refuse(key, table, "must be an install, accumulate, step, retire, resume or repeat")


# --- checking values --------------------------------------------------------------------------


def _check_choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        _refuse(key, value, f"must be one of {', '.join(choices)}")


def _check_at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not least <= value < math.inf:
        _refuse(key, value, f"must be at least {least}, and finite")


def _check_values(scenario: Scenario) -> None:
    _check_at_least("seed", scenario.seed, 0)
    _check_choice("precision", scenario.precision, PRECISIONS)
    _check_choice("gradients", scenario.gradients, GRADIENTS)
    _check_at_least("pool.n_slots", scenario.pool.n_slots, 1)
    _check_at_least("pool.rank", scenario.pool.rank, 1)
    _check_model(scenario)
    _check_ranks(scenario)
    _check_optimizer(scenario)
    if not scenario.tenants:
        raise ValueError("tenants is empty: give at least one tenant")
    for name, tenant in scenario.tenants.items():
        _check_tenant(f"tenants.{name}", tenant, scenario.pool)


def _check_model(scenario: Scenario) -> None:
    model = scenario.model
    if isinstance(model, Stack) == (scenario.gradients == "text"):
        _refuse(
            "gradients",
            scenario.gradients,
            "text needs model.transformer, and model.transformer needs text",
        )
    if isinstance(model, Transformer):
        for field in dataclasses.fields(model):
            key = f"model.transformer.{field.name}"
            _check_at_least(key, getattr(model, field.name), 1)
        if model.hidden_size % model.n_heads:
            _refuse(
                "model.transformer.n_heads",
                model.n_heads,
                f"must divide hidden_size = {model.hidden_size}",
            )
        return
    names = [layer.name for layer in model.layers]
    if not names or len(set(names)) < len(names):
        _refuse("model.layers", names, "must name at least one layer, each once")
    for index, layer in enumerate(model.layers):
        _check_at_least(f"model.layers[{index}].in_features", layer.in_features, 1)
        _check_at_least(f"model.layers[{index}].out_features", layer.out_features, 1)


def _check_ranks(scenario: Scenario) -> None:
    ranks, model = scenario.ranks, scenario.model
    _check_at_least("ranks.data_parallel", ranks.data_parallel, 1)
    _check_at_least("ranks.tensor_parallel", ranks.tensor_parallel, 1)
    layers = model.layers if isinstance(model, Stack) else ()
    if ranks.tensor_parallel > 1 and not any(layer.parallel for layer in layers):
        right = 'needs model.layers with parallel = "column" or "row"'
        _refuse("ranks.tensor_parallel", ranks.tensor_parallel, right)
    for index, layer in enumerate(layers):
        if layer.parallel is None:
            continue
        key = f"model.layers[{index}]"
        _check_choice(f"{key}.parallel", layer.parallel, PARALLELISMS)
        field = "out_features" if layer.parallel == "column" else "in_features"
        if getattr(layer, field) % ranks.tensor_parallel:
            right = f"must be a multiple of ranks.tensor_parallel = {ranks.tensor_parallel}"
            _refuse(f"{key}.{field}", getattr(layer, field), right)


def _check_optimizer(scenario: Scenario) -> None:
    optimizer = scenario.optimizer
    for key, choices in OPTIMIZER_CHOICES.items():
        if key in optimizer:
            _check_choice(f"optimizer.{key}", optimizer[key], choices)
    for key in ("clip_grad", "grad_norm_skip_threshold", "adam_eps", "adaptive_muon_eps"):
        _check_at_least(f"optimizer.{key}", optimizer.get(key), 0)
    for key in ("decoupled_lr", "decoupled_min_lr"):
        _check_at_least(f"optimizer.{key}", optimizer.get(key), 0)
    _check_at_least("optimizer.muon_num_ns_steps", optimizer.get("muon_num_ns_steps"), 1)
    for key, kind in OPTIMIZER_FIELDS.items():
        if kind is float and key.endswith(("beta1", "beta2", "momentum")):
            if not 0 <= optimizer.get(key, 0) < 1:
                _refuse(f"optimizer.{key}", optimizer[key], "must be at least 0 and below 1")
    _check_coefficients(optimizer)
    _check_qkv(scenario)
    _check_beyond_megatron(scenario)
    if optimizer.get("rank_aware"):
        _check_rank_aware(scenario)


def _check_coefficients(optimizer: dict[str, Any]) -> None:
    sets = optimizer.get("custom_coefficients")
    is_custom = optimizer.get("muon_coefficient_type") == "custom"
    if is_custom != bool(sets):
        right = 'give a non-empty list exactly for muon_coefficient_type = "custom"'
        _refuse("optimizer.custom_coefficients", sets, right)
    for index, numbers in enumerate(sets or ()):
        key = f"optimizer.custom_coefficients[{index}]"
        if len(_typed(key, numbers, list)) != 3:
            _refuse(key, numbers, "must be the three numbers of a step")
        for number in numbers:
            _typed(key, number, float)


def _check_qkv(scenario: Scenario) -> None:
    layers = scenario.model.layers if isinstance(scenario.model, Stack) else ()
    for pattern, sizes in scenario.optimizer.get("qkv_split_shapes", {}).items():
        key = f"optimizer.qkv_split_shapes.{pattern}"
        for size in _typed(key, sizes, list):
            _check_at_least(key, _typed(key, size, int), 1)
        for layer in layers:
            rows = layer.out_features
            if fnmatchcase(f"{layer.name}.linear_out", pattern) and (
                not sizes or rows % sum(sizes)
            ):
                right = f"its sum must divide the {rows} rows of layer {layer.name}"
                _refuse(key, sizes, right)


def _check_beyond_megatron(scenario: Scenario) -> None:
    """Where emerging-optimizers' class is the reference: what it cannot do is refused."""
    optimizer = scenario.optimizer
    adaptive = optimizer["optimizer"] == "adaptive_muon"
    custom = optimizer.get("muon_coefficient_type") == "custom"
    method = optimizer.get("weight_decay_method", "decoupled")
    if not (adaptive or custom or method != "decoupled"):
        return
    if optimizer.get("qkv_split_shapes"):
        right = "must be empty: its reference, emerging-optimizers' own Muon, does not split"
        _refuse("optimizer.qkv_split_shapes", optimizer["qkv_split_shapes"], right)
    if scenario.ranks.tensor_parallel > 1:
        right = "must be 1: its reference, emerging-optimizers' own Muon, knows no shards"
        _refuse("ranks.tensor_parallel", scenario.ranks.tensor_parallel, right)
    if adaptive and custom:
        _refuse("optimizer.muon_coefficient_type", "custom", "adaptive_muon takes no custom sets")
    if adaptive and method == "l2" and optimizer.get("adaptive_muon_moment2_method") == "namo":
        _refuse("optimizer.weight_decay_method", method, "namo reads the gradient that it changes")


def _check_rank_aware(scenario: Scenario) -> None:
    """The reference is a pool of the tenants' own rank, which must then be one."""
    ranks = {tenant.rank for tenant in scenario.tenants.values()}
    if len(ranks) > 1:
        right = "needs tenants of one rank, that of the reference's pool"
        _refuse("optimizer.rank_aware", True, right)
    if scenario.ranks.tensor_parallel > 1:
        _refuse("ranks.tensor_parallel", scenario.ranks.tensor_parallel, "rank_aware needs 1")
    for layer in scenario.model.layers if isinstance(scenario.model, Stack) else ():
        if min(layer.in_features, layer.out_features) <= scenario.pool.rank:
            right = f"rank_aware needs layer {layer.name} to be larger than pool.rank on both sides"
            _refuse("optimizer.rank_aware", True, right)


def _check_tenant(key: str, tenant: Tenant, pool: Pool) -> None:
    if not 1 <= tenant.rank <= pool.rank:
        _refuse(f"{key}.rank", tenant.rank, f"must be between 1 and pool.rank = {pool.rank}")
    for field in ("batch_size", "num_step", "lr_wsd_decay_iters"):
        _check_at_least(f"{key}.{field}", getattr(tenant, field), 1)
    for field in ("lr", "alpha", "weight_decay", "start_weight_decay", "lr_warmup_iters"):
        _check_at_least(f"{key}.{field}", getattr(tenant, field), 0)
    for field in ("min_lr", "lr_warmup_init"):
        if not 0 <= getattr(tenant, field) <= tenant.lr:
            value = getattr(tenant, field)
            _refuse(f"{key}.{field}", value, f"must be between 0 and lr = {tenant.lr}")
    _check_choice(f"{key}.init", tenant.init, INITS)
    _check_choice(f"{key}.lr_decay_style", tenant.lr_decay_style, LR_DECAY_STYLES)
    _check_warmup(key, tenant)
    _check_wsd(key, tenant)
    _check_weight_decay(key, tenant)


def _check_warmup(key: str, tenant: Tenant) -> None:
    fraction, iters = tenant.lr_warmup_fraction, tenant.lr_warmup_iters
    if fraction is None:
        if iters is not None and tenant.num_step is not None and iters >= tenant.num_step:
            right = f"must be below num_step = {tenant.num_step}"
            _refuse(f"{key}.lr_warmup_iters", iters, right)
        return
    if not 0 <= fraction < 1:
        _refuse(f"{key}.lr_warmup_fraction", fraction, "must be at least 0 and below 1")
    if iters is not None:
        _refuse(f"{key}.lr_warmup_iters", iters, "give it or lr_warmup_fraction, not both")
    if tenant.num_step is None:
        right = "is a fraction of num_step: give num_step, or lr_warmup_iters instead"
        _refuse(f"{key}.lr_warmup_fraction", fraction, right)


def _check_wsd(key: str, tenant: Tenant) -> None:
    wsd_fields = ("lr_wsd_decay_iters", "lr_wsd_decay_style")
    if tenant.lr_decay_style != "WSD":
        for field in wsd_fields:
            if getattr(tenant, field) is not None:
                right = 'belongs to lr_decay_style = "WSD"'
                _refuse(f"{key}.{field}", getattr(tenant, field), right)
        return
    _check_choice(f"{key}.lr_wsd_decay_style", tenant.lr_wsd_decay_style, WSD_DECAY_STYLES)
    if tenant.num_step is None or tenant.lr_wsd_decay_iters is None:
        right = "needs num_step and lr_wsd_decay_iters"
        _refuse(f"{key}.lr_decay_style", tenant.lr_decay_style, right)
    if tenant.lr_wsd_decay_iters > tenant.num_step:
        right = f"must be at most num_step = {tenant.num_step}"
        _refuse(f"{key}.lr_wsd_decay_iters", tenant.lr_wsd_decay_iters, right)


def _check_weight_decay(key: str, tenant: Tenant) -> None:
    style = tenant.weight_decay_incr_style
    start, end = tenant.start_weight_decay, tenant.end_weight_decay
    _check_choice(f"{key}.weight_decay_incr_style", style, WD_INCR_STYLES)
    given = (tenant.weight_decay is not None, start is not None, end is not None)
    if given not in ((True, False, False), (False, True, True)):
        right = "give weight_decay, or both start_weight_decay and end_weight_decay"
        _refuse(f"{key}.weight_decay", tenant.weight_decay, right)
    if start is not None and end < start:
        _refuse(f"{key}.end_weight_decay", end, f"must be at least start_weight_decay = {start}")
    if style == "constant":
        if start != end:
            right = 'weight_decay_incr_style = "constant" keeps it at start_weight_decay'
            _refuse(f"{key}.end_weight_decay", end, right)
    elif tenant.num_step is None:
        _refuse(f"{key}.weight_decay_incr_style", style, "needs num_step: it rises up to it")


# --- replaying --------------------------------------------------------------------------------


class _Replay:
    """Who sits where, with how many samples: all that decides whether an event is possible."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.occupant: dict[int, str] = {}
        self.samples: dict[int, int] = {}
        self.retired: set[str] = set()

    def batch_size(self, slot: int) -> int:
        return self.scenario.tenants[self.occupant[slot]].batch_size

    def free(self) -> list[int]:
        return [s for s in range(self.scenario.pool.n_slots) if s not in self.occupant]

    def full(self) -> list[int]:
        return [s for s in sorted(self.occupant) if self.samples[s] == self.batch_size(s)]

    def unfilled(self) -> list[int]:
        return [s for s in sorted(self.occupant) if self.samples[s] < self.batch_size(s)]

    def absent(self) -> list[str]:
        return [t for t in self.scenario.tenants if t not in self.occupant.values()]

    def apply(self, event: Event, index: int) -> None:
        """Applies one event.

        Raises:
            ValueError: the event is not possible now.
        """
        problem = self._problem(event)
        if problem:
            # Counted after `repeat` is expanded.
            _refuse(f"lifecycle event {index}", event, problem)
        match event:
            case Install(tenant, slot) | Resume(tenant, slot):
                self.occupant[slot] = tenant
                self.samples[slot] = 0
                self.retired.discard(tenant)
            case Accumulate(slot, samples):
                self.samples[slot] += samples
            case Step(slots):
                self.samples.update(dict.fromkeys(slots, 0))
            case Retire(slot):
                self.retired.add(self.occupant.pop(slot))
                del self.samples[slot]

    def _problem(self, event: Event) -> str | None:
        slots = event.slots if isinstance(event, Step) else (event.slot,)
        n_slots = self.scenario.pool.n_slots
        for slot in slots:
            if not 0 <= slot < n_slots:
                return f"slot {slot} must be between 0 and {n_slots - 1}"
        match event:
            case Install() | Resume():
                return self._arrival_problem(event)
            case Step(()):
                return "must name at least one slot"
            case Step(slots) if len(set(slots)) < len(slots):
                return "must name each slot once"
        for slot in slots:
            if slot not in self.occupant:
                return f"slot {slot} is empty: install a tenant first"
        match event:
            case Accumulate(slot, samples):
                room = self.batch_size(slot) - self.samples[slot]
                if not 1 <= samples <= room:
                    return (
                        f"{self.occupant[slot]} has {self.samples[slot]} of its batch_size = "
                        f"{self.batch_size(slot)} samples: accumulate at least 1 and no more"
                    )
            case Step(slots):
                for slot in slots:
                    if self.samples[slot] != self.batch_size(slot):
                        return (
                            f"slot {slot} has {self.samples[slot]} samples: {self.occupant[slot]} "
                            f"steps on exactly batch_size = {self.batch_size(slot)}"
                        )
        return None

    def _arrival_problem(self, event: Install | Resume) -> str | None:
        if event.tenant not in self.scenario.tenants:
            return f"unknown tenant; known: {', '.join(self.scenario.tenants)}"
        if event.slot in self.occupant:
            return f"slot {event.slot} is occupied by {self.occupant[event.slot]}: retire it first"
        if event.tenant in self.occupant.values():
            return f"{event.tenant} already occupies another slot"
        if isinstance(event, Resume) and event.tenant not in self.retired:
            return f"{event.tenant} has not retired: install it"
        if isinstance(event, Install) and event.resume_step < 0:
            return "resume_step must be at least 0"
        if isinstance(event, Resume) and event.source is not None:
            if event.source not in SOURCES:
                return f"source must be one of {', '.join(SOURCES)}"
            if self.scenario.ranks != Ranks():
                return "a tenant file is written by a single rank"
        return None


def random_events(scenario: Scenario, count: int) -> tuple[Event, ...]:
    """Draws ``count`` valid events from the scenario's seed; its own events play no part.

    Every tenant is installed and steps at least once, and every verb occurs.

    Raises:
        ValueError: ``count`` is too small for that.
    """
    rng = random.Random(scenario.seed)
    for _ in range(_RANDOM_ATTEMPTS):
        events = random_walk(scenario, count, rng)
        if _uses_everything(scenario, events):
            return events
    _refuse("lifecycle.random", count, "too few events to use every tenant and every verb")


def random_walk(scenario: Scenario, count: int, rng: random.Random) -> tuple[Event, ...]:
    """Draws ``count`` events, each possible after those before it."""
    replay = _Replay(scenario)
    events = []
    for index in range(count):
        moves = _moves(replay, rng)
        events.append(rng.choices([e for e, _ in moves], [weight for _, weight in moves])[0])
        replay.apply(events[-1], index)
    return tuple(events)


def _uses_everything(scenario: Scenario, events: tuple[Event, ...]) -> bool:
    """Tells whether every verb occurs and every tenant steps."""
    replay = _Replay(scenario)
    stepped = set()
    for index, event in enumerate(events):
        if isinstance(event, Step):
            stepped.update(replay.occupant[slot] for slot in event.slots)
        replay.apply(event, index)
    return stepped == set(scenario.tenants) and {*map(type, events)} == set(get_args(Event))


def _moves(replay: _Replay, rng: random.Random) -> list[tuple[Event, float]]:
    """Returns one possible event per verb, with the verb's weight: mostly fill and step."""
    moves: list[tuple[Event, float]] = []
    free, absent, retired = replay.free(), replay.absent(), sorted(replay.retired)
    if free and absent:
        newcomers = [tenant for tenant in absent if tenant not in retired]
        # A retired tenant may also start anew.
        moves.append((Install(rng.choice(newcomers or absent), rng.choice(free)), 4.0))
    if free and retired:
        moves.append((Resume(rng.choice(retired), rng.choice(free)), 2.0))
    if replay.occupant:
        moves.append((Retire(rng.choice(sorted(replay.occupant))), 0.5))
    if unfilled := replay.unfilled():
        slot = rng.choice(unfilled)
        room = replay.batch_size(slot) - replay.samples[slot]
        samples = room if rng.random() < 0.7 else rng.randint(1, room)
        moves.append((Accumulate(slot, samples), 6.0))
    if full := replay.full():
        slots = rng.sample(full, rng.randint(1, len(full)))
        moves.append((Step(tuple(sorted(slots))), 4.0))
    return moves


# --- writing ----------------------------------------------------------------------------------


def dump(scenario: Scenario) -> str:
    """Returns TOML text that loads to exactly this scenario, its events written out."""
    head = {
        "name": scenario.name.removesuffix(f"[{scenario.precision}]"),
        "description": scenario.description,
        "seed": scenario.seed,
        "precisions": [scenario.precision],
        "gradients": scenario.gradients,
    }
    if isinstance(scenario.model, Stack):
        model = {"layers": [_table(layer) for layer in scenario.model.layers]}
    else:
        model = {"transformer": _table(scenario.model)}
    lines = _assignments(head)
    lines += ["", "[pool]", *_assignments(_table(scenario.pool))]
    lines += ["", "[ranks]", *_assignments(_table(scenario.ranks))]
    lines += ["", "[model]", *_assignments(model)]
    lines += ["", "[optimizer]", *_assignments(scenario.optimizer)]
    for name, tenant in scenario.tenants.items():
        lines += ["", f"[tenants.{_toml_key(name)}]", *_assignments(_table(tenant))]
    lines += ["", "[lifecycle]", "events = ["]
    lines += [f"  {_toml(event)}," for event in scenario.events]
    return "\n".join([*lines, "]", ""])


def _table(instance: Any) -> dict[str, Any]:
    """Returns a dataclass's fields, those that are None left out: TOML has no null."""
    table = {f.name: getattr(instance, f.name) for f in dataclasses.fields(instance)}
    return {key: value for key, value in table.items() if value is not None}


def _event_table(event: Event) -> dict[str, Any]:
    match event:
        case Install(tenant, slot, resume_step):
            table = {"install": tenant, "slot": slot}
            return table | ({"resume_step": resume_step} if resume_step else {})
        case Accumulate(slot, samples):
            return {"accumulate": samples, "slot": slot}
        case Step(slots):
            return {"step": list(slots)}
        case Retire(slot):
            return {"retire": slot}
        case Resume(tenant, slot, source):
            return {"resume": tenant, "slot": slot} | ({"source": source} if source else {})


def _assignments(table: dict[str, Any]) -> list[str]:
    return [f"{_toml_key(key)} = {_toml(value)}" for key, value in table.items()]


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case dict():
            return "{" + ", ".join(_assignments(value)) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case Install() | Accumulate() | Step() | Retire() | Resume():
            return _toml(_event_table(value))
        case None:
            return "(not given)"
    return repr(value)
