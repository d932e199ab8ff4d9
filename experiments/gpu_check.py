"""``python -m experiments.gpu_check``: does the step compute on a GPU what it does elsewhere?

A line per check, then the benchmark's table. The machine needs jax with its GPU, NumPy and this
project's own packages; without torch and megatron-core their rival is left out.

Exit code 0: all checks passed; 1: one failed; 2: no GPU, nothing was checked.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

from experiments.rivals import ADAM, CLIP, LEARNING_RATE, MUON, WEIGHT_DECAY
from experiments.workloads import WORKLOADS, Arrays, Workload
from jax_impl import OptimizerConfig, multi_lora_optimizer, newton_schulz
from jax_impl.newton_schulz import COEFFICIENTS
from parity import oracle
from parity.policy import EPS, FLOOR_EPS, SINGLE_RATIO

POOL = Workload("check", {"q": (256, 512), "o": (768, 256)}, n_layers=2, rank=16, n_slots=4)
STEPS = 3
IN_BF16 = dataclasses.replace(MUON, muon_fp32_matmul_prec="medium")
CONFIGS = {
    "Muon, Gram form": MUON,
    "Muon, standard form": dataclasses.replace(MUON, ns_method="standard"),
    "Muon, iteration in bf16": IN_BF16,
    "AdamW": ADAM,
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One line: what was looked at, what was found, whether that is right."""

    name: str
    found: str
    passed: bool

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'FAIL'}  {self.name}: {self.found}"


def inputs() -> tuple[Arrays, list[Arrays]]:
    """Parameters, and each step's gradients: slots of different size, one ill-conditioned."""
    sizes = np.asarray([1e-3, 1e-2, 1.0, 10.0], np.float32)[:, None, None]
    decay = np.logspace(0, -3, POOL.rank, dtype=np.float32)

    def gradients(seed):
        grads = POOL.random(seed, scale=1.0)
        for name, g in grads.items():
            g *= sizes
            g[1] *= decay[:, None] if name.endswith("linear_in") else decay
        return grads

    return POOL.random(seed=0, scale=0.02), [gradients(seed) for seed in range(1, STEPS + 1)]


def update_on(device: jax.Device, config: OptimizerConfig, slots=None) -> Arrays:
    """What `STEPS` steps add to the parameters on a device."""
    tx = multi_lora_optimizer(config)
    start, all_grads = inputs()

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, slots=slots, learning_rate=LEARNING_RATE)
        return optax.apply_updates(params, updates), state

    with jax.default_device(device):
        params = jax.device_put(start, device)
        state = tx.init(params)
        for grads in all_grads:
            params, state = step(params, state, jax.device_put(grads, device))
    return {name: np.asarray(p, np.float64) - start[name] for name, p in params.items()}


def true_update(config: OptimizerConfig) -> Arrays:
    """The same in float64, or with bf16's roundings where the iteration is to make them."""
    start, all_grads = inputs()
    slots = [true_update_of_slot(config, start, all_grads, i) for i in range(POOL.n_slots)]
    return {name: np.stack([slot[name] for slot in slots]) for name in start}


def true_update_of_slot(
    config: OptimizerConfig, start: Arrays, all_grads: list[Arrays], slot: int
) -> Arrays:
    """`true_update` of one slot: {slot-free name: (...)}."""
    begin = {name: p[slot].astype(np.float64) for name, p in start.items()}
    step_one = muon_stepper(config) if config.optimizer == "muon" else adam_stepper(config)
    params, states = dict(begin), dict.fromkeys(begin)
    for grads in all_grads:
        own = {name: g[slot].astype(np.float64) for name, g in grads.items()}
        clipped, _ = oracle.clipped_gradients(own, 1, {"clip_grad": CLIP})
        for name, p in params.items():
            params[name], states[name] = step_one(p, states[name], clipped[name])
    return {name: params[name] - p for name, p in begin.items()}


def muon_stepper(config: OptimizerConfig) -> Callable:
    """The function (p, state, gradient) -> (p, state) of the oracle's Muon."""
    in_bf16 = config.muon_fp32_matmul_prec == "medium"
    iterate = oracle.newton_schulz_bf16 if in_bf16 else oracle.newton_schulz
    kind = config.muon_coefficient_type
    orthogonalize = partial(
        iterate,
        steps=config.muon_num_ns_steps,
        coefficient_type=kind,
        coefficients=COEFFICIENTS[kind],
    )

    def step(p, state, grad):
        return oracle.muon_step(
            p,
            state or {"momentum_buffer": np.zeros_like(p)},
            grad,
            lr=LEARNING_RATE,
            wd=WEIGHT_DECAY,
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            orthogonalize=orthogonalize,
            scale=lambda x: x * oracle.muon_scale(*x.shape, config.muon_scale_mode),
        )

    return step


