"""Reports in one file: what they hold, and that a real browser shows and sorts them."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from sim import Scenario, simulate, sweep
from sim.cli import build_app
from sim.report.html import write_run_report, write_sweep_report
from sim.results import interval_text

BASE = Scenario.default().with_set("scheduler={policy: sarathi}", "workload.limit=30")
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Nesting(HTMLParser):
    """Fails where tags do not close in order, and gathers text and sources."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.sources, self.cells = [], [], [], 0

    def handle_starttag(self, tag, attributes):
        self.cells += tag == "td"
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(path):
    parser = Nesting()
    parser.feed(path.read_text(encoding="utf-8"))
    parser.close()
    assert parser.open == []
    # Nothing is loaded from anywhere.
    assert all(source.startswith("data:image/svg+xml;base64,") for source in parser.sources)
    return parser


def test_a_run_report_holds_tables_pictures_scenario_and_provenance(tmp_path):
    result = simulate(BASE)
    found = parsed(write_run_report(result, tmp_path / "r.html"))
    text = " ".join(found.text)
    assert "30 of 30 requests finished" in text
    assert "TTFT (first token)" in text
    assert "token_budget" in text or "policy: sarathi" in text
    assert result.manifest["hash"] in text
    assert len(found.sources) == 2


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a run with classes, whose tables and words are all there are."""
    classes = "classes={chat: {share: 1, slo: {ttft_s: 0.5}}, batch: {share: 1}}"
    run = simulate(BASE.with_set(classes, "slo={ttft_p95_s: 0.9, ttft_s: 1}"))
    return run, write_run_report(run, tmp_path_factory.mktemp("page") / "r.html")


def test_a_page_says_the_slo_beside_what_keeps_it_and_what_is_to_be_measured(page):
    run, path = page
    text = " ".join(parsed(path).text)
    assert "of requests, goodput" in text
    assert "TTFT at most 500 ms of each request, kept by 100.0%" in text
    assert re.search(r"TTFT p95 \S+ .?s, within 900 ms", text)
    assert "class chat" in text
    assert f"To be measured: {interval_text(run.summary['intervals'])}" in text


def test_every_colour_of_the_page_has_one_for_the_dark(page):
    style = page[1].read_text().partition("<style>")[2].partition("</style>")[0]
    light, _, dark = style.partition("@media (prefers-color-scheme: dark)")
    dark = dark.partition("} }")[0]
    named = set(re.findall(r"(--\w+):", light))
    assert named == set(re.findall(r"(--\w+):", dark)) == set(re.findall(r"var\((--\w+)\)", style))
    # Colours without a name are marks at the edge of notes, which both have, and the ground that pictures are drawn on.
    rules = style.replace(dark, "").partition("body {")[2]
    assert set(re.findall(r"#\w{3,6}", rules)) == {"#E69F00", "#D55E00", "#fff"}
    assert "color-scheme: light dark" in style


def test_a_page_fits_a_phone_and_what_is_wider_scrolls(page):
    text = page[1].read_text()
    assert "<meta name='viewport' content='width=device-width, initial-scale=1'>" in text
    assert text.count("<table") == text.count("<div class='scroll'><table") > 2
    assert text.count("<img ") == text.count("<div class='picture'><img ") > 1
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert not re.search(r"[^-]\bwidth: *\d+px", style)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "s"
    return sweep(BASE, axes={"scheduler.token_budget": [128, 1024, -1, 512]}, out=folder, jobs=1)


def test_a_sweep_report_holds_every_point_and_every_failure(swept, tmp_path):
    found = parsed(write_sweep_report(swept, tmp_path / "s.html"))
    text = " ".join(found.text)
    assert "Sweep over scheduler.token_budget" in text
    assert "1 run failed." in text
    assert "token_budget" in text
    assert len(found.sources) >= 1


def test_names_from_outside_are_shown_and_not_run(tmp_path):
    rows = [{"replicas": 1, "meta.note": "<script>alert(1)</script>"}, {"replicas": 2, "meta.note": "a & b"}]
    path = write_sweep_report(sweep(BASE, points=rows, jobs=1), tmp_path / "s.html")
    assert "<script>alert" not in path.read_text()
    assert "<script>alert(1)</script>" in " ".join(parsed(path).text)


def test_the_commands_write_reports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(
        build_app(), ["run", "--set", "workload.limit=10", "--no-plots", "--html", "--timeline", "t.json", "--out", "r"]
    )
    assert run.exit_code == 0, run.output
    parsed(tmp_path / "r" / "report.html")
    assert (tmp_path / "t.json").read_text().startswith('{"displayTimeUnit"')
    again = CliRunner().invoke(build_app(), ["run", "--set", "workload.limit=10", "--no-plots", "--out", "r"])
    assert again.exit_code == 0, again.output
    done = CliRunner().invoke(
        build_app(),
        ["sweep", "--set", "workload.limit=10", "--axis", "replicas=1,2", "--jobs", "1", "--out", "s", "--html"],
    )
    assert done.exit_code == 0, done.output
    parsed(tmp_path / "s" / "report.html")
    refused = CliRunner().invoke(build_app(), ["run", "--timeline", "no/where/t.json", "--out", "x"])
    assert refused.exit_code == 2
    assert "give another --timeline" in refused.stderr
    assert not (tmp_path / "x").exists()


def browse(page, folder, *options):
    """The page as a browser sees it after its scripts have run."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs chromium, which is not installed")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--dump-dom"]
    command += options
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=600, check=True).stdout


@pytest.mark.slow(reason="a browser loads the page")
def test_a_browser_sorts_the_points_by_the_column_that_is_clicked(swept, tmp_path):
    page = write_sweep_report(swept, tmp_path / "s.html")
    # The same page with a click on the first head, a check of every picture, and what went wrong.
    probe = (
        "<script>window.addEventListener('load', () => {"
        "document.querySelector('table.sortable th').click();"
        "const loaded = [...document.images].filter((image) => image.complete && image.naturalWidth > 300).length;"
        "document.body.dataset.pictures = loaded + ' of ' + document.images.length;});</script></body>"
    )
    page.write_text(page.read_text().replace("</body>", probe))
    dom = browse(page, tmp_path / "profile")
    body = dom[dom.index('<table class="sortable">') :]
    firsts = re.findall(r"<tr><td data-value=\"(-?\d+)\"", body[: body.index("</table>")])
    assert firsts == ["-1", "128", "512", "1024"]
    pictures = re.search(r'data-pictures="(\d+) of (\d+)"', dom)
    assert pictures is not None
    assert pictures[1] == pictures[2] != "0"


@pytest.mark.slow(reason="a browser loads the page")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_on_a_phone_without_scrolling_sideways(page, scheme, tmp_path):
    """Text stands out from the ground, and nothing but tables and pictures is wider than the screen."""
    probe = (
        "<script>const s = getComputedStyle(document.body); document.body.dataset.seen = "
        "[document.documentElement.scrollWidth <= innerWidth, s.color, s.backgroundColor].join('|');</script></body>"
    )
    (tmp_path / "p.html").write_text(page[1].read_text().replace("</body>", probe))
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    seen = re.search(
        r'data-seen="([^"]*)"', browse(tmp_path / "p.html", tmp_path / "b", "--window-size=500,900", *dark)
    )
    assert seen is not None
    fits, text, ground = seen[1].split("|")
    assert fits == "true"
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (text, ground)]
    assert abs(brightness[0] - brightness[1]) > 400
    assert (brightness[1] < 200) == (scheme == "dark")
