"""The health of a node: who hangs is ended, who is slow is named, a requested save goes to rank 0's worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.agent.health.incidents import Incidents
from elastic_trainer.agent.health.node_health import (
    LEAST_INTERVAL_S,
    LOOK_EVERY_S,
    LOOKS_IN_A_ROW,
    REPEATED_INCIDENT_S,
    Evictions,
    Health,
    HealthPorts,
    HealthStore,
    HealthSubject,
    RunOrders,
    SaveRequests,
    StragglerWatch,
    row,
)
from elastic_trainer.agent.health.pages import Pages
from elastic_trainer.agent.health.verdicts import Clues, KernelLog, VerdictLimits, VerdictPorts, Verdicts
from elastic_trainer.agent.workers.hang_rules import HangLimits
from elastic_trainer.agent.workers.machine import LogTails, Machine
from elastic_trainer.agent.workers.watchdog import HungWorkers
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import StoreUnavailableError
from elastic_trainer.ipc.page import ORDER_SUFFIX, Reading
from elastic_trainer.membership.documents import (
    Incident,
    LeaveRequest,
    NodeHealth,
    RankHealth,
    RestartRequest,
    RoundDocument,
    RoundState,
    RunResult,
    SaveRequest,
)
from elastic_trainer.model import Cause, Phase
from elastic_trainer.store.api import Delete, EventKind, Operation, Put, RunKeys, Watch, WatchEvent, WatchListener
from tests.support.memory_store import ManualClock, MemoryStore
from tests.unit.agent.readings import rank, reading, round_of, told_by
from tests.unit.membership.scenes import node

LIMITS = HangLimits(step_s=10.0, first_step_s=100.0, phase_s=1000.0)


class NoKills(HungWorkers):
    def __init__(self, count: Callable[[], None]) -> None:
        super().__init__(count)
        self.ended: list[int] = []

    def kill(self, pid: int, reason: str, *, local_rank: int) -> None:
        if pid not in self._reasons:
            self._reasons[pid] = reason
            self.ended.append(pid)
            self._count()


class Readings(Pages):
    def __init__(self, clock: ManualClock, root: Path) -> None:
        super().__init__(clock, root)
        self.readings: list[Reading] = []

    def living(self) -> list[Reading]:
        return [] if self._closed else list(self.readings)


class Kept(HealthStore):
    """Keeps what is published; ``away``: incidents cannot be written."""

    def __init__(self) -> None:
        self.documents: dict[str, NodeHealth] = {}
        self.written: list[NodeHealth] = []
        self.incidents: list[Incident] = []
        self.away = False

    def write(self, health: NodeHealth) -> None:
        self.written.append(health)

    def told(self) -> dict[str, NodeHealth]:
        return self.documents

    def write_incident(self, incident: Incident) -> str:
        if self.away:
            raise StoreUnavailableError("away")
        self.incidents.append(incident)
        return "key"


KEYS = RunKeys("/p", "run")


@dataclass
class Desk:
    """The health of node ``a``, a turn at a time."""

    clock: ManualClock
    pages: Readings
    store: Kept = field(default_factory=Kept)
    incidents: Incidents = field(default_factory=lambda: Incidents("a"))
    round: RoundDocument | None = None
    stalled: list[tuple[int, str]] = field(default_factory=list)
    asks: MemoryStore = field(default_factory=MemoryStore)
    left: list[str] = field(default_factory=list)
    told: list[tuple[str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.judge = NoKills(partial(self.pages.count_event, "workers_killed"))
        self.health = self.health_with(LIMITS)

    def health_with(self, limits: HangLimits, **more: Any) -> Health:
        go = partial(self.left.append, "a")
        evictions = Evictions("a", self.asks, KEYS, lambda: 0, go, obeys=False, leave=go)
        nobody_is_slow = StragglerWatch("a", evictions, dict, evicts=False, clock=self.clock)  # has tests of its own
        clues = Clues("a", lambda: 0, clock=self.clock)
        ports = HealthPorts(
            self.pages,
            self.store,
            self.incidents,
            evictions,
            nobody_is_slow,
            SaveRequests(MemoryStore(), KEYS, "a"),
            RunOrders(MemoryStore(), KEYS, "a"),
            self.judge,
            Machine({"CUDA_VISIBLE_DEVICES": ""}),
            LogTails(8),
            clues,
            KernelLog(Path("/nowhere")),
            Verdicts(
                clues,
                MemoryStore(),
                KEYS,
                VerdictLimits(),
                VerdictPorts(self.store.told, evictions.ask_any, lambda number, reason: None),
                self.clock,
            ),
            lambda: self.round,
            lambda number, reason: self.stalled.append((number, reason)),
        )
        return Health(HealthSubject("a", limits, "h", "http://h:1", **more), ports, self.clock)

    @property
    def written(self) -> list[NodeHealth]:
        return self.store.written

    @property
    def kept(self) -> list[Incident]:
        return self.store.incidents

    def hurries(self) -> bool:
        """Whether the next turn of the writer comes at once."""
        return self.health._writing._awake.is_set()

    def turns(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            self.clock.advance(0.5)
            self.health.turn()

    def worker(self, pid: int = 1, **more: object) -> Reading:
        """One that has just moved."""
        values: dict[str, object] = {"pid": pid, "moved_at": self.clock.monotonic(), **more}
        return reading(**values)  # type: ignore[arg-type]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    clock = ManualClock()
    desk = Desk(clock, Readings(clock, tmp_path))
    yield desk
    desk.pages.close()


# ---- the watchdog


def test_the_file_of_a_liveness_probe_is_touched_as_long_as_the_agent_looks(desk: Desk, tmp_path: Path) -> None:
    """Every few seconds, whatever the store does; an agent that stands still touches nothing."""
    alive = tmp_path / "alive"
    health = desk.health_with(LIMITS, alive=alive)
    health.turn()
    assert alive.exists()
    for passed_s, touched in ((0.0, False), (4.0, False), (1.0, True)):
        os.utime(alive, (0, 0))
        desk.clock.advance(passed_s)
        health.turn()
        assert (alive.stat().st_mtime > 0) is touched


def test_culprits_are_ended_once_and_victims_never(desk: Desk) -> None:
    """Who waits for others is not to blame; a worker that dies slowly is not ended again."""
    desk.pages.readings = [desk.worker(1), desk.worker(2, waits=True)]
    desk.turns(10.0)
    assert desk.judge.ended == []
    desk.turns(30.0)
    assert desk.judge.ended == [1]
    assert desk.pages.counters()["workers_killed"] == 1.0
    assert "it has made no progress for 10.5 s" in str(desk.judge.take(1))


def test_a_victim_is_not_ended_when_it_is_freed(desk: Desk) -> None:
    """Between the end of its wait and its next step it looks as a culprit does; it gets a limit of its own."""
    victim = desk.worker(1, waits=True)
    desk.pages.readings = [victim]
    desk.turns(40.0)
    desk.pages.readings = [replace(victim, waits=False)]
    desk.turns(9.5)
    assert desk.judge.ended == []
    desk.turns(2.0)
    assert desk.judge.ended == [1]


def test_an_agent_that_stood_still_excuses_everybody(desk: Desk) -> None:
    """A whole node that was frozen: each worker gets all the time that it still had, and no more."""
    desk.pages.readings = [desk.worker(1)]
    desk.turns(4.0)
    desk.clock.advance(500.0)
    desk.health.turn()
    desk.turns(6.0)
    assert desk.judge.ended == []
    desk.turns(0.5)
    assert desk.judge.ended == [1]


@pytest.mark.parametrize("head", ["a", "b"])
@pytest.mark.parametrize("others", ["wait", "silent", "busy"])
@pytest.mark.parametrize("state", [RoundState.ACTIVE, RoundState.BROKEN])
def test_a_round_in_which_all_wait_for_each_other_is_given_up(
    desk: Desk, head: str, others: str, state: RoundState
) -> None:
    """By rank 0's node, if all nodes report that their ranks wait, and only while the round is on."""
    desk.round = round_of(7, *sorted(("a", "b"), key=lambda name: name != head), state=state)
    told = {"wait": told_by("b", rank(1), number=7), "busy": told_by("b", rank(1, waits=False), number=7)}
    desk.store.documents = {"a": told_by("a", rank(0), number=7)}
    if others in told:
        desk.store.documents["b"] = told[others]
    desk.pages.readings = [desk.worker(1, waits=True)]
    desk.turns(LIMITS.step_s)
    assert desk.stalled == []
    desk.turns(0.5)
    assert desk.judge.ended == []
    if (head, others, state) == ("a", "wait", RoundState.ACTIVE):
        assert desk.stalled == [(7, "all ranks have waited for each other for 10.5 s")]
    else:
        assert desk.stalled == []


