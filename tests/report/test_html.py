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


def browse(page, folder):
    """The page as a browser sees it after its scripts have run."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs chromium, which is not installed")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--dump-dom"]
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=600, check=True).stdout


@pytest.mark.slow
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
