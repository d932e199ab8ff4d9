"""The training state of a pool: what lives in each slot from install to retire."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_impl.clip import total_l2_norm
from jax_impl.config import OptimizerConfig
from jax_impl.families import FamilyState
from jax_impl.per_slot import (
    as_slots,
    gather_slots,
    put_slot,
    reset_slots,
    scatter_slots,
    select_slots,
    slot_count,
    take_slot,
)
from jax_impl.schedule import ParamScheduleConfig, param_schedule

PyTree = Any


class StepReport(NamedTuple):
    """What a step did, slot by slot; every field is (S,), and zero where a slot was not named.

    Attributes:
      stepped: bool, the slot was updated.
      skipped: bool, the slot was named but its gradients were not finite, or their norm was over
        the threshold: parameters, state, clock and schedule are as before, and its gradient sum
        was dropped.
      grad_norm: L2 norm of the slot's mean gradient before clipping.
      learning_rate, weight_decay: what the step used.
      samples: int32, the schedule's position after the step.
    """

    stepped: jax.Array
    skipped: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    weight_decay: jax.Array
    samples: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotTrainState:
    """A pool of S slots as one pytree whose every leaf has the leading axis S.

    Immutable: each operation returns a new state. All of them work under ``jax.jit`` (donate the
    old state), where values cannot be checked: a slot that is named against the rules then simply
    does not take part, and its co-tenants are untouched as always.

    Attributes:
      params: parameters in float32 at least, the masters; `model_params` casts them.
      grad_buffer: what `grad_sum` reads, like ``params``. A step leaves it as it is, which saves
        writing it: it counts for nothing where ``accumulated`` is 0.
      accumulated: int32 (S,), the samples in the gradient sums.
      samples: int32 (S,), the samples trained on: the position in the schedule.
      batch_size: int32 (S,), samples per step; 0 in a free slot.
      rank: int32 (S,), the adapter's own rank.
      family: int32 (S,), which of the configurations of `multi_lora_optimizer` the adapter has.
      schedule: `ParamScheduleConfig` of arrays (S,).
      opt_state: state of ``tx``.
      tx: the lifted optimizer, e.g. from `multi_lora_optimizer`.
      pool_rank: the rank that adapters are padded to.
      param_dtype: dtype of the model's copy of the parameters.
      grad_norm_skip_threshold: largest norm of a slot's mean gradient, before clipping, that it
        steps on.
    """

    params: PyTree
    grad_buffer: PyTree
    accumulated: jax.Array
    samples: jax.Array
    batch_size: jax.Array
    rank: jax.Array
    family: jax.Array
    schedule: ParamScheduleConfig
    opt_state: PyTree
    tx: optax.GradientTransformationExtraArgs = dataclasses.field(metadata={"static": True})
    pool_rank: int = dataclasses.field(metadata={"static": True})
    param_dtype: Any = dataclasses.field(metadata={"static": True})
    grad_norm_skip_threshold: float = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        tx: optax.GradientTransformationExtraArgs,
        params: PyTree,
        *,
        rank: int,
        grad_norm_skip_threshold: float = OptimizerConfig.grad_norm_skip_threshold,
    ) -> "SlotTrainState":
        """Returns an empty pool.

        Args:
          tx: a lifted optimizer.
          params: arrays or `jax.ShapeDtypeStruct` of shape (S, ...), of which only shapes and
            dtypes count; the first dtype is the model's.
          rank: the rank that every adapter is padded to.
          grad_norm_skip_threshold: see the attribute; `OptimizerConfig` has it under this name.
        """
        _at_least("rank", rank, 1)
        size = slot_count(params=params)
        masters = jax.tree.map(
            lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
        )

        def counts():
            return jnp.zeros(size, jnp.int32)  # each its own, or the state could not be donated

        return cls(
            params=masters,
            grad_buffer=jax.tree.map(jnp.zeros_like, masters),
            accumulated=counts(),
            samples=counts(),
            batch_size=counts(),
            rank=counts(),
            family=counts(),
            schedule=jax.tree.map(lambda x: jnp.stack([x] * size), as_arrays(FREE)),
            opt_state=tx.init(masters),
            tx=tx,
            pool_rank=rank,
            param_dtype=jax.tree.leaves(params)[0].dtype,
            grad_norm_skip_threshold=grad_norm_skip_threshold,
        )

    @property
    def n_slots(self) -> int:
        """S."""
        return self.batch_size.shape[0]

    @property
    def n_families(self) -> int:
        """How many configurations of `multi_lora_optimizer` the pool was made with."""
        own = isinstance(self.opt_state, FamilyState)
        return len(self.opt_state.families) if own else 1

    @property
    def occupied(self) -> jax.Array:
        """bool (S,): the slots that hold an adapter."""
        return self.batch_size > 0

    @property
    def ready(self) -> jax.Array:
        """bool (S,): the slots whose batch is full."""
        return self.occupied & (self.accumulated == self.batch_size)

    @property
    def grad_sum(self) -> PyTree:
        """The sums of gradients over the samples accumulated so far, (S, ...)."""
        zeros = jax.tree.map(jnp.zeros_like, self.grad_buffer)
        return select_slots(self.accumulated > 0, self.grad_buffer, zeros)

    def model_params(self) -> PyTree:
        """The parameters in the model's dtype, (S, ...)."""
        return jax.tree.map(lambda p: p.astype(self.param_dtype), self.params)

    def install(
        self,
        slot: Any,
        params: PyTree,
        *,
        rank: int,
        batch_size: Any,
        schedule: ParamScheduleConfig,
        samples: Any = 0,
        family: Any = 0,
        opt_state: PyTree | None = None,
    ) -> "SlotTrainState":
        """Puts an adapter into a free slot, fresh or to go on where it stopped.

        Args:
          slot: the slot.
          params: its weights, leaves of one slot, at the pool's rank or at its own, in which case
            zeros are added.
          rank: the adapter's own rank.
          batch_size: samples per step.
          schedule: its schedule, of scalars; see `slot_schedule`.
          samples: the schedule's position, for an adapter that has trained before.
          family: which of several configurations of `multi_lora_optimizer` trains it.
          opt_state: its optimizer state, as `take_slot` gave it of ``state.opt_state``; fresh if
            absent.

        Raises:
          ValueError: an occupied slot, a rank over the pool's, a batch size below 1, negative
            samples, a family that the pool has not, or weights of the wrong shape.
        """
        _check(self.occupied, slot, "slot {} is occupied; retire its adapter first", wanted=False)
        if not isinstance(rank, int | np.integer) or not 1 <= rank <= self.pool_rank:
            raise ValueError(f"rank is {rank}; this pool holds ranks 1 to {self.pool_rank}")
        _at_least("batch_size", batch_size, 1)
        _at_least("samples", samples, 0)
        known = (family >= 0) & (family < self.n_families)
        if _is_known(known) and not known:
            raise ValueError(f"family is {family}; it must be in [0, {self.n_families})")
        allowed = ~take_slot(self.occupied, slot) & (batch_size >= 1) & (samples >= 0) & known
        slot = jnp.where(allowed, slot, self.n_slots)  # under jit nothing is written instead
        state = self._replace_slot(
            slot,
            params=self._pad(params, rank),
            samples=samples,
            batch_size=batch_size,
            rank=rank,
            family=family,
            schedule=as_arrays(schedule),
        )
        if opt_state is None:
            return state
        return dataclasses.replace(state, opt_state=put_slot(state.opt_state, slot, opt_state))

    def retire(self, slot: Any) -> "SlotTrainState":
        """Takes the adapter out of a slot and scrubs it: zeros everywhere, clocks at 0.

        Raises:
          ValueError: the slot is free.
        """
        _check(self.occupied, slot, "slot {} is free; there is no adapter to retire")
        zeros = jax.tree.map(jnp.zeros_like, take_slot(self.params, slot))
        return self._replace_slot(
            slot, params=zeros, samples=0, batch_size=0, rank=0, family=0, schedule=as_arrays(FREE)
        )

    def tenant(self, slot: Any) -> "SlotTrainState":
        """Returns all of one slot: this state with leaves (...) in place of (S, ...).

        `place` puts it into a slot of this pool or of another, where it goes on bit for bit.

        Raises:
          ValueError: the slot is free.
        """
        _check(self.occupied, slot, "slot {} is free; there is no adapter in it")
        tenant = take_slot(self, slot)
        counts = tenant.accumulated > 0
        sums = jax.tree.map(lambda s: jnp.where(counts, s, 0), tenant.grad_buffer)
        # Under jit there is no adapter to place from a slot outside the pool.
        batch_size = jnp.where(self._is_slot(slot), tenant.batch_size, 0)
        return dataclasses.replace(tenant, grad_buffer=sums, batch_size=batch_size)

    def place(self, slot: Any, tenant: "SlotTrainState") -> "SlotTrainState":
        """Puts a `tenant`, with everything that it had, into a free slot.

        It may come from a pool of another rank, if its own rank fits this one: its padding is cut
        or grows.

        Raises:
          ValueError: an occupied slot, a rank over the pool's, or parameters or optimizer state of
            another structure, shape or dtype than the pool's.
        """
        _check(self.occupied, slot, "slot {} is occupied; retire its adapter first", wanted=False)
        fits = tenant.rank <= self.pool_rank
        if _is_known(fits) and not fits:
            raise ValueError(
                f"the tenant's rank is {tenant.rank}; this pool holds ranks 1 to {self.pool_rank}"
            )
        fitted = fit_tenant(tenant, self)
        allowed = self._is_free(slot) & fits & (tenant.batch_size > 0)
        slot = jnp.where(allowed, slot, self.n_slots)  # under jit nothing is written instead
        return put_slot(self, slot, fitted)

    def move(self, source: Any, target: Any) -> "SlotTrainState":
        """Moves the adapter of the slot ``source`` into the free slot ``target``.

        Raises:
          ValueError: ``source`` is free, or ``target`` occupied.
        """
        tenant = self.tenant(source)
        moved = self._is_free(target) & (tenant.batch_size > 0)
        return self.place(target, tenant).retire(jnp.where(moved, source, self.n_slots))

    def clone(self, source: Any, target: Any) -> "SlotTrainState":
        """Branches the adapter of the slot ``source``: the free slot ``target`` goes on from it.

        Raises:
          ValueError: ``source`` is free, or ``target`` occupied.
        """
        return self.place(target, self.tenant(source))

    def accumulate(self, grads: PyTree, samples: Any) -> "SlotTrainState":
        """Adds gradients, themselves sums over samples, to the slots' gradient sums.

        Args:
          grads: (S, ...), any float dtype; where ``samples`` is 0 they are not read.
          samples: int (S,), how many samples of each slot the gradients are over.

        Raises:
          ValueError: negative samples, samples for a free slot, more than its batch size, or
            gradients that do not fit the parameters.
        """
        samples = jnp.asarray(samples)
        if samples.shape != (self.n_slots,) or not jnp.issubdtype(samples.dtype, jnp.integer):
            raise ValueError(
                f"samples is {samples.dtype}{list(samples.shape)}; give integers ({self.n_slots},)"
            )
        samples = samples.astype(jnp.int32)
        room = self.batch_size - self.accumulated
        _check_all(samples >= 0, "slot {}: samples is negative")
        _check_all((samples == 0) | self.occupied, "slot {} is free; it takes no samples")
        _check_all((samples == 0) | (samples <= room), "slot {}: more samples than its batch size")
        _check_like(grads, self.params)
        added = (samples > 0) & self.occupied & (samples <= room)
        sums = jax.tree.map(lambda s, g: s + g.astype(s.dtype), self.grad_sum, grads)
        return dataclasses.replace(
            self,
            grad_buffer=select_slots(added, sums, self.grad_buffer),
            accumulated=jnp.where(added, self.accumulated + samples, self.accumulated),
        )

    def discard(self, slots: Any) -> "SlotTrainState":
        """Drops the gradient sums of the named slots (bool (S,) or indices)."""
        named = _as_mask(slots, self.n_slots)
        return dataclasses.replace(self, accumulated=jnp.where(named, 0, self.accumulated))

    def step(
        self, slots: Any = None, **hyperparameters: Any
    ) -> tuple["SlotTrainState", StepReport]:
        """Updates the named slots, each by its mean gradient, and advances their schedules.

        A slot steps only when its batch is full. One whose gradients are not finite, or have a
        norm over ``grad_norm_skip_threshold``, is skipped.

        Args:
          slots: None for every slot whose batch is full; bool (S,); or int (k,), of which only
            the named slots are computed (see `per_slot`).
          **hyperparameters: floats of the optimizer for this step, scalar or (S,); a
            ``learning_rate`` or ``weight_decay`` given here goes before the schedule's.

        Raises:
          ValueError: a named slot is free or its batch is not full.
        """
        if slots is None:
            return self._step(self.ready, hyperparameters)
        slots = as_slots(slots, self.n_slots)
        named = _as_mask(slots, self.n_slots)
        _check_all(~named | self.occupied, "slot {} is free; it cannot step")
        _check_all(
            ~named | self.ready,
            "slot {} cannot step: the samples accumulated are not its batch size",
        )
        if slots.dtype == bool:
            return self._step(slots & self.ready, hyperparameters)
        return self._step_chosen(slots, hyperparameters)

    def _step_chosen(self, slots, hyperparameters):
        """Steps the slots of the index ``slots`` (k,), computing only them."""
        if slots.size == 1:
            # XLA turns the gather of a single slot into a slice, and then copies whole pools where
            # it would otherwise write in place. One entry of padding keeps it from that.
            slots = jnp.append(slots, self.n_slots)
        per_slot_floats = {n: x for n, x in hyperparameters.items() if jnp.ndim(x) > 0}
        slot_count(self.n_slots, state=self.batch_size, **per_slot_floats)
        chosen, chosen_floats = gather_slots((self, per_slot_floats), slots)
        stepped, report = chosen._step(chosen.ready, hyperparameters | chosen_floats)
        changed = ("params", "opt_state", "samples", "accumulated")
        state = dataclasses.replace(
            self,
            **{
                name: scatter_slots(getattr(self, name), slots, getattr(stepped, name))
                for name in changed
            },
        )
        nothing = jax.tree.map(lambda x: jnp.zeros((self.n_slots,), x.dtype), report)
        return state, scatter_slots(nothing, slots, report)

    def _step(self, named, hyperparameters):
        """Steps the slots of the mask ``named``, all of which have a full batch."""
        mean = mean_gradients(self.grad_buffer, self.batch_size)
        norm = mean_norms(self.grad_buffer, self.batch_size)
        lr, wd = param_schedule(self.schedule)(self.samples)
        hyperparameters = {"learning_rate": lr, "weight_decay": wd, **hyperparameters}
        threshold = hyperparameters.get("grad_norm_skip_threshold", self.grad_norm_skip_threshold)
        stepped = named & jnp.isfinite(norm) & (norm <= threshold)
        updates, opt_state = self.tx.update(
            mean,
            self.opt_state,
            self.params,
            slots=stepped,
            total_norm=norm,
            rank=self.rank,
            family=self.family,
            schedule=self.schedule,
            samples=self.samples,
            **hyperparameters,
        )
        params = select_slots(stepped, optax.apply_updates(self.params, updates), self.params)
        samples = self.samples + jnp.where(stepped, self.batch_size, 0)
        samples = jnp.where(samples < self.samples, jnp.iinfo(samples.dtype).max, samples)
        state = dataclasses.replace(
            self.discard(named), params=params, opt_state=opt_state, samples=samples
        )
        used = [
            jnp.broadcast_to(hyperparameters[name], norm.shape)
            for name in ("learning_rate", "weight_decay")
        ]
        report = StepReport(stepped, named & ~stepped, norm, *used, samples)
        return state, select_slots(named, report, jax.tree.map(jnp.zeros_like, report))

    def _is_slot(self, slot) -> jax.Array:
        return (jnp.asarray(slot) >= 0) & (jnp.asarray(slot) < self.n_slots)

    def _is_free(self, slot) -> jax.Array:
        return self._is_slot(slot) & ~take_slot(self.occupied, jnp.clip(slot, 0, self.n_slots - 1))

    def _replace_slot(self, slot, **values) -> "SlotTrainState":
        """Writes ``values`` into one slot, with no gradient sum and fresh optimizer state."""
        values |= {
            "grad_buffer": jax.tree.map(
                lambda x: jnp.zeros(x.shape[1:], x.dtype), self.grad_buffer
            ),
            "accumulated": 0,
        }
        pool = {name: getattr(self, name) for name in values}
        written = {
            name: jax.tree.map(
                lambda x, v: jnp.asarray(v, x.dtype), take_slot(pool[name], slot), value
            )
            for name, value in values.items()
        }
        state = dataclasses.replace(self, **put_slot(pool, slot, written))
        opt_state = reset_slots(self.tx, state.opt_state, state.params, jnp.asarray([slot]))
        return dataclasses.replace(state, opt_state=opt_state)

    def _pad(self, params: PyTree, rank: int) -> PyTree:
        """Pads each leaf's axis of length ``rank`` with zeros to the pool's where it is shorter."""

        def pad(path, p, pool):
            wanted = pool.shape[1:]
            axes = [
                (0, want - have) if (have, want) == (rank, self.pool_rank) else (0, 0)
                for have, want in zip(p.shape, wanted, strict=False)
            ]
            padded = jnp.pad(p, axes) if p.ndim == len(wanted) else p
            if p.shape == wanted and wanted.count(self.pool_rank) == 1 and _is_known(p):
                beyond = np.moveaxis(np.asarray(p), wanted.index(self.pool_rank), 0)[rank:]
                if beyond.any():
                    raise ValueError(
                        f"params{jax.tree_util.keystr(path)} is not zero beyond its rank {rank}"
                    )
            if padded.shape != wanted:
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} has shape {p.shape}; this slot takes "
                    f"{wanted}, or {rank} (its own rank) in place of {self.pool_rank}"
                )
            return padded

        _check_same_structure(params, self.params)
        return jax.tree_util.tree_map_with_path(pad, params, self.params)


