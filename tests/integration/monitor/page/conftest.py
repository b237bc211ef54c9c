"""A real Chromium with a server of the status page that the test controls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from tests.support.browsing import launched
from tests.support.snapshots import listing
from tests.support.statuspage import StatusServer

Open = Callable[..., Page]
SOON_MS = 30_000.0
"""So long a page may take to show what it is to show; Playwright's own 5 s can be missed on a loaded machine."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for the tests of a module: while it is there, this thread has an event loop that runs."""
    with sync_playwright() as playwright:
        expect.set_options(timeout=SOON_MS)
        browser = launched(playwright)
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[StatusServer]:
    server = StatusServer()
    server.board.list = listing()
    yield server
    server.close()


@pytest.fixture
def complaints() -> list[str]:
    """What the browser's console said: errors, warnings, violations of the content policy."""
    return []


@pytest.fixture
def open_page(chromium: Browser, complaints: list[str]) -> Iterator[Open]:
    """Opens an address in a context of its own and waits until the script has drawn it."""
    contexts: list[BrowserContext] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(f"{message.type}: {message.text}")

    def open_page(url: str, *, script: str = "", drawn: bool = True, **options: Any) -> Page:
        context = chromium.new_context(**{"viewport": {"width": 1360, "height": 900}, "timezone_id": "UTC"} | options)
        contexts.append(context)
        if script:
            context.add_init_script(script)
        page = context.new_page()
        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(f"exception: {error}"))
        page.goto(url)
        if drawn:
            page.wait_for_selector("#view[data-by=script] h1")
        return page

    yield open_page
    for context in contexts:
        context.close()
