"""On eight devices (see `mesh_test`): the guide's Python code runs as it stands."""

import pathlib
import re

import numpy as np

from jax_impl.placement import bytes_on_devices

GUIDE = pathlib.Path(__file__).parents[1] / "docs" / "meshes.md"


def test_the_guides_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    blocks = [block for block in blocks if "jax.distributed" not in block]
    assert len(blocks) >= 6
    namespace = {}
    for i, block in enumerate(blocks):
        exec(compile(block, str(GUIDE), "exec"), namespace)
        if i == 0:
            np.testing.assert_array_equal(np.flatnonzero(namespace["report"].stepped), [5])
            assert len(set(bytes_on_devices(namespace["state"]).values())) == 1
    assert sorted(namespace["device_of_tenant"]) == list(range(8))
    pool = namespace["pool"]
    for name, total in namespace["grad_sum"].items():
        np.testing.assert_array_equal(total, np.full(pool[name].shape, 3 * 16))