def fit_tenant(tenant: SlotTrainState, pool: SlotTrainState) -> SlotTrainState:
    """Returns the tenant as if it came from ``pool``: padded to its rank, with its static fields.

    Raises:
      ValueError: a leaf that the pool has not, that differs from the pool's in more than that, or
        whose padding is not zero where it would be cut.
    """
    static = {
        field.name: getattr(pool, field.name)
        for field in dataclasses.fields(pool)
        if field.metadata.get("static")
    }
    if tenant.tx is not pool.tx and (tenant.n_families, pool.n_families) != (1, 1):
        raise ValueError(
            f"the tenant is of family {tenant.family} of another pool, whose families need not be "
            "this one's; a checkpoint or a tenant file finds its own"
        )
    own = dataclasses.replace(tenant, **static)
    if (got := jax.tree.structure(own)) != (want := jax.tree.structure(pool)):
        raise ValueError(f"the tenant has the structure {got}; the pool's is {want}")

    def fit(path, x, like):
        shape = like.shape[1:]
        differs = [have != want for have, want in zip(x.shape, shape, strict=False)]
        by_rank = [
            (have, want) == (tenant.pool_rank, pool.pool_rank)
            for have, want in zip(x.shape, shape, strict=False)
        ]
        if x.ndim != len(shape) or x.dtype != like.dtype or any(np.greater(differs, by_rank)):
            raise ValueError(
                f"the tenant's {jax.tree_util.keystr(path)} is {x.dtype}{list(x.shape)}; "
                f"this pool holds {like.dtype}{list(shape)}"
            )
        if not any(differs):
            return x
        kept = x[tuple(map(slice, shape))]
        if _is_known(x) and np.count_nonzero(x) != np.count_nonzero(kept):
            raise ValueError(
                f"the tenant's {jax.tree_util.keystr(path)} is not zero beyond its rank, in what "
                f"this pool of rank {pool.pool_rank} would cut"
            )
        return jnp.pad(
            kept, [(0, want - have) for have, want in zip(kept.shape, shape, strict=True)]
        )

    return jax.tree_util.tree_map_with_path(fit, own, pool)


