"""A real browser for tests of the page: Chromium by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = "ROOFTRACE_CHROMIUM"
"""The environment variable that names the browser, where it is not the `chromium` or `google-chrome` of the path."""


def expect(locator: Any) -> Any:
    """Playwright's assertions on *locator*, which wait for what is to become true."""
    from playwright.sync_api import expect as of

    of.set_options(timeout=20_000)
    return of(locator)


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser, while the tests of one module run: as long as it runs, nothing else in the process can run an event loop."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install -e '.[test]')")
    found = os.environ.get(CHROMIUM) or shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip(f"there is no Chromium here: apt-get install chromium, or name one in {CHROMIUM}")
    with api.sync_playwright() as playwright:
        # No sandbox of its own: in a container the browser runs as root.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """Pages of one test; at its end none of them may have written an error to its console or loaded anything from elsewhere."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser, self._url = browser, url
        self._contexts: list[Any] = []
        self.errors: list[str] = []
        self.loaded: list[str] = []

    def __call__(
        self, hash_: str = "", *, url: str | None = None, width: int = 1280, height: int = 900, **context: Any
    ) -> Page:
        """The page with *hash_* behind its address, once its exact answer and what stands beside it are there."""
        made = self._browser.new_context(viewport={"width": width, "height": height}, **context)
        made.set_default_timeout(30_000)
        self._contexts.append(made)
        page = made.new_page()
        page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.loaded.append(request.url))
        page.goto((url or self._url) + hash_)
        page.wait_for_selector("main .figures")
        return page

    def close(self) -> None:
        for each in self._contexts:
            each.close()
        elsewhere = [url for url in self.loaded if not url.startswith((self._url, "data:", "blob:", "file:"))]
        assert not elsewhere, elsewhere
        assert not self.errors, self.errors


def figure(page: Page, name: str) -> Any:
    """The card of a figure by its name on the page."""
    return page.locator(".figure").filter(has=page.get_by_text(name, exact=True))


def settle(page: Page) -> None:
    """Wait until the answer is exact."""
    page.wait_for_selector(".answer[aria-busy=false]")


def chart(page: Page, title: str) -> Any:
    return page.locator("figure.chart").filter(has=page.get_by_role("heading", name=title, exact=True))


def drag_over(page: Page, sheet: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Choose a range on a chart; places are shares of its width and height."""
    sheet.scroll_into_view_if_needed()
    box = sheet.bounding_box()
    assert box is not None
    points = [(box["x"] + share[0] * box["width"], box["y"] + share[1] * box["height"]) for share in (start, end)]
    page.mouse.move(*points[0])
    page.mouse.down()
    page.mouse.move(*points[1], steps=4)
    page.mouse.up()


def save_as(download: Any, folder: Path) -> Path:
    target = folder / download.suggested_filename
    download.save_as(target)
    return target
