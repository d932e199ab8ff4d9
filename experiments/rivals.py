"""The ways of stepping a pool that the benchmark times, all on the same gradients.

Each function here builds one of them, compiled and with its state resident. Whatever the way, a
step is: the norm of each slot's gradients, clipping by it, the schedule's learning rate, the
update of every slot.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.workloads import Arrays, Workload
from jax_impl import (
    OptimizerConfig,
    SlotTrainState,
    multi_lora_optimizer,
    param_schedule,
    per_slot,
    slot_schedule,
    take_slot,
)
from jax_impl.newton_schulz import COEFFICIENTS

PyTree = Any

CLIP = 1.0
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
NUM_STEP = 10_000
BATCH_SIZE = 8
MUON = OptimizerConfig(
    optimizer="muon",
    weight_decay=WEIGHT_DECAY,
    clip_grad=CLIP,
    muon_fp32_matmul_prec="highest",
)
ADAM = OptimizerConfig(optimizer="adam", weight_decay=WEIGHT_DECAY, clip_grad=CLIP)
TENANT = dict(
    lr=LEARNING_RATE,
    batch_size=BATCH_SIZE,
    num_step=NUM_STEP,
    lr_decay_style="cosine",
    weight_decay=WEIGHT_DECAY,
)


@dataclasses.dataclass(frozen=True)
class Rival:
    """One way of stepping the pool.

    Attributes:
        name: what tables call it.
        step: does one step and returns when its results are there.
        params: reads the parameters, {slot-free name: (S, ...)}; None where there are none.
        prepare: what has to happen between steps, untimed.
        compile_seconds: what tracing and compiling took; 0 where nothing is compiled.
        peak_memory: bytes at the peak over those of parameters, gradients and state of a pool;
            None where nobody tells.
        bytes_accessed: what XLA says that a step reads and writes; None where it does not.
        note: what a reader has to know.
    """

    name: str
    step: Callable[[], None]
    params: Callable[[], Arrays] | None = None
    prepare: Callable[[], None] = lambda: None
    compile_seconds: float = 0.0
    peak_memory: float | None = None
    bytes_accessed: float | None = None
    note: str = ""


class Program:
    """A function compiled ahead for its arguments, the first of which it may overwrite."""

    def __init__(self, function: Callable, *arguments: PyTree):
        started = time.perf_counter()
        with jax.default_matmul_precision("highest"):
            lowered = jax.jit(function, donate_argnums=0).lower(*arguments)
        self.run = lowered.compile()
        self.compile_seconds = time.perf_counter() - started

    @property
    def extra_bytes(self) -> int:
        """What a call allocates beyond its arguments."""
        memory = self.run.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

    @property
    def bytes_accessed(self) -> float:
        """What XLA says that a call reads and writes."""
        return self.run.cost_analysis()["bytes accessed"]


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all arrays of a tree."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def on_device(arrays: PyTree) -> PyTree:
    """A fresh copy on the device, that may be donated."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), arrays)


def repeated(name: str, function: Callable, state: PyTree, grads: PyTree, note: str = "") -> Rival:
    """A rival whose step is ``function(state, grads) -> state`` with ``state.params``."""
    program = Program(function, state, grads)
    held = [state]

    def step():
        held[0] = jax.block_until_ready(program.run(held[0], grads))

    return Rival(
        name,
        step,
        params=lambda: jax.tree.map(np.asarray, held[0][0]),
        compile_seconds=program.compile_seconds,
        peak_memory=1 + program.extra_bytes / tree_bytes((state, grads)),
        bytes_accessed=program.bytes_accessed,
        note=note,
    )


def slot_schedules(n_slots: int):
    """The tenants' schedules, every number (S,)."""
    return jax.tree.map(lambda x: jnp.full(n_slots, x), slot_schedule(**TENANT))


def optax_schedule() -> optax.Schedule:
    """The same learning rates, by steps."""
    return optax.cosine_decay_schedule(LEARNING_RATE, NUM_STEP)


# --- ours ---------------------------------------------------------------------------------------


def lifted(name: str, params: Arrays, grads: PyTree, *configs: OptimizerConfig) -> Rival:
    """`multi_lora_optimizer` with schedule and apply, without a training state around it.

    With several configurations the slots have them in turn.
    """
    tx = multi_lora_optimizer(*configs)
    params = on_device(params)
    n_slots = len(jax.tree.leaves(params)[0])
    schedule = param_schedule(slot_schedules(n_slots))

    def step(state, grads):
        params, opt_state, samples = state
        lr, wd = schedule(samples)
        own = dict(learning_rate=lr, weight_decay=wd, family=jnp.arange(n_slots) % len(configs))
        updates, opt_state = tx.update(grads, opt_state, params, **own)
        return optax.apply_updates(params, updates), opt_state, samples + BATCH_SIZE

    state = (params, tx.init(params), jnp.zeros(n_slots, jnp.int32))
    return repeated(name, step, state, grads)


