"""Schedules beside Megatron's scheduler."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.schedule import LR_DECAY_STYLES, WD_INCR_STYLES, WSD_DECAY_STYLES, param_schedule
from jax_impl.schedule_test import STYLE_NAMES, STYLES, WARMUPS, assert_within_ulps, make


@functools.cache
def megatron():
    import torch
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    def run(c, samples):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        values = {f.name: getattr(c, f.name) for f in dataclasses.fields(c)}
        values["lr_decay_style"] = LR_DECAY_STYLES[c.lr_decay_style]
        values["wd_incr_style"] = WD_INCR_STYLES[c.wd_incr_style]
        values["lr_wsd_decay_style"] = WSD_DECAY_STYLES[c.lr_wsd_decay_style]
        scheduler = OptimizerParamScheduler(optimizer, **values)
        scheduler.step(int(samples))
        group = optimizer.param_groups[0]
        return group["lr"], group["weight_decay"]

    return run


@pytest.mark.parametrize("wd_style", WD_INCR_STYLES)
@pytest.mark.parametrize("style", STYLES, ids=STYLE_NAMES)
def test_follows_megatron(style, wd_style):
    for warmup in WARMUPS.values():
        c = make(*style, 1000, warmup, wd_style, min_lr=1e-5)
        # Near the horizon Megatron's own float64 cancels, but not at a thousand samples.
        samples = np.asarray([0, 1, 49, 50, 51, 123, 124, 500, 857, 858, 950, 999, 1000, 1001])
        lr, wd = param_schedule(c)(jnp.asarray(samples))
        expected = np.asarray([megatron()(c, t) for t in samples])
        assert_within_ulps(lr, expected[:, 0], samples)
        assert_within_ulps(wd, expected[:, 1], samples)
