"""The pages as the server writes them, read by a strict parser: words, sentences, files, updates."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.model import Cause, Phase
from elastic_trainer.monitor import page
from elastic_trainer.monitor.page import NAMES, NONE, TIMES, edits
from elastic_trainer.telemetry.families import NODE_STATES, RUN_STATES
from tests.support import snapshots

Element = ElementTree.Element


def parsed(html: str) -> Element:
    return ElementTree.fromstring(html)


def words(element: Element | None) -> str:
    return "" if element is None else " ".join("".join(element.itertext()).split())


def part(html: str, name: str) -> Element:
    return next(each for each in parsed(html).iter("section") if words(each.find("h2")) == name)


def table(html: str, name: str) -> list[list[str]]:
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
    """Names, reasons and states with markup are read as they are written; a run's name cannot lead out of ``runs/``."""
    html = page.run_page(snapshots.hostile())
    assert "<script>alert" not in html
    assert snapshots.HOSTILE in words(part(html, "Nodes and ranks"))
    assert snapshots.HOSTILE in words(part(html, "Incidents"))
    assert words(parsed(html).find("head/title")).startswith("</title><script>")
    html = page.runs_page({"runs": [{"run": "../../a b/<c>", "state": "training"}]})
    (link,) = (link for link in parsed(html).iter("a") if link.get("class") is None)
    assert link.get("href") == "runs/..%2F..%2Fa%20b%2F%3Cc%3E"


def test_tables_have_what_is_known_of_rounds_incidents_and_nodes() -> None:
    """A round has one row, with what began and what ended it; a planned change is no incident; the sick come first."""
    html = page.run_page(snapshots.healthy())
    rows = table(html, "Rounds")
    assert [row[0] for row in rows] == ["7", "6", "5", "4"]
    assert rows[0][1:4] == ["active", "21 min ago", "21 min"]
    assert (rows[1][1], rows[1][6]) == ("broken", "3 nodes are readyworker 3 of node-1 ended with signal 9")
    assert rows[2][1:4] == ["followed by the next", "2 h 14 min ago", "1 h 9 min"]
    newest, lost = table(html, "Incidents")
    assert newest[1].startswith("Worker lost: node-1, rank 3")
    assert newest[2:6] == ["6 → 7", "6", "0", "810 ms"]
    assert (lost[4], lost[6]) == ("12", "6.1 s 1.4 s 700 ms")
    sick = page.run_page(snapshots.straggling())
    assert table(sick, "Nodes and ranks")[0][0].startswith("node-1")
    notes = [words(item) for item in part(sick, "Needs attention").iter("li")]
    assert notes[0] == "1 rank makes no progress: rank 3 on node-1 (training, for 1 min 14 s)."
    assert notes[1] == "The last 2 saves failed."


def test_a_node_shows_its_load_and_what_its_workers_wrote_last() -> None:
    """GPUs have a column if any node has one; the lines are those of whoever writes to the file, and text."""
    gpus = [
        {"index": index, "busy": busy, "used_bytes": 2**34, "total_bytes": 2**36}
        for index, busy in enumerate((0.9, 0.5, None))
    ]
    load = {"cpu": 0.253, "cpus": 16, "used_bytes": 2**33, "total_bytes": 2**35, "gpus": gpus}
    snapshot = snapshots.healthy()
    first, second = snapshot["nodes"][:2]
    assert page.run_page(snapshot).count("GPU") == 0
    tails = [{"ranks": [0, 1], "file": "/logs/<n0>", "lines": ["step 7", "<b>Killed</b>"]}]
    told = snapshot | {"nodes": [first | {"load": load, "tails": tails}, second]}
    html = page.run_page(told)
    rows = table(html, "Nodes and ranks")
    assert rows[0][6:8] == ["25.3 %8.6 GB of 34.4 GB", "70.0 %51.5 GB of 206 GB"]
    assert [NONE, NONE] in [row[6:8] for row in rows]
    (figure,) = part(html, "Nodes and ranks").findall(".//figure[@class='log']")
    assert words(figure) == "Last lines of ranks 0-1 /logs/<n0> step 7 <b>Killed</b>"


