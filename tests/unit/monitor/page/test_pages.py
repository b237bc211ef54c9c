"""The pages as the server writes them, read by a strict parser."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest

from elastic_trainer.model import Cause, Phase
from elastic_trainer.monitor import page
from elastic_trainer.monitor.page.view import NAMES
from elastic_trainer.telemetry.families import NODE_STATES, RUN_STATES
from tests.support import snapshots

Element = ElementTree.Element


def parsed(html: str) -> Element:
    """The page; fails if it is not well-formed."""
    return ElementTree.fromstring(html)


def words(element: Element | None) -> str:
    return "" if element is None else " ".join("".join(element.itertext()).split())


def part(html: str, name: str) -> Element:
    """The section that has the heading ``name``."""
    return next(each for each in parsed(html).iter("section") if words(each.find("h2")) == name)


def table(html: str, name: str) -> list[list[str]]:
    """The rows of the first table in a section."""
    rows = part(html, name).findall(".//table")[0].findall("tbody/tr")
    return [[words(cell) for cell in row] for row in rows]


@pytest.mark.parametrize("make", [*snapshots.SMALL.values(), snapshots.large], ids=lambda make: make.__name__)
def test_every_page_is_well_formed_and_safe(make: Callable[[], Any]) -> None:
    """Whatever the snapshot holds: no script but the page's own, no handler, no style that the policy would refuse."""
    root = parsed(page.run_page(make()))
    scripts = list(root.iter("script"))
    assert [script.get("src") for script in scripts] == ["../static/page.js"]
    assert words(scripts[0]) == ""
    for element in root.iter():
        assert not [name for name in element.attrib if name.startswith("on") or name == "style"]
        assert not str(element.get("href", "")).lower().startswith("javascript")
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))


def test_hostile_names_are_text() -> None:
    """Names, reasons and states with markup in them are read as they are written."""
    html = page.run_page(snapshots.hostile())
    assert "<script>alert" not in html
    assert snapshots.HOSTILE in words(part(html, "Nodes and ranks"))
    assert snapshots.HOSTILE in words(part(html, "Incidents"))
    assert words(parsed(html).find("head/title")).startswith("</title><script>")


def test_the_name_of_a_run_is_quoted_in_its_link() -> None:
    """A name cannot lead out of ``runs/``."""
    html = page.runs_page({"runs": [{"run": "../../a b/<c>", "state": "training"}]})
    assert [link.get("href") for link in parsed(html).iter("a") if link.get("class") is None] == [
        "runs/..%2F..%2Fa%20b%2F%3Cc%3E"
    ]


def test_the_first_lines_say_how_the_run_is() -> None:
    """State, since when, who is missing, what happened last and what was lost, in words."""
    html = page.run_page(snapshots.recovering())
    said = words(parsed(html).find(".//section[@class='verdict']"))
    assert "Recovering for 14 s" in said
    assert "node-2 was lost" in said
    look = words(part(html, "Needs attention"))
    assert "1 node is gone: node-2 (heard 21 s ago)." in look
    assert "node-3 is warming up." in look
    last = words(part(html, "Last incident"))
    assert "Node lost 14 s ago" in last
    assert "node-2, ranks 4, 5" in last


def test_what_was_lost_is_said() -> None:
    """Steps lost, or that none was, and how long training stood still, from the last step on."""
    run = snapshots.healthy()
    said = "No step was lost. Training stood still for 810 ms: 80 ms until it was noticed, 310 ms to regroup, 420 ms to"
    assert said in words(part(page.run_page(run), "Last incident"))
    run["incidents"] = run["incidents"][2:]
    said = "12 steps were lost. Training stood still for 8.2 s: 6.1 s until it was noticed, 1.4 s to regroup, 700 ms to"
    assert said in words(part(page.run_page(run), "Last incident"))


def test_the_sentences_of_what_needs_attention_are_shown() -> None:
    """In the order in which the snapshot has them, and the node that they are of is the first."""
    look = part(page.run_page(snapshots.straggling()), "Needs attention")
    assert [words(item) for item in look.iter("li")] == [
        "1 rank makes no progress: rank 3 on node-1 (training, for 1 min 14 s).",
        "The last 2 saves failed.",
    ]
    assert table(page.run_page(snapshots.straggling()), "Nodes and ranks")[0][0].startswith("node-1")


def test_nothing_needs_a_look_when_all_is_well_or_over() -> None:
    """A calm run says so, and an ended one has nothing to look at."""
    assert "Nothing: no node is missing, no rank is slow." in words(
        part(page.run_page(snapshots.healthy()), "Needs attention")
    )
    ended = snapshots.recovering() | {"state": "succeeded", "attention": []}
    assert "The run has ended." in words(part(page.run_page(ended), "Needs attention"))


def test_the_journal_becomes_rounds() -> None:
    """A round has a line for each of its transitions; the page has one row, with what began it and what ended it."""
    rows = table(page.run_page(snapshots.healthy()), "Rounds")
    assert [row[0] for row in rows] == ["7", "6", "5", "4"]
    assert rows[0][1:4] == ["active", "21 min ago", "21 min"]
    assert rows[1][1] == "broken"
    assert rows[1][6] == "3 nodes are readyworker 3 of node-1 ended with signal 9"
    assert rows[2][1:4] == ["followed by the next", "2 h 14 min ago", "1 h 9 min"]


