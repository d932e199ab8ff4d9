"""The guides' Python code runs as it stands, in one namespace for each guide."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("guide", ["tenants.md"])
def test_the_code_of_a_guide_runs(guide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").mkdir()
    text = (DOCS / guide).read_text(encoding="utf-8")
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, guide, "exec"), namespace)
    state = namespace["state"]
    assert state.occupied.tolist() == [False, True, True, False]
    assert namespace["elsewhere"].samples.tolist() == [0, 8]
    assert (tmp_path / "build/peft/adapter_model.safetensors").exists()