def test_the_list_shows_every_run() -> None:
    first = parsed(page.runs_page(snapshots.listing())).findall(".//tbody/tr")[0]
    said = "gpt-small-07|Training for 21 min|nothing|48,210|2.087|6|3 of 2 to 4|96.8 %|Worker lost 21 min ago"
    assert "|".join(words(cell) for cell in first) == said
    sick = snapshots.listing()
    sick["runs"][1]["attention"] = []
    sick["runs"][2]["attention"] = [{"look": "bad", "words": "1 standing still"}, {"look": "warn", "words": "1 slow"}]
    html = page.runs_page(sick)
    assert "1 standing still, 1 slow" in html
    assert "<title>(1) Runs, elastic-trainer</title>" in html
    assert [row.get("class") for row in parsed(html).findall(".//tbody/tr")].count("sick look-bad") == 1
    assert "6 runs: 3 training" in html
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


WRITTEN: list[tuple[Callable[[Any], str], dict[Any, str]]] = [
    (page.duration, {
        None: NONE, -3: "0 s", 0: "0 s", 0.00125: "1.3 ms", 0.0099: "9.9 ms", 0.83: "830 ms", 0.9996: "1.0 s",
        8.25: "8.3 s", 43.4: "43 s", 59.6: "1 min", 75: "1 min 15 s", 600: "10 min", 1910: "31 min", 3599.7: "1 h",
        8040: "2 h 14 min", 86_400 * 3 + 3600 * 4: "3 d 4 h", float("nan"): NONE, True: NONE, "5": NONE,
    }),
    (page.measure, {
        2.08714: "2.087", 0.0123456: "0.0123", 0.0000123: "1.23e-5", 123456.7: "1.23e+5", 1e-12: "1.00e-12",
        345.67: "345.7", -0.5: "-0.5000", 0: "0.0000", None: NONE,
    }),
    (page.count, {1234567.5: "1,234,568", None: NONE}), (page.percent, {0.9685: "96.9 %", None: NONE}),
    (page.size, {1_483_000_000: "1.5 GB", 999.4: "999 B", None: NONE}),
    (page.times, {2.31: f"2.31{TIMES}", None: NONE}), (page.ago, {None: NONE}),
]  # fmt: skip


@pytest.mark.parametrize(("write", "values"), WRITTEN, ids=lambda each: getattr(each, "__name__", ""))
def test_numbers_have_the_digits_and_units_that_matter(write: Callable[[Any], str], values: dict[Any, str]) -> None:
    """Durations at most two units, losses about four digits; null is a dash."""
    assert {value: write(value) for value in values} == values


def test_what_this_version_does_not_know_is_shown_as_it_is() -> None:
    """A phase of a newer node, a time that no calendar has; node-10 comes after node-2."""
    told = {"key": "other", "label": "warming the cache", "look": "other", "mark": "?"}
    assert page.named("phases", "warming_the_cache") == told
    assert page.named("phases", None)["label"] == "not known"
    assert page.stamp(1_789_000_000.9) == ("2026-09-10T00:26:40Z", "2026-09-10 00:26:40 UTC")
    assert page.stamp(None) == page.stamp(1e300) == ("", "")
    assert sorted(["node-10", "node-2", "a"], key=page.natural) == ["a", "node-2", "node-10"]


STATIC = files("elastic_trainer.monitor.page").joinpath("static")
FILES = sorted(each.name for each in STATIC.iterdir())


def test_static_files_are_served_as_they_are_and_ask_for_nothing_from_elsewhere() -> None:
    """With ``nosniff`` a module of another type is refused. Names are flat, as the server wants them; imports are files
    of the folder, and no file refers to another host."""
    kinds = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "json": "application/json"}
    for name in FILES:
        found = page.static(name)
        assert found is not None
        content = STATIC.joinpath(name).read_text(encoding="utf-8")
        assert found[0] == content.encode()
        assert found[1] == kinds.get(name.rpartition(".")[2], found[1])
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name)
        assert all(each.startswith("http://www.w3.org/") for each in re.findall(r"https?://[^\s\"'`)]+", content))
        assert set(re.findall(r"from \"\./([^\"]+)\"", content)) <= set(FILES)


texts = st.lists(st.sampled_from("abc"), max_size=12)


def after(before: Sequence[str], changes: Sequence[tuple[int, int, Sequence[str]]]) -> list[str]:
    lines = list(before)
    for start, removed, put in changes:
        lines[start : start + removed] = put
    return lines


