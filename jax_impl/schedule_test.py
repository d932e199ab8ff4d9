import dataclasses
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_impl.schedule import (
    LR_DECAY_STYLES,
    WD_INCR_STYLES,
    WSD_DECAY_STYLES,
    ParamScheduleConfig,
    param_schedule,
    slot_schedule,
)

ULPS = 6


def oracle(c: ParamScheduleConfig, samples: int) -> tuple[float, float]:
    """Learning rate and weight decay in float64, in forms that do not cancel."""
    style = LR_DECAY_STYLES[c.lr_decay_style]
    return learning_rate(c, style, samples), weight_decay(c, samples)


def learning_rate(c, style, t):
    if c.lr_warmup_steps > 0 and t <= c.lr_warmup_steps:
        return c.init_lr + (c.max_lr - c.init_lr) * t / c.lr_warmup_steps
    if style == "constant":
        return c.max_lr
    if t > c.lr_decay_steps:
        return c.min_lr
    if style == "inverse-square-root":
        return max(c.min_lr, c.max_lr * math.sqrt(max(c.lr_warmup_steps, 1) / max(t, 1)))
    left = c.lr_decay_steps - t
    if style == "WSD":
        if left >= c.wsd_decay_steps:
            return c.max_lr
        rest, style = left / c.wsd_decay_steps, WSD_DECAY_STYLES[c.lr_wsd_decay_style]
    else:
        rest = left / (c.lr_decay_steps - c.lr_warmup_steps)
    coefficient = {
        "linear": rest,
        "cosine": math.sin(math.pi / 2 * rest) ** 2,
        "exponential": math.expm1(math.log(2) * rest),
        "minus_sqrt": rest / (1 + math.sqrt(1 - rest)),
    }[style]
    return c.min_lr + coefficient * (c.max_lr - c.min_lr)


def weight_decay(c, t):
    share = min(t / c.wd_incr_steps, 1.0)
    style = WD_INCR_STYLES[c.wd_incr_style]
    growth = {"constant": 1.0, "linear": share, "cosine": math.sin(math.pi / 2 * share) ** 2}
    return c.start_wd + growth[style] * (c.end_wd - c.start_wd)


def assert_within_ulps(actual, expected, samples):
    expected = np.asarray(expected)
    assert actual.dtype == jnp.float32
    ulps = np.abs(np.float64(actual) - expected) / np.spacing(np.float32(np.abs(expected)))
    worst = np.argmax(ulps)
    assert ulps[worst] <= ULPS, (
        f"{ulps[worst]:.1f} ulp at sample {np.ravel(samples)[worst]}: "
        f"{np.ravel(actual)[worst]!r}, should be {expected[worst]!r}"
    )


def places(c) -> np.ndarray:
    """Samples everywhere, more of them where something changes, and beyond the horizon."""
    horizon = c.lr_decay_steps
    ends = (0, c.lr_warmup_steps, horizon - c.wsd_decay_steps, horizon, c.wd_incr_steps)
    near = [int(end) + d for end in ends for d in (-1000, -99, -10, -3, -2, -1, 0, 1, 2, 3, 10)]
    anywhere = np.random.default_rng(0).integers(0, horizon, 300)
    grid = np.linspace(0, horizon, 101).astype(int)
    samples = np.concatenate([near, anywhere, grid, [horizon + 1000, 2 * horizon]])
    return np.resize(np.unique(samples[samples >= 0]), 500)  # one length, one compilation


STYLES = [
    (lr, wsd)
    for lr in LR_DECAY_STYLES
    for wsd in (WSD_DECAY_STYLES if lr == "WSD" else WSD_DECAY_STYLES[:1])
]
STYLE_NAMES = ["-".join(pair) if pair[0] == "WSD" else pair[0] for pair in STYLES]
WARMUPS = {"none": 0.0, "whole": 0.05, "fractional": 0.1234567}


