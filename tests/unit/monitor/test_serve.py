"""What is answered to which request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import RoundState
from elastic_trainer.monitor import page
from elastic_trainer.monitor.reading import RunReading, StoreReading
from elastic_trainer.monitor.serve import Board, MonitorSite, targets
from elastic_trainer.monitor.snapshot import StoreStatus
from elastic_trainer.monitor.state import Observer
from elastic_trainer.web.server import Access, Answer, Request
from tests.support.memory_store import ManualClock
from tests.support.monitored import health, record, run


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def board(clock: ManualClock) -> Board:
    board = Board(clock)
    seen = RunReading(
        run(health={"n0": health("n0", metrics="https://10.0.0.1:9000")}), Observer().observe(run(), 1.0, 2.0)
    )
    board.publish(StoreReading({"r": seen}, StoreStatus(True, 0.0), read_at=1000.0, read_wall=5.0, serial=1))
    return board


def ask(board: Board, target: str, method: str = "GET", access: Access | None = None, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = MonitorSite(board, access if access is not None else Access()).answer(Request(method, target, named))
    assert isinstance(answer, Answer)
    return answer


def content(answer: Answer) -> Any:
    assert answer.status == 200, answer.body.plain
    return json.loads(answer.body.plain)


def test_the_list_and_a_run_are_served_as_json(board: Board) -> None:
    assert [each["run"] for each in content(ask(board, "/api/runs"))["runs"]] == ["r"]
    answer = ask(board, "/api/runs/r?ignored=1")
    assert content(answer)["run"] == "r"
    assert (answer.kind, answer.headers["Cache-Control"]) == ("application/json", "no-store")


def test_each_reading_is_encoded_once(board: Board) -> None:
    """However many ask; a new reading is encoded anew."""
    first = ask(board, "/api/runs/r").body
    assert ask(board, "/api/runs/r").body is first
    board.publish(StoreReading(board.reading.runs, read_at=1.0, serial=2))
    assert ask(board, "/api/runs/r").body is not first


@pytest.mark.parametrize("path", ["/runs/x", "/runs/x/stream", "/runs/x/update", "/api/runs/x", "/api/runs/x/stream"])
def test_a_run_that_is_not_there_is_404_and_the_others_are_named(board: Board, path: str) -> None:
    answer = ask(board, path)
    assert (answer.status, answer.body.plain) == (404, b"there is no run 'x'; there are: r\n")


def test_an_update_is_what_the_page_shows(board: Board) -> None:
    """Of the same values as the JSON, for whoever has chosen something too; what many see is made once."""
    run, runs = content(ask(board, "/api/runs/r")), content(ask(board, "/api/runs"))
    assert content(ask(board, "/update"))["view"][0][2] == list(page.runs_update(runs).view)
    assert ask(board, "/").body.plain.decode() == page.runs_page(runs)
    assert ask(board, "/").kind.startswith("text/html")
    for query in ("", "turn=n0"):
        update = page.run_update(run, page.Choice.parse(query))
        assert content(ask(board, f"/runs/r/update?{query}"))["view"][0][2] == list(update.view)
        assert ask(board, f"/runs/r?{query}").body.plain.decode() == page.run_page(run, page.Choice.parse(query))
    assert board.run_update("r", page.Choice()) is board.run_update("r", page.Choice())


@pytest.mark.parametrize(
    "path",
    [
        *("/static/../page/__init__.py", "/static/..%2f__init__.py", "/static/%2e%2e/x", "/static//etc/passwd"),
        *("/static/", "/static/.hidden", "/static/a/b", "/static/%00", "/static/__init__.py", "/../x", "//", "/static"),
        *("/nothing", "/api", "/api/runs/r/x", "/runs", "http://other/x"),
    ],
)
def test_nothing_but_what_there_is_can_be_asked_for(board: Board, path: str) -> None:
    assert ask(board, path).status == 404


def test_static_files_are_kept_by_browsers_and_asked_about(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a tag of their content: unchanged, they are not sent again."""
    monkeypatch.setattr(page, "static", {"a.css": (b"x", "text/css")}.get)
    answer = ask(board, "/static/a.css")
    assert (answer.status, answer.kind, answer.body.plain) == (200, "text/css", b"x")
    again = ask(board, "/static/a.css", if_none_match=f'"other", W/{answer.headers["ETag"]}')
    assert (again.status, again.body.plain) == (304, b"")
    monkeypatch.setattr(page, "static", {"a.css": (b"y", "text/css")}.get)
    assert ask(board, "/static/a.css", if_none_match=answer.headers["ETag"]).status == 200