@given(texts, texts)
def test_edits_make_one_text_the_other(before: list[str], now: list[str]) -> None:
    assert after(before, edits(before, now)) == now


def test_an_update_carries_what_has_changed() -> None:
    """At first the whole page; of a run of 64 ranks that has made a step a small part of its snapshot."""
    before, run = page.run_update(snapshots.large(8)), snapshots.large(8, turn=1)
    now = page.run_update(run)
    told = page.message(now, before)
    assert after(before.view, json.loads(told)["view"]) == list(now.view)
    assert len(told) < len(json.dumps(run)) / 10
    first = json.loads(page.message(now))
    assert first["full"]
    assert (after((), first["view"]), after((), first["course"])) == (list(now.view), list(now.course))


@pytest.mark.parametrize(
    ("query", "choice"),
    [
        ("", page.Choice()),
        ("turned=a&turned=b&turn=b&turn=c", page.Choice(turned=frozenset("ac"))),
        ("all=&all=1&find=+node-4", page.Choice(every=True, find="node-4")),
        ("all=1&all=0", page.Choice()),
        ("find=" + "x" * 200, page.Choice(find="x" * 100)),
    ],
)
def test_a_choice_is_that_of_the_form(query: str, choice: page.Choice) -> None:
    """Of two values the button's counts; a node that is turned twice is as it was."""
    assert page.Choice.parse(query) == choice


AWAY = {"connected": False, "age_s": 43.0}
LEFT = {"node": "n1", "planned": True, "reason": "SIGTERM", "exit_code": 143, "wall": 1.0}
NOBODY: dict[str, Any] = {"nodes": [], "world_size": 0}


def ended(**more: Any) -> dict[str, Any]:
    """A run whose last round broke, and was followed by none."""
    values = {"round": 1, "next_round": None, "detect_s": 30.0, "regroup_s": 1.0, "resume_s": 0.0} | more
    return {"incidents": [snapshots.incident(1.0, "worker_lost", **values)]}