def test_incidents_have_their_durations() -> None:
    """Who, which rounds, how many ranks, what was lost, how long. A planned change is none."""
    newest, lost = table(page.run_page(snapshots.healthy()), "Incidents")
    assert newest[1].startswith("Worker lost: node-1, rank 3")
    assert newest[2:6] == ["6 → 7", "6", "0", "810 ms"]
    assert lost[4] == "12"
    assert lost[6] == "6.1 s 1.4 s 700 ms"


def test_a_monitor_that_came_later_goes_by_the_journal() -> None:
    """It has not seen the state begin, but the journal tells when."""
    said = words(parsed(page.run_page(snapshots.healthy(state_s=None))).find(".//section[@class='verdict']"))
    assert "Training for 21 min" in said


def test_an_empty_run_says_what_is_not_there() -> None:
    """No heading stands above nothing."""
    html = page.run_page(snapshots.empty())
    assert "No node is there." in words(part(html, "Nodes and ranks"))
    assert "No step has been seen yet." in words(part(html, "Course"))
    for name in ("Time of all ranks", "Checkpoints", "Incidents", "Rounds"):
        assert len(words(part(html, name))) > len(name) + 5


def test_an_unreached_store_is_named() -> None:
    """Old data is never shown as if it were new."""
    html = page.run_page(snapshots.healthy(store={"connected": False, "age_s": 43.0}))
    assert "cannot reach the store: this page is 43 s old." in words(parsed(html).find(".//header"))


def test_without_scripts_the_page_renews_itself() -> None:
    """Only there: the script does better."""
    root = parsed(page.run_page(snapshots.healthy()))
    metas = [meta for meta in root.iter("meta") if meta.get("http-equiv") == "refresh"]
    assert [meta.get("content") for meta in metas] == ["10"]
    assert metas == root.findall("head/noscript/meta")


def test_headers_have_a_scope_and_headings_an_order() -> None:
    """Screen readers tell by these which number belongs to what."""
    for html in (page.run_page(snapshots.straggling()), page.runs_page(snapshots.listing())):
        root = parsed(html)
        assert all(header.get("scope") in ("col", "row") for header in root.iter("th"))
        assert len(list(root.iter("h1"))) == 1
        assert [
            landmark for landmark in ("header", "main", "nav", "footer") if root.find(f".//{landmark}") is None
        ] == []


def test_the_list_shows_every_run() -> None:
    """State with its duration, place and the last incident."""
    rows = [[words(cell) for cell in row] for row in parsed(page.runs_page(snapshots.listing())).findall(".//tbody/tr")]
    assert rows[0] == [
        "gpt-small-07",
        "Training for 21 min",
        "nothing",
        "48,210",
        "2.087",
        "6",
        "3 of 2 to 4",
        "96.8 %",
        "Worker lost 21 min ago",
    ]
    sick = snapshots.listing()
    sick["runs"][1]["attention"] = []
    sick["runs"][2]["attention"] = [{"look": "bad", "words": "1 standing still"}, {"look": "warn", "words": "1 slow"}]
    html = page.runs_page(sick)
    assert "1 standing still, 1 slow" in html
    assert "<title>(1) Runs, elastic-trainer</title>" in html
    assert [row.get("class") for row in parsed(html).findall(".//tbody/tr")].count("sick look-bad") == 1
    assert "6 runs: 3 training" in html


def test_an_empty_list_says_so() -> None:
    """Nothing registered is a state of its own."""
    assert "A run appears here as soon as" in page.runs_page({"runs": []})


def test_512_nodes_are_written_quickly_and_small() -> None:
    """The bounds are ten times of what it takes: they find what grows with the square of the nodes."""
    run = snapshots.large()
    page.run_page(run)
    began = time.process_time()
    html = page.run_page(run)
    assert time.process_time() - began < 2.0
    assert len(html) < 1_000_000
    assert len(table(html, "Nodes and ranks")) == 24
    html = page.run_page(run, page.Choice(every=True))
    assert len(html) < 1_000_000
    assert len(table(html, "Nodes and ranks")) == 512


def test_every_word_of_the_contract_has_a_name() -> None:
    """States, phases and causes that the package knows are shown in words, with an icon that exists."""
    assert set(NAMES["states"]) == set(RUN_STATES)
    assert set(NAMES["nodes"]) == {*NODE_STATES, "gone"}
    assert set(NAMES["phases"]) == {str(phase) for phase in Phase}
    assert set(NAMES["causes"]) == {str(cause) for cause in Cause}
    marks = [phase["mark"] for phase in NAMES["phases"].values()]
    assert len(set(marks)) == len(marks)
    sprite = ElementTree.fromstring((page.static("icons.svg") or (b"", ""))[0])
    looks = {each["look"] for kind in NAMES.values() for each in kind.values() if "look" in each}
    assert looks <= {symbol.get("id") for symbol in sprite}