def mean_gradients(grad_sum: PyTree, batch_size: jax.Array) -> PyTree:
    """Divides each slot's gradient sum (S, ...) by its batch size (S,)."""
    per_sample = 1.0 / jnp.maximum(batch_size, 1)
    return jax.tree.map(
        lambda s: s * per_sample.reshape((-1,) + (1,) * (s.ndim - 1)).astype(s.dtype), grad_sum
    )


def mean_norms(grad_sum: PyTree, batch_size: jax.Array) -> jax.Array:
    """The L2 norm over all of each slot's mean gradient: (S,).

    Taken of the sums, so that the mean need not be stored between the norm and the step.
    """
    return jax.vmap(total_l2_norm)(grad_sum) / jnp.maximum(batch_size, 1)


# What a slot without an adapter has for a schedule.
FREE = ParamScheduleConfig()


def as_arrays(schedule: ParamScheduleConfig) -> ParamScheduleConfig:
    """The schedule of one slot as scalars of the dtypes that a pool keeps.

    Counts of samples are integers, so that distances between them are exact; only the warm-up may
    be fractional.
    """
    floats = ("init_lr", "max_lr", "min_lr", "lr_warmup_steps", "start_wd", "end_wd")
    values = {
        field.name: jnp.asarray(
            getattr(schedule, field.name),
            jnp.result_type(float) if field.name in floats else jnp.int32,
        )
        for field in dataclasses.fields(schedule)
    }
    return ParamScheduleConfig(**values)


