import pathlib
import re
import subprocess
import sys

import jax_impl

HEAVY = ("torch", "megatron", "emerging_optimizers", "flax", "chex")


def run(program: str) -> str:
    """The output of a Python program in a process of its own."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_needs_neither_torch_nor_megatron():
    out = run(
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({HEAVY}))\n"  # None there makes an import fail
        "import jax, jax.numpy as jnp, jax_impl\n"
        "config = jax_impl.OptimizerConfig(optimizer='muon', lr=0.1)\n"
        "tx = jax_impl.multi_lora_optimizer(config)\n"
        "params = {'w': jnp.ones((2, 3, 4)), 'b': jnp.ones((2, 3))}\n"
        "updates, _ = tx.update(params, tx.init(params), params, slots=jnp.asarray([1]))\n"
        "print(bool(updates['w'][0].any()), bool(updates['w'][1].all()))\n"
    )
    assert out.split() == ["False", "True"]


def test_importing_starts_no_backend_and_imports_nothing_above():
    out = run(
        "import sys, jax_impl\n"
        "from jax._src import xla_bridge\n"
        "above = {'torch', 'megatron', 'torch_ref', 'parity', 'experiments'}\n"
        "print(sorted(above & set(sys.modules)), xla_bridge.backends_are_initialized())\n"
    )
    assert out.strip() == "[] False"


def test_public_names_are_there():
    assert sorted(jax_impl.__all__) == jax_impl.__all__
    for name in jax_impl.__all__:
        assert getattr(jax_impl, name).__doc__, name


def test_no_file_here_names_what_is_above():
    """Comparisons with other stacks are parity's, tests included."""
    names = "torch|megatron|emerging_optimizers|torch_ref|parity|experiments|transformers"
    above = re.compile(rf"""(?m)^\s*(?:import|from) (?:{names})\b|importorskip\("(?:{names})""")
    files = sorted(pathlib.Path(jax_impl.__file__).parent.glob("*.py"))
    found = {file.name for file in files if above.search(file.read_text(encoding="utf-8"))}
    assert len(files) > 40 and not found
