"""The status page in a real browser, with the content policy that the monitor sends."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from elastic_trainer.monitor import page as monitor_page
from tests.integration.monitor.page.conftest import Open
from tests.support import snapshots
from tests.support.statuspage import StatusServer

SCHEMES = ("light", "dark")
PHONE = {"width": 320, "height": 640}

# Every frame's work with the layout that it causes, in milliseconds.
STOPWATCH = """
window.frames_ms = [];
const ask = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (callback) => ask((time) => {
  const began = performance.now();
  callback(time);
  document.body.getBoundingClientRect();
  window.frames_ms.push(performance.now() - began);
});
"""


@pytest.fixture(autouse=True)
def _quiet_console(complaints: list[str]) -> Any:
    """No test leaves anything on the console, unless it has looked at it and cleared it."""
    yield
    assert complaints == []


def fits(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


WRITTEN = """(page) => {
  const of = (root) => {
    const view = root.getElementById("view").cloneNode(true);
    for (const drawn of view.querySelectorAll(".drawn")) drawn.remove();
    return view.innerHTML.trim();
  };
  return [of(document), of(new DOMParser().parseFromString(page, "text/html"))];
}"""


@pytest.mark.parametrize("make", snapshots.SMALL.values(), ids=lambda make: make.__name__)
def test_updates_make_the_page_that_the_server_writes(
    make: Callable[[], Any], server: StatusServer, open_page: Open
) -> None:
    """Element by element, whatever was there before; nothing is left of it."""
    page = open_page(server.show(snapshots.recovering() | {"run": "r"}))
    now = make() | {"run": "r"}
    server.show(now | {"step": 1_234_567})
    expect(page.locator(".figures").first).to_contain_text("1,234,567")
    server.show(now)
    expect(page.locator(".figures").first).not_to_contain_text("1,234,567")
    mounted, written = page.evaluate(WRITTEN, monitor_page.run_page(now))
    assert mounted == written


def test_news_change_the_page(server: StatusServer, open_page: Open) -> None:
    """A snapshot from the stream is shown without loading anything again; a turn is told to screen readers."""
    page = open_page(server.show(snapshots.healthy()))
    expect(page.locator("#fresh")).to_contain_text("Live")
    expect(page.locator("#said")).to_be_empty()
    page.evaluate("window.same = true")
    server.show(snapshots.recovering() | {"run": "gpt-small-07"})
    expect(page.locator(".state")).to_contain_text("Recovering for 14 s")
    expect(page.locator(".attention")).to_contain_text("1 node is gone: node-2")
    expect(page.locator("#said")).to_have_text("Recovering. Node lost.")
    expect(page).to_have_title("Recovering: gpt-small-07, elastic-trainer")
    assert page.evaluate("window.same")
    page = open_page(server.url)
    server.board.list["runs"][0]["state"] = "failed"
    expect(page.locator("tbody tr").first).to_contain_text("Failed")
    expect(page.locator("#said")).to_have_text("gpt-small-07: Failed.")


def test_a_lost_connection_is_shown_and_recovers(server: StatusServer, open_page: Open, complaints: list[str]) -> None:
    """Nobody takes old data for new: the page says that it is cut off, and since when, and goes on by itself."""
    page = open_page(server.show(snapshots.healthy()))
    expect(page.locator("#fresh")).to_contain_text("Live")
    server.fall_silent()
    expect(page.locator("#fresh")).to_contain_text(re.compile(r"Connection lost\. This page is \d+ s old"))
    expect(page.locator("#said")).to_contain_text("Connection lost")
    expect(page.locator("body")).to_have_class("stale")
    server.come_back()
    server.show(snapshots.healthy(step=48_999))
    expect(page.locator(".figures").first).to_contain_text("48,999")
    expect(page.locator("#fresh")).to_contain_text("Live")
    expect(page.locator("#said")).to_have_text("Connected again.")
    assert all("ERR_" in each for each in complaints), complaints  # the browser's own words for requests that failed
    complaints.clear()


# Time can be put forward, and all that is said, or looks stale in between, is kept.
AHEAD = """
const now = performance.now.bind(performance);
window.ahead = 0;
performance.now = () => now() + window.ahead;
window.heard = [];
addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
  const said = document.querySelector("#said")?.textContent;
  if (said) window.heard.push(said);
  if (document.body.classList.contains("stale")) window.heard.push("stale");
}).observe(document.documentElement, { subtree: true, childList: true, characterData: true, attributes: true }));
"""


def test_a_quiet_run_is_no_lost_connection(server: StatusServer, open_page: Open) -> None:
    """A stream sends nothing where nothing happens: the page asks whether it still lives, and alarms nobody."""
    page = open_page(server.show(snapshots.healthy()), script=AHEAD)
    expect(page.locator("#fresh")).to_contain_text("Live,")
    page.evaluate("window.ahead = 10500")
    expect(page.locator("#fresh")).to_contain_text("Live by polling")
    assert page.evaluate("window.heard") == []


def test_without_a_stream_the_page_asks(server: StatusServer, open_page: Open, complaints: list[str]) -> None:
    """A proxy that refuses streams costs nothing but a second."""
    server.streams = False
    page = open_page(server.show(snapshots.healthy()))
    expect(page.locator("#fresh")).to_contain_text("Live by polling")
    server.show(snapshots.healthy(step=48_999))
    expect(page.locator(".figures").first).to_contain_text("48,999")
    assert all("404" in each for each in complaints), complaints
    complaints.clear()


def test_a_store_that_does_not_answer_is_shown(server: StatusServer, open_page: Open) -> None:
    """The monitor is reached, and knows nothing new."""
    page = open_page(server.show(snapshots.healthy(store={"connected": False, "age_s": 43.0})))
    expect(page.locator("#fresh")).to_contain_text(re.compile(r"cannot reach the store\. This page is 4\d s old"))


def test_what_cannot_be_shown_is_told(server: StatusServer, open_page: Open, complaints: list[str]) -> None:
    """A newer monitor may send something else to a page that was opened before: no old data without a word."""
    page = open_page(server.show(snapshots.healthy()))
    server.garbled = True
    server.show(snapshots.healthy(step=48_998))
    expect(page.locator("#fresh")).to_have_text("The update from the monitor cannot be shown. Reload this page.")
    expect(page.locator("body")).to_have_class("stale")
    server.garbled = False
    server.show(snapshots.healthy(step=48_999))
    expect(page.locator(".figures").first).to_contain_text("48,999")
    expect(page.locator("body")).not_to_have_class("stale")
    assert complaints
    complaints.clear()


def test_without_scripts_the_tables_are_there(server: StatusServer, open_page: Open) -> None:
    """Nodes, ranks, incidents and rounds are in the page that the server sends."""
    page = open_page(server.show(snapshots.straggling()), java_script_enabled=False, drawn=False)
    for name, rows in (("nodes", 3), ("ranks", 6), ("incidents", 3), ("rounds", 4)):
        direct = "tbody > tr:not(.inner)"
        expect(page.locator(f"table.{name} > {direct}")).to_have_count(rows)
    assert page.locator("noscript meta[http-equiv=refresh]").count() == 1
    assert page.evaluate("getComputedStyle(document.querySelector('.cell')).width") != "auto"


def test_everything_is_reached_with_the_keyboard(server: StatusServer, open_page: Open) -> None:
    """Skip link, curves and nodes: with the tab key, arrows and the space bar."""
    page = open_page(server.show(snapshots.healthy()))
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    slider = page.get_by_role("slider", name="Moment in the course of the run")
    slider.focus()
    newest = slider.get_attribute("aria-valuetext")
    page.keyboard.press("PageUp")
    assert "Worker lost" in (slider.get_attribute("aria-valuetext") or "")
    page.keyboard.press("Home")
    expect(slider).to_have_attribute("aria-valuenow", "0")
    page.keyboard.press("ArrowRight")
    expect(slider).to_have_attribute("aria-valuenow", "1")
    page.keyboard.press("Escape")
    expect(slider).to_have_attribute("aria-valuetext", newest or "")
    turn = page.get_by_role("button", name="node-0")
    turn.focus()
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    expect(turn).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Space")
    expect(turn).to_have_attribute("aria-expanded", "false")
    expect(page.locator("table.ranks")).to_have_count(2)


def test_focus_and_open_nodes_survive_news(server: StatusServer, open_page: Open) -> None:
    """Whoever reads a node is not thrown out of it every second."""
    page = open_page(server.show(snapshots.healthy()))
    turn = page.get_by_role("button", name="node-1")
    turn.focus()
    page.keyboard.press("Space")
    server.show(snapshots.healthy(step=48_999))
    expect(page.locator(".figures").first).to_contain_text("48,999")
    expect(turn).to_be_focused()
    expect(turn).to_have_attribute("aria-expanded", "false")


def test_curves_show_rounds_incidents_and_units(server: StatusServer, open_page: Open) -> None:
    """Both curves have points, every incident a mark, every round a block, and the axes say what they measure."""
    page = open_page(server.show(snapshots.healthy()))
    chart = page.locator("svg.chart")
    for curve in ("loss", "pace"):
        assert (chart.locator(f"path.{curve}").get_attribute("d") or "").count("L") > 500
    expect(chart.locator("rect.round")).to_have_count(4)
    expect(chart.locator(".mark")).to_have_count(3)
    said = chart.text_content() or ""
    assert all(words in said for words in ("loss", "step time, ms", "time, UTC", "round 5: 4"))
    page.get_by_text("1 h", exact=True).click()
    expect(chart.locator(".mark")).to_have_count(1)
    chart.hover(position={"x": 60, "y": 200})
    expect(page.locator(".readout")).to_contain_text(
        re.compile(r"23:2\d:\d\d · step [\d,]+ · loss [\d.]+ · step time \d+ ms · 6 ranks")
    )


def test_the_loss_is_drawn_on_a_logarithmic_scale(server: StatusServer, open_page: Open) -> None:
    """Where no loss is 0 or below. Its axis has powers of ten, and the last value is told."""
    run = snapshots.healthy()
    many = len(run["curves"]["loss"])
    run["curves"]["loss"] = [10.0 ** (2 - 4 * place / (many - 1)) for place in range(many)]
    page = open_page(server.show(run))
    curve, switch = page.locator("path.loss"), page.get_by_label("log scale")
    before = curve.get_attribute("d")
    page.get_by_text("log scale").click()
    expect(switch).to_be_checked()
    assert curve.get_attribute("d") != before
    heights = [float(point.split()[1]) for point in (curve.get_attribute("d") or "")[1:].split("L")]
    straight = [heights[0] + (heights[-1] - heights[0]) * place / (many - 1) for place in range(many)]
    assert heights == pytest.approx(straight, abs=0.2)
    labels = page.locator("svg.chart text").all_text_contents()
    assert {"0.01", "1", "100"} <= set(labels)
    assert "last 0.0100" in labels
    run["curves"]["loss"][-1] = -1.0
    server.show(run)
    expect(switch).to_have_count(0)


def test_the_list_is_searched_by_name_state_and_trouble(server: StatusServer, open_page: Open) -> None:
    """The search is in the URL, and survives news."""
    every = server.board.list["runs"]
    assert len(every) > monitor_page.MANY_RUNS
    page = open_page(server.url)
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(len(every))
    page.get_by_label("Find a run").fill(every[1]["run"][-5:])
    expect(rows).to_have_count(1)
    assert "find=" in page.url
    server.board.list["runs"][0]["state"] = "failed"
    page.get_by_label("Find a run").fill("FAILED")
    expect(rows.first).to_contain_text("Failed")
    page.get_by_label("Find a run").fill("no such thing")
    expect(page.locator(".empty")).to_contain_text("No run has this")
    page.get_by_label("Find a run").fill("")
    expect(rows).to_have_count(len(every))


def test_a_missing_number_breaks_the_line_and_nothing_else(server: StatusServer, open_page: Open) -> None:
    """Before the first step there is no loss; the curve begins where it is known."""
    run = snapshots.healthy()
    run["curves"]["loss"][:300] = [None] * 300
    run["curves"]["loss"][400] = None
    run["curves"]["step_s"] = [None] * 600
    page = open_page(server.show(run))
    assert (page.locator("path.loss").get_attribute("d") or "").count("M") == 2
    expect(page.locator("svg.chart")).to_contain_text("nothing known yet")


@pytest.mark.parametrize("make", [*snapshots.SMALL.values(), snapshots.large], ids=lambda make: make.__name__)
def test_nothing_sticks_out_on_a_phone(make: Callable[[], Any], server: StatusServer, open_page: Open) -> None:
    """At 320 pixels the page does not scroll sideways, with and without scripts; wide tables scroll in themselves."""
    url = server.show(make())
    assert fits(open_page(url, viewport=PHONE))
    assert fits(open_page(url, viewport=PHONE, java_script_enabled=False, drawn=False))
    assert fits(open_page(server.url, viewport=PHONE))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "make",
    [snapshots.recovering, snapshots.straggling, snapshots.failed, snapshots.large],
    ids=lambda make: make.__name__,
)
def test_the_page_is_accessible(make: Callable[[], Any], scheme: str, server: StatusServer, open_page: Open) -> None:
    """axe finds nothing: names, roles, contrast, headings, landmarks; in both color schemes, of which one is dark."""
    page = open_page(server.show(make()), color_scheme=scheme)
    color = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", color)[:3]))
    assert brightness > 700 if scheme == "light" else brightness < 100
    page.locator("summary").click()
    for shown in (page, open_page(server.url, color_scheme=scheme)):
        found = Axe().run(shown)
        assert found.violations_count == 0, found.generate_report()


def test_states_are_not_shown_by_color_alone(server: StatusServer, open_page: Open) -> None:
    """Each look has an icon and a word, each cell that does not train a letter or a sign."""
    page = open_page(server.show(snapshots.recovering()))
    for label in page.locator(".labelled").all():
        assert (label.text_content() or "").strip()
        assert label.locator("svg.icon use").count() == 1
    for cell in page.locator(".cell:not(.p-training)").all():
        assert (cell.text_content() or "").strip()


def test_nothing_moves_where_motion_is_not_wanted(server: StatusServer, open_page: Open) -> None:
    page = open_page(server.show(snapshots.healthy()), reduced_motion="reduce")
    moving = """[...document.querySelectorAll("*")]
      .filter((each) => parseFloat(getComputedStyle(each, "::before").transitionDuration) > 0).length"""
    assert page.evaluate(moving) == 0
    assert page.evaluate("document.getAnimations().length") == 0


def test_nodes_of_a_large_run_are_found(server: StatusServer, open_page: Open) -> None:
    """Those that need a look come first, any other is found by its name, and all can be shown."""
    page = open_page(server.show(snapshots.large()))
    rows = page.locator("table.nodes > tbody")
    expect(rows).to_have_count(24)
    expect(rows.nth(0)).to_contain_text("node-37")
    expect(rows.nth(1)).to_contain_text("node-101")
    page.get_by_label("Find a node").fill("node-48")
    expect(rows).to_have_count(11)
    page.get_by_label("Find a node").fill("")
    page.get_by_role("button", name="Show all 512 nodes").click()
    expect(rows).to_have_count(512)
    page.get_by_role("button", name="node-300").click()
    expect(page.locator("table.ranks tbody tr")).to_have_count(8)


@pytest.mark.parametrize(
    ("nodes", "everything"), [(8, False), (512, False), (512, True)], ids=["64 ranks", "4,096 ranks", "all nodes shown"]
)
def test_updates_are_quick(
    nodes: int, everything: bool, server: StatusServer, open_page: Open, record_property: Callable[[str, object], None]
) -> None:
    """Mounting and layout of an update. To be below 100 ms on a quiet machine, which a busy one is not held to."""
    page = open_page(server.show(snapshots.large(nodes)), script=STOPWATCH)
    if everything:
        page.get_by_role("button", name="Show all 512 nodes").click()
        expect(page.locator("table.nodes > tbody")).to_have_count(512)
    taken = []
    for turn in range(1, 6):
        page.evaluate("window.frames_ms.length = 0")
        server.show(snapshots.large(nodes, turn=turn))
        expect(page.locator(".figures").first).to_contain_text(f"{48_210 + turn:,}")
        taken.append(max(page.evaluate("window.frames_ms")))
    record_property("update_ms", round(median(taken), 1))
    print(f"update of {nodes} nodes: median {median(taken):.1f} ms, worst {max(taken):.1f} ms")
    assert min(taken) < 1000
