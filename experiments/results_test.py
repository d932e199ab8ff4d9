import json
import re

from experiments import results, studies

PAGE = "Words.\n\n<!-- a -->\nold\n<!-- /a -->\n\nMore.\n<!-- b -->\nkept\n<!-- /b -->\n"


def test_a_study_that_was_run_fills_its_part_and_leaves_the_rest(tmp_path):
    (tmp_path / "a").mkdir()
    record = {"command": "python -m x", "seconds": 12.3}
    (tmp_path / "a" / "results.json").write_text(json.dumps(record))
    (tmp_path / "a" / "table.md").write_text("| t |\n")
    filled = results.fill(PAGE, tmp_path)
    assert filled == PAGE.replace("old\n", "`python -m x` (12 s)\n\n| t |\n")
    assert results.fill(filled, tmp_path) == filled


def test_the_page_has_a_part_for_every_study_and_its_pictures_exist():
    text = (results.HERE / "RESULTS.md").read_text()
    parts = re.findall(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", text, flags=re.DOTALL)
    assert sorted(name for name, _ in parts) == sorted(studies.NAMES)
    for name, body in parts:
        assert studies.command(name, "full") in body and "| --- |" in body
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert pictures and all((results.HERE / picture).is_file() for picture in pictures)