@pytest.mark.parametrize(
    "path", ["/", "/runs/r", "/api/runs", "/api/runs/r", "/metrics", "/sd/nodes", "/static/x", "/x"]
)
def test_nothing_can_be_changed_and_without_the_token_nothing_is_shown(board: Board, path: str) -> None:
    """Not even whether a path exists; browsers are told to ask for it. A kubelet, which has none, is answered."""
    access = Access("token")
    answer = ask(board, path, access=access)
    assert (answer.status, answer.body.plain) == (401, b"a token is needed\n")
    assert answer.headers["WWW-Authenticate"].startswith("Basic ")
    assert ask(board, path, access=access, authorization="Bearer token").status in (200, 404)
    assert [ask(board, probe, access=access).body.plain for probe in ("/healthz", "/readyz")] == [b"ok\n", b"ready\n"]
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        answer = ask(board, path, method)
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_other_names_are_refused_on_a_loopback_port_without_a_token(board: Board) -> None:
    assert ask(board, "/api/runs", host="evil.example").status == 421
    assert ask(board, "/api/runs", host="localhost:9470").status == 200
    assert ask(board, "/healthz", host="evil.example").status == 200


def test_it_is_ready_while_the_store_is_read_and_alive_while_it_polls(board: Board, clock: ManualClock) -> None:
    """503 before the first read, and after a minute without an answer of the store. That is no reason to end it: a
    restart would not mend it. A poll that never ends is no life."""
    assert ask(Board(clock), "/readyz").status == 503
    clock.advance(59.0)
    assert ask(board, "/readyz").status == 200
    clock.advance(2.0)
    answer = ask(board, "/readyz")
    assert (answer.status, answer.body.plain) == (503, b"the store was last read 61 s ago\n")
    clock.advance(58.0)
    assert ask(board, "/healthz").status == 200
    clock.advance(2.0)
    assert ask(board, "/healthz").status == 503
    board.publish(StoreReading())
    assert ask(board, "/healthz").status == 200


def test_the_usable_endpoints_of_live_nodes_are_targets(board: Board, clock: ManualClock) -> None:
    """One group each, as Prometheus' http_sd wants them; nodes that have published no endpoint, or a malformed one, are
    left out, and so is a run that is long over. Before the store was read an error: an empty list would make Prometheus
    drop all that it has."""
    assert content(ask(board, "/sd/nodes")) == [
        {"targets": ["10.0.0.1:9000"], "labels": {"__scheme__": "https", "run": "r", "node": "n0"}}
    ]
    assert ask(Board(clock), "/sd/nodes").status == 503
    views = {name: NodeView(name, 1, 1, record(1)) for name in ("early", "odd", "told")}
    told = {
        "told": health("told", metrics="http://[::1]:9000/"),
        "odd": health("odd", metrics="http://user@host:1/../x"),
        "gone": health("gone", metrics="http://10.0.0.9:9000"),
    }
    observer, documents = Observer(), run(state=RoundState.CLOSED, nodes=views, health=told)
    observer.observe(documents, 0.0, 0.0)
    found, later = (
        targets(StoreReading({"r": RunReading(documents, observer.observe(documents, at, at))}))
        for at in (10.0, 4000.0)
    )
    assert [(each["labels"], each["targets"]) for each in found] == [
        ({"__scheme__": "http", "run": "r", "node": "told"}, ["[::1]:9000"]),
    ]
    assert later == []
