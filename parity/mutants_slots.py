"""Faults of slots: who is touched by what, and what a tenant leaves behind."""

import dataclasses

import jax
import jax.numpy as jnp

from parity.mutants_registry import mutant, replaced, wrapped

STEP = "train_state.SlotTrainState._step"


def _kept_on_reset(field: str):
    """One field of optimizer state survives the reset of a slot."""

    def faulty(reset_slots, tx, state, params, slots):
        return jax.tree_util.tree_map_with_path(
            lambda path, new, old: old if field in jax.tree_util.keystr(path) else new,
            reset_slots(tx, state, params, slots),
            state,
        )

    return wrapped("train_state.reset_slots", faulty)


@mutant("reuse_other_rank")
def momentum_not_zeroed_on_retire():
    return _kept_on_reset("momentum_buffer")


@mutant("reuse_other_rank")
def adam_clock_not_reset():
    return _kept_on_reset(".step")


@mutant("reuse_other_rank")
def second_moment_not_zeroed_on_retire():
    return _kept_on_reset("exp_avg_sq")


@mutant("reuse_other_rank")
def reset_of_all_slots():
    return replaced("train_state.reset_slots", lambda tx, state, params, slots: tx.init(params))


@mutant("reuse_other_rank")
def weights_not_zeroed_on_retire():
    def faulty(retire, state, slot):
        return dataclasses.replace(retire(state, slot), params=state.params)

    return wrapped("train_state.SlotTrainState.retire", faulty)


@mutant("reuse_other_rank")
def retire_scrubs_the_neighbour():
    def faulty(retire, state, slot):
        after, other = retire(state, slot), (slot + 1) % state.n_slots
        return dataclasses.replace(
            after, params=jax.tree.map(lambda p: p.at[other].set(0), after.params)
        )

    return wrapped("train_state.SlotTrainState.retire", faulty)


@mutant("reuse_other_rank")
def sum_survives_the_next_install():
    def faulty(replace_slot, state, slot, **values):
        sums = {"grad_buffer": state.grad_buffer, "accumulated": state.accumulated}
        return dataclasses.replace(replace_slot(state, slot, **values), **sums)

    return wrapped("train_state.SlotTrainState._replace_slot", faulty)


@mutant("resume")
def resume_forgets_the_optimizer():
    def faulty(install, state, slot, params, *, opt_state=None, **options):
        return install(state, slot, params, **options)

    return wrapped("train_state.SlotTrainState.install", faulty)


@mutant("resume")
def resume_forgets_the_schedule():
    def faulty(install, state, slot, params, *, samples=0, **options):
        return install(state, slot, params, **options)

    return wrapped("train_state.SlotTrainState.install", faulty)


@mutant("partial_sum")
def accumulate_overwrites():
    def faulty(accumulate, state, grads, samples):
        empty = jax.tree.map(jnp.zeros_like, state.grad_buffer)
        return accumulate(dataclasses.replace(state, grad_buffer=empty), grads, samples)

    return wrapped("train_state.SlotTrainState.accumulate", faulty)


@mutant("partial_sum")
def sum_in_half_precision():
    def faulty(accumulate, state, grads, samples):
        half = jax.tree.map(lambda g: g.astype(jnp.float16).astype(g.dtype), grads)
        return accumulate(state, half, samples)

    return wrapped("train_state.SlotTrainState.accumulate", faulty)


@mutant("interleaved")
def sum_kept_after_the_step():
    return wrapped("train_state.SlotTrainState.discard", lambda discard, state, slots: state)


@mutant("mixed_pool")
def mask_ignored():
    return wrapped("train_state.SlotTrainState.step", lambda step, state, slots: step(state))


@mutant("interleaved")
def mask_of_the_neighbour():
    def faulty(step, state, named, hyperparameters):
        return step(state, jnp.roll(named, 1), hyperparameters)

    return wrapped(STEP, faulty)


@mutant("interleaved")
def skipped_slot_decays():
    def faulty(step, state, named, hyperparameters):
        after, report = step(state, named, hyperparameters)
        return _with_idle(after, report.stepped, lambda p: 0.999 * p), report

    return wrapped(STEP, faulty)


@mutant("interleaved")
def co_tenant_off_by_one_ulp():
    def faulty(step, state, named, hyperparameters):
        after, report = step(state, named, hyperparameters)
        return _with_idle(after, report.stepped, lambda p: jnp.nextafter(p, 2 * p)), report

    return wrapped(STEP, faulty)


def _with_idle(state, stepped, change):
    """The state with the parameters changed of the slots that did not step."""

    def changed(p):
        return jnp.where(stepped.reshape((-1,) + (1,) * (p.ndim - 1)), p, change(p))

    return dataclasses.replace(state, params=jax.tree.map(changed, state.params))


@mutant("mixed_pool")
def index_minus_one_wraps():
    return replaced(
        "per_slot._drop_outside", lambda slots, size: jnp.asarray(slots % size, jnp.int32)
    )


@mutant("mixed_pool")
def repeated_index_steps_twice():
    def faulty(tree, slots, chosen):
        def scatter(x, new):
            if x.dtype == bool:
                return x.at[slots].set(new, mode="drop")
            return x.at[slots].add(new - x.at[slots].get(mode="clip"), mode="drop")

        return jax.tree.map(scatter, tree, chosen)

    return replaced("train_state.scatter_slots", faulty)


@mutant("interleaved")
def clock_shared():
    def faulty(per_slot, inner):
        tx = per_slot(inner)

        def update(*arguments, **extra):
            updates, state = tx.update(*arguments, **extra)
            return updates, jax.tree_util.tree_map_with_path(latest, state)

        def latest(path, x):
            is_clock = jax.tree_util.keystr(path).endswith(".step")
            return jnp.full_like(x, x.max()) if is_clock else x

        return tx._replace(update=update)

    return wrapped("multi_lora.per_slot", faulty)


@mutant("interleaved")
def momentum_of_the_neighbour():
    def faulty(step, state, named, hyperparameters):
        def rolled(path, x):
            is_momentum = "momentum_buffer" in jax.tree_util.keystr(path)
            return jnp.roll(x, 1, axis=0) if is_momentum else x

        opt_state = jax.tree_util.tree_map_with_path(rolled, state.opt_state)
        return step(dataclasses.replace(state, opt_state=opt_state), named, hyperparameters)

    return wrapped(STEP, faulty)


@mutant("one_muon[bf16]")
def masters_in_bf16():
    def faulty(step, state, named, hyperparameters):
        after, report = step(state, named, hyperparameters)
        rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(p.dtype), after.params)
        return dataclasses.replace(after, params=rounded), report

    return wrapped(STEP, faulty)


@mutant("reuse_other_rank")
def padding_of_noise():
    def faulty(pad, state, params, rank):
        return jax.tree.map(lambda p: jnp.where(p == 0, 1e-6, p), pad(state, params, rank))

    return wrapped("train_state.SlotTrainState._pad", faulty)


@mutant("non_finite")
def schedule_advances_on_a_skipped_step():
    def faulty(step, state, named, hyperparameters):
        after, report = step(state, named, hyperparameters)
        advance = jnp.where(report.skipped, state.batch_size, 0)
        return dataclasses.replace(after, samples=after.samples + advance), report

    return wrapped(STEP, faulty)


@mutant("non_finite")
def skipped_step_keeps_its_sum():
    def faulty(step, state, named, hyperparameters):
        after, report = step(state, named, hyperparameters)
        kept = jnp.where(report.skipped, state.accumulated, after.accumulated)
        return dataclasses.replace(after, accumulated=kept), report

    return wrapped(STEP, faulty)
