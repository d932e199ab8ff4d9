"""Faults of schedules, clipping and the mean over the batch."""

import dataclasses

import jax
import jax.numpy as jnp

import jax_impl
from parity.mutants_registry import mutant, replaced, wrapped


@mutant("warmup_cosine")
def schedule_counted_in_steps():
    def faulty(step, state, named, hyperparameters):
        after, report = step(state, named, hyperparameters)
        return dataclasses.replace(after, samples=state.samples + report.stepped), report

    return wrapped("train_state.SlotTrainState._step", faulty)


@mutant("warmup_cosine")
def rates_taken_after_the_advance():
    def faulty(step, state, named, hyperparameters):
        after = state.samples + state.batch_size
        lr, wd = jax_impl.param_schedule(state.schedule)(after)
        return step(state, named, {"learning_rate": lr, "weight_decay": wd} | hyperparameters)

    return wrapped("train_state.SlotTrainState._step", faulty)


@mutant("warmup_cosine")
def horizon_one_sample_late():
    return _schedule(lambda c: {"lr_decay_steps": c.lr_decay_steps + 1})


@mutant("warmup_cosine")
def warmup_one_sample_late():
    return _schedule(lambda c: {"lr_warmup_steps": c.lr_warmup_steps + 1})


@mutant("warmup_cosine")
def min_lr_ignored():
    return _schedule(lambda c: {"min_lr": 0 * c.min_lr})


@mutant("warmup_cosine")
def weight_decay_does_not_rise():
    return _schedule(lambda c: {"end_wd": c.start_wd})


def _schedule(changed):
    """The step reads a schedule with other numbers."""
    return wrapped(
        "train_state.param_schedule",
        lambda schedule, config: schedule(dataclasses.replace(config, **changed(config))),
    )


@mutant("mixed_pool")
def rates_of_the_neighbour():
    def faulty(schedule, config):
        return lambda samples: jax.tree.map(lambda x: jnp.roll(x, 1), schedule(config)(samples))

    return wrapped("train_state.param_schedule", faulty)


@mutant("one_muon")
def rates_in_half_precision():
    def faulty(schedule, config):
        def half(x):
            return x.astype(jnp.float16).astype(x.dtype)

        return lambda samples: jax.tree.map(half, schedule(config)(samples))

    return wrapped("train_state.param_schedule", faulty)


@mutant("near_the_horizon")
def cosine_from_its_textbook_form():
    return replaced("schedule._half_cosine", lambda rest: (1 - jnp.cos(jnp.pi * rest)) / 2)


@mutant("clipping")
def clip_over_whole_pool():
    def faulty(mean_norms, grad_sum, batch_size):
        norms = mean_norms(grad_sum, batch_size)
        return jnp.full_like(norms, jnp.linalg.norm(norms))

    return wrapped("train_state.mean_norms", faulty)


@mutant("clipping")
def norm_of_the_sum():
    def faulty(mean_norms, grad_sum, batch_size):
        return mean_norms(grad_sum, jnp.ones_like(batch_size))

    return wrapped("train_state.mean_norms", faulty)


@mutant("matrix_and_scalar")
def norm_over_matrices_only():
    def faulty(mean_norms, grad_sum, batch_size):
        matrices = {name: g for name, g in grad_sum.items() if g.ndim == 3}
        return mean_norms(matrices, batch_size)

    return wrapped("train_state.mean_norms", faulty)


@mutant("clipping")
def norm_of_bf16_gradients():
    def faulty(mean_norms, grad_sum, batch_size):
        rounded = jax.tree.map(lambda g: g.astype(jnp.bfloat16).astype(g.dtype), grad_sum)
        return mean_norms(rounded, batch_size)

    return wrapped("train_state.mean_norms", faulty)


@mutant("clipping_tiny")
def clip_eps_missing():
    return replaced("clip.NORM_EPS", 0.0)


@mutant("clipping")
def clip_factor_in_half_precision():
    def faulty(clip_factor, norm, max_norm):
        return clip_factor(norm, max_norm).astype(jnp.float16).astype(norm.dtype)

    return wrapped("clip.clip_factor", faulty)


@mutant("clipping")
def norm_reported_after_clipping():
    def faulty(step, state, named, hyperparameters):
        after, report = step(state, named, hyperparameters)
        return after, report._replace(grad_norm=jnp.minimum(report.grad_norm, 15.0))

    return wrapped("train_state.SlotTrainState._step", faulty)


@mutant("one_muon")
def sum_not_divided_by_batch_size():
    return replaced("train_state.mean_gradients", lambda grad_sum, batch_size: grad_sum)


@mutant("interleaved")
def mean_by_a_half_precision_reciprocal():
    def faulty(mean_gradients, grad_sum, batch_size):
        size = jnp.maximum(batch_size, 1)
        rounded = (1 / size).astype(jnp.float16).astype(jnp.float32) * size
        means = mean_gradients(grad_sum, batch_size)
        return jax.tree.map(lambda g: g * rounded.reshape((-1,) + (1,) * (g.ndim - 1)), means)

    return wrapped("train_state.mean_gradients", faulty)
