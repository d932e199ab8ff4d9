import json
import re

from experiments import results, studies

PAGE = "Words.\n\n<!-- a -->\nold\n<!-- /a -->\n\nMore.\n<!-- b -->\nkept\n<!-- /b -->\n"


def test_a_study_that_was_run_fills_its_part_and_leaves_the_rest(tmp_path):
    for setting in ("small", "full"):  # the full setting goes before the small one
        folder = tmp_path / setting / "a"
        folder.mkdir(parents=True)
        record = {"command": f"python -m x {setting}", "seconds": 12.3}
        (folder / "results.json").write_text(json.dumps(record))
        (folder / "table.md").write_text("| t |\n")
        filled = results.fill(PAGE, tmp_path)
        assert filled == PAGE.replace("old\n", f"`python -m x {setting}` (12 s)\n\n| t |\n")
        assert results.fill(filled, tmp_path) == filled


def test_the_page_has_a_part_for_every_study_and_its_pictures_exist():
    text = (results.HERE / "RESULTS.md").read_text()
    parts = re.findall(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", text, flags=re.DOTALL)
    assert sorted(name for name, _ in parts) == sorted(studies.NAMES)
    for name, body in parts:
        commands = [studies.command(name, setting) for setting in ("full", "small")]
        assert any(command in body for command in commands) and "| --- |" in body
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert pictures and all((results.HERE / picture).is_file() for picture in pictures)
