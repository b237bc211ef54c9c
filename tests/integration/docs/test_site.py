"""The documentation as its readers get it: built strictly, searched in a real browser, fit for a phone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.support.browsing import launched
from tests.support.pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address on this machine."""
    directory = tmp_path_factory.mktemp("site")
    call = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(call, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=directory))
    threading.Thread(target=server.serve_forever, name="site", daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = launched(playwright)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    yield page
    page.close()


@pytest.mark.parametrize(
    ("words", "leads_to"),
    [("hang_timeout", "reference/rendezvous/"), ("steps without a block", "framework-loops"), ("quota", "deploy/")],
)
def test_a_search_leads_to_the_page(words: str, leads_to: str, site: str, page: Page) -> None:
    page.goto(site)
    box = page.get_by_role("textbox", name="Search")
    ready = page.locator(".md-search-result__meta")  # words that are typed before that are lost
    expect(ready).to_have_text("Type to start searching", timeout=30_000)
    box.press_sequentially(words)  # each key is an event, which is what the search waits for
    found = page.locator(f"a.md-search-result__link[href*='{leads_to}']").first
    expect(found).to_be_visible(timeout=30_000)
    found.click()
    expect(page).to_have_url(re.compile(leads_to))


@pytest.mark.parametrize("path", ["", "reference/session/", "reference/command-line/", "tutorials/train/"])
def test_a_phone_shows_a_page_without_scrolling_sideways(path: str, site: str, page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(site + path)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
