"""The README's Python code runs as it stands; torch_ref tests what needs Megatron."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_readme_code_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    blocks = [block for block in blocks if "import torch" not in block]
    assert len(blocks) >= 2
    namespace = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    stepped, *numbers = re.split(r"(?<=\])", capsys.readouterr().out, maxsplit=1)
    assert stepped == "[False False  True False]"
    assert all(float(x) > 0 for x in numbers[0].split())
    assert not namespace["state"].occupied.any()
