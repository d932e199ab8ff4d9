"""Tests of parity.oracle: closed forms, and the real classes of both reference libraries."""

import math
import types
from typing import get_args

import numpy as np
import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from emerging_optimizers.orthogonalized_optimizers.adaptive_muon import AdaptiveMuon, Moment2MethodT
from emerging_optimizers.orthogonalized_optimizers.muon import Muon, get_muon_scale_factor
from emerging_optimizers.scalar_optimizers import Lion
from emerging_optimizers.utils import fp32_matmul_precision
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from parity import oracle
from parity.scenario import OWN_FIELDS
from torch_ref import SlotOptimizerConfig

TYPES = sorted(muon_utils._COEFFICIENT_SETS)
SHAPES = [(8, 48), (48, 8), (16, 16), (2, 7)]


def _coefficients(coefficient_type):
    return muon_utils._COEFFICIENT_SETS[coefficient_type]


def _iterate(x, coefficient_type="quintic", steps=5):
    return oracle.newton_schulz(x, steps, coefficient_type, _coefficients(coefficient_type))


def _scalar(s, coefficient_type="quintic", steps=5):
    """The iteration on singular values."""
    coefficients = _coefficients(coefficient_type)
    for a, b, c in oracle.cycle_or_repeat(coefficients, steps, coefficient_type):
        s = a * s + b * s**3 + c * s**5
    return s