def ours(params: Arrays, grads: PyTree) -> Rival:
    """Our per-slot Muon."""
    return lifted("ours: per-slot Muon", params, grads, MUON)


def our_adamw(params: Arrays, grads: PyTree) -> Rival:
    """Our per-slot AdamW."""
    return lifted("ours: per-slot AdamW", params, grads, ADAM)


def mixed(params: Arrays, grads: PyTree) -> Rival:
    """One pool in which every other slot has Muon and the rest AdamW."""
    return lifted("ours: Muon and AdamW mixed", params, grads, MUON, ADAM)


def train_state(
    params: Arrays, grads: PyTree, slots: Sequence[int] | None = None, config=MUON
) -> Rival:
    """`SlotTrainState.step`, of all slots or of those in ``slots`` (an index array, as padded)."""
    n_slots = len(jax.tree.leaves(params)[0])
    rank = min(jax.tree.leaves(params)[0].shape[1:])
    empty = SlotTrainState.create(multi_lora_optimizer(config), params, rank=rank)
    state = dataclasses.replace(
        empty,
        params=on_device(params),
        grad_buffer=on_device(grads),
        accumulated=jnp.full(n_slots, BATCH_SIZE, jnp.int32),
        batch_size=jnp.full(n_slots, BATCH_SIZE, jnp.int32),
        rank=jnp.full(n_slots, rank, jnp.int32),
        schedule=jax.tree.map(
            lambda x, like: x.astype(like.dtype), slot_schedules(n_slots), empty.schedule
        ),
    )
    del empty
    named = () if slots is None else (jnp.asarray(slots, jnp.int32),)
    program = Program(lambda state, *slots: state.step(*slots), state, *named)
    held = [state]

    def step():
        held[0], _ = jax.block_until_ready(program.run(held[0], *named))

    def refill():
        full = jnp.full(n_slots, BATCH_SIZE, jnp.int32)
        sums = jax.tree.map(lambda g: g * BATCH_SIZE, grads)
        held[0] = dataclasses.replace(held[0], grad_buffer=sums, accumulated=full)
        jax.block_until_ready(held[0])

    return Rival(
        "ours: SlotTrainState.step",
        step,
        params=lambda: jax.tree.map(np.asarray, held[0].params),
        prepare=refill,
        compile_seconds=program.compile_seconds,
        peak_memory=1 + program.extra_bytes / tree_bytes(state),
        bytes_accessed=program.bytes_accessed,
        note="also takes the mean, drops the sum and skips non-finite gradients",
    )


# --- Optax --------------------------------------------------------------------------------------


def optax_muon() -> optax.GradientTransformation:
    """Optax's Muon for one adapter, set to what `MUON` does."""
    return optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.contrib.muon(
            optax_schedule(),
            ns_coeffs=COEFFICIENTS[MUON.muon_coefficient_type][: MUON.muon_num_ns_steps],
            beta=MUON.muon_momentum,
            nesterov=MUON.muon_nesterov,
            weight_decay=WEIGHT_DECAY,
            consistent_rms=1.0,  # the "spectral" scale
        ),
    )


def optax_adamw() -> optax.GradientTransformation:
    """Optax's AdamW for one adapter, set to what `ADAM` does."""
    return optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.adamw(optax_schedule(), weight_decay=WEIGHT_DECAY),
    )


def applied(tx: optax.GradientTransformation) -> Callable:
    """The function ``((params, opt_state), grads) -> (params, opt_state)``."""

    def step(state, grads):
        params, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def looped_muon(params: Arrays, grads: PyTree) -> Rival:
    """One Optax Muon per slot, stepped in a Python loop over one compiled program."""
    tx = optax_muon()
    n_slots = len(jax.tree.leaves(params)[0])
    slot_params = [on_device(take_slot(params, i)) for i in range(n_slots)]
    states = [(p, tx.init(p)) for p in slot_params]
    slot_grads = [jax.block_until_ready(take_slot(grads, i)) for i in range(n_slots)]
    program = Program(applied(tx), states[0], slot_grads[0])

    def step():
        for i in range(n_slots):
            states[i] = program.run(states[i], slot_grads[i])
        jax.block_until_ready(states)

    return Rival(
        "loop of optax.contrib.muon",
        step,
        params=lambda: jax.tree.map(lambda *x: np.stack(x), *(s[0] for s in states)),
        compile_seconds=program.compile_seconds,
        peak_memory=1 + program.extra_bytes / tree_bytes((states, slot_grads)),
        bytes_accessed=n_slots * program.bytes_accessed,
    )


