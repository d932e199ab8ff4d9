"""The soak in small; `make soak` runs it in full."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from experiments.soak import crashes, life


def test_a_short_life(tmp_path):
    found = life.soak(80, 3, tmp_path)
    assert sum(found["operations"].values()) == 80 and found["twins"] > 4
    assert found["steps of the oldest"] > 1


def test_a_leak_between_slots_is_seen(tmp_path, monkeypatch):
    def leaky(state, slots):
        """Also touches the last slot's sample count."""
        return discard(state, slots)._replace_samples()

    discard = life.discard
    monkeypatch.setattr(
        life.SlotTrainState,
        "_replace_samples",
        lambda s: dataclasses.replace(s, samples=s.samples.at[-1].add(1)),
        raising=False,
    )
    monkeypatch.setattr(life, "discard", leaky)
    with pytest.raises(AssertionError, match="discard of .* changed slot 15"):
        life.soak(300, 0, tmp_path)


def test_a_step_that_depends_on_the_slot_is_seen_by_the_twin(tmp_path, monkeypatch):
    step = life.step

    def uneven(state, slots, lr):
        """Trains busy pools a little faster."""
        return step(state, slots, lr * (1 + 1e-6 * jnp.sum(state.occupied)))

    monkeypatch.setattr(life, "step", uneven)
    with pytest.raises(AssertionError, match="differs from its twin"):
        life.soak(60, 0, tmp_path)


def test_two_kills(tmp_path):
    assert crashes.kill_writers(2, 0, tmp_path)["kills"] == 2


def test_some_damage(tmp_path):
    found = crashes.damage_checkpoints(8, 0, tmp_path)
    assert sum(found.values()) == 8


def test_bits_are_compared_slot_by_slot():
    one, other = (life.slot_bits(crashes.marked_pool(n)) for n in (1, 2))
    assert one[0] != other[0] and one[1:] == other[1:]
    assert len(jax.tree.leaves(crashes.marked_pool(1))) == len(one[0])