def test_who_stands_still_with_all_its_workers_reports_so_at_once(desk: Desk) -> None:
    """Rank 0's node can only give the round up when it knows; the next regular word may be seconds away. Once: in a
    job of a thousand nodes all report."""
    desk.round = round_of(1, "b", "a")
    desk.pages.readings = [desk.worker(1, waits=True)]
    desk.turns(LIMITS.step_s)
    assert not desk.hurries()
    desk.turns(0.5)
    assert desk.hurries()
    desk.health._writing._awake.clear()
    assert desk.health.report(desk.pages.readings, {}).ranks[0].waits_s == pytest.approx(LIMITS.step_s, abs=0.5)
    desk.turns(20.0)
    assert not desk.hurries()


def test_a_round_with_a_culprit_here_is_not_given_up(desk: Desk) -> None:
    desk.round, desk.store.documents = round_of(1, "a"), {"a": told_by("a", rank(0))}
    desk.pages.readings = [desk.worker(1, waits=True), desk.worker(2)]
    desk.turns(60.0)
    assert (desk.judge.ended, desk.stalled) == ([2], [])


# ---- telling


def test_what_is_published_is_what_the_pages_say(desk: Desk) -> None:
    saved = {"step": 4, "wall": 1.0, "bytes": 9, "duration_s": 0.5}
    desk.round = round_of(3, "a")
    desk.pages.readings = [
        desk.worker(1, rank=0, step=5, loss=1.25, notes={"saved": saved, "device": "cuda:0"}, save_interval_s=60.0),
        desk.worker(2, rank=-1),
    ]
    desk.health.publish()
    (health,) = desk.written
    assert (health.node, health.host, health.round, health.metrics) == ("a", "h", 3, "http://h:1")
    assert health.ranks == (row(desk.pages.readings[0], desk.clock.monotonic()),)
    assert (health.loss, health.save_interval_s, health.ranks[0].device) == (1.25, 60.0, "cuda:0")
    assert health.saved is not None
    assert health.saved.model_dump() == {**saved, "free_bytes": None}
    names = {f"seconds.{phase}" for phase in Phase} | {"samples", "steps", "nonfinite_steps"}
    assert set(health.counters) == names
    assert NodeHealth.decode(health.encode(), "key") == health


