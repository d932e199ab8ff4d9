"""Tests of parity.scenario: loading, defaults, refusals, replay, random lifecycles, dump."""

import dataclasses
from collections import Counter
from typing import Optional, get_args

import pytest
from emerging_optimizers.mixin import WeightDecayT
from emerging_optimizers.orthogonalized_optimizers.adaptive_muon import Moment2MethodT
from emerging_optimizers.orthogonalized_optimizers.muon import MuonScaleT
from emerging_optimizers.orthogonalized_optimizers.muon_utils import NSCoeffT
from emerging_optimizers.utils import FP32MatmulPrecT

from parity import scenario as sc
from torch_ref import SlotOptimizerConfig

TEXT = """
description = "two tenants"
seed = 3
precisions = ["fp32", "bf16"]
gradients = "gaussian"

[pool]
n_slots = 2
rank = 8

[model]
layers = [{name = "q", in_features = 64, out_features = 96, bias = true}]

[optimizer]
optimizer = "muon"
clip_grad = 1

[tenants.alice]
rank = 8
alpha = 16.0
batch_size = 4
num_step = 20
lr = 1e-2
lr_warmup_fraction = 0.1
lr_decay_style = "cosine"
weight_decay = 0.1

[tenants.bob]
rank = 4
alpha = 8
batch_size = 6
lr = 0.01
lr_warmup_iters = 3
weight_decay = 0.1

[lifecycle]
events = [
  {install = "alice", slot = 0},
  {install = "bob", slot = 1, resume_step = 5},
  {repeat = 2, events = [{accumulate = 4, slot = 0}, {step = [0]}]},
  {accumulate = 6, slot = 1},
  {step = [1]},
  {retire = 0},
  {resume = "alice", slot = 0},
]
"""


def _text(old: str = "", new: str = "") -> str:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


def _events(*events: str) -> str:
    return TEXT[: TEXT.index("events = [")] + "events = [" + ", ".join(events) + "]\n"


def test_one_scenario_per_precision():
    fp32, bf16 = sc.parse(TEXT, "two.toml")
    assert (fp32.name, fp32.precision) == ("two", "fp32")
    assert (bf16.name, bf16.precision) == ("two[bf16]", "bf16")
    assert dataclasses.replace(bf16, name="two", precision="fp32") == fp32
    assert fp32.optimizer == {"optimizer": "muon", "clip_grad": 1.0}
    assert fp32.model == sc.Stack((sc.Layer("q", 64, 96, True),))


def test_events_are_read_and_repeats_expanded():
    scenario = sc.parse(TEXT, "two.toml")[0]
    assert scenario.events == (
        sc.Install("alice", 0),
        sc.Install("bob", 1, resume_step=5),
        sc.Accumulate(0, 4),
        sc.Step((0,)),
        sc.Accumulate(0, 4),
        sc.Step((0,)),
        sc.Accumulate(1, 6),
        sc.Step((1,)),
        sc.Retire(0),
        sc.Resume("alice", 0),
    )


