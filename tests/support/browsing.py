"""The list of runs as a browser draws it, on a wide screen and on a phone.

*Runs in* a test. *Owns* a Chromium with one page for each width. *Fails by* a skip where there is no Chromium.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from playwright.sync_api import Browser, Page, Playwright, sync_playwright

from tests.support.requirements import find, needs

WIDTHS = (1280, 390)
# What of each row is seen: where it begins, and whether its third cell lies on the screen without scrolling sideways.
_ROWS = """() => [...document.querySelectorAll("table.runs tbody tr")].map((row) => {
  return {
    run: row.querySelector("th").innerText.trim(),
    state: row.cells[1].innerText.trim(),
    needs: row.cells[2].innerText.trim(),
    sick: row.classList.contains("sick"),
    top: row.getBoundingClientRect().top,
    seen: row.cells[2].getBoundingClientRect().left < document.documentElement.clientWidth,
  };
})"""


@dataclass(frozen=True, slots=True)
class Row:
    """One run as it stands on the page."""

    run: str
    state: str
    needs: str
    sick: bool
    top: float
    seen: bool
    """Whether what it needs is on the screen."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The page with the list of runs, in a window of ``width`` pixels."""

    width: int
    page: Page

    @property
    def title(self) -> str:
        """Of the window."""
        return str(self.page.title())

    def rows(self) -> list[Row]:
        """From top to bottom."""
        return sorted((Row(**each) for each in self.page.evaluate(_ROWS)), key=lambda row: row.top)


def launched(playwright: Playwright) -> Browser:
    """Chromium without a window, as a program of its own where there is one: it does the same with half of the work."""
    path = find("chromium-headless-shell") or needs("chromium", "the status page is tested in a real browser")
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])


@contextmanager
def overviews(url: str, widths: tuple[int, ...] = WIDTHS) -> Iterator[list[Overview]]:
    """The same page at each of ``widths``, kept up to date by its script."""
    with sync_playwright() as playwright:
        browser = launched(playwright)
        found = []
        for width in widths:
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(url)
            page.wait_for_selector("#view[data-by=script] h1")
            found.append(Overview(width, page))
        yield found
        browser.close()