def test_nothing_is_invented_where_rank_0_is_elsewhere(desk: Desk) -> None:
    desk.pages.readings = [desk.worker(1, rank=1, loss=1.0)]
    desk.health.publish()
    desk.pages.readings = [desk.worker(1, rank=0)]
    desk.health.publish()
    assert [(health.loss, health.saved, health.round) for health in desk.written] == [(None, None, 0)] * 2


def test_a_row_reports_how_long(desk: Desk) -> None:
    now = desk.clock.monotonic()
    one = desk.worker(9, slot=2, rank=6, waits=True, moved_at=now - 3.0, phase_at=now - 4.0, step_s=0.5, compute_s=0.25)
    assert row(one, now) == RankHealth(
        rank=6, local_rank=2, pid=9, phase="training", phase_s=4.0, still_s=3.0, step_s=0.5, compute_s=0.25, waits=True
    )


def recovered(desk: Desk) -> None:
    """A round ends and the next one makes a step."""
    now = desk.clock.monotonic()
    desk.incidents.see(round_of(1, "a", "b"), now, now)
    desk.pages.readings = [desk.worker(1, round=1, step=10, stepped_at=now)]
    desk.health.turn()
    desk.clock.advance(0.5)
    now = desk.clock.monotonic()
    for document in (
        round_of(1, "a", "b", state=RoundState.BROKEN, cause=Cause.NODE_LOST),
        round_of(2, "a", cause=Cause.NODE_LOST),
    ):
        desk.incidents.see(document, now, now)
        desk.round = document
    desk.pages.readings = [desk.worker(1, round=2, step=11, fresh=1, first_at=now + 0.75)]
    desk.clock.advance(1.0)
    desk.health.turn()


