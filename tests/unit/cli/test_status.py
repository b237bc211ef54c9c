"""What status, events and the report of an incident print; waiting for a run that is to be watched."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from elastic_trainer import wording
from elastic_trainer.cli import connection
from elastic_trainer.cli.events import as_line, in_order, report
from elastic_trainer.cli.main import Parser
from elastic_trainer.cli.monitor import listen_address
from elastic_trainer.cli.status import list_view, run_view, show_live, show_plain
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import ConfigError, StoreUnavailableError
from elastic_trainer.membership.documents import GpuLoad, Incident, JournalEntry, NodeLoad, RoundState, Saved
from elastic_trainer.monitor.reading import RunReading, StoreReading
from elastic_trainer.monitor.snapshot import StoreStatus, listing, snapshot, summary
from elastic_trainer.monitor.state import Observed, Observer
from elastic_trainer.settings import StoreSettings, parse_endpoints, secret
from elastic_trainer.store.api import Order, Put, RunKeys, Snapshot
from tests.support.memory_store import MemoryBackend, MemoryStore
from tests.support.monitored import entry, grouped, health, incident, rank, run

AWAY = StoreStatus(False, 75.0)


def printed(view: RenderableType, width: int = 160, *, crop: bool = True) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(view, crop=crop)
    return out.getvalue()


TOLD = {
    "n0": health("n0", [rank(0, still_s=33.0), rank(1, 1)], {"seconds.training": 9.0, "seconds.data": 1.0}, loss=0.25),
    "n1": health("n1", [rank(2), rank(3, 1, compute_s=0.5)]),
}
TOLD["n0"] = TOLD["n0"].model_copy(update={"saved": Saved(step=8, wall=1.0, bytes=2**21, duration_s=0.05)})
SEEN = Observed(now=100.0, state="training", state_since=40.0, saved_s=12.0, arrived={"n1": 60.0}, steps_per_s=4.0)
HELD = run(1, health={"n0": health("n0", [rank(0, waits=True, still_s=42.0), rank(1, 1, still_s=42.0)])})
VIEWS = {
    "all that is known": (
        snapshot(run(health=TOLD, incidents=(incident(1, reason="worker 0 died"),)), SEEN),
        ["run r  training for 1 min  round 1: all are there", "4 ranks, 2 nodes of 1:4, recovery restart",
         "step 12, 4 steps/s, loss 0.25, goodput 90.0 %", "checkpoint of step 8, 12 s ago, 2 MiB in 50 ms",
         "no step for 33 s", "straggler x5", "silent for 40 s", "worker_lost, round 1 -> 2", "worker 0 died [n1]"],
    ),
    "what is not known is a dash, and an outage is said": (
        snapshot(run(round=None, unreadable=("/x/spec",)), Observed(), AWAY),
        ["no round yet", "no checkpoint yet", "step -, goodput -", "cannot be read by this version: /x/spec",
         "etcd does not answer; this was read 1 min 15 s ago"],
    ),
    "group and place behind the state, of a spare the place alone": (
        snapshot(grouped(), Observed(now=1.0, state="training")),
        ["4 ranks, 5 nodes of 2:4, 2 shard groups of 2, recovery", "ready 0.0", "ready 1.1", "ready -.0"],
    ),
    "the rank that the others wait for": (
        snapshot(HELD, Observer().observe(HELD, 0.0, 0.0)),
        ["needs attention: rank 1 on n0 holds", "waits for 42 s", "no step for 42 s, the others wait for it"],
    ),
    "the last transition stands in for incidents": (
        snapshot(run(journal=(entry(1), entry(2, RoundState.BROKEN, reason="n1 is gone"))), Observed()),
        ["round 2 broken: n1 is gone"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_a_run_is_shown_with_all_that_is_known_of_it(name: str) -> None:
    """And nothing that is old news: a rate of a minute ago says nothing of a standstill."""
    shown, parts = VIEWS[name]
    text = printed(run_view(shown))
    assert [part for part in parts if part not in text] == [], text
    assert ("steps/s" in text) is (name == "all that is known")


def test_with_many_ranks_a_node_is_one_row() -> None:
    """With the numbers of its ranks, what they do, and who of them is slow."""
    told = {"n1": health("n1", [rank(8 + i, i, compute_s=0.9 if i == 3 else 0.1, step=10 + i) for i in range(8)])}
    told |= {"n0": health("n0", [rank(i, i, phase="data" if i else "checkpoint") for i in range(8)])}
    text = printed(run_view(snapshot(run(6, 8, health=told), Observed())))
    for part in ("0-7", "7 data, 1 checkpoint", "straggler 11", "40-47"):
        assert part in text, text
    assert text.count("\n") < 20


def test_a_node_shows_how_busy_its_machine_is() -> None:
    """Once, with its first rank."""
    gpus = tuple(GpuLoad(index=index, busy=busy) for index, busy in enumerate((0.9, 0.5, None)))
    told = {"n0": health("n0", [rank(0), rank(1, 1)], load=NodeLoad(cpu=0.253, cpus=16, gpus=gpus))}
    text = printed(run_view(snapshot(run(1, health=told), Observed()), wide=True), 400)
    assert [line.split()[1] for line in text.splitlines() if "25.3 %" in line and "70.0 %" in line] == ["n0"]
    assert text.count("25.3 %") == 1


LONG = "gpu-a100-pool-0017"


def pages(*, wide: bool) -> list[RenderableType]:
    """A run with names as they are, in which a rank holds up another, and the list with it."""
    told = {"n0": health("n0", [rank(0, waits=True, still_s=42.0), rank(1, 1, still_s=42.0, phase="data")])}
    documents = replace(run(1, health=told), run="llama-3-8b-pretrain-2026-11-28")
    view, round_ = documents.nodes["n0"], documents.round
    assert round_ is not None
    documents = replace(
        documents,
        nodes={LONG: replace(view, id=LONG, record=view.record.model_copy(update={"host": f"{LONG}.eu.example.com"}))},
        health={LONG: told["n0"]},
        round=round_.model_copy(update={"members": tuple(each._replace(node=LONG) for each in round_.members)}),
    )
    seen = Observer().observe(documents, 0.0, 0.0)
    rows = [summary(documents, seen), summary(run(2), seen)]
    listed = list_view(listing(rows, StoreStatus(True, 0.0), 0.0), wide=wide)
    return [run_view(snapshot(documents, seen), wide=wide), listed]


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_narrow_terminal_loses_whole_columns_and_no_part_of_a_word(width: int) -> None:
    """Who, which step and what is wrong stay; what was left out is named."""
    known = {word.rstrip(":,") for page in pages(wide=True) for word in printed(page, 400).split()}
    for page in pages(wide=False):
        text = printed(page, width)
        assert max(map(len, text.splitlines())) <= width
        shown = {word.rstrip(":,") for line in text.partition("no room for: ")[0].splitlines() for word in line.split()}
        assert {word for word in shown if word.isascii()} <= known | {"rank"}, text
        assert {"12", "holds", "others"} <= shown, text
        assert "(-o wide shows all)" in " ".join(text.split())


def test_wide_shows_all_columns_on_any_terminal() -> None:
    shown = [printed(page, 80, crop=False) for page in pages(wide=True)]
    assert f"{LONG}.eu.example.com" in shown[0]
    assert "no room for" not in "".join(shown)
    assert [name in text for text, name in zip(shown, ("threads", "samples/s"), strict=True)] == [True, True]


def reading(serial: int) -> StoreReading:
    documents = run(serial=serial)
    return StoreReading({"r": RunReading(documents, Observer().observe(documents, 0.0, 0.0))}, StoreStatus(True, 0.0))


def test_where_nothing_can_be_redrawn_a_view_is_printed_again_when_there_is_news() -> None:
    """But not at every change, and in any case at the end; without any control characters."""
    out = io.StringIO()

    def readings() -> Iterator[tuple[StoreReading, bool]]:
        for serial in (1, 2, 3):
            yield reading(serial), False
        assert out.getvalue().count("run r  training") == 1
        yield reading(3), True

    show_plain(
        Console(file=out, force_terminal=True, no_color=True, _environ={"TERM": "dumb"}, width=120), "r", readings()
    )
    assert out.getvalue().count("run r  training") == 2


def test_on_a_terminal_the_view_is_redrawn_in_place() -> None:
    out = io.StringIO()
    show_live(Console(file=out, force_terminal=True, width=120), "r", [(reading(1), False), (StoreReading(), True)])
    assert "run r is gone" in out.getvalue()


def test_transitions_and_incidents_are_lines_in_order_of_time() -> None:
    """With all that is known of an incident; one that ended no round has no next one."""
    happened = in_order(
        [
            incident(3, steps_lost=2, detect_s=0.4, world_before=2, world_after=1),
            entry(2, wall=1001.0),
            entry(9, wall=9000.0),
        ]
    )
    lines = [as_line(each) for each in happened]
    assert lines[0] == "1970-01-01 00:16:41Z  round 2 active (1 node, 2 ranks): because"
    assert lines[1].endswith(
        "worker_lost, round 3 -> 4, 2 -> 1 rank: no reason given [n1]. 2 steps were lost. Training stood still for 480"
        " ms: 400 ms until it was noticed, 50 ms to regroup, 30 ms to resume."
    )
    other = incident(4, kind="checkpoint_failed", cause=None, step=7, reason="disk full")
    assert "checkpoint_failed in round 4, step 7: disk full" in as_line(other)


def test_numbers_and_names_are_short() -> None:
    """Few digits, ranges, and not more names than a line holds."""
    assert [wording.number(each) for each in (None, 12.0, 0.021345, 4567.8)] == ["-", "12", "0.0213", "4568"]
    assert wording.ranges([7, 1, 2, 3, 9, 10]) == "1-3,7,9-10"
    assert wording.named(f"n{i}" for i in range(9)) == "n0, n1, n2, n3, n4, n5 and 3 more"
    assert (wording.percent(None), wording.duration(None), wording.duration(119.0)) == ("-", "-", "1 min 59 s")


def options(*words: str) -> argparse.Namespace:
    parser = Parser()
    connection.add_options(parser)
    return parser.parse_args(words)


def test_the_password_is_the_first_line_of_a_file(tmp_path: Path) -> None:
    """Not an argument, which all users of the machine could see; an empty file is a mistake."""
    (tmp_path / "secret").write_text(" pass word \nrest\n")
    settings = connection.store_settings(options("--user", "me", "--password-file", str(tmp_path / "secret")))
    assert (settings.user, settings.password, settings.password_file) == ("me", None, tmp_path / "secret")
    assert secret(tmp_path / "secret", "--token-file") == "pass word"
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="holds nothing"):
        secret(tmp_path / "empty", "--token-file")
    (tmp_path / "bytes").write_bytes(b"pass\xffword")
    with pytest.raises(ConfigError, match="is not text") as caught:
        secret(tmp_path / "bytes", "--token-file")
    assert "xff" not in str(caught.value)
    with pytest.raises(ConfigError, match="--client-cert and --client-key go together"):
        connection.store_settings(options("--client-cert", "x"))
    with pytest.raises(ConfigError, match="user and password go together"):
        connection.store_settings(options("--user", "me"))


def test_the_address_to_listen_on_has_a_host_and_a_port() -> None:
    assert listen_address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert listen_address("[::]:9470") == ("::", 9470)
    for wrong in ("9470", ":9470", "x:", "x:70000", "x:-1", "x:²"):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            listen_address(wrong)


DIED = incident(7, kind="worker_died", cause=None, reason="worker 0 (rank 1) ended with exit code 1: ValueError: x | y")
HAPPENED: list[JournalEntry | Incident] = [entry(6), incident(6), entry(7), DIED, entry(7, RoundState.BROKEN)]
HAPPENED += [incident(7, world_before=4), entry(8)]


def test_a_report_has_all_of_one_round_and_what_followed() -> None:
    """Both kinds of records, and the transitions of the round and of the next one, in both forms."""
    values = json.loads(report("r", 7, HAPPENED, as_json=True))
    assert (values["run"], values["round"]) == ("r", 7)
    assert [each["kind"] for each in values["incidents"]] == ["worker_died", "round"]
    states = [(each["round"], each["state"]) for each in values["transitions"]]
    assert states == [(7, "active"), (7, "broken"), (8, "active")]
    page = report("r", 7, HAPPENED)
    assert page.startswith("# Run r, round 7\n\n## Worker died\n")
    for part in (
        "| reason | worker 0 (rank 1) ended with exit code 1: ValueError: x / y |",
        "| outcome | No step was lost. Nobody knows since when training stood still; it took 50 ms to regroup",
        *("| next round | 8 |", "- 1970-01-01 00:16:40Z  round 7 active (1 node, 2 ranks): because\n- "),
    ):
        assert part in page


@pytest.mark.parametrize(
    ("is_open", "said"), [(True, "No round has followed yet."), (False, "The run did not continue after it.")]
)
def test_where_nothing_followed_the_report_says_so(is_open: bool, said: str) -> None:
    """And gives no figures of a recovery that never was."""
    page = report("r", 7, [incident(7).model_copy(update={"open": is_open, "next_round": None})])
    assert f"| outcome | {said} |" in page
    assert "next round" not in page


@pytest.mark.parametrize(
    ("happened", "hint"), [([entry(7), incident(3), incident(5)], "there are some of rounds 3,5"), ([], "none")]
)
def test_an_incident_that_is_not_there_is_one_sentence(happened: list[JournalEntry | Incident], hint: str) -> None:
    with pytest.raises(ConfigError, match="no incident of round 7 of run 'r' is known") as caught:
        report("r", 7, happened)
    assert hint in str(caught.value)


KEYS = RunKeys("/elastic_trainer", "run")


class Troubled(MemoryStore):
    """A store that is away for two reads after the first, and then has the run."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.reads: Iterator[int] = iter(range(100))

    def range(
        self, prefix: str, deadline: Deadline, *, limit: int = 0, order: Order = Order.KEY, keys_only: bool = False
    ) -> Snapshot:
        if prefix == KEYS.root:
            turn = next(self.reads)
            if turn in (1, 2):
                raise StoreUnavailableError("etcd does not answer")
            if turn == 3:
                self.transact([], [Put(KEYS.spec, b"{}")], deadline=Deadline.after(1.0))
        return super().range(prefix, deadline, limit=limit, order=order, keys_only=keys_only)


def test_an_outage_does_not_end_the_wait_for_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once, as is that the run is not there; the wait ends when the run is."""
    monkeypatch.setattr(connection, "pause", lambda _: None)
    settings = StoreSettings(endpoints=parse_endpoints("127.0.0.1:2379"))
    connection.await_run(Troubled(), settings, KEYS)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines] == [
        "waiting: there is no run 'run' in the etcd at 127.0.0.1:2379",
        "waiting: etcd does not answer",
    ]
