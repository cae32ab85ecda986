"""The page of `rooftrace explore` in a real browser, over a server whose answers are made up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.explore.browser import Opened, chart, drag_over, expect, figure, save_as, settle
from tests.explore.fake_server import Fake, answer, document, recorded

RATE = "workload.rate_per_s"
LAYOUT = "deployment.tensor_parallel"


@pytest.fixture
def fake() -> Iterator[Fake]:
    made = Fake()
    server = made.serve()
    yield made
    for each in made.held_back.values():
        each.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def opened(browser: Any, fake: Fake) -> Iterator[Opened]:
    pages = Opened(browser, fake.url)
    yield pages
    pages.close()


@pytest.mark.slow(reason="a browser loads the page")
def test_the_first_paint_has_the_answer_and_asks_for_no_run(opened: Opened, fake: Fake) -> None:
    page = opened()
    expect(figure(page, "TTFT, p95")).to_contain_text("378 ms", use_inner_text=True)
    expect(figure(page, "TTFT, p95")).to_contain_text("348 to 409 ms", use_inner_text=True)
    expect(page.get_by_text("stack and device measured")).to_be_visible()
    assert fake.states_asked("run") == []


@pytest.mark.slow(reason="a browser loads the page")
def test_a_moved_slider_shows_an_estimate_and_then_the_exact_run(opened: Opened, fake: Fake) -> None:
    page = opened()
    let_go = fake.hold_back("run")
    page.get_by_role("slider", name="Rate").press("ArrowRight")
    page.wait_for_selector(".figure.estimate")
    expect(figure(page, "TTFT, p95")).to_contain_text("≈", use_inner_text=True)
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "true")
    let_go.set()
    settle(page)
    expect(page.locator(".figure.estimate")).to_have_count(0)
    moved = fake.states_asked("run")[-1][RATE]
    assert moved > 6.0
    assert page.get_by_label("Rate (requests/s)").input_value() == str(moved)


@pytest.mark.slow(reason="a browser loads the page")
def test_a_newer_state_ends_the_run_of_the_one_before(opened: Opened, fake: Fake) -> None:
    page = opened()
    let_go = fake.hold_back("run")
    slider = page.get_by_role("slider", name="Rate")
    for _ in range(4):
        asked = len(fake.states_asked("run"))
        slider.press("ArrowRight")
        page.wait_for_function("count => document.querySelector('.figure.estimate')", arg=asked)
        _until(page, lambda asked=asked: len(fake.states_asked("run")) > asked)
    _until(page, lambda: fake.ended.count("run") == 3)
    let_go.set()
    settle(page)
    last = fake.states_asked("run")[-1]
    assert (
        f"{1e3 * answer({'set': last})['figures']['ttft_p95_s']['value']:.0f} ms"
        in figure(page, "TTFT, p95").inner_text()
    )


@pytest.mark.slow(reason="a browser loads the page")
def test_a_slider_that_moves_on_and_on_asks_for_few_runs(opened: Opened, fake: Fake) -> None:
    page = opened()
    slider = page.get_by_role("slider", name="Rate")
    took_ms = page.evaluate(
        """async () => {
            const slider = document.querySelector('input[type=range][aria-label="Rate"]');
            const begun = performance.now();
            for (let place = 100; place < 200; place++) {
                slider.value = place;
                slider.dispatchEvent(new Event('input', {bubbles: true}));
                await new Promise((go) => setTimeout(go, 5));
            }
            return performance.now() - begun;
        }"""
    )
    _until(page, lambda: len(fake.states_asked("run")) > 0)
    settle(page)
    assert len(fake.states_asked("run")) <= 2 + took_ms / 60
    assert fake.states_asked("run")[-1][RATE] == float(page.get_by_label("Rate (requests/s)").input_value())
    assert slider.input_value() == "199"


@pytest.mark.slow(reason="a browser loads the page")
def test_a_refused_setting_says_its_sentence_beside_its_control(opened: Opened) -> None:
    page = opened()
    box = page.get_by_label("Tensor parallel (devices)")
    box.fill("3")
    box.press("Enter")
    page.wait_for_selector(".control.refused")
    expect(box).to_have_attribute("aria-invalid", "true")
    beside = page.locator(f'[id="{box.get_attribute("aria-describedby")}"]')
    expect(beside).to_have_text(
        "tensor_parallel divides the 32 attention heads of llama-3.1-8b; got 3", use_inner_text=True
    )
    expect(figure(page, "TTFT, p95")).to_contain_text("378 ms", use_inner_text=True)
    box.fill("2")
    box.press("Enter")
    settle(page)
    expect(page.locator(".control.refused")).to_have_count(0)


@pytest.mark.slow(reason="a browser loads the page")
def test_the_state_is_in_the_url_and_comes_back_from_it(opened: Opened, fake: Fake) -> None:
    page = opened()
    page.get_by_label("Device", exact=True).select_option("a100-80g")
    page.get_by_role("slider", name="Rate").press("ArrowRight")
    page.get_by_role("tab", name="Why").click()
    settle(page)
    page.wait_for_url(re.compile(r"#set=hardware.*view=why"))
    again = opened(f"#{page.url.partition('#')[2]}")
    settle(again)
    assert fake.states_asked("run")[-1].keys() == {"hardware", RATE}
    assert again.get_by_label("Device", exact=True).locator("option:checked").inner_text() == "a100-80g"
    assert again.get_by_label("Rate (requests/s)").input_value() == page.get_by_label("Rate (requests/s)").input_value()
    expect(again.get_by_role("tab", name="Why")).to_have_attribute("aria-selected", "true")


@pytest.mark.slow(reason="a browser loads the page")
def test_going_back_opens_the_state_before(opened: Opened, fake: Fake) -> None:
    page = opened()
    page.get_by_role("button", name="Open h100-sxm tp2").click()
    settle(page)
    assert page.get_by_label("Tensor parallel (devices)").input_value() == "2"
    page.go_back()
    page.wait_for_function("() => document.getElementById('set-deployment.tensor_parallel').value === '1'")
    settle(page)
    assert fake.states_asked("run")[-1] == {}


@pytest.mark.slow(reason="a browser loads the page")
def test_a_range_of_time_filters_the_distributions_and_the_requests(opened: Opened) -> None:
    page = opened()
    drag_over(page, chart(page, "Requests").locator(".sheet"), (0.3, 0.5), (0.55, 0.5))
    page.wait_for_selector("text=chosen requests")
    of = re.search(r"(\d+) of 300 requests are chosen", page.get_by_label("Distributions").inner_text())
    assert of is not None
    assert 0 < int(of[1]) < 150
    page.get_by_role("tab", name="Requests").click()
    expect(page.get_by_role("region", name="Requests", exact=True)).to_contain_text(
        f"{of[1]} of 300 requests", use_inner_text=True
    )
    page.get_by_role("button", name="Show all").click()
    page.wait_for_selector("text=300 of 300 requests")


@pytest.mark.slow(reason="a browser loads the page")
def test_a_range_of_latency_shows_when_those_requests_came(opened: Opened) -> None:
    page = opened()
    drag_over(page, chart(page, "Time to first token").last.locator(".sheet"), (0.5, 0.5), (0.7, 0.5))
    page.wait_for_selector("text=when the")
    assert re.search(r"when the \d+ chosen requests came", page.get_by_label("The run in time").inner_text())


@pytest.mark.slow(reason="a browser loads the page")
def test_ranges_of_throughput_and_of_load_filter_the_candidates(opened: Opened) -> None:
    page = opened()
    table = page.get_by_label("Candidates", exact=True)
    page.wait_for_selector("text=10 of 10 shown")
    drag_over(page, chart(page, "Throughput against speed for a user").locator(".sheet"), (0.5, 0.05), (0.98, 0.85))
    page.wait_for_function("() => !document.body.innerText.includes('10 of 10 shown')")
    few = re.search(r"(\d+) of 10 shown", table.inner_text())
    assert few is not None
    assert 0 < int(few[1]) < 8
    page.get_by_role("button", name="Show all").click()
    page.wait_for_selector("text=10 of 10 shown")
    drag_over(page, chart(page, "Goodput").locator(".sheet"), (0.12, 0.5), (0.3, 0.5))
    page.wait_for_function("() => !document.body.innerText.includes('10 of 10 shown')")


@pytest.mark.slow(reason="a browser loads the page")
def test_candidates_whose_run_holds_the_slo_come_first_and_the_cheapest_on_top(opened: Opened) -> None:
    page = opened()
    page.wait_for_selector("text=10 of 10 shown")
    names = page.locator(".ranking tbody th").all_inner_texts()
    assert names[0].endswith("h100-sxm tp1")
    assert [name for name in names if name.endswith("tp3")] == names[-2:]
    assert names.index("a100-80g tp1") == len(names) - 3
    page.get_by_role("button", name="Cost", exact=True).click()
    page.wait_for_selector("th[aria-sort=ascending]")
    assert page.locator(".ranking tbody th").first.inner_text() == "a100-80g tp1"


@pytest.mark.slow(reason="a browser loads the page")
def test_what_candidates_vary_is_chosen_from_the_settings(opened: Opened, fake: Fake) -> None:
    page = opened()
    page.get_by_role("combobox", name="Vary").select_option(label="Device")
    page.get_by_role("checkbox", name="h200-sxm").check()
    page.get_by_role("checkbox", name="a100-80g").check()
    page.wait_for_selector("text=2 of 2 shown")
    assert [state["over"] for path, state in fake.asked if path == "candidates"][-1] == {
        "hardware": ["h200-sxm", "a100-80g"]
    }


@pytest.mark.slow(reason="a browser loads the page")
def test_a_dropped_benchmark_lies_over_the_curves_and_a_fit_moves_them(opened: Opened, fake: Fake) -> None:
    page = opened()
    page.evaluate(
        """() => { const files = new DataTransfer(); files.items.add(new File(['{}'], 'mine.json'));
        document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true})); }"""
    )
    page.wait_for_selector(".legend >> text=mine.json")
    expect(chart(page, "Time to first token").first.locator(".points.cross:has(.error) path")).to_have_count(3)
    page.get_by_role("tab", name="Yours over ours").click()
    expect(page.get_by_label("Points of mine.json")).to_contain_text("−13 %", use_inner_text=True)
    page.get_by_role("button", name="Fit to these points").click()
    page.wait_for_selector("text=Mean absolute error over 3 runs")
    settle(page)
    assert fake.states_asked("run")[-1] == {RATE: 7.0}
    assert [state["file"] for path, state in fake.asked if path == "fit"] == ["mine.json"]


@pytest.mark.slow(reason="a browser loads the page")
def test_a_held_state_stands_beside_the_later_one_with_the_difference(opened: Opened) -> None:
    page = opened()
    page.get_by_role("button", name="Hold as A").click()
    page.get_by_label("Tensor parallel (devices)").fill("2")
    page.get_by_label("Tensor parallel (devices)").press("Enter")
    settle(page)
    assert "−100 %" not in figure(page, "Devices").inner_text()
    expect(figure(page, "Devices")).to_contain_text("+100 %", use_inner_text=True)
    page.get_by_role("tab", name="Two states").click()
    page.wait_for_selector("text=The same 2,500 requests, one by one.")
    shown = page.get_by_role("row", name="TTFT, mean").inner_text().split()
    assert shown[2:4] + shown[8:10] == ["151", "ms", "96", "ms"]
    assert " ".join(shown).endswith("−36.6 % −37.6 % to −35.6 % faster")
    expect(page.get_by_text("Tensor parallel: A 1, now 2")).to_be_visible()
    again = opened(f"#{page.url.partition('#')[2]}")
    again.wait_for_selector("text=Tensor parallel: A 1, now 2")
    again.wait_for_selector("text=−36.6 %")


@pytest.mark.slow(reason="a browser loads the page")
def test_why_shows_shares_that_add_up_what_ifs_and_sources(opened: Opened, fake: Fake) -> None:
    page = opened("#view=why")
    page.wait_for_selector("text=Each was found by running it")
    shares = [float(text.rstrip(" %")) for text in page.locator(".causes tbody td:nth-child(2) span").all_inner_texts()]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    expect(page.get_by_role("row", name="a tenth more bandwidth")).to_contain_text("−6 %", use_inner_text=True)
    page.get_by_role("button", name=re.compile("^datasheet")).click()
    rows = page.get_by_label("Table of sources").locator("tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("3.35 TB/s", use_inner_text=True)


@pytest.mark.slow(reason="a browser loads the page")
def test_without_the_why_view_no_what_if_is_run(opened: Opened, fake: Fake) -> None:
    fake.hold_back("explain")
    page = opened()
    page.wait_for_selector("text=Memory bandwidth bounds it")
    _until(page, lambda: "explain" in fake.ended)


@pytest.mark.slow(reason="a browser loads the page")
def test_theories_are_asked_for_when_they_are_looked_at(opened: Opened, fake: Fake) -> None:
    page = opened()
    assert fake.states_asked("theory") == []
    page.get_by_role("tab", name="Speed-up against theory").click()
    page.wait_for_selector("text=speculation over the batch")
    page.get_by_role("button", name="Pipeline bubbles").click()
    page.wait_for_selector("text=bubbles over the batch")
    assert [state["view"] for path, state in fake.asked if path == "theory"] == ["speculation", "bubbles"]


@pytest.mark.slow(reason="a browser loads the page")
def test_a_request_opens_and_the_run_can_be_taken_to_perfetto(opened: Opened) -> None:
    page = opened("#view=requests")
    page.get_by_role("button", name="Open request 2", exact=True).click()
    expect(page.get_by_role("region", name="Request 2", exact=True)).to_contain_text("queued", use_inner_text=True)
    link = page.get_by_role("link", name="Timeline of requests and iterations for Perfetto")
    expect(link).to_have_attribute("href", "/api/timeline?key=k-6.0-1.0")


@pytest.mark.slow(reason="a browser loads the page")
def test_the_page_works_with_the_keyboard_alone(opened: Opened, fake: Fake) -> None:
    page = opened()
    page.wait_for_selector("text=9 points.")
    page.get_by_role("tab", name="Answer").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Requests")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowLeft")
    sheet = chart(page, "Time to first token").first.locator(".sheet")
    sheet.focus()
    page.keyboard.press("ArrowRight")
    expect(sheet.locator(".readout[role=status]")).to_contain_text("Load 2 req/s", use_inner_text=True)
    for _ in range(4):
        page.keyboard.press("Shift+ArrowRight")
    page.get_by_text("A range is chosen").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("A range is chosen").wait_for(state="detached")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    settle(page)
    assert fake.states_asked("run")[-1] == {RATE: 2}
    page.get_by_role("button", name="Copy as …").press("Enter")
    page.keyboard.press("Escape")
    assert page.get_by_role("button", name="Copy as …").evaluate("button => button === document.activeElement")


@pytest.mark.slow(reason="a browser loads the page")
def test_screen_readers_hear_exact_answers_alone(opened: Opened, fake: Fake) -> None:
    page = opened()
    let_go = fake.hold_back("run")
    said = page.locator(".answer > [aria-live=polite]")
    page.get_by_role("slider", name="Rate").press("ArrowRight")
    page.wait_for_selector(".figure.estimate")
    let_go.set()
    settle(page)
    expect(said).to_contain_text("Exact answer: TTFT, mean")


@pytest.mark.slow(reason="a browser loads the page")
def test_the_state_is_copied_as_a_scenario_a_command_the_servers_command_and_a_manifest(opened: Opened) -> None:
    page = opened("", permissions=["clipboard-read", "clipboard-write"])
    wanted = answer({})["commands"]
    for label, name in {
        "Scenario (YAML)": "scenario",
        "Command of rooftrace": "run",
        "Command of the server": "server",
        "Manifest": "manifest",
    }.items():
        page.get_by_role("button", name="Copy as …").click()
        page.get_by_role("button", name=label, exact=True).click()
        page.wait_for_function(f"() => document.body.innerText.includes({label!r} + ' copied.')")
        assert page.evaluate("navigator.clipboard.readText()") == wanted[name]


@pytest.mark.slow(reason="a browser loads the page")
def test_an_export_opens_from_disk_without_a_server(browser: Any, opened: Opened, fake: Fake, tmp_path: Path) -> None:
    page = opened()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    file = save_as(download.value, tmp_path)
    asked = len(fake.asked)
    page.close()
    alone = opened("", url=file.as_uri())
    settle(alone)
    expect(figure(alone, "TTFT, p95")).to_contain_text("378 ms", use_inner_text=True)
    assert alone.get_by_label("Device", exact=True).is_disabled()
    alone.wait_for_selector("text=9 points.")
    for name, text in {
        "Why": "Each was found by running it",
        "Speed-up against theory": "speculation over the batch",
        "Requests": "300 of 300 requests",
    }.items():
        alone.get_by_role("tab", name=name).click()
        alone.wait_for_selector(f"text={text}")
    assert len(fake.asked) == asked
    assert all(url.startswith(("file:", "data:")) for url in opened.loaded[opened.loaded.index(file.as_uri()) :])


@pytest.mark.slow(reason="a browser loads the page")
def test_an_export_without_some_figures_says_so(opened: Opened, tmp_path: Path) -> None:
    data = recorded({"set": {}})
    del data["events"]["/api/curve"]
    file = tmp_path / "part.html"
    file.write_text(document(data, alone=True), encoding="utf-8")
    page = opened("", url=file.as_uri())
    expect(page.get_by_label("Latency against load")).to_contain_text(
        "This file was written without these figures", use_inner_text=True
    )


@pytest.mark.slow(reason="a browser loads the page")
def test_colours_follow_the_system_until_the_button_is_pressed(opened: Opened) -> None:
    def ground(page: Any) -> str:
        return page.evaluate("getComputedStyle(document.documentElement).backgroundColor")

    page = opened("", color_scheme="dark")
    dark = ground(page)
    page.get_by_role("button", name="Colours: system").click()
    assert ground(page) == dark
    page.get_by_role("button", name="Colours: dark").click()
    light = ground(page)
    assert light != dark
    page.reload()
    page.wait_for_selector("main .figures")
    assert ground(page) == light


@pytest.mark.slow(reason="a browser loads the page")
def test_nothing_is_wider_than_a_phone(opened: Opened, fake: Fake) -> None:
    fake.data["benches"] = recorded({})["benches"]
    page = opened("#held=", width=390, height=844)
    settle(page)
    page.locator("aside summary").first.click()
    expect(page.get_by_label("Rate (requests/s)")).to_be_visible()
    for tab in page.get_by_role("tab").all():
        tab.click()
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab.inner_text()
        box = tab.bounding_box()
        assert 0 <= box["x"] < 390


@pytest.mark.slow(reason="a browser loads the page")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(opened: Opened, fake: Fake, scheme: str) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed (pip install -e '.[test]')"
    )
    fake.data["benches"] = recorded({})["benches"]
    fake.data["watch"] = {"where": "http://fleet/metrics"}
    page = opened(f"#held=&set={LAYOUT}%3D2", color_scheme=scheme)
    settle(page)
    for tab in page.get_by_role("tab").all():
        tab.click()
        page.wait_for_timeout(200)
        found = axe.Axe().run(page)
        assert found.violations_count == 0, f"{tab.inner_text()}: {found.generate_report()}"


@pytest.mark.slow(reason="a browser loads the page")
def test_a_watched_fleet_is_shown_first_and_again_when_it_changes(opened: Opened, fake: Fake) -> None:
    fake.data["watch"] = {"where": "http://fleet/metrics"}
    let_go = fake.hold_back("watch")
    page = opened(width=500)
    expect(page.get_by_role("tab", name="Now")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_text("It would start 1 machine.").first).to_be_visible()
    expect(page.get_by_text("3 machines serve the forecast.")).to_be_visible()
    expect(figure(page, "Requests that came")).to_contain_text("2 req/s", use_inner_text=True)
    expect(chart(page, "Requests a second, seen and forecast")).to_contain_text("forecast", use_inner_text=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 500
    let_go.set()
    expect(figure(page, "Requests that came")).to_contain_text("2.5 req/s", use_inner_text=True)
    # Who does not see the page is told when the decision changes.
    expect(page.get_by_role("status")).to_have_text("It would leave the 3 machines that there are.")
    expect(page.get_by_role("alert")).to_contain_text("it is gone. What follows is what was seen last.")


@pytest.mark.slow(reason="a browser loads the page")
def test_a_page_that_watches_nothing_has_no_view_of_now(opened: Opened, fake: Fake) -> None:
    page = opened("#view=now")
    expect(page.get_by_role("tab", name="Answer")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_role("tab", name="Now")).to_have_count(0)
    assert fake.states_asked("watch") == []


def _until(page: Any, holds: Any) -> None:
    """Wait until the server has seen something."""
    for _ in range(500):
        if holds():
            return
        page.wait_for_timeout(20)
    raise AssertionError("it did not happen in ten seconds")