def test_an_incident_is_counted_and_reported(desk: Desk) -> None:
    recovered(desk)
    desk.health.publish()
    counters = desk.written[-1].counters
    assert counters["ended.node_lost"] == 1.0
    assert counters["recovery_s.failure.le.2"] == counters["recovery_s.failure.count"] == 1.0
    assert counters["recovery_s.failure.sum"] == 1.25
    assert [incident.next_round for incident in desk.kept] == [2]


def test_incidents_outlast_an_outage_of_the_store(desk: Desk) -> None:
    """They are reported in order when it is back, each once; what the workers do is published anyway."""
    desk.store.away = True
    recovered(desk)
    for _ in range(3):
        desk.health.publish()
    assert (desk.kept, len(desk.written)) == ([], 3)
    desk.store.away = False
    desk.health.publish()
    desk.health.publish()
    assert [incident.round for incident in desk.kept] == [1]


def test_the_failure_of_the_run_is_reported_though_the_agent_ends_at_once(desk: Desk) -> None:
    desk.round = round_of(1, "a", "b")
    desk.incidents.see(desk.round, 1.0, 1.0)
    closed = round_of(1, "a", "b", state=RoundState.CLOSED, result=RunResult.FAILED, cause=Cause.WORKER_LOST)
    desk.incidents.see(closed, 2.0, 2.0)
    desk.health.close()
    desk.health.close()
    assert len(desk.written) == 1
    assert [(incident.cause, incident.next_round) for incident in desk.kept] == [(Cause.WORKER_LOST, None)]
    counters = desk.written[-1].counters
    assert counters["ended.worker_lost"] == 1.0
    assert "recovery_s.failure.count" not in counters


@pytest.mark.parametrize(
    ("nodes", "every_s"), [(0, LEAST_INTERVAL_S), (2, LEAST_INTERVAL_S), (250, 2.0), (1000, 8.0), (2000, 16.0)]
)
def test_nodes_write_less_often_the_more_there_are(desk: Desk, nodes: int, every_s: float) -> None:
    """All together a bounded number of times a second; the document says how often."""
    desk.round = round_of(1, "a", *(f"n{number}" for number in range(nodes - 1))) if nodes else None
    assert desk.health.every_s() == every_s
    desk.health.publish()
    assert desk.written[-1].every_s == every_s
    desk.round = None  # spares, and nodes that wait for a first round, are as many writers as members
    assert desk.health_with(LIMITS, max_nodes=nodes).every_s() == every_s


def test_failed_saves_and_the_loss_outlast_the_worker_that_reported_them(desk: Desk) -> None:
    """A worker that has not tried to save yet says nothing of it, and a run that has ended keeps its last loss."""
    for notes in ({"saves_failing": 2}, {}, {"saves_failing": 0}):
        desk.pages.readings = [desk.worker(1, rank=0, loss=0.5, notes=notes)]
        desk.health.publish()
    desk.pages.readings = []
    desk.health.publish()
    assert [health.saves_failing for health in desk.written] == [2, 2, 0, 0]
    assert desk.written[-1].loss == 0.5


