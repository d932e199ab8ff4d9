"""Several processes on JAX's distributed runtime, each with some CPU devices, over gloo.

``run_processes`` starts them, and this module is what they run.
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

HEARTBEAT_TIMEOUT = 10  # seconds without a sign of life after which a process counts as dead


class Ended(NamedTuple):
    """How a process ended: None for an exit code says that it had to be ended."""

    exit_code: int | None
    output: str
    seconds: float


def run_processes(
    processes: int, devices_each: int, task: str, *arguments: str, timeout: float = 120.0
) -> list[Ended]:
    """Runs a task of this module in so many processes until all have ended, however they do."""
    flags = f"--xla_force_host_platform_device_count={devices_each}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    port, start = str(_free_port()), time.monotonic()
    ended: dict[int, Ended] = {}
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder, str(i)) for i in range(processes)]
        running = {}
        try:
            for i, log in enumerate(logs):
                command = [sys.executable, "-m", __name__, task, port, str(processes), str(i)]
                with log.open("wb") as out:
                    running[i] = subprocess.Popen(
                        [*command, *arguments], env=environment, stdout=out, stderr=out
                    )
            while running and time.monotonic() - start < timeout:
                for i in [i for i, process in running.items() if process.poll() is not None]:
                    code, output = running.pop(i).returncode, logs[i].read_text(errors="replace")
                    ended[i] = Ended(code, output, time.monotonic() - start)
                time.sleep(0.05)
        finally:
            for i, process in running.items():
                process.kill()
                process.wait()
                output = logs[i].read_text(errors="replace")
                ended[i] = Ended(None, output, time.monotonic() - start)
    return [ended[i] for i in range(processes)]


def connect(port: str, processes: str, process: str) -> None:
    """Joins the other processes, within a bounded time."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        int(processes),
        int(process),
        initialization_timeout=60,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
        shutdown_timeout_seconds=20,
    )


def task_live(folder: str, *placements: str) -> None:
    """Lives in each placement; the first process writes what came of it to the folder."""
    for _ in lives(folder, placements):
        pass


def task_live_and_save(folder: str, *placements: str) -> None:
    """The same, and all processes save a tenant."""
    for placement, state, mesh in lives(folder, placements):
        save_tenant(pathlib.Path(folder, f"{placement}_tenant"), state, mesh)


def lives(folder: str, placements: Sequence[str]) -> Iterator[tuple]:
    """Lives in one placement after the other: each, the state at its end, the mesh."""
    import jax
    import numpy as np

    from jax_impl import mesh_testing as testing

    mesh = testing.mesh_of(jax.device_count())
    for placement in placements:
        pool = testing.pool_on(mesh, placement, n_layers=1)
        leaves, state = testing.live_briefly(pool, mesh)
        if jax.process_index() == 0:
            np.savez(pathlib.Path(folder, placement), *leaves)
        yield placement, state, mesh


def task_live_and_restore(folder: str, saved: str, *pairs: str) -> None:
    """Lives in each new placement; and for each "old:new", restores the tenant saved by the old."""
    import jax
    import numpy as np

    from jax_impl import mesh_testing as testing

    task_live(folder, *(pair.split(":")[1] for pair in pairs))
    mesh = testing.mesh_of(jax.device_count())
    for pair in pairs:
        old, new = pair.split(":")
        pool = testing.pool_on(mesh, new, n_layers=1)
        state = restore_tenant(pathlib.Path(saved, f"{old}_tenant"), pool, slot=6)
        leaves = testing.on_host(state, mesh)
        np.savez(pathlib.Path(folder, f"{old}_{new}"), *leaves)


def task_die(victim: str, folder: str) -> None:
    """Saves a tenant after a step, and steps on and on, until the victim kills itself."""
    import jax

    from jax_impl import mesh_testing as testing

    mesh = testing.mesh_of(jax.device_count())
    pool = testing.pool_on(mesh, "tensor", n_layers=1)
    state = pool.install(pool.state, SAVED_SLOT, testing.tenant(0, pool))
    save_tenant(pathlib.Path(folder, "tenant"), state, mesh)
    for step in range(10_000):
        state, report = pool.step(state)
        report.grad_norm.block_until_ready()
        if step == 3 and jax.process_index() == int(victim):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)


SAVED_SLOT = 3


def save_tenant(path: pathlib.Path, state, mesh) -> None:
    """Writes the tenant of `SAVED_SLOT`, in the form that it has in a pool on one device."""
    import jax
    import orbax.checkpoint as ocp
    from jax.sharding import NamedSharding, PartitionSpec

    from jax_impl.mesh_testing import tenant_of
    from jax_impl.placement import automatic

    everywhere = NamedSharding(automatic(mesh), PartitionSpec())
    tenant = jax.jit(tenant_of, out_shardings=everywhere)(state, SAVED_SLOT)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), tenant)


def restore_tenant(path: pathlib.Path, pool, slot: int):
    """Returns the pool's state with the tenant in a slot, wherever it was saved."""
    import jax
    import orbax.checkpoint as ocp

    from jax_impl.mesh_testing import tenant_of

    def placed(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)

    tenant = jax.eval_shape(tenant_of, pool.state, slot)
    here = jax.tree.leaves(pool.state)[0].sharding
    if hasattr(here, "mesh"):
        here = jax.sharding.NamedSharding(here.mesh, jax.sharding.PartitionSpec())
    with ocp.StandardCheckpointer() as checkpointer:
        tenant = checkpointer.restore(path.absolute(), jax.tree.map(placed, tenant))
    return pool.resume(pool.state, slot, tenant)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    task, port, processes, process, *arguments = sys.argv[1:]
    if processes != "1":
        connect(port, processes, process)
    globals()[f"task_{task}"](*arguments)
