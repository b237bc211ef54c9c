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


def test_nothing_can_be_changed(board: Board) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        answer = ask(board, "/api/runs", method)
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_without_the_token_nothing_of_a_run_is_shown(board: Board) -> None:
    """Not even whether a path exists; browsers are told to ask for it. A kubelet, which has none, is answered."""
    access = Access("token")
    for path in ("/", "/runs/r", "/api/runs", "/api/runs/r", "/metrics", "/sd/nodes", "/static/x", "/x"):
        answer = ask(board, path, access=access)
        assert (answer.status, answer.body.plain) == (401, b"a token is needed\n")
        assert answer.headers["WWW-Authenticate"].startswith("Basic ")
        assert ask(board, path, access=access, authorization="Bearer token").status in (200, 404)
    assert [ask(board, path, access=access).body.plain for path in ("/healthz", "/readyz")] == [b"ok\n", b"ready\n"]


def test_other_names_are_refused_on_a_loopback_port_without_a_token(board: Board) -> None:
    assert ask(board, "/api/runs", host="evil.example").status == 421
    assert ask(board, "/api/runs", host="localhost:9470").status == 200
    assert ask(board, "/healthz", host="evil.example").status == 200


def test_it_is_ready_once_the_store_was_read_and_while_that_is_not_long_ago(board: Board, clock: ManualClock) -> None:
    """503 before, and after a minute without an answer of the store."""
    assert ask(Board(clock), "/readyz").status == 503
    clock.advance(59.0)
    assert ask(board, "/readyz").status == 200
    clock.advance(2.0)
    answer = ask(board, "/readyz")
    assert (answer.status, answer.body.plain) == (503, b"the store was last read 61 s ago\n")


def test_it_is_alive_while_it_polls(board: Board, clock: ManualClock) -> None:
    """Whatever the store does: a restart would not mend that. A poll that never ends is no life."""
    clock.advance(119.0)
    assert ask(board, "/healthz").status == 200
    clock.advance(2.0)
    assert ask(board, "/healthz").status == 503
    board.publish(StoreReading())
    assert ask(board, "/healthz").status == 200


def test_the_endpoints_of_nodes_are_targets(board: Board, clock: ManualClock) -> None:
    """One group each, as Prometheus' http_sd wants them. Before the store was read an error: an empty list would make
    Prometheus drop all that it has."""
    assert content(ask(board, "/sd/nodes")) == [
        {"targets": ["10.0.0.1:9000"], "labels": {"__scheme__": "https", "run": "r", "node": "n0"}}
    ]
    assert ask(Board(clock), "/sd/nodes").status == 503


def test_only_live_nodes_with_a_usable_endpoint_are_targets() -> None:
    """Nodes that have published no endpoint, or a malformed one, are left out."""
    views = {name: NodeView(name, 1, 1, record(1)) for name in ("early", "odd", "told")}
    told = {
        "told": health("told", metrics="http://[::1]:9000/"),
        "odd": health("odd", metrics="http://user@host:1/../x"),
        "gone": health("gone", metrics="http://10.0.0.9:9000"),
    }
    documents = run(nodes=views, health=told)
    found = targets(StoreReading({"r": RunReading(documents, Observer().observe(documents, 0.0, 0.0))}))
    assert [(each["labels"], each["targets"]) for each in found] == [
        ({"__scheme__": "http", "run": "r", "node": "told"}, ["[::1]:9000"]),
    ]


def test_the_nodes_of_a_run_that_is_long_over_are_no_targets() -> None:
    node, told = NodeView("n0", 1, 1, record()), health("n0", metrics="http://10.0.0.1:9000")
    over, observer = run(state=RoundState.CLOSED, nodes={"n0": node}, health={"n0": told}), Observer()
    observer.observe(over, 0.0, 0.0)
    assert targets(StoreReading({"r": RunReading(over, observer.observe(over, 10.0, 10.0))}))
    assert not targets(StoreReading({"r": RunReading(over, observer.observe(over, 4000.0, 4000.0))}))