def _gaussian(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def _distance(x, y):
    return np.linalg.norm(x - y) / np.linalg.norm(y)


# --- Newton-Schulz ----------------------------------------------------------------------------


@pytest.mark.parametrize("coefficient_type", TYPES)
@pytest.mark.parametrize("steps", [1, 5, 12])
def test_cycle_or_repeat_is_emerging_optimizers(coefficient_type, steps):
    mode = "repeat_last" if coefficient_type in oracle._REPEAT_LAST else "cycle"
    coefficients = _coefficients(coefficient_type)
    expected = list(muon_utils.get_coefficient_iterator(steps, coefficients, mode))
    assert oracle.cycle_or_repeat(coefficients, steps, coefficient_type) == expected


@pytest.mark.parametrize("coefficient_type", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_is_a_polynomial_of_the_singular_values(coefficient_type, shape):
    x = _gaussian(shape)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    expected = u * _scalar(s / np.linalg.norm(s), coefficient_type) @ vt
    assert _distance(_iterate(x, coefficient_type), expected) < 1e-12


def test_newton_schulz_of_an_orthogonal_matrix():
    q = np.linalg.qr(_gaussian((16, 16)))[0]
    assert _distance(_iterate(3.0 * q), _scalar(1 / 4) * q) < 1e-12


def test_newton_schulz_of_rank_one():
    u, v = _gaussian(8), _gaussian(48, seed=1)
    expected = _scalar(1.0) * np.outer(u / np.linalg.norm(u), v / np.linalg.norm(v))
    assert _distance(_iterate(np.outer(u, v)), expected) < 1e-12


def test_newton_schulz_of_zero_is_exactly_zero():
    assert not _iterate(np.zeros((8, 48))).any()


def test_newton_schulz_divides_by_eps_below_it():
    x = _gaussian((8, 48))
    x *= 1e-10 / np.linalg.norm(x)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    assert _distance(_iterate(x), u * _scalar(s / 1e-7) @ vt) < 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_transposes(shape):
    x = _gaussian(shape)
    np.testing.assert_allclose(_iterate(x), _iterate(x.T).T, rtol=0, atol=1e-13)


@pytest.mark.parametrize("coefficient_type", TYPES)
@pytest.mark.parametrize("steps", [5, 9])
@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_against_emerging_optimizers(coefficient_type, steps, shape):
    x = _gaussian(shape).astype(np.float32)
    with fp32_matmul_precision("highest"):
        theirs = muon_utils.newton_schulz(torch.from_numpy(x), steps, coefficient_type)
    limit = 1e-5 * max(1.0, _amplification(x, coefficient_type, steps))
    assert limit < 1e-3
    assert _distance(theirs.numpy(), _iterate(x, coefficient_type, steps)) < limit


def _amplification(x, coefficient_type, steps):
    """By how much the iteration itself enlarges a relative error of its normalised input."""
    s = np.linalg.svd(x.astype(np.float64), compute_uv=False)
    s /= np.linalg.norm(s)
    end = _scalar(s, coefficient_type, steps)
    return (
        max(_distance(_scalar(s * (1 + d), coefficient_type, steps), end) for d in (1e-7, -1e-7))
        / 1e-7
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_bf16_predicts_the_medium_path(shape):
    """Medium is about 0.5% from the truth, and (nearly) bit-equal to the oracle that rounds."""
    x = _gaussian(shape).astype(np.float32)
    with fp32_matmul_precision("medium"):
        theirs = muon_utils.newton_schulz(torch.from_numpy(x), 5, "quintic").numpy()
    ours = oracle.newton_schulz_bf16(x, 5, "quintic", _coefficients("quintic"))
    truth = _iterate(x)
    assert _distance(theirs, truth) > 1e-4
    assert _distance(theirs, ours) < 0.5 * _distance(theirs, truth)


def test_round_to_bfloat16():
    x = np.array([1.0, 1 + 2**-9, 1 + 3 * 2**-9, -3.14159265, 0.0, 1e-30])
    expected = torch.from_numpy(x).to(torch.bfloat16).to(torch.float64).numpy()
    np.testing.assert_array_equal(oracle.round_to_bfloat16(x), expected)
    assert oracle.round_to_bfloat16(x).dtype == np.float64


# --- Muon -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["shape_scaling", "spectral", "unit_rms_norm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_muon_scale(mode, shape):
    assert oracle.muon_scale(*shape, mode) == pytest.approx(
        get_muon_scale_factor(*shape, mode), rel=1e-15, abs=0
    )


def test_muon_refuses_unknown_names():
    with pytest.raises(ValueError, match="muon_scale_mode = 'x'"):
        oracle.muon_scale(1, 1, "x")
    with pytest.raises(ValueError, match="weight_decay_method = 'x'"):
        oracle.muon_step(
            np.ones((1, 1)),
            {"momentum_buffer": np.ones((1, 1))},
            np.ones((1, 1)),
            lr=1,
            wd=1,
            momentum=0,
            nesterov=False,
            orthogonalize=_iterate,
            scale=_iterate,
            weight_decay_method="x",
        )


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay_method", ["decoupled", "independent", "palm", "l2"])
def test_muon_step_against_emerging_optimizers(nesterov, weight_decay_method):
    settings = {"momentum": 0.9, "nesterov": nesterov, "weight_decay_method": weight_decay_method}
    start = _gaussian((8, 48)).astype(np.float32)
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = Muon([theirs], lr=0.1, weight_decay=0.5, fp32_matmul_prec="highest", **settings)
    p, state = start.astype(np.float64), {"momentum_buffer": np.zeros(start.shape)}
    for step in range(4):
        grad = _gaussian((8, 48), seed=step + 1).astype(np.float32)
        theirs.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        p, state = oracle.muon_step(
            p,
            state,
            grad.astype(np.float64),
            lr=0.1,
            wd=0.5,
            orthogonalize=_iterate,
            scale=lambda u: oracle.muon_scale(*u.shape, "spectral") * u,
            **settings,
        )
        assert _distance(theirs.detach().numpy(), p) < 1e-5
        theirs_buffer = optimizer.state[theirs]["momentum_buffer"].numpy()
        assert _distance(theirs_buffer, state["momentum_buffer"]) < 1e-6


@pytest.mark.parametrize("method", get_args(Moment2MethodT))
@pytest.mark.parametrize("shape", [(8, 48), (48, 8), (16, 16)])
def test_adaptive_muon_against_emerging_optimizers(method, shape):
    start = _gaussian(shape).astype(np.float32)
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    moment2 = {"beta2": 0.8, "eps": 1e-3}
    optimizer = AdaptiveMuon(
        [theirs], 0.1, 0.9, 0.5, fp32_matmul_prec="highest", moment2_method=method, **moment2
    )
    fields = _fields_of("adaptive_muon", muon_momentum=0.9, adaptive_muon_moment2_method=method)
    fields |= {"adaptive_muon_beta2": 0.8, "adaptive_muon_eps": 1e-3, "clip_grad": 0.0}
    params = {"w": start.astype(np.float64)}
    state = oracle.init_state(params, fields)
    for step in range(4):
        grad = _gaussian(shape, seed=step + 1).astype(np.float32)
        theirs.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        params, state, _ = _step(params, state, {"w": grad.astype(float)}, fields, batch_size=1)
        assert _distance(theirs.detach().numpy(), params["w"]) < 1e-5
        ours, buffer = state["w"]["moment2_buffer"], optimizer.state[theirs]["moment2_buffer"]
        assert ours.shape == tuple(buffer.shape) and _distance(buffer.numpy(), ours) < 1e-5


def test_adaptive_muon_refuses_unknown_methods():
    one = np.ones((1, 1))
    with pytest.raises(ValueError, match="moment2_method = 'x'"):
        oracle.adapt_muon(one, one, one, one, method="x", beta2=0.9, eps=1e-8)


# --- Lion -------------------------------------------------------------------------------------


def test_lion_step_against_emerging_optimizers():
    start = _gaussian((8, 48))
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = Lion([theirs], lr=0.1, betas=(0.8, 0.9), weight_decay=0.5)
    p, exp_avg = start, np.zeros(start.shape)
    with torch.compiler.set_stance("force_eager"):
        for step in range(4):
            grad = _gaussian(start.shape, seed=step + 1)
            theirs.grad = torch.from_numpy(grad.copy())
            optimizer.step()
            rates = {"lr": 0.1, "wd": 0.5, "beta1": 0.8, "beta2": 0.9}
            p, exp_avg = oracle.lion_step(p, exp_avg, grad, **rates)
            np.testing.assert_allclose(theirs.detach().numpy(), p, rtol=1e-12)
            np.testing.assert_allclose(optimizer.state[theirs]["exp_avg"], exp_avg, rtol=1e-12)


def test_lion_doubts_what_nearly_cancels():
    moment, grad = np.array([1.0, 1.0, 1.0, 0.0]), np.array([-4.0, -4.0001, -3.0, 0.0])
    doubts = oracle.lion_doubts(moment, grad, beta1=0.8, precision=1e-4)
    assert doubts.tolist() == [True, True, False, False]


# --- Adam -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 48), (48,)])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.95)])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_step_against_torch(shape, betas, decoupled):
    start = _gaussian(shape)
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([theirs], lr=0.1, betas=betas, eps=1e-8, weight_decay=0.5)
    p, exp_avg, exp_avg_sq, clock = start, np.zeros(shape), np.zeros(shape), 0
    for step in range(6):
        grad = _gaussian(shape, seed=step + 1)
        theirs.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        p, exp_avg, exp_avg_sq, clock = oracle.adam_step(
            p,
            exp_avg,
            exp_avg_sq,
            clock,
            grad,
            lr=0.1,
            wd=0.5,
            beta1=betas[0],
            beta2=betas[1],
            eps=1e-8,
            decoupled=decoupled,
        )
    state = optimizer.state[theirs]
    assert clock == int(state["step"]) == 6
    np.testing.assert_allclose(theirs.detach().numpy(), p, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(state["exp_avg"].numpy(), exp_avg, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(state["exp_avg_sq"].numpy(), exp_avg_sq, rtol=1e-12)


# --- norm and clip ----------------------------------------------------------------------------


def test_total_norm():
    assert oracle.total_norm([np.array([[3.0]]), np.array([4.0])]) == 5.0
    assert oracle.total_norm([np.full(3, 1e30, np.float32)]) == pytest.approx(3**0.5 * 1e30)


def test_clip_factor_against_megatrons_formula():
    assert oracle.clip_factor(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert oracle.clip_factor(0.5, 1.0) == 1.0
    assert oracle.clip_factor(1.0, 1.0) == 1.0 / (1.0 + 1e-6)
    assert oracle.clip_factor(1e9, 0.0) == 1.0
    assert oracle.clip_factor(0.0, 1.0) == 1.0


# --- a whole slot -----------------------------------------------------------------------------


def _fields_of(optimizer, **settings):
    return vars(SlotOptimizerConfig(optimizer=optimizer, **settings)) | OWN_FIELDS


def _slot(optimizer, **settings):
    fields = _fields_of(optimizer, **settings)
    params = {
        "q.linear_in": _gaussian((4, 6)),
        "q.linear_out": _gaussian((8, 4), 1),
        "q.bias": _gaussian(8, 2),
    }
    sums = {name: _gaussian(p.shape, 3) for name, p in params.items()}
    return params, sums, fields


def _step(params, state, sums, fields, **kwargs):
    def rates(name, p):
        return 0.1, 0.5 * oracle.weight_decay_multiplier(name, p)

    kwargs = {"batch_size": 4, "rates": rates} | kwargs
    return oracle.step(
        params, state, sums, optimizer=fields, coefficients=_coefficients("quintic"), **kwargs
    )


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_step_routes_matrices_and_the_rest(optimizer):
    params, _, fields = _slot(optimizer)
    state = oracle.init_state(params, fields)
    matrix = {"momentum_buffer"} if optimizer == "muon" else {"exp_avg", "exp_avg_sq", "step"}
    assert set(state["q.linear_in"]) == set(state["q.linear_out"]) == matrix
    assert set(state["q.bias"]) == {"exp_avg", "exp_avg_sq", "step"}


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_step_decays_only_what_has_weight_decay(optimizer):
    """With zero gradients decay alone is left: p (1 - lr wd)."""
    params, sums, fields = _slot(optimizer)
    zeros = {name: 0 * g for name, g in sums.items()}
    new, _, norm = _step(params, oracle.init_state(params, fields), zeros, fields)
    assert norm == 0.0
    for name, p in params.items():
        factor = 1.0 if name == "q.bias" else 1 - 0.1 * 0.5
        np.testing.assert_allclose(new[name], factor * p, rtol=1e-15)


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_step_divides_by_the_batch_and_clips_over_the_whole_slot(optimizer):
    params, sums, fields = _slot(optimizer, clip_grad=0.25)
    state = oracle.init_state(params, fields)
    _, clipped, norm = _step(params, state, sums, fields)
    flat = np.concatenate([g.ravel() for g in sums.values()])
    assert norm == pytest.approx(np.linalg.norm(flat) / 4)
    first = "momentum_buffer" if optimizer == "muon" else "exp_avg"
    weight = 1 - fields["muon_momentum" if optimizer == "muon" else "adam_beta1"]
    expected = weight * 0.25 / (norm + 1e-6) * sums["q.linear_in"] / 4
    np.testing.assert_allclose(clipped["q.linear_in"][first], expected, rtol=1e-13)


def test_step_by_hand():
    params, sums, fields = _slot("muon", clip_grad=0.0, muon_extra_scale_factor=0.2)
    new, state, _ = _step(params, oracle.init_state(params, fields), sums, fields)
    p, grad = params["q.linear_out"], sums["q.linear_out"] / 4
    expected = p * (1 - 0.05) - 0.1 * 0.2 * math.sqrt(8) * _iterate(grad)
    np.testing.assert_allclose(new["q.linear_out"], expected, rtol=1e-12)
    # The first Adam step has the length lr in every element.
    moved = new["q.bias"] - params["q.bias"]
    np.testing.assert_allclose(moved, -0.1 * np.sign(sums["q.bias"]), rtol=1e-6)
    assert state["q.bias"]["step"] == 1


def test_step_leaves_its_arguments_alone():
    params, sums, fields = _slot("muon")
    state = oracle.init_state(params, fields)
    before = {name: p.copy() for name, p in params.items()}
    _step(params, state, sums, fields)
    for name, p in params.items():
        np.testing.assert_array_equal(p, before[name])
    assert not state["q.linear_in"]["momentum_buffer"].any() and state["q.bias"]["step"] == 0


def test_step_takes_the_rounding_iteration():
    params, sums, fields = _slot("muon")
    state = oracle.init_state(params, fields)
    exact = _step(params, state, sums, fields)[0]
    rounded = _step(params, state, sums, fields, iterate=oracle.newton_schulz_bf16)[0]
    assert 1e-5 < _distance(rounded["q.linear_in"], exact["q.linear_in"]) < 0.1
    np.testing.assert_array_equal(rounded["q.bias"], exact["q.bias"])


def test_embedding_and_output_parameters_leave_muon_and_may_have_rates_of_their_own():
    params, _, fields = _slot("muon", muon_scalar_optimizer="lion")
    fields |= {"embedding_or_output_parameters": ["*.linear_out"]}
    owners = [oracle.owner(name, p, fields) for name, p in params.items()]
    assert owners == ["muon", "lion", "lion"]
    plan = _fields(("linear", None), warmup=0)
    usual = [oracle.group_rates(name, p, 40, plan, fields) for name, p in params.items()]
    assert {lr for lr, _ in usual} == {oracle.schedule(40, **plan)[0]}
    assert [wd > 0 for _, wd in usual] == [True, True, False]
    fields |= {"decoupled_lr": 0.5}
    lr, _ = oracle.group_rates("q.linear_out", params["q.linear_out"], 40, plan, fields)
    assert lr == pytest.approx(0.001 + 0.6 * (0.5 - 0.001))
    fields |= {"decoupled_min_lr": 0.1}
    lr, _ = oracle.group_rates("q.linear_out", params["q.linear_out"], 40, plan, fields)
    assert lr == pytest.approx(0.1 + 0.6 * (0.5 - 0.1))
    assert oracle.group_rates("q.linear_in", params["q.linear_in"], 40, plan, fields) == usual[0]


def test_skips_what_is_over_the_threshold_or_not_finite():
    fields = _fields_of("adam")
    norms = (1e30, math.inf, math.nan)
    assert [oracle.is_skipped(norm, fields) for norm in norms] == [False, True, True]
    fields["grad_norm_skip_threshold"] = 2.0
    assert [oracle.is_skipped(norm, fields) for norm in (2.0, 2.1)] == [False, True]


def test_rank_aware_scale_reads_the_own_shape():
    params, sums, fields = _slot("muon", muon_scale_mode="unit_rms_norm")
    state = oracle.init_state(params, fields)

    def moved(**kwargs):
        rates = {"rates": lambda name, p: (0.1, 0.0)}
        return _step(params, state, sums, fields, **rates, **kwargs)[0]["q.linear_in"]

    old, padded = params["q.linear_in"], moved()
    np.testing.assert_array_equal(moved(own_shape=lambda name, shape: (1, 6)), padded)
    fields["rank_aware"] = True
    own = moved(own_shape=lambda name, shape: (1, 6))
    np.testing.assert_allclose(own - old, (padded - old) / 2, rtol=1e-9, atol=1e-12)


# --- schedules --------------------------------------------------------------------------------

STYLES = [("constant", None), ("linear", None), ("cosine", None), ("inverse-square-root", None)]
STYLES += [("WSD", style) for style in ("linear", "cosine", "exponential", "minus_sqrt")]


def _fields(style=("cosine", None), wd_style="linear", warmup=12.5, horizon=100, min_lr=0.001):
    start, end = (0.3, 0.3) if wd_style == "constant" else (0.1, 0.3)
    return {
        "init_lr": 0.0005,
        "max_lr": 0.01,
        "min_lr": min_lr,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": horizon,
        "lr_decay_style": style[0],
        "start_wd": start,
        "end_wd": end,
        "wd_incr_steps": horizon,
        "wd_incr_style": wd_style,
        "wsd_decay_steps": 40 if style[0] == "WSD" else None,
        "lr_wsd_decay_style": style[1],
    }


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("wd_style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 12.5, 20])
def test_schedule_against_megatron(style, wd_style, warmup):
    fields = _fields(style, wd_style, warmup)
    group = {}
    megatron = OptimizerParamScheduler(types.SimpleNamespace(param_groups=[group]), **fields)
    for samples in range(120):
        lr, wd = oracle.schedule(samples, **fields)
        assert lr == pytest.approx(group["lr"], rel=1e-13, abs=1e-17)
        assert wd == pytest.approx(group["weight_decay"], rel=1e-13, abs=1e-17)
        megatron.step(1)


@pytest.mark.parametrize(
    ("style", "near_the_end"),
    [
        (("linear", None), lambda rest: rest),
        (("cosine", None), lambda rest: (math.pi / 2 * rest) ** 2),
        (("WSD", "linear"), lambda rest: rest),
        (("WSD", "cosine"), lambda rest: (math.pi / 2 * rest) ** 2),
        (("WSD", "exponential"), lambda rest: rest * math.log(2) * (1 + rest * math.log(2) / 2)),
        (("WSD", "minus_sqrt"), lambda rest: rest / 2 * (1 + rest / 4)),
    ],
)
def test_schedule_is_well_conditioned_near_its_horizon(style, near_the_end):
    horizon = 10**9
    fields = _fields(style, warmup=0, horizon=horizon, min_lr=0.0)
    fields["wsd_decay_steps"] = horizon
    for distance in (1, 2, 7):
        lr, _ = oracle.schedule(horizon - distance, **fields)
        assert lr == pytest.approx(0.01 * near_the_end(distance / horizon), rel=1e-14, abs=0)
    assert oracle.schedule(horizon, **fields)[0] == 0.0


def test_schedule_weight_decay_is_well_conditioned_at_its_start():
    fields = _fields(wd_style="cosine", horizon=10**9) | {"start_wd": 0.0, "end_wd": 1.0}
    _, wd = oracle.schedule(1, **fields)
    assert wd == pytest.approx((math.pi / 2 * 1e-9) ** 2, rel=1e-14, abs=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr_decay_style": "x"}, "lr_decay_style = 'x'"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 9}, "lr_wsd_decay_style = None"),
        ({"wd_incr_style": "x"}, "wd_incr_style = 'x'"),
    ],
)
def test_schedule_refuses_unknown_styles(change, message):
    with pytest.raises(ValueError, match=message):
        oracle.schedule(95, **(_fields() | change))


def test_a_moment_without_memory_is_what_was_seen_last():
    """However large it was before: beta2 = 0."""
    orthogonal, before = np.full((2, 3), 0.75), np.full((2, 3), 1e25)
    arguments = dict(method="adamuon", beta2=0.0, eps=1e-8)
    _, moment2 = oracle.adapt_muon(orthogonal, before, orthogonal, orthogonal, **arguments)
    assert np.array_equal(moment2, orthogonal**2)
