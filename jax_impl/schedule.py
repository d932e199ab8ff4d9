"""Learning rate and weight decay of a slot over the samples it has trained on."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_impl.config import one_of

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WD_INCR_STYLES = ("constant", "linear", "cosine")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ParamScheduleConfig:
    """The constructor arguments of Megatron-Core's ``OptimizerParamScheduler``.

    Every number may be an array over the slots, (S,), and every style a name or an index into
    its tuple of names, alone or over the slots: slots with different styles share one program.
    A registered pytree; names are turned into indices on construction.

    Attributes:
      init_lr, max_lr, min_lr: where the warm-up starts, where it ends, where the decay ends.
      lr_warmup_steps: length of the warm-up in samples; may be fractional.
      lr_decay_steps: the horizon in samples.
      lr_decay_style: one of `LR_DECAY_STYLES`.
      start_wd, end_wd, wd_incr_steps, wd_incr_style: the weight decay, its growth in samples and
        one of `WD_INCR_STYLES`.
      wsd_decay_steps, lr_wsd_decay_style: for "WSD", the length in samples of the final decay and
        one of `WSD_DECAY_STYLES`.

    Raises:
      ValueError: an unknown style, or numbers that the reference refuses.
    """

    init_lr: Any = 0.0
    max_lr: Any = 0.0
    min_lr: Any = 0.0
    lr_warmup_steps: Any = 0
    lr_decay_steps: Any = 1
    lr_decay_style: Any = "constant"
    start_wd: Any = 0.0
    end_wd: Any = 0.0
    wd_incr_steps: Any = 1
    wd_incr_style: Any = "constant"
    wsd_decay_steps: Any = 1
    lr_wsd_decay_style: Any = "linear"

    def __post_init__(self):
        for name, names in (
            ("lr_decay_style", LR_DECAY_STYLES),
            ("wd_incr_style", WD_INCR_STYLES),
            ("lr_wsd_decay_style", WSD_DECAY_STYLES),
        ):
            value = getattr(self, name)
            if isinstance(value, str):
                one_of(name, value, names)
                object.__setattr__(self, name, names.index(value))


def param_schedule(
    config: ParamScheduleConfig,
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns ``samples -> (lr, wd)``, Megatron-Core's ``OptimizerParamScheduler``.

    Warm-up is linear up to and including ``lr_warmup_steps``; past ``lr_decay_steps`` every style
    but "constant" stays at ``min_lr``. Works under jit and vmap; arrays over the slots in
    ``config`` go with ``samples`` (S,). The forms are those that keep float32 within 6 ulp of the
    exact value up to the horizon, where 1 + cos(pi * ratio) and its like cancel: the distance to
    the horizon is an integer before it is a float, and the cosine a series in it.

    The function takes ``samples``, an integer () or (S,), and gives floats of that shape.
    """
    dtype = jnp.result_type(float)

    def real(value) -> jax.Array:
        return jnp.asarray(value, dtype)

    def difference(larger, smaller) -> jax.Array:
        """larger - smaller, taken before rounding to float32."""
        return real(larger - smaller)

    def schedule(samples):
        samples = jnp.asarray(samples)
        c = config
        warmup, horizon = c.lr_warmup_steps, c.lr_decay_steps
        max_lr, min_lr, init_lr = real(c.max_lr), real(c.min_lr), real(c.init_lr)

        warm = samples <= warmup
        warming = init_lr + difference(c.max_lr, c.init_lr) * (
            real(samples) / jnp.maximum(real(warmup), 1e-30)
        )

        rest = _share(horizon - samples, difference(horizon, warmup))
        wsd_rest = _share(horizon - samples, real(c.wsd_decay_steps))
        wsd_done = _share(samples - (horizon - c.wsd_decay_steps), real(c.wsd_decay_steps))
        wsd_coefficient = _choose(
            c.lr_wsd_decay_style,
            wsd_rest,
            _half_cosine(wsd_rest),
            jnp.expm1(wsd_rest * math.log(2)),
            wsd_rest / (1 + jnp.sqrt(wsd_done)),
        )
        wsd_coefficient = jnp.where(samples <= horizon - c.wsd_decay_steps, 1.0, wsd_coefficient)
        coefficient = _choose(
            c.lr_decay_style, jnp.ones_like(rest), rest, _half_cosine(rest), rest, wsd_coefficient
        )
        decayed = min_lr + coefficient * difference(c.max_lr, c.min_lr)
        inverse_root = max_lr * jnp.sqrt(
            jnp.maximum(real(warmup), 1) / jnp.maximum(real(samples), 1)
        )

        def is_style(name):
            return c.lr_decay_style == LR_DECAY_STYLES.index(name)

        decayed = jnp.where(
            is_style("inverse-square-root"), jnp.maximum(min_lr, inverse_root), decayed
        )
        decayed = jnp.where(samples > horizon, min_lr, decayed)
        decayed = jnp.where(is_style("constant"), max_lr, decayed)
        lr = jnp.where((real(warmup) > 0) & warm, warming, decayed)

        grown = _share(samples, real(c.wd_incr_steps))
        growth = _choose(c.wd_incr_style, jnp.ones_like(grown), grown, _half_cosine(grown))
        growing = real(c.start_wd) + growth * difference(c.end_wd, c.start_wd)
        wd = jnp.where(samples > c.wd_incr_steps, real(c.end_wd), growing)
        shape = jnp.shape(samples)
        return jnp.broadcast_to(lr, shape), jnp.broadcast_to(wd, shape)

    return schedule