@pytest.mark.parametrize(
    ("count", "kind"), [("save.failed", "checkpoint_failed"), ("nonfinite_steps", "nonfinite_loss")]
)
def test_what_goes_wrong_again_and_again_is_reported_now_and_then(desk: Desk, count: str, kind: str) -> None:
    """At once, and then at most every ten minutes; nothing is reported without anything new."""
    desk.round = round_of(3, "a", "b")
    desk.health.publish()
    assert desk.kept == []
    for _ in range(5):
        desk.pages.count_event(count)
        desk.health.publish()
        desk.clock.advance(10.0)
    assert [(incident.kind, incident.round, incident.nodes) for incident in desk.kept] == [(kind, 3, ("a",))]
    desk.clock.advance(REPEATED_INCIDENT_S)
    desk.health.publish()
    assert len(desk.kept) == 1
    desk.pages.count_event(count)
    desk.health.publish()
    assert len(desk.kept) == 2


def test_a_save_that_fails_is_reported_with_its_error(desk: Desk) -> None:
    desk.round = round_of(3, "a", "b")
    desk.health.publish()
    desk.pages.readings = [desk.worker(1, rank=0, notes={"saves_failing": 1, "save_error": "OSError: full"})]
    desk.pages.count_event("save.failed")
    desk.health.publish()
    assert [each.reason for each in desk.kept] == ["a checkpoint could not be saved: OSError: full"]


def test_a_loss_that_all_ranks_find_is_reported_by_one_node(desk: Desk) -> None:
    """That of rank 0; a node that becomes it later does not report what was before."""
    desk.round = round_of(3, "b", "a")
    desk.pages.count_event("nonfinite_steps")
    desk.health.publish()
    desk.round = round_of(4, "a")
    desk.health.publish()
    assert desk.kept == []


def test_ranks_that_an_audit_names_become_an_incident_once(desk: Desk) -> None:
    """With their nodes, which are others than the one that reports; the same nodes again only after a while."""
    desk.round = round_of(3, "a", "b", "c")
    found = {"step": 40, "ranks": [2], "reason": "ranks 0 and 1 agree"}
    shown = [found | {"number": number, "nodes": [node]} for number, node in ((1, "c"), (2, "c"), (3, "b"))]
    for count in (1, 2, 3):
        desk.pages.readings = [desk.worker(rank=0, notes={"audits": shown[:count]})]
        desk.health.publish()
        desk.health.publish()
    assert [(each.kind, each.nodes, each.ranks, each.step) for each in desk.kept] == [
        ("audit_mismatch", ("c",), (2,), 40),
        ("audit_mismatch", ("b",), (2,), 40),
    ]


@pytest.mark.parametrize(
    ("named", "least", "asked", "said"),
    [
        (["c"], 2, {"c"}, "; its node was asked to leave"),
        (["a"], 2, {"a"}, "; its node was asked to leave"),
        (["c"], 3, set(), "; its node stays, since --nnodes needs it"),
        (["b", "c"], 2, set(), ""),
        (["gone"], 2, set(), ""),
    ],
)
def test_the_node_that_an_audit_names_is_let_go_where_the_run_can_do_without_it(
    desk: Desk, named: list[str], least: int, asked: set[str], said: str
) -> None:
    """Also the one that reports. Of two, of which nobody knows which is wrong, none goes."""
    soon, present = Deadline.after(60.0), round_of(3, "a", "b", "c")
    created = [desk.asks.transact([], [Put(KEYS.node(each.node), b"")], deadline=soon) for each in present.members]
    members = [each._replace(create_revision=at.revision) for each, at in zip(present.members, created, strict=True)]
    desk.round = present.model_copy(update={"members": tuple(members)})
    health = desk.health_with(LIMITS, evicts_mismatched=True, min_nodes=least)
    found = {"step": 40, "ranks": [2], "reason": "it differs", "number": 1, "nodes": named}
    desk.pages.readings = [desk.worker(rank=0, notes={"audits": [found]})]
    health.publish()
    health.publish()
    waiting = {name for name in "abc" if desk.asks.get(KEYS.eviction(name), soon).first is not None}
    assert waiting | set(desk.left) == asked
    assert [each.reason for each in desk.kept] == ["it differs" + said]


