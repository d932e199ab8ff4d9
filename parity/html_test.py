"""The report, read as text and looked at in a browser."""

import re
import shutil
import subprocess

import pytest
from matplotlib import image
from typer.testing import CliRunner

from parity import html, html_plots
from parity.checks import Check, Result
from parity.cli import app
from parity.mutants_test import SCENARIO
from parity.scenario import parse

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OFFLINE = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars "
    "--window-size=1240,1800"
).split()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    scenario, page = folder / "mine.toml", folder / "new" / "report.html"
    scenario.write_text(SCENARIO)
    result = CliRunner().invoke(app, ["run", str(scenario), "--report", str(page)])
    assert result.exit_code == 0, result.output
    return page


def test_says_everything(report):
    page = report.read_text()
    for words in (
        "1 scenarios passed, 0 failed",
        "learning rate",
        "weight decay",
        "relative error",
        "slot 1",
        "alice",
        "limit",
        "python -m parity run",
        "megatron-core",
        "CPUs",
    ):
        assert words in page, words


def test_needs_no_other_file(report):
    page = report.read_text()
    assert not re.search(r"https?:|<script|<link|<img|url\(|@import", page)


def test_looks_right_in_a_browser(report, tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.fail(f"install a browser to look at the report: one of {', '.join(BROWSERS)}")
    picture = tmp_path / "report.png"
    command = [browser, *OFFLINE, f"--user-data-dir={tmp_path}", f"--screenshot={picture}"]
    subprocess.run([*command, report.as_uri()], check=True, capture_output=True, timeout=120)
    pixels = (255 * image.imread(picture)[..., :3]).round().astype(int)
    # Both rates' lines, the errors of the free run, and the limit, drawn and not only written.
    for color in (html_plots.BLUE, html_plots.ORANGE, html_plots.GREEN, html_plots.VERMILION):
        rgb = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (abs(pixels - rgb).max(axis=-1) < 8).sum() > 200, color
    # Something is drawn all the way down and across.
    ink = pixels.min(axis=-1) < 200
    assert ink[:600].any() and ink[600:1200].any() and ink[:, 620:].any()


def test_a_failure_is_at_the_top_of_the_worst():
    (scenario,) = parse(SCENARIO, "mine.toml")
    near = Check("2 step", 1, 0, "near", "gram", "muon update", 7.9, 8.0, 1e-5, 1e-6)
    wrong = Check("2 step", 1, 0, "<wrong>", "gram", "exact", 1.0, 0.0)
    page = html.page([Result(scenario, [near, wrong], [0.0])], lambda s: "again")
    assert page.index("&lt;wrong&gt;") < page.index("<td>near</td>")
    assert "1 checks failed" in page and "<code>again</code>" in page


def test_occupancy():
    (scenario,) = parse(SCENARIO, "mine.toml")
    spans = list(html.occupancy(scenario.events))
    assert spans == [(0, 0, 9, "alice"), (1, 1, 9, "bob")]


def test_ticks_are_round_and_inside():
    scale = html_plots.Scale(0.0, 0.0234, 0, 100)
    assert scale.ticks() == pytest.approx([0, 0.005, 0.01, 0.015, 0.02])
    log = html_plots.Scale(1e-8, 1e-5, 0, 90, log=True)
    assert log.ticks() == pytest.approx([1e-8, 1e-7, 1e-6, 1e-5])
    assert log(1e-7) == pytest.approx(30)


def test_a_chart_leaves_out_what_its_axis_cannot_show():
    points = [(0, 0.0), (1, float("nan")), (2, 1e-3), (3, 1e-2)]
    series = [html_plots.Series("a", points, html_plots.BLUE, "dots")]
    options = {"title": "t", "x_label": "x", "y_label": "y"}
    # One more circle is in the legend.
    assert html_plots.chart(series, log=True, **options).count("<circle") == 3
    assert "nothing to show" in html_plots.chart([], **options)