def slot_schedule(
    *,
    lr: float,
    batch_size: int,
    num_step: int | None = None,
    min_lr: float = 0.0,
    lr_warmup_fraction: float | None = None,
    lr_warmup_iters: int = 0,
    lr_warmup_init: float = 0.0,
    lr_decay_style: str = "linear",
    weight_decay: float = 0.01,
    start_weight_decay: float | None = None,
    end_weight_decay: float | None = None,
    weight_decay_incr_style: str = "constant",
    lr_wsd_decay_style: str = "exponential",
    lr_wsd_decay_iters: int | None = None,
) -> ParamScheduleConfig:
    """Turns a tenant's settings, in steps, into a schedule in samples.

    The names are Megatron's training arguments. The horizon is ``num_step * batch_size``, the
    warm-up ``lr_warmup_fraction`` of it or ``lr_warmup_iters * batch_size``; without ``num_step``
    the rate warms up and then holds.

    Raises:
      ValueError: a count below 1, both warm-ups, a warm-up that leaves no room to decay, a rate
        or decay that is negative or in the wrong order, an unknown style.
    """
    _at_least("batch_size", batch_size, 1)
    if num_step is not None:
        _at_least("num_step", num_step, 1)
    if lr_warmup_fraction is not None and lr_warmup_iters:
        raise ValueError(
            f"lr_warmup_fraction is {lr_warmup_fraction} and lr_warmup_iters is {lr_warmup_iters}; "
            "give one of them"
        )
    if lr_warmup_fraction is not None and num_step is None:
        raise ValueError("lr_warmup_fraction needs num_step, of which it is a fraction")
    _at_least("lr_warmup_fraction", lr_warmup_fraction or 0.0, 0)
    _at_least("lr_warmup_iters", lr_warmup_iters, 0)
    _at_least("lr_wsd_decay_iters", 1 if lr_wsd_decay_iters is None else lr_wsd_decay_iters, 1)
    one_of("lr_decay_style", lr_decay_style, LR_DECAY_STYLES)
    _ordered(min_lr=(0.0, min_lr, lr), lr_warmup_init=(0.0, lr_warmup_init, lr))
    start_wd = weight_decay if start_weight_decay is None else start_weight_decay
    end_wd = weight_decay if end_weight_decay is None else end_weight_decay
    _ordered(start_weight_decay=(0.0, start_wd, end_wd))
    if weight_decay_incr_style == "constant" and start_wd != end_wd:
        raise ValueError(
            f"start_weight_decay is {start_wd} and end_weight_decay is {end_wd}; "
            "a constant weight decay needs them equal"
        )

    horizon = None if num_step is None else num_step * batch_size
    warmup = lr_warmup_iters * batch_size
    if lr_warmup_fraction is not None:
        warmup = lr_warmup_fraction * horizon
    if horizon is None:
        horizon, lr_decay_style = warmup + 1, "constant"  # never reached: a constant rate holds
    if not warmup < horizon:
        raise ValueError(f"the warm-up is {warmup} samples; the horizon is only {horizon}")
    if lr_decay_style == "WSD" and lr_wsd_decay_iters is None:
        raise ValueError("lr_decay_style 'WSD' needs lr_wsd_decay_iters")
    return ParamScheduleConfig(
        init_lr=lr_warmup_init,
        max_lr=lr,
        min_lr=min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=horizon,
        lr_decay_style=lr_decay_style,
        start_wd=start_wd,
        end_wd=end_wd,
        wd_incr_steps=horizon,
        wd_incr_style=weight_decay_incr_style,
        wsd_decay_steps=(lr_wsd_decay_iters or 1) * batch_size,
        lr_wsd_decay_style=lr_wsd_decay_style,
    )


# (1 - cos(pi * x)) / 2 in powers of x², from the highest to the first; float64 needs no more.
HALF_COSINE_SERIES = [
    (-1) ** (k + 1) * math.pi ** (2 * k) / (2 * math.factorial(2 * k)) for k in range(12, 0, -1)
]


def _share(part, whole: jax.Array) -> jax.Array:
    """part / whole, kept within [0, 1]; the difference in ``part`` is exact, it is an integer."""
    return jnp.clip(jnp.asarray(part, whole.dtype) / whole, 0, 1)


def _half_cosine(rest: jax.Array) -> jax.Array:
    """(1 - cos(pi * rest)) / 2 on [0, 1] by its series in rest², which keeps its digits near 0.

    The square of a sine would, too, but it doubles the rounding of the sine and its argument.
    """
    square = jnp.square(jnp.minimum(rest, 1 - rest))
    half = square * functools.reduce(lambda total, c: total * square + c, HALF_COSINE_SERIES)
    return jnp.where(rest < 0.5, half, 1 - half)


def _choose(style, *branches: jax.Array) -> jax.Array:
    """Returns the branch that the index ``style`` names, slot by slot."""
    shape = jnp.broadcast_shapes(jnp.shape(style), *map(jnp.shape, branches))
    style = jnp.clip(jnp.broadcast_to(style, shape), 0, len(branches) - 1)
    # Not by a gather: over slots on several devices that would communicate.
    return jax.lax.select_n(style, *(jnp.broadcast_to(b, shape) for b in branches))


def _at_least(name: str, value, smallest) -> None:
    if not value >= smallest:
        raise ValueError(f"{name} is {value}; it must be at least {smallest}")


def _ordered(**ranges) -> None:
    for name, (low, value, high) in ranges.items():
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}; it must be between {low} and {high}")