def vmapped_muon(params: Arrays, grads: PyTree) -> Rival:
    """Optax's Muon under ``jax.vmap`` over the slots."""
    tx = optax_muon()
    params = on_device(params)
    state = (params, jax.vmap(tx.init)(params))
    return repeated("vmap of optax.contrib.muon", jax.vmap(applied(tx)), state, grads)


def per_slot_adamw(params: Arrays, grads: PyTree) -> Rival:
    """Optax's AdamW in our lift."""
    tx = per_slot(optax_adamw())
    params = on_device(params)
    return repeated("per_slot(optax.adamw)", applied(tx), (params, tx.init(params)), grads)


def whole_pool_adamw(params: Arrays, grads: PyTree) -> Rival:
    """One optimizer over the whole pool per adapter, which sees zeros for the other slots.

    The pattern of SkyRL's JAX server: every adapter's step is an AdamW step over all slots.
    """
    tx = optax_adamw()
    params = on_device(params)
    n_slots = len(jax.tree.leaves(params)[0])

    def update_one(state, params, grads, slot):
        def only_slot(x):
            own = (jnp.arange(n_slots) == slot).reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(own, x, 0)

        own_grads = jax.tree.map(only_slot, grads)
        updates, opt_state = tx.update(own_grads, state, params)
        # Its weight decay must not reach the other adapters.
        return optax.apply_updates(params, jax.tree.map(only_slot, updates)), opt_state

    states = [tx.init(params) for _ in range(n_slots)]
    slots = [jnp.int32(i) for i in range(n_slots)]
    own_bytes = tree_bytes((params, states[0], grads))

    def flipped(held, grads, slot):
        params, state = held
        return update_one(state, params, grads, slot)

    program = Program(flipped, (params, states[0]), grads, slots[0])
    held = [params]
    del params

    def step():
        for i in range(n_slots):
            held[0], states[i] = program.run((held[0], states[i]), grads, slots[i])
        jax.block_until_ready((held, states))

    return Rival(
        "whole-pool AdamW per adapter",
        step,
        params=lambda: jax.tree.map(np.asarray, held[0]),
        compile_seconds=program.compile_seconds,
        peak_memory=(tree_bytes((held, states, grads)) + program.extra_bytes) / own_bytes,
        bytes_accessed=n_slots * program.bytes_accessed,
    )


# --- the floor ----------------------------------------------------------------------------------


def sum_of_squares(x: jax.Array) -> jax.Array:
    """(S,): the sum over each slot of (S, m, n)."""
    # Over rows first, which vectorises in any layout; along a row XLA would add one by one.
    return jnp.sum(jnp.sum(x * x, axis=1), axis=1)


def floor(params: Arrays, grads: PyTree) -> Rival:
    """Reads and writes what Muon with clipping cannot avoid, and does nothing else.

    28 bytes per float32 parameter in three passes, each of which needs all of the one before it:
    gradients; gradients, and momentum there and back; momentum, and parameters there and back.
    Three programs, for within one XLA may compute the new momentum twice instead of reading it.
    """
    params = on_device(params)
    momentum = jax.tree.map(jnp.zeros_like, params)

    def per_slot_factor(total, x):
        return total.reshape(-1, *[1] * (x.ndim - 1))

    def norms(unused, grads):
        return unused, jnp.sqrt(sum(map(sum_of_squares, jax.tree.leaves(grads))))

    def momenta(momentum, grads, factor):
        return jax.tree.map(lambda m, g: m + per_slot_factor(factor, m) * g, momentum, grads)

    def parameters(params, momentum, factor):
        return jax.tree.map(lambda p, m: p - per_slot_factor(factor, p) * m, params, momentum)

    factor = jnp.full(len(jax.tree.leaves(params)[0]), 1e-6)
    first = Program(norms, (), grads)
    second = Program(momenta, momentum, grads, factor)
    third = Program(parameters, params, momentum, factor)
    held = [params, momentum]
    own_bytes = tree_bytes((params, momentum, grads))
    del params, momentum

    def step():
        _, factor = first.run((), grads)
        held[1] = second.run(held[1], grads, factor)
        held[0] = jax.block_until_ready(third.run(held[0], held[1], factor))

    programs = (first, second, third)
    return Rival(
        "floor: 28 bytes per parameter",
        step,
        compile_seconds=sum(p.compile_seconds for p in programs),
        peak_memory=1 + max(p.extra_bytes for p in programs) / own_bytes,
        bytes_accessed=sum(p.bytes_accessed for p in programs),
    )