def _as_mask(slots: Any, size: int) -> jax.Array:
    slots = as_slots(slots, size)
    return slots if slots.dtype == bool else jnp.zeros(size, bool).at[slots].set(True, mode="drop")


def _is_known(*values: Any) -> bool:
    """Whether the values can be looked at, which they cannot under jit."""
    return not any(isinstance(x, jax.core.Tracer) for x in values)


def _check_all(holds: jax.Array, message: str) -> None:
    """Raises ValueError naming the first slot where ``holds`` (S,) is false."""
    if _is_known(holds) and not (holds := np.asarray(holds)).all():
        raise ValueError(message.format(int(np.argmin(holds))))


def _check(flags: jax.Array, slot: Any, message: str, wanted: bool = True) -> None:
    """Raises ValueError unless ``flags[slot]`` is ``wanted``."""
    if _is_known(flags, slot) and bool(take_slot(flags, slot)) != wanted:
        raise ValueError(message.format(slot))


def _at_least(name: str, value: Any, smallest: int) -> None:
    if _is_known(value) and not value >= smallest:
        raise ValueError(f"{name} is {value}; it must be at least {smallest}")


def _check_same_structure(tree: PyTree, pool: PyTree) -> None:
    if (got := jax.tree.structure(tree)) != (want := jax.tree.structure(pool)):
        raise ValueError(f"the tree has the structure {got}; the pool's is {want}")


def _check_like(grads: PyTree, params: PyTree) -> None:
    _check_same_structure(grads, params)
    for (path, g), p in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(params), strict=True
    ):
        if g.shape != p.shape:
            raise ValueError(
                f"grads{jax.tree_util.keystr(path)} has shape {g.shape}; the pool's is {p.shape}"
            )