class Quiet(MemoryStore):
    """A store whose watch says something only when the test does."""

    following = 0

    def watch(self, prefix: str, listener: WatchListener, *, exact: bool = False) -> Watch:
        assert (prefix, exact) == (KEYS.save, True)
        self.following += 1
        return self  # which closes what it has opened

    def close(self) -> None:
        self.following -= 1


class Scene:
    """The agent of node ``a``, which has rank 0 in round 1, and its worker."""

    def __init__(self, directory: Path) -> None:
        self.store, self.directory = Quiet(), directory
        self.requests = SaveRequests(self.store, KEYS, "a")
        self.requests.follow_round(round_of(1, "a", "b"))

    def put(self, request: SaveRequest) -> None:
        self.store.transact([], [Put(KEYS.save, request.encode())], deadline=Deadline.after(1.0))
        self.receive()

    def receive(self) -> None:
        (item,) = self.store.get(KEYS.save, Deadline.after(1.0)).items
        self.requests.on_events([WatchEvent(EventKind.PUT, item)])

    def worker(self, pid: int = 7, **notes: Any) -> Reading:
        return replace(reading(pid=pid, notes=notes), path=self.directory / f"0-{pid}.page")

    def passed_on(self, pid: int = 7) -> str | None:
        path = self.directory / f"0-{pid}.save"
        return path.read_text() if path.exists() else None

    @property
    def stored(self) -> SaveRequest:
        (item,) = self.store.get(KEYS.save, Deadline.after(1.0)).items
        return SaveRequest.decode(item.value, item.key)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_request_is_passed_on_and_answered_once(scene: Scene) -> None:
    scene.put(SaveRequest(id="x", wall=1.0))
    assert not scene.requests.pass_on([scene.worker()])
    assert scene.passed_on() == "x"
    scene.requests.follow_round(round_of(1, "a", "b"))
    assert not scene.stored.answered
    assert not scene.requests.pass_on([scene.worker(on_demand={"id": "an older one", "name": "step-1"})])
    done = scene.worker(on_demand={"id": "x", "name": "step-5"})
    assert [scene.requests.pass_on([done]) for _ in range(3)] == [True, False, False]
    scene.requests.follow_round(round_of(1, "a", "b"))
    assert scene.stored == SaveRequest(id="x", wall=1.0, name="step-5")
    scene.receive()
    assert not scene.requests.pass_on([done])
    scene.requests.follow_round(round_of(1, "a", "b"))
    assert scene.stored.name == "step-5"


def test_a_worker_that_has_taken_its_request_does_not_get_it_again(scene: Scene) -> None:
    scene.put(SaveRequest(id="x", wall=1.0))
    scene.requests.pass_on([scene.worker()])
    (scene.directory / "0-7.save").unlink()
    scene.requests.pass_on([scene.worker()])
    assert scene.passed_on() is None
    scene.put(SaveRequest(id="y", wall=2.0))
    scene.requests.pass_on([scene.worker()])
    assert scene.passed_on() == "y"


def test_the_worker_that_follows_on_a_dead_one_gets_the_request_too(scene: Scene) -> None:
    scene.put(SaveRequest(id="x", wall=1.0))
    scene.requests.pass_on([scene.worker(7)])
    scene.requests.pass_on([])
    scene.requests.pass_on([scene.worker(8)])
    assert scene.passed_on(8) == "x"
    other = replace(reading(pid=9, rank=1), path=scene.directory / "0-9.page")
    scene.requests.pass_on([other])
    assert scene.passed_on(9) is None


def test_a_refusal_is_an_answer_and_waits_for_the_store(scene: Scene) -> None:
    scene.put(SaveRequest(id="x", wall=1.0))
    assert scene.requests.pass_on([scene.worker(on_demand={"id": "x", "name": "", "problem": "disk full", "code": 73})])
    scene.store.backend.down = True
    with pytest.raises(StoreUnavailableError):
        scene.requests.follow_round(round_of(1, "a", "b"))
    scene.store.backend.down = False
    assert not scene.stored.answered
    scene.requests.follow_round(round_of(1, "a", "b"))
    assert (scene.stored.problem, scene.stored.code) == ("disk full", 73)