def numpy_copy(params: Arrays) -> Rival:
    """`np.copyto` of as many bytes as the floor reads and writes, in one thread per core."""
    n_bytes = 28 * sum(p.size for p in params.values())
    n_threads, n_copies = len(os.sched_getaffinity(0)), 7
    n_copied = n_bytes // 2 // n_copies  # copying reads and writes
    pairs = [np.ones((2, n_copied // n_threads), np.uint8) for _ in range(n_threads)]
    pool = concurrent.futures.ThreadPoolExecutor(n_threads)

    def copy(pair):
        for _ in range(n_copies):
            np.copyto(*pair)

    return Rival("NumPy copy of the same bytes", lambda: list(pool.map(copy, pairs)))


# --- torch --------------------------------------------------------------------------------------


@contextlib.contextmanager
def torch_reference(workload: Workload, params: Arrays, grads: Arrays) -> Iterator[Rival]:
    """The reference's own optimizers, one set per slot.

    With a GPU all of `torch_ref.step_adapter_slots` is timed. On a CPU Megatron's norm asks for
    CUDA, so there it and the clip are plain torch, on the same tensors; the rest is Megatron's,
    and the mode that redirects CUDA to the CPU, which costs time, is off.
    """
    import torch
    from megatron.core.optimizer import OptimizerConfig as MegatronConfig

    import torch_ref

    # A module's name must not have dots.
    module_names = {name: name.replace(".", "_") for name in workload.adapted()}
    layers = [(module_names[name], *features) for name, features in workload.adapted().items()]
    slots = range(workload.n_slots)
    shared = set(MegatronConfig.__dataclass_fields__) & set(vars(MUON))
    config = MegatronConfig(**{name: getattr(MUON, name) for name in shared})

    def torch_name(name):
        layer, _, kind = name.rpartition(".")
        return f"{module_names[layer]}.{kind}"

    with torch_ref.start_megatron() as device:
        model = torch_ref.MultiLoRAStack(layers, workload.n_slots, workload.rank)
        chunks, optimizer = torch_ref.setup_model_and_optimizer(model, config)

        def install():
            for slot in slots:
                weights = {
                    torch_name(n): torch.from_numpy(p[slot].copy()) for n, p in params.items()
                }
                torch_ref.install_adapter(
                    chunks, optimizer, slot, weights, rank=workload.rank, alpha=1.0, **TENANT
                )

        install()
        parameters = [dict(torch_ref.adapter_slot_parameters(chunks, slot)) for slot in slots]
        children = [torch_ref.adapter_slot_children(optimizer, slot) for slot in slots]
        means = {torch_name(n): torch.from_numpy(g).to(device) for n, g in grads.items()}
        batch_sizes = dict.fromkeys(slots, BATCH_SIZE)

        @torch.no_grad()
        def refill():
            for slot in slots:
                for name, parameter in parameters[slot].items():
                    parameter.main_grad.copy_(means[name][slot])

        @torch.no_grad()
        def step_on_cpu():
            with torch._C.DisableTorchFunction():
                for own in children:
                    for child in own:
                        child.prepare_grads()
                    own_grads = [p.grad for child in own for p in child.get_parameters()]
                    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(own_grads)))
                    torch._foreach_mul_(own_grads, torch.clamp(CLIP / (norm + 1e-6), max=1.0))
                    for child in own:
                        child.step_with_ready_grads()
                torch_ref.step_slot_schedulers(optimizer, batch_sizes)

        def step_on_cuda():
            # The gradients are means already.
            torch_ref.step_adapter_slots(optimizer, dict.fromkeys(slots, 1), CLIP)
            torch_ref.step_slot_schedulers(optimizer, batch_sizes)
            torch.cuda.synchronize()

        on_cpu = device.type == "cpu"
        step = step_on_cpu if on_cpu else step_on_cuda
        threads = use_fastest_threads(refill, step)
        for slot in slots:  # begin anew after the trials
            torch_ref.retire_adapter(chunks, optimizer, slot)
        install()
        note = f"{threads} threads, the fastest"
        if on_cpu:
            note += "; norm and clip in plain torch, for Megatron's own need CUDA"
        yield Rival(
            "torch reference (Megatron)",
            step,
            params=lambda: {
                name: np.stack(
                    [parameters[s][torch_name(name)].detach().cpu().numpy() for s in slots]
                )
                for name in params
            },
            prepare=refill,
            note=note,
        )


def use_fastest_threads(prepare: Callable[[], None], step: Callable[[], None]) -> int:
    """Gives torch one thread or one per core, whichever steps faster; returns how many.

    Its threads wait for each other in every operation: of small ones, or where other processes
    share the cores, more of them are slower, by up to fifty times (seen).
    """
    import torch

    def seconds(n_threads: int) -> float:
        torch.set_num_threads(n_threads)
        prepare()
        started = time.perf_counter()
        step()
        return time.perf_counter() - started

    counts = {1, torch.get_num_threads()}
    fastest = min(counts, key=lambda n: statistics.median(seconds(n) for _ in range(3)))
    torch.set_num_threads(fastest)
    return fastest
