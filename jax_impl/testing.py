"""What the tests of this package share."""

import os
import pathlib
import random
import subprocess
import sys

import jax
import numpy as np


def bits(x) -> np.ndarray:
    """The bytes of an array, by which -0.0 differs from 0.0 and one NaN from another."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.ascontiguousarray(x)
    return x.view(np.uint8) if x.size and x.ndim else np.frombuffer(x.tobytes(), np.uint8)


def assert_same_bits(actual, expected) -> None:
    """Asserts equal structures, dtypes, shapes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        where = jax.tree_util.keystr(path)
        assert (a.dtype, a.shape) == (e.dtype, e.shape), f"{where}: {a.dtype}{a.shape}"
        np.testing.assert_array_equal(bits(a), bits(e), err_msg=where)


def relative_error(actual, expected) -> float:
    """|actual - expected| / |expected| in the Frobenius norm, in float64."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def damage_a_file(folder: pathlib.Path, rng: random.Random) -> str:
    """Flips a bit of a file, cuts it short, empties it, swaps it with another or removes it.

    Returns which.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path, other = rng.sample(files, 2)
    data = path.read_bytes()
    kind = rng.choice(["flip", "cut", "empty", "swap", "remove"])
    match kind:
        case "flip":
            at = rng.randrange(len(data))
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        case "cut":
            path.write_bytes(data[: rng.randrange(len(data))])
        case "empty":
            path.write_bytes(b"")
        case "swap":
            path.write_bytes(other.read_bytes())
            other.write_bytes(data)
        case "remove":
            path.unlink()
    return kind


def run_on_devices(count: int, *arguments: str) -> str:
    """The output of ``python *arguments`` in a process that has ``count`` CPU devices.

    Raises:
      AssertionError: its exit code is not 0; has its output.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    result = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
