"""The page over the real server, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sim.run import simulate
from sim.scenario import Scenario
from tests.explore.browser import Opened, expect, figure, save_as, settle

pytestmark = pytest.mark.slow(reason="a browser loads the page")
SMALL = Scenario.default().with_set("workload.limit=200")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    for package in ("starlette", "uvicorn", "httptools"):
        pytest.importorskip(package)
    from sim.explore.notebook import explore

    page = explore(SMALL, out=tmp_path_factory.mktemp("explored"))
    yield page.url
    page.close()


@pytest.fixture
def opened(browser: Any, url: str) -> Iterator[Opened]:
    pages = Opened(browser, url)
    yield pages
    pages.close()


def _ms(page: Any, name: str) -> float:
    found = re.search(r"([\d.]+) ms", figure(page, name).inner_text())
    assert found is not None
    return float(found[1])


def test_the_page_shows_the_figures_of_the_command(opened: Opened) -> None:
    page = opened("#set=replicas%3D2")
    settle(page)
    summary = simulate(SMALL.with_set("replicas=2")).summary
    assert _ms(page, "TTFT, mean") == float(f"{1e3 * summary['ttft_s']['mean']:.3g}")
    assert _ms(page, "TPOT, mean") == float(f"{1e3 * summary['tpot_s']['mean']:.3g}")


def test_a_refused_setting_has_the_sentence_of_the_scenario_beside_its_control(opened: Opened) -> None:
    page = opened()
    box = page.get_by_label("Memory of the GPU (share)")
    box.fill("1.5")
    box.press("Enter")
    page.wait_for_selector(".control.refused")
    expect(page.locator(".control.refused .sentence")).to_contain_text("1.5", use_inner_text=True)


def test_every_view_fills_and_an_export_of_it_opens_from_disk(opened: Opened, tmp_path: Path) -> None:
    page = opened("#over=parallel.tensor%3D%5B1%2C2%5D", accept_downloads=True)
    page.set_default_timeout(240_000)
    settle(page)
    filled = {
        "Answer": "2 of 2 shown",
        "Requests": "200 of 200 requests",
        "Why": "Each was found by running it",
        "Speed-up against theory": "event loop",
    }
    for name, text in filled.items():
        page.get_by_role("tab", name=name).click()
        page.wait_for_selector(f"#view >> text={text}")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    alone = opened("", url=save_as(download.value, tmp_path).as_uri())
    assert _ms(alone, "TTFT, mean") == _ms(page, "TTFT, mean")
    for name in ("Answer", "Requests", "Why", "Speed-up against theory"):
        alone.get_by_role("tab", name=name).click()
        expect(alone.get_by_text("This file was written without")).to_have_count(0)


def test_other_traffic_brings_its_own_settings(opened: Opened) -> None:
    page = opened()
    page.get_by_label("Traffic", exact=True).select_option(label="conversations of several turns")
    page.get_by_role("slider", name="Sessions").wait_for()
    settle(page)
    expect(page.get_by_label("Prompt (tokens)", exact=True)).to_have_count(0)