LAST = {"number": 7, "world_size": 6, "nodes": 1, "duration_s": 3720.0}
HELD = [snapshots.node(0, ranks=[snapshots.rank(at, still_s=42.0, stall=("awaited", "waits")[at]) for at in (0, 1)])]
GROUPED = [snapshots.node(0) | {"group": 0, "place": 0}, snapshots.node(1) | {"group": 0, "place": 1}]
GROUPED.append(snapshots.node(2, in_round=False) | {"group": None, "place": 1})
STATES = [
    # what is there, the part of the page, what it says, what it must not say
    ({}, "Needs attention", "Nothing: no node is missing", "Unknown"),
    ({"store": AWAY}, "Needs attention", "Unknown: the monitor cannot reach the store.", "no node is missing"),
    ({"state": "stopped", "departure": LEFT, **NOBODY}, "Needs attention", "Stopped on request (SIGTERM).", "needs"),
    ({"state": "gathering", "min_nodes": 1}, "Needs attention", "nodes are joining", "no node is missing"),
    ({"state": "recovering"}, "Needs attention", "the next round is forming", "no node is missing"),
    ({"attention": [{"look": "bad", "words": "3 rounds broke in the last 15 min",
      "sentence": "3 rounds broke in the last 15 min."}]}, "Needs attention",
     "3 rounds broke in the last 15 min.", "Nothing"),
    ({"state": "succeeded"}, "Needs attention", "The run has ended.", "missing"),
    ({"state": "failed", **ended()}, "Last incident", "The run did not continue after it.", "stood still"),
    ({"state": "failed", **ended()}, "Last incident", "Worker lost", "was lost"),
    ({"state": "recovering", **ended(open=True)}, "Last incident", "Worker lost", "did not continue"),
    (ended(next_round=2), "Last incident", "No step was lost. Training stood still for 31 s: 30 s until", "did not"),
    (ended(next_round=2, detect_s=0.0), "Last incident", "Nobody knows since when training stood still", "still for"),
    (ended(next_round=2, resumed=False), "Last incident", "No step of round 2 is known", "was lost"),
    (ended(next_round=2, before_s=29.0), "Last incident", "1 min: 29 s in rounds without a step, 30 s", "did not"),
    (ended(next_round=2, steps_lost=3), "Last incident", "3 steps were lost.", "No step"),
    (ended(next_round=2, steps_lost=1), "Last incident", "1 step was lost.", "1 steps"),
    (ended(next_round=2, steps_lost=12, detect_s=6.1, regroup_s=1.4, resume_s=0.7), "Last incident",
     "12 steps were lost. Training stood still for 8.2 s: 6.1 s until it was noticed, 1.4 s to regroup, 700 ms", "No"),
    (snapshots.recovering(), "verdict", "Recovering for 14 s", "Training"),
    (snapshots.recovering(), "verdict", "node-2 was lost", "Training"),
    (snapshots.recovering(), "Needs attention", "1 node is gone: node-2 (heard 21 s ago).", "Nothing"),
    (snapshots.recovering(), "Needs attention", "node-3 is warming up.", "ready"),
    (snapshots.recovering(), "Last incident", "Node lost 14 s ago node-2, ranks 4, 5", "stood still"),
    ({"state_s": None}, "verdict", "Training for 21 min", "when last seen"),  # by the journal
    (snapshots.empty(), "Nodes and ranks", "No node is there.", "Find"),
    (snapshots.empty(), "Course", "No step has been seen yet.", "When"),
    (snapshots.empty(), "Time of all ranks", "No rank has reported its time yet.", "Phase"),
    (snapshots.empty(), "Checkpoints", "None has been saved or loaded.", "Last"),
    (snapshots.empty(), "Incidents", "None recorded.", "Took"),
    (snapshots.empty(), "Rounds", "None yet.", "Lasted"),
    ({"store": AWAY}, "header", "cannot reach the store: this page is 43 s old.", "Renewed"),
    ({"store": AWAY}, "verdict", "Training when last seen", "for 21 min ago"),
    ({"min_nodes": 1, "max_nodes": 1}, "verdict", "3 nodes, 1 node needed.", "allowed"),
    ({"state": "succeeded", "last": LAST, **NOBODY}, "verdict",
     "Round 7 was the last: 6 ranks on 1 node, 2 to 4 nodes allowed. It took 1 h 2 min from", "No round"),
    ({"nodes": HELD, "step_s": None}, "Nodes and ranks", "no step for 42 s, the others wait for it", "standing still"),
    ({"nodes": HELD, "step_s": None}, "Nodes and ranks", "waits for 42 s", "standing still"),
    ({"nodes": HELD, "step_s": None}, "Nodes and ranks",
     "1 training, held up: the others wait for it, 1 waiting for others", "standing still"),
    ({"nodes": GROUPED, "shard_nodes": 2}, "verdict", "2 to 4 nodes allowed in shard groups of 2", "needed"),
    ({"nodes": GROUPED}, "Needs attention", "node-2 (place 1) is ready and not in the round", "node-0"),
    ({"nodes": GROUPED}, "Nodes and ranks", "group 0, place 1", "group 1"),
]  # fmt: skip


@pytest.mark.parametrize(("there", "name", "said", "unsaid"), STATES, ids=range(len(STATES)))
def test_each_state_has_its_sentence(there: dict[str, Any], name: str, said: str, unsaid: str) -> None:
    """The table of states, each of what differs from a healthy run, or of a whole one."""
    html = page.run_page(there if "run" in there else snapshots.healthy(**there))
    where = {"header": ".//header", "verdict": ".//section[@class='verdict']"}.get(name)
    shown = words(parsed(html).find(where) if where is not None else part(html, name))
    assert said in shown
    assert unsaid not in shown


def test_what_is_old_or_over_is_no_news_in_the_list() -> None:
    """While the store does not answer nothing looks good; of a run that has ended those are counted that trained."""
    assert "look-good" not in page.run_page(snapshots.healthy(store=AWAY)).partition("</section>")[0]
    assert "not known" in page.runs_page(snapshots.listing() | {"store": AWAY})
    row = {"run": "r", "state": "succeeded", "last": LAST, "world_size": 0, "nodes": 0, "min_nodes": 1, "max_nodes": 4}
    assert "1 of 1 to 4" in page.runs_page({"runs": [row]})
    assert "at the end" in page.run_page(snapshots.healthy(state="succeeded", last=LAST, **NOBODY))
