"""A run whose keys were written by somebody who means harm: it is shown as far as it can be read, and harms nobody."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from rich.console import Console

from elastic_trainer.cli import events, status
from elastic_trainer.clock import Deadline
from elastic_trainer.ipc.channel import Progress
from elastic_trainer.membership.documents import Document, GpuLoad, LogTail, NodeLoad, RoundState, RunProgress, Spec
from elastic_trainer.monitor.reading import Reader
from elastic_trainer.monitor.serve import Board, MonitorSite
from elastic_trainer.monitor.snapshot import listing, snapshot, summary
from elastic_trainer.store.api import Put, RunKeys
from elastic_trainer.web.server import Access, Answer, Request
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore
from tests.support.monitored import PREFIX, Writer, entry, health, incident, rank, record

KEYS = RunKeys(PREFIX, "r")
PATHS = ("/", "/runs/r", "/api/runs", "/api/runs/r", "/metrics", "/sd/nodes")
HOSTILE: tuple[Any, ...] = (
    *(
        "one\nround 9 closed: forged",
        "\x1b[2J\x1b]0;title\x07",
        "<script>alert(1)</script>",
        "",
        "\u202e",
        "a" * 10_000,
    ),
    *("[bold]x[/nothing] [link=file:///etc/passwd]y[/link]", 'x"} 1\nforged{run="r', "../../etc/passwd"),
    *("</script><img src=x onerror=alert(1)>", "javascript:alert(1)", "http://10.0.0.1:1/@evil", None, True, "\u202e"),
    *(0, -1, 10**18, 10**30, 1e308, -1e308, 5e-324, float("nan"), float("inf")),
    *([], {}, [[[[[]]]]], {"a": {"b": "c"}}, [1, 2, 3], ["x"] * 2000),
)


FAR = RunProgress(step=3, epoch=0, epochs=2, last_step=6, part=0.5, left_s=9.5, lr=0.1)


LOAD = NodeLoad(cpu=0.5, cpus=8, used_bytes=1, total_bytes=9, gpus=(GpuLoad(index=0, busy=0.5, total_bytes=4),))
TAILS = (LogTail(ranks=(0, 1), file="/logs/n0", lines=("one", "two")),)


def good() -> dict[str, Any]:
    """The documents of a run, as plain values by key."""
    documents: dict[str, Document | Progress] = {
        KEYS.spec: Spec(min_nodes=1, max_nodes=4),
        KEYS.node("n0"): record(),
        KEYS.node("n1"): record(),
        KEYS.node_health("n0"): health(
            "n0",
            [rank(0), rank(1, 1)],
            {"seconds.training": 5.0, "samples": 9.0},
            loss=0.5,
            progress=FAR,
            load=LOAD,
            tails=TAILS,
        ),
        KEYS.event(4): entry(1),
        KEYS.incident(1): incident(1),
        KEYS.progress: Progress(round=1, step=3, epoch=0, samples=9),
    }
    values = {key: json.loads(document.encode()) for key, document in documents.items()}
    store = MemoryStore(MemoryBackend(ManualClock()))
    writer = Writer(store)
    for name in ("n0", "n1"):
        writer.put(KEYS.node(name), record())
    writer.round(1, {"n0": 2, "n1": 2}, RoundState.ACTIVE)
    found = store.get(KEYS.round, Deadline.after(5.0)).first
    assert found is not None
    return values | {KEYS.round: json.loads(found.value)}


GOOD = good()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, name))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    result = copy.deepcopy(value)
    inner = result
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = new
    return result


PLACES = [(key, path) for key, value in GOOD.items() for path in places(value)]


def shown(values: dict[str, Any], extra: dict[str, bytes] | None = None) -> dict[str, str]:
    """All that the monitor and the commands make of these documents, by where it is read."""
    clock = ManualClock(2000.0)
    store = MemoryStore(MemoryBackend(clock))
    raw = {key: json.dumps(value).encode() for key, value in values.items()} | (extra or {})
    store.transact([], [Put(key, value) for key, value in raw.items()], deadline=Deadline.after(5.0))
    reader, board = Reader(store, PREFIX, clock=clock), Board(clock)
    reader.poll()
    reading = reader.poll()
    board.publish(reading)
    found = {
        path: _answered(board, path) for path in PATHS if path.count("r/r") or "r" in reading.runs or "/r" not in path
    }
    output = io.StringIO()
    console = Console(file=output, width=200, force_terminal=False)
    for run in reading.runs.values():
        console.print(status.run_view(snapshot(run.documents, run.seen, reading.store)))
        rows = [summary(run.documents, run.seen)]
        console.print(status.list_view(listing(rows, reading.store, reading.wall)))
    found["status"] = output.getvalue()
    past = events.past(store, KEYS, 100)
    found["events"] = "\n".join(map(events.as_line, past))
    assert len(found["events"].splitlines()) == len(past), "a line was forged"
    found["events --json"] = "\n".join(map(events.as_json, past))
    return found


def _answered(board: Board, path: str) -> str:
    answer = MonitorSite(board, Access()).answer(Request("GET", path, {}))
    assert isinstance(answer, Answer)
    assert answer.status in (200, 404), (path, answer.status)
    return answer.body.plain.decode()


def check(found: dict[str, str]) -> None:
    """Nothing in it can be obeyed by a terminal or a browser, and each metric has a line of its own."""
    for where, text in found.items():
        assert not {each for each in text if (ord(each) < 32 and each != "\n") or 127 <= ord(each) < 160}, where
        assert "\u202e" not in text, where
    for page in ("/", "/runs/r"):
        assert "<img" not in found.get(page, "")
        assert "<script>alert" not in found.get(page, "")
        assert 'href="javascript:' not in found.get(page, "")
    assert "forged{" not in [line[:7] for line in found["/metrics"].splitlines()]


def test_a_good_run_is_shown() -> None:
    found = shown(GOOD)
    assert all(text for text in found.values())
    assert "n1" in found["status"]
    assert "because" in found["events"]


@given(st.sampled_from(PLACES), st.sampled_from(HOSTILE))
@effort(deadline=None, max_examples=120)
def test_any_part_of_any_document_may_be_anything(place: tuple[str, tuple[Any, ...]], new: Any) -> None:
    """One part of one key is replaced: pages, metrics, targets and commands still answer."""
    key, path = place
    check(shown(GOOD | {key: changed(GOOD[key], path, new)}))


@pytest.mark.parametrize(
    "name", ["\x1b[31mred", "a b", "../n9", "<script>alert(1)</script>", "", "n/9", "x" * 300, "_gone", "\udcff\udcfe"]
)
def test_keys_that_no_node_can_have_are_refused(name: str) -> None:
    """Below nodes, health, events and incidents; the rest is shown, and they are named as what cannot be read."""
    values = json.dumps(GOOD[KEYS.node("n0")]).encode(), json.dumps(GOOD[KEYS.node_health("n0")]).encode()
    extra = {KEYS.nodes + name: values[0], KEYS.events + name: b"junk", KEYS.incidents + name: b"\xff\x00"}
    if name != "_gone":
        extra[KEYS.health + name] = values[1]
    found = shown(GOOD, extra)
    check(found)
    told = json.loads(found["/api/runs/r"])
    assert {node["node"] for node in told["nodes"]} == {"n0", "n1"}
    assert told["unreadable"]