def test_load_scenarios_reads_a_file_and_names_it_in_errors(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(TEXT)
    assert sc.load_scenarios(path) == sc.parse(TEXT, "two.toml")
    path.write_text("[pool\n")
    with pytest.raises(ValueError, match=r"^two\.toml: not valid TOML: "):
        sc.load_scenarios(path)


@pytest.mark.parametrize("name", sc.shipped())
def test_dump_round_trip(name):
    scenario = sc.shipped()[name]
    assert sc.parse(sc.dump(scenario), "elsewhere.toml") == [scenario]


def test_dump_escapes():
    awkward = 'back\\slash "quotes"\ttab\nline \x7f \U0001f600'
    scenario = dataclasses.replace(sc.parse(TEXT, "two.toml")[0], description=awkward)
    scenario.tenants["a b"] = scenario.tenants["bob"]
    assert sc.parse(sc.dump(scenario), "two.toml") == [scenario]


def test_schedule_with_horizon():
    schedule = sc.parse(TEXT, "two.toml")[0].tenants["alice"].schedule()
    assert schedule == {
        "init_lr": 0.0,
        "max_lr": 0.01,
        "min_lr": 0.0,
        "lr_warmup_steps": 8.0,
        "lr_decay_steps": 80,
        "lr_decay_style": "cosine",
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": 80,
        "wd_incr_style": "constant",
        "wsd_decay_steps": None,
        "lr_wsd_decay_style": None,
    }


def test_schedule_without_horizon_holds_whatever_the_style():
    tenant = sc.parse(TEXT, "two.toml")[0].tenants["bob"]
    schedule = dataclasses.replace(tenant, lr_decay_style="cosine").schedule()
    assert schedule["lr_decay_style"] == "constant"
    assert schedule["lr_warmup_steps"] == 18 < schedule["lr_decay_steps"]


def test_schedule_wsd_and_rising_weight_decay():
    tenant = sc.Tenant(
        rank=1,
        alpha=1.0,
        batch_size=4,
        lr=0.1,
        num_step=10,
        lr_decay_style="WSD",
        lr_wsd_decay_iters=3,
        lr_wsd_decay_style="linear",
        start_weight_decay=0.1,
        end_weight_decay=0.3,
        weight_decay_incr_style="cosine",
    )
    schedule = tenant.schedule()
    assert (schedule["wsd_decay_steps"], schedule["lr_wsd_decay_style"]) == (12, "linear")
    assert (schedule["start_wd"], schedule["end_wd"]) == (0.1, 0.3)


def test_optimizer_fields_are_megatrons():
    types = {field.name: field.type for field in dataclasses.fields(SlotOptimizerConfig)}
    own = {"custom_coefficients", *sc.OWN_FIELDS}
    assert sc.OPTIMIZER_FIELDS.keys() - types.keys() == sc.OWN_FIELDS.keys()
    for name in sc.OPTIMIZER_FIELDS.keys() - own:
        assert types[name] in (sc.OPTIMIZER_FIELDS[name], Optional[float])  # noqa: UP045


def test_choices_are_those_of_the_installed_reference():
    """A new coefficient type, or any other choice, of emerging-optimizers fails here."""
    assert set(sc.OPTIMIZER_CHOICES["muon_coefficient_type"]) == set(get_args(NSCoeffT))
    assert set(sc.OPTIMIZER_CHOICES["weight_decay_method"]) == set(get_args(WeightDecayT))
    assert set(sc.OPTIMIZER_CHOICES["muon_scale_mode"]) == set(get_args(MuonScaleT))
    assert set(sc.OPTIMIZER_CHOICES["muon_fp32_matmul_prec"]) == set(get_args(FP32MatmulPrecT))
    moments = sc.OPTIMIZER_CHOICES["adaptive_muon_moment2_method"]
    assert set(moments) == set(get_args(Moment2MethodT))


def test_every_choice_has_a_scenario():
    scenarios = [vars(SlotOptimizerConfig(**_known(s))) for s in sc.shipped().values()]
    for field, choices in sc.OPTIMIZER_CHOICES.items():
        assert {optimizer[field] for optimizer in scenarios} == set(choices), field


def _known(scenario):
    return {k: v for k, v in scenario.optimizer.items() if k not in sc.OWN_FIELDS}


def test_variants_are_scenarios_of_their_own():
    text = _text("[pool]", "[variants.nesterov]\nmuon_nesterov = true\n[variants.plain]\n[pool]")
    variants = sc.parse(text, "two.toml")
    names = ["two[nesterov]", "two[nesterov][bf16]", "two[plain]", "two[plain][bf16]"]
    assert [scenario.name for scenario in variants] == names
    assert variants[0].optimizer == {**variants[2].optimizer, "muon_nesterov": True}
    for scenario in variants:
        assert sc.parse(sc.dump(scenario), "dumped.toml") == [scenario]


ALICE = "num_step = 20\nlr = 1e-2\nlr_warmup_fraction = 0.1"
OPTIMIZER = "clip_grad = 1"


def _setting(text: str, right: str) -> tuple[str, str, str]:
    return OPTIMIZER, f"{OPTIMIZER}\n{text}", right


REFUSED = [
    _setting("grad_norm_skip_threshold = -1", "grad_norm_skip_threshold = -1.0: must be at least"),
    _setting("lion_beta1 = 1", "optimizer.lion_beta1 = 1.0: must be at least 0 and below 1"),
    _setting('muon_scalar_optimizer = "sgd"', "must be one of adam, lion"),
    _setting('muon_coefficient_type = "custom"', "custom_coefficients = (not given): give a non-"),
    _setting("custom_coefficients = [[1, 2, 3]]", 'exactly for muon_coefficient_type = "custom"'),
    _setting(
        'muon_coefficient_type = "custom"\ncustom_coefficients = [[1, 2]]',
        "custom_coefficients[0] = [1, 2]: must be the three numbers of a step",
    ),
    _setting('qkv_split_shapes = {"q.*" = [40, 7]}', "must divide the 96 rows of layer q"),
    _setting(
        'weight_decay_method = "palm"\nqkv_split_shapes = {"q.*" = [32, 16]}',
        "emerging-optimizers' own Muon, does not split",
    ),
    _setting("rank_aware = true", "rank_aware = true: needs tenants of one rank"),
    ("rank = 8\nalpha = 16", "rank = 9\nalpha = 16", "tenants.alice.rank = 9: must be between 1"),
    ("batch_size = 4", "batch_size = 0", "tenants.alice.batch_size = 0: must be at least 1"),
    ("num_step = 20", "num_step = 0", "tenants.alice.num_step = 0: must be at least 1"),
    ("num_step = 20", "num_step = 2.5", "tenants.alice.num_step = 2.5: must be a whole number"),
    ("batch_size = 4", "batch_size = true", "tenants.alice.batch_size = true: must be a whole"),
    ("num_step = 20\n", "", "tenants.alice.lr_warmup_fraction = 0.1: is a fraction of num_step"),
    ('"cosine"', '"cosin"', 'lr_decay_style = "cosin": must be one of constant, linear, cosine'),
    ("lr = 1e-2\n", "", "tenants.alice.lr is missing: give a number"),
    ("lr = 1e-2", "lr = nan", "tenants.alice.lr = nan: must be at least 0, and finite"),
    ("alpha = 16.0", "alpah = 16.0", "tenants.alice.alpah = 16.0: unknown key; did you mean alpha"),
    ("alpha = 16.0", 'alpha = "16"', 'tenants.alice.alpha = "16": must be a number'),
    (ALICE, ALICE + "\nmin_lr = 0.1", "tenants.alice.min_lr = 0.1: must be between 0 and lr"),
    (ALICE, ALICE + "\nlr_warmup_init = 0.1", "tenants.alice.lr_warmup_init = 0.1: must be betw"),
    (ALICE, ALICE + "\nlr_warmup_iters = 2", "lr_warmup_iters = 2: give it or lr_warmup_fraction"),
    (ALICE, ALICE.replace("0.1", "1.0"), "lr_warmup_fraction = 1.0: must be at least 0 and below"),
    (
        ALICE,
        "num_step = 20\nlr = 1e-2\nlr_warmup_iters = 20",
        "lr_warmup_iters = 20: must be below num_step = 20",
    ),
    (
        ALICE,
        ALICE + "\nlr_wsd_decay_iters = 2",
        "lr_wsd_decay_iters = 2: belongs to lr_decay_style",
    ),
    ('"cosine"', '"WSD"', "lr_wsd_decay_style = (not given): must be one of linear, cosine"),
    (
        '"cosine"',
        '"WSD"\nlr_wsd_decay_style = "linear"',
        'lr_decay_style = "WSD": needs num_step and lr_wsd_decay_iters',
    ),
    (
        '"cosine"',
        '"WSD"\nlr_wsd_decay_style = "linear"\nlr_wsd_decay_iters = 21',
        "lr_wsd_decay_iters = 21: must be at most num_step = 20",
    ),
    ("weight_decay = 0.1\n", "", "weight_decay = (not given): give weight_decay, or both"),
    (
        "weight_decay = 0.1\n",
        "start_weight_decay = 0.2\nend_weight_decay = 0.1\n",
        "end_weight_decay = 0.1: must be at least start_weight_decay = 0.2",
    ),
    (
        "weight_decay = 0.1\n",
        "start_weight_decay = 0.1\nend_weight_decay = 0.2\n",
        'end_weight_decay = 0.2: weight_decay_incr_style = "constant"',
    ),
    (
        "lr_warmup_iters = 3",
        'lr_warmup_iters = 3\nweight_decay_incr_style = "linear"',
        'tenants.bob.weight_decay_incr_style = "linear": needs num_step',
    ),
    (
        "lr_warmup_iters = 3",
        'optimizer = "adam"',
        'tenants.bob.optimizer = "adam": a tenant trains with the pool\'s optimizer, "muon"',
    ),
    ("lr_warmup_iters = 3", 'init = "zero"', 'init = "zero": must be one of lora, random'),
    ("n_slots = 2", "n_slots = 0", "pool.n_slots = 0: must be at least 1"),
    ("rank = 8\n\n", "\n", "pool.rank is missing: give a whole number"),
    ("seed = 3", "seed = -1", "seed = -1: must be at least 0"),
    ('"bf16"]', '"fp16"]', 'precisions = "fp16": must be one of fp32, bf16'),
    ('"bf16"]', '"fp32"]', 'precisions = ["fp32", "fp32"]: must name each precision once'),
    ('"gaussian"', '"uniform"', 'gradients = "uniform": must be one of gaussian'),
    ('"gaussian"', '"text"', 'gradients = "text": text needs model.transformer'),
    ('"muon"', '"sgd"', 'optimizer.optimizer = "sgd": must be one of adam, muon'),
    ("clip_grad", "clip_grads", "optimizer.clip_grads = 1: unknown key; did you mean clip_grad?"),
    ("clip_grad = 1", "muon_momentum = 1", "optimizer.muon_momentum = 1.0: must be at least 0 and"),
    ("clip_grad = 1", "muon_num_ns_steps = 0", "muon_num_ns_steps = 0: must be at least 1"),
    ("clip_grad = 1", 'muon_scale_mode = "x"', 'muon_scale_mode = "x": must be one of spectral'),
    ("in_features = 64", "in_features = 0", "model.layers[0].in_features = 0: must be at least 1"),
    ("layers = [{", "layers = [3, {", "model.layers[0] = 3: must be a table"),
    ("[tenants.alice]", "[tenants]\ncarol = 1\n[tenants.alice]", "tenants.carol = 1: must be a ta"),
    ("[model]", "[model]\ntransformer = {}", "model: give either layers or transformer"),
    ("[model]", "[ranks]\ndata_parallel = 0\n[model]", "ranks.data_parallel = 0: must be at least"),
    ("[model]", "[ranks]\ntensor_parallel = 2\n[model]", "ranks.tensor_parallel = 2: needs model."),
    ("bias = true", 'parallel = "rows"', 'model.layers[0].parallel = "rows": must be one of colu'),
    (
        "[model]\nlayers = [{",
        '[ranks]\ntensor_parallel = 5\n[model]\nlayers = [{parallel = "row", ',
        "model.layers[0].in_features = 64: must be a multiple of ranks.tensor_parallel = 5",
    ),
    ("[lifecycle]", "[lifecycle]\nrandom = 9", "lifecycle: give either events or random"),
    ("repeat = 2", "repeat = 0", "lifecycle.events[2].repeat = 0: must be at least 1"),
    ("{retire = 0}", "{retier = 0}", "must be an install, accumulate, step, retire, resume or rep"),
]


@pytest.mark.parametrize(("old", "new", "message"), REFUSED)
def test_malformed_values_are_refused(old, new, message):
    with pytest.raises(ValueError) as error:
        sc.parse(_text(old, new), "bad.toml")
    assert str(error.value).startswith("bad.toml: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


ARRIVE = '{install = "alice", slot = 0}'
IMPOSSIBLE = [
    (["{step = [0]}"], "lifecycle event 0 = {step = [0]}: slot 0 is empty: install a tenant first"),
    (["{accumulate = 1, slot = 1}"], "slot 1 is empty"),
    (["{retire = 0}"], "slot 0 is empty"),
    (["{retire = 2}"], "slot 2 must be between 0 and 1"),
    (['{install = "alice", slot = -1}'], "slot -1 must be between 0 and 1"),
    (['{install = "carol", slot = 0}'], "unknown tenant; known: alice, bob"),
    (['{resume = "carol", slot = 0}'], "unknown tenant; known: alice, bob"),
    (['{install = "alice", slot = 0, resume_step = -1}'], "resume_step must be at least 0"),
    ([ARRIVE, '{install = "bob", slot = 0}'], "slot 0 is occupied by alice: retire it first"),
    ([ARRIVE, '{install = "alice", slot = 1}'], "alice already occupies another slot"),
    ([ARRIVE, '{resume = "bob", slot = 1}'], "bob has not retired: install it"),
    ([ARRIVE, "{step = [0]}"], "slot 0 has 0 samples: alice steps on exactly batch_size = 4"),
    ([ARRIVE, "{step = []}"], "must name at least one slot"),
    ([ARRIVE, "{accumulate = 4, slot = 0}", "{step = [0, 0]}"], "must name each slot once"),
    ([ARRIVE, "{accumulate = 4, slot = 0}", "{step = [0, 1]}"], "slot 1 is empty"),
    ([ARRIVE, "{accumulate = 0, slot = 0}"], "alice has 0 of its batch_size = 4 samples"),
    (
        [ARRIVE, "{accumulate = 3, slot = 0}", "{accumulate = 2, slot = 0}"],
        "lifecycle event 2 = {accumulate = 2, slot = 0}: alice has 3 of its batch_size = 4 samples",
    ),
    # A retired tenant's partial sum does not come back with it.
    (
        [
            ARRIVE,
            "{accumulate = 4, slot = 0}",
            "{retire = 0}",
            '{resume = "alice", slot = 0}',
            "{step = [0]}",
        ],
        "slot 0 has 0 samples",
    ),
]


@pytest.mark.parametrize(("events", "message"), IMPOSSIBLE)
def test_impossible_events_are_refused(events, message):
    with pytest.raises(ValueError) as error:
        sc.parse(_events(*events), "bad.toml")
    assert str(error.value).startswith("bad.toml: lifecycle event ")
    assert message in str(error.value)


def test_validate_checks_a_scenario_made_in_code():
    scenario = sc.parse(TEXT, "two.toml")[0]
    sc.validate(scenario)
    with pytest.raises(ValueError, match="slot 0 is empty"):
        sc.validate(dataclasses.replace(scenario, events=scenario.events[2:]))


@pytest.mark.parametrize("seed", range(10))
def test_random_events_are_valid_and_use_everything(seed):
    scenario = dataclasses.replace(sc.shipped()["mixed_pool"], seed=seed)
    events = sc.random_events(scenario, 50)
    assert events == sc.random_events(scenario, 50)
    assert len(events) == 50
    sc.validate(dataclasses.replace(scenario, events=events))
    assert {type(e) for e in events} == {
        sc.Install,
        sc.Accumulate,
        sc.Step,
        sc.Retire,
        sc.Resume,
    }
    assert {e.tenant for e in events if isinstance(e, sc.Install)} == set(scenario.tenants)
    assert len({slots for e in events if isinstance(e, sc.Step) for slots in e.slots}) > 1


def test_random_events_differ_with_the_seed_and_need_room():
    scenario = sc.shipped()["mixed_pool"]
    other = dataclasses.replace(scenario, seed=scenario.seed + 1)
    assert sc.random_events(scenario, 50) != sc.random_events(other, 50)
    with pytest.raises(ValueError, match=r"lifecycle.random = 5: too few events"):
        sc.random_events(scenario, 5)


def test_shipped_scenarios_cover_what_they_must():
    shipped = sc.shipped()
    both = "one_muon one_adam interleaved matrix_and_scalar reuse_other_rank real_text".split()
    assert set(shipped) >= {*both, *(f"{name}[bf16]" for name in both)}
    assert {s.gradients for s in shipped.values()} == set(sc.GRADIENTS)
    assert {s.optimizer["optimizer"] for s in shipped.values()} == {"adam", "muon", "adaptive_muon"}
    for scenario in shipped.values():
        counts = Counter(type(event) for event in scenario.events)
        assert 3 <= counts[sc.Step] <= 15, scenario.name
        if scenario.optimizer["optimizer"] != "adam" and scenario.precision == "fp32":
            assert scenario.optimizer["muon_fp32_matmul_prec"] in ("highest", "high")