def test_only_the_node_of_rank_0_follows_requests(scene: Scene) -> None:
    for document, following in (
        (round_of(2, "b", "a"), 0),
        (round_of(3, "a", "b"), 1),
        (round_of(3, "a", "b", state=RoundState.BROKEN), 1),
        (round_of(3, "a", "b", state=RoundState.CLOSED), 0),
        (None, 0),
    ):
        scene.requests.follow_round(document)
        assert scene.store.following == following
    scene.requests.follow_round(round_of(4, "a"))
    scene.store.transact([], [Put(KEYS.save, b"{]")], deadline=Deadline.after(1.0))
    scene.receive()
    assert not scene.requests.pass_on([scene.worker()])
    assert scene.passed_on() is None


def computing(number: int, compute_s: float) -> RankHealth:
    return replace(rank(number, waits=False, still_s=0.0), compute_s=compute_s)


@dataclass
class Job:
    """Three nodes of one rank each, of which ``slow`` computes ten times as long; a fourth is ready if ``spare``."""

    slow: str = "c"
    spare: bool = True
    clock: ManualClock = field(default_factory=ManualClock)
    store: MemoryStore = field(default_factory=MemoryStore)
    left: list[str] = field(default_factory=list)
    told: list[tuple[str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.created = {name: self.show(name) for name in "abc"}

    def show(self, name: str) -> int:
        key, soon = KEYS.node(name), Deadline.after(60.0)
        self.store.transact([], [Delete(key)], deadline=soon)
        return self.store.transact([], [Put(key, b"")], deadline=soon).revision

    def evictions(self, name: str) -> Evictions:
        created = self.created[name]
        workers, node = (partial(self.left.append, each) for each in (f"workers of {name}", name))

        def told(reason: str, workers: bool) -> None:
            self.told.append((reason, workers))

        return Evictions(name, self.store, KEYS, lambda: created, workers, obeys=True, leave=node, told=told)

    def looks(self, name: str, times: int = 10, *, evicts: bool = True) -> list[Incident | None]:
        records = {"spare": node("spare", 9).record} if self.spare else {}
        watch = StragglerWatch(name, self.evictions(name), lambda: records, evicts=evicts, clock=self.clock)
        current = round_of(1, "a", "b", "c")
        members = [each._replace(create_revision=self.created[each.node]) for each in current.members]
        current = current.model_copy(update={"members": tuple(members)})
        told = {each: told_by(each, computing(i, 1.0 if each == self.slow else 0.1)) for i, each in enumerate("abc")}
        found = []
        for _ in range(times):
            self.clock.advance(LOOK_EVERY_S)
            found.append(watch.judge(current, lambda: told))
        return found

    def asked(self, name: str) -> bool:
        return self.store.get(KEYS.eviction(name), Deadline.after(60.0)).first is not None


def test_a_rank_that_stays_slow_is_reported_once() -> None:
    """Not at the first look of a round, whose figures may be older, and not before it was slow several times. Only the
    node of rank 0 reports."""
    found = Job().looks("a", 1 + LOOKS_IN_A_ROW + 3, evicts=False)
    (told,) = [each for each in found if each is not None]
    assert found.index(told) == LOOKS_IN_A_ROW
    assert (told.nodes, told.ranks) == (("c",), (2,))
    assert Job().looks("b") == Job().looks("c") == [None] * 10


@pytest.mark.parametrize(("slow", "spare", "asked"), [("c", True, "c"), ("c", False, ""), ("a", True, "")])
def test_a_slow_node_goes_where_another_is_ready(slow: str, spare: bool, asked: str) -> None:
    """Slow is better than none, and the node of rank 0 holds what all meet at. Who is asked leaves once."""
    job = Job(slow, spare)
    job.looks("a")
    assert [name for name in "abc" if job.asked(name)] == list(asked)
    for _ in range(2):
        job.evictions("c").obey()
    assert (job.left, job.asked("c")) == (list(asked), False)


def test_what_was_asked_of_a_node_of_the_same_name_before_is_not_obeyed() -> None:
    """The one that took its name is another, which nobody knows to be slow: it is not asked either."""
    job = Job()
    job.show("c")
    job.looks("a")
    assert not job.asked("c")
    request = Put(KEYS.eviction("c"), LeaveRequest(reason="slow").encode())
    job.store.transact([], [request], deadline=Deadline.after(60.0))
    job.created["c"] = job.show("c")
    job.evictions("c").obey()
    assert (job.left, job.asked("c")) == ([], False)


# ---- what operators ask of all ranks


@pytest.fixture
def ordered(tmp_path: Path) -> tuple[MemoryStore, Callable[..., str]]:
    """A store, and what the worker of rank 0 on node a reads after a turn of its agent."""
    store, page = MemoryStore(), tmp_path / "0-7.page"

    def turn(number: int = 1, rank: int = 0, **changes: Any) -> str:
        current = round_of(number, "a", "b").model_copy(update=changes)
        RunOrders(store, KEYS, "a").follow(current, [replace(reading(rank=rank), path=page)])
        order = page.with_suffix(ORDER_SUFFIX)
        return order.read_text() if order.exists() else ""

    return store, turn


def write(store: MemoryStore, *operations: Operation) -> None:
    store.transact([], list(operations), deadline=Deadline.after(60.0))


def test_a_pause_lasts_while_its_key_does(ordered: tuple[MemoryStore, Callable[..., str]]) -> None:
    """Not while the round drains, when no rank could follow, and not for a worker that has lost rank 0."""
    store, turn = ordered
    write(store, Put(KEYS.pause, b"an operator"))
    assert [turn(), turn(), turn(state=RoundState.DRAINING), turn(2)] == ["pause", "pause", "", "pause"]
    assert turn(2, rank=1) == ""
    assert turn(2) == "pause"
    write(store, Delete(KEYS.pause))
    assert turn(2) == ""


def test_a_restart_is_for_one_round(ordered: tuple[MemoryStore, Callable[..., str]]) -> None:
    """It goes before a pause, stays until that round is over, and is removed then."""
    store, turn = ordered
    write(store, Put(KEYS.pause, b"an operator"), Put(KEYS.restart, RestartRequest(round=2).encode()))
    assert [turn(1), turn(2), turn(2)] == ["pause", "restart 2", "restart 2"]
    assert turn(3) == "pause"
    assert store.get(KEYS.restart, Deadline.after(60.0)).first is None


def test_a_node_of_before_asks_in_plain_text() -> None:
    """The reason alone; who has no key yet is not meant."""
    job = Job()
    request = Put(KEYS.eviction("c"), b"rank 3 computes 0.2 s")
    write(job.store, request)
    job.created["c"], created = 0, job.created["c"]
    job.evictions("c").obey()
    assert (job.left, job.asked("c")) == ([], True)
    job.created["c"] = created
    job.evictions("c").obey()
    assert (job.left, job.asked("c")) == (["c"], False)


def test_an_operator_may_have_the_workers_leave_alone() -> None:
    job = Job()
    write(job.store, Put(KEYS.eviction("c"), LeaveRequest(reason="why", ordered=True, workers=True).encode()))
    job.evictions("c").obey()
    assert (job.left, job.told) == (["workers of c"], [("why", True)])


def test_a_node_that_is_in_no_round_can_be_asked_to_leave() -> None:
    """Its workers may be starting again; one that is not there at all is not asked."""
    job = Job()
    here = job.evictions("a")
    assert here.ask_any("b", "its machine is broken")
    assert job.asked("b")
    assert not here.ask_any("nobody", "its machine is broken")
    assert here.ask_any("a", "this one")
    assert job.left == ["a"]
