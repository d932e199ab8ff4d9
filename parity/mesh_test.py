"""Shipped scenarios pass with the JAX side on eight devices, whatever the reference's ranks."""

from jax_impl.testing import run_on_devices
from parity.cli_test import invoke

PROGRAM = """
from parity.cli import both_stacks
with both_stacks():
    import jax
    from parity.candidate import MODES
    from parity.mesh import run_on_mesh
    from parity.scenario import shipped
    assert jax.device_count() == 8
    for name, placement in {cases}:
        result = run_on_mesh(shipped()[name], placement, MODES[2:])
        failed = [check for check in result.checks if not check.passed]
        assert result.passed and len(result.checks) > 100, failed[:3]
        print(result.scenario.name)
"""
CASES = [("one_muon", "slot"), ("tp2_blockwise", "tensor")]


def test_shipped_scenarios_pass_on_eight_devices():
    out = run_on_devices(8, "-c", PROGRAM.format(cases=CASES))
    assert out.split("\n")[: len(CASES)] == [f"{name} by {placement}" for name, placement in CASES]


def test_bad_usage():
    result = invoke("mesh", "one_muon", "--placement", "diagonal")
    assert result.exit_code == 2 and "diagonal" in result.output
    assert invoke("mesh", "no_such_scenario").exit_code == 2