def adam_stepper(config: OptimizerConfig) -> Callable:
    """The function (p, state, gradient) -> (p, state) of the oracle's AdamW."""

    def step(p, state, grad):
        p, *state = oracle.adam_step(
            p,
            *(state or (np.zeros_like(p), np.zeros_like(p), 0)),
            grad,
            lr=LEARNING_RATE,
            wd=WEIGHT_DECAY,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
        )
        return p, state

    return step


def distance(update: Arrays, truth: Arrays) -> float:
    """The largest relative distance of any slot's any matrix."""
    return max(
        np.linalg.norm(update[name][slot] - truth[name][slot]) / np.linalg.norm(truth[name][slot])
        for name in truth
        for slot in range(POOL.n_slots)
    )


def rounding_of_parameters(update: Arrays) -> float:
    """How far an update is off because it was added to float32 parameters, as `distance` counts."""
    start, _ = inputs()
    return max(
        EPS * np.linalg.norm(start[name][slot]) / np.linalg.norm(update[name][slot])
        for name in update
        for slot in range(POOL.n_slots)
    )


def parity_check(name: str, config: OptimizerConfig, device: jax.Device) -> Check:
    """The device is as close to the oracle as the CPU is, within the harness's limit."""
    truth = true_update(config)
    there, here = (update_on(d, config) for d in (device, jax.devices("cpu")[0]))
    floor = FLOOR_EPS * max(EPS, rounding_of_parameters(truth))
    off, cpu_off = distance(there, truth), distance(here, truth)
    ratio = max(off, floor) / max(cpu_off, floor)
    found = (
        f"{off:.1e} from the oracle, the CPU {cpu_off:.1e}, ratio {ratio:.2f} (at most "
        f"{SINGLE_RATIO:g}); {distance(there, here):.1e} from the CPU"
    )
    return Check(name, found, ratio <= SINGLE_RATIO)


def bystander_check(device: jax.Device) -> Check:
    """Slots that are not named keep their bits, padding is padding, named ones move."""
    update = update_on(device, MUON, slots=jnp.asarray([2, -1, POOL.n_slots]))
    moved = [any(update[name][slot].any() for name in update) for slot in range(POOL.n_slots)]
    return Check(
        "only the named slot moves", f"moved: {moved}", moved == [False, False, True, False]
    )


def precision_times(device: jax.Device, repeat: int = 10) -> dict[str, float]:
    """Median milliseconds of Newton-Schulz on 448 matrices (16, 3072), by precision."""
    x = jax.device_put(
        np.random.default_rng(0).standard_normal((448, 16, 3072), np.float32), device
    )
    times = {}
    for prec in ("highest", "medium"):
        run = jax.jit(partial(newton_schulz, fp32_matmul_prec=prec))
        jax.block_until_ready(run(x))
        taken = []
        for _ in range(repeat):
            started = time.perf_counter()
            jax.block_until_ready(run(x))
            taken.append(1e3 * (time.perf_counter() - started))
        times[prec] = statistics.median(taken)
    return times


def checks(device: jax.Device) -> Iterator[Check]:
    """All checks of a device against the CPU and the oracle."""
    for name, config in CONFIGS.items():
        yield parity_check(name, config, device)
    yield bystander_check(device)


def main(
    workload: Annotated[str, typer.Option(help="Of the benchmark: small or large.")] = "large",
    repeat: Annotated[int, typer.Option(min=2, help="Of the benchmark.")] = 9,
) -> None:
    """Checks the step on this machine's GPU, then times it."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        print("no GPU: jax sees only the CPU, so nothing was checked")
        raise typer.Exit(2)
    print(f"{device.device_kind}, jax {jax.__version__}")
    passed = True
    for check in checks(device):
        print(check, flush=True)
        passed = passed and check.passed
    times = precision_times(device)
    faster = "at least as fast" if times["medium"] <= times["highest"] else "slower"
    print(
        f"info  iteration in bf16 {times['medium']:.2f} ms, {faster} than float32 "
        f"{times['highest']:.2f} ms"
    )
    from experiments import benchmark

    benchmark.report(WORKLOADS[workload], repeat)
    raise typer.Exit(0 if passed else 1)


if __name__ == "__main__":
    typer.run(main)