def make(style, wsd_style, horizon, warmup=0.0, wd_style="cosine", **overrides):
    steps = warmup * horizon if warmup != 0.05 else round(warmup * horizon)
    values = dict(
        init_lr=1e-5,
        max_lr=3e-3,
        min_lr=0.0,
        lr_warmup_steps=steps,
        lr_decay_steps=horizon,
        lr_decay_style=style,
        start_wd=0.0 if wd_style != "constant" else 0.1,
        end_wd=0.1,
        wd_incr_steps=horizon,
        wd_incr_style=wd_style,
        wsd_decay_steps=max(horizon // 7, 1),
        lr_wsd_decay_style=wsd_style,
    )
    return ParamScheduleConfig(**{**values, **overrides})


@pytest.mark.parametrize("min_lr", [0.0, 1e-4])
@pytest.mark.parametrize("warmup", WARMUPS.values(), ids=WARMUPS)
@pytest.mark.parametrize("style", STYLES, ids=STYLE_NAMES)
def test_within_6_ulp_all_along(style, warmup, min_lr):
    horizons = (7, 1000, 999_983, 1_000_000)
    for horizon, wd_style in zip(horizons, itertools.cycle(WD_INCR_STYLES), strict=False):
        c = make(*style, horizon, warmup, wd_style, min_lr=min_lr)
        samples = places(c)
        lr, wd = param_schedule(c)(jnp.asarray(samples, jnp.int32))
        expected_lr, expected_wd = zip(*(oracle(c, int(t)) for t in samples), strict=True)
        assert_within_ulps(lr, expected_lr, samples)
        assert_within_ulps(wd, expected_wd, samples)


def test_ends_are_exact():
    for style, wsd in STYLES:
        c = make(style, wsd, 1000, 0.05, min_lr=1e-4)
        lr, wd = map(np.asarray, param_schedule(c)(jnp.asarray([0, 50, 1000, 1001, 10**9])))
        assert lr[0] == np.float32(1e-5) and lr[1] == np.float32(3e-3)
        end = {"constant": 3e-3, "inverse-square-root": 3e-3 * math.sqrt(50 / 1000)}.get(
            style, 1e-4
        )
        np.testing.assert_allclose(lr[2], end, rtol=3e-7)
        assert lr[3] == lr[4] == np.float32(3e-3 if style == "constant" else 1e-4)
        assert wd[0] == 0.0 and (wd[2:] == np.float32(0.1)).all()


def as_arrays(configs):
    """One configuration whose numbers and styles are (S,), as a pool keeps them."""
    floats = ("init_lr", "max_lr", "min_lr", "lr_warmup_steps", "start_wd", "end_wd")
    return ParamScheduleConfig(
        **{
            field.name: jnp.asarray(
                [getattr(c, field.name) for c in configs],
                jnp.float32 if field.name in floats else jnp.int32,
            )
            for field in dataclasses.fields(ParamScheduleConfig)
        }
    )


def test_slots_of_different_styles_share_one_program():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def read(config, samples):
        return param_schedule(config)(samples)

    for horizon, warmup in ((1000, 0.0), (1_000_000, 0.1234567), (123_456, 0.05)):
        wd_styles = itertools.cycle(WD_INCR_STYLES)
        configs = [make(*s, horizon, warmup, next(wd_styles), min_lr=1e-5) for s in STYLES]
        for step in (0, 1, horizon // 20, horizon // 2, horizon - 1, horizon, horizon + 1):
            samples = np.full(len(configs), step) - np.arange(len(configs))
            samples = np.maximum(samples, 0)
            lr, wd = read(as_arrays(configs), jnp.asarray(samples, jnp.int32))
            expected = [oracle(c, int(t)) for c, t in zip(configs, samples, strict=True)]
            assert lr.shape == wd.shape == (len(configs),)
            assert_within_ulps(lr, [e[0] for e in expected], samples)
            assert_within_ulps(wd, [e[1] for e in expected], samples)


def test_vmap_jit_and_arrays_agree():
    configs = [make(*s, 1000, 0.05) for s in STYLES]
    stacked, samples = as_arrays(configs), jnp.arange(len(configs), dtype=jnp.int32) * 100
    together = param_schedule(stacked)(samples)
    mapped = jax.vmap(lambda c, t: param_schedule(c)(t))(stacked, samples)
    chex.assert_trees_all_close(mapped, together, rtol=2e-7)
    for i, c in enumerate(configs):
        lr, wd = param_schedule(c)(samples[i])
        chex.assert_shape([lr, wd], ())
        np.testing.assert_allclose([lr, wd], [together[0][i], together[1][i]], rtol=3e-7)


def test_float64_under_x64():
    with jax.enable_x64(True):
        for style, wsd in STYLES:
            c = make(style, wsd, 1_000_000, 0.1234567, "linear", min_lr=1e-4)
            samples = places(c)
            lr, wd = param_schedule(c)(jnp.asarray(samples))
            assert lr.dtype == wd.dtype == jnp.float64
            expected_lr, expected_wd = zip(*(oracle(c, int(t)) for t in samples), strict=True)
            np.testing.assert_allclose(lr, expected_lr, rtol=1e-14)
            np.testing.assert_allclose(wd, expected_wd, rtol=1e-14)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    lr=st.floats(1e-6, 1.0),
    ratio=st.floats(0.0, 1.0),
    batch_size=st.integers(1, 64),
    num_step=st.integers(2, 1000),
    fraction=st.floats(0.0, 0.9),
    style=st.sampled_from(LR_DECAY_STYLES[:4]),
)
def test_a_tenants_rate_stays_between_its_bounds(lr, ratio, batch_size, num_step, fraction, style):
    config = slot_schedule(
        lr=lr,
        min_lr=ratio * lr,
        batch_size=batch_size,
        num_step=num_step,
        lr_warmup_fraction=fraction,
        lr_decay_style=style,
    )
    horizon = num_step * batch_size
    assert config.lr_decay_steps == horizon
    assert config.lr_warmup_steps == fraction * horizon
    samples = np.linspace(0, 2 * horizon, 57).astype(np.int32)
    rates, _ = map(np.asarray, param_schedule(config)(jnp.asarray(samples)))
    decaying = rates[samples > config.lr_warmup_steps]
    assert (rates >= 0).all() and (rates <= lr * (1 + 1e-6)).all()
    assert (decaying >= ratio * lr * (1 - 1e-6)).all()
    assert (np.diff(decaying) <= 1e-6 * lr).all()


def test_slot_schedule_counts_in_samples():
    c = slot_schedule(
        lr=0.1,
        batch_size=4,
        num_step=20,
        lr_warmup_iters=3,
        lr_decay_style="WSD",
        lr_wsd_decay_iters=5,
        lr_wsd_decay_style="minus_sqrt",
        start_weight_decay=0.0,
        end_weight_decay=0.2,
        weight_decay_incr_style="linear",
        min_lr=0.01,
        lr_warmup_init=0.02,
    )
    assert c == ParamScheduleConfig(
        init_lr=0.02,
        max_lr=0.1,
        min_lr=0.01,
        lr_warmup_steps=12,
        lr_decay_steps=80,
        lr_decay_style="WSD",
        start_wd=0.0,
        end_wd=0.2,
        wd_incr_steps=80,
        wd_incr_style="linear",
        wsd_decay_steps=20,
        lr_wsd_decay_style="minus_sqrt",
    )
    assert slot_schedule(
        lr=0.1, batch_size=3, num_step=5, lr_warmup_fraction=0.1
    ).lr_warmup_steps == (0.1 * 15)


def test_without_a_horizon_the_rate_warms_up_and_holds():
    c = slot_schedule(lr=0.1, batch_size=4, lr_warmup_iters=5, lr_decay_style="cosine")
    lr, wd = param_schedule(c)(jnp.asarray([0, 10, 20, 21, 22, 10**6]))
    np.testing.assert_allclose(lr, [0, 0.05, 0.1, 0.1, 0.1, 0.1], rtol=2e-7)
    np.testing.assert_allclose(wd, 0.01, rtol=1e-7)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(batch_size=0), "batch_size is 0"),
        (dict(num_step=0), "num_step is 0"),
        (dict(lr_warmup_fraction=0.1, lr_warmup_iters=2), "give one of them"),
        (dict(lr_warmup_fraction=0.1, num_step=None), "needs num_step"),
        (dict(lr_warmup_fraction=1.0), "the warm-up is 40"),
        (dict(lr_warmup_iters=10), "the warm-up is 40 samples; the horizon is only 40"),
        (dict(lr_warmup_iters=-1), "lr_warmup_iters is -1"),
        (dict(lr_warmup_fraction=-0.1), "lr_warmup_fraction is -0.1"),
        (dict(lr=-1.0), "is"),
        (dict(min_lr=0.2), "min_lr is 0.2"),
        (dict(min_lr=-0.1), "min_lr is -0.1"),
        (dict(lr_warmup_init=0.2), "lr_warmup_init is 0.2"),
        (dict(weight_decay=-0.1), "start_weight_decay is -0.1"),
        (dict(start_weight_decay=0.2, end_weight_decay=0.1), "start_weight_decay is 0.2"),
        (dict(start_weight_decay=0.0, end_weight_decay=0.1), "needs them equal"),
        (dict(lr_decay_style="WSD"), "needs lr_wsd_decay_iters"),
        (dict(lr_decay_style="WSD", lr_wsd_decay_iters=-1), "lr_wsd_decay_iters is -1"),
        (dict(lr_decay_style="cosin"), "lr_decay_style is 'cosin'"),
        (dict(weight_decay_incr_style="cubic"), "wd_incr_style is 'cubic'"),
        (dict(lr_wsd_decay_style="cubic"), "lr_wsd_decay_style is 'cubic'"),
        (dict(lr_decay_style="cosin", num_step=None), "lr_decay_style is 'cosin'"),
        (dict(lr=math.nan), "is"),
    ],
)
def test_slot_schedule_names_what_is_wrong(kwargs, message):
    with pytest.raises(ValueError, match=message):
        slot_schedule(**{**dict(lr=0.1, batch_size=4, num_step=10), **kwargs})
