"""Nobody is asked while steps come in time; who does not answer when others wait is suspected, and nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_trainer.agent import suspicion as module
from elastic_trainer.agent.suspicion import (
    LATE_S,
    TURN_S,
    Address,
    PeerReply,
    Peers,
    Suspects,
    Suspicion,
)
from elastic_trainer.agent.workers import hang_rules
from elastic_trainer.agent.workers.conductor import Worker
from elastic_trainer.clock import Deadline
from elastic_trainer.errors import StoreUnavailableError
from elastic_trainer.ipc.page import Reading
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import Ghost, RoundDocument, RoundState
from elastic_trainer.model import Phase
from tests.support.memory_store import ManualClock
from tests.unit.agent.readings import reading, round_of
from tests.unit.membership.scenes import node

ROUND = round_of(3, "a", "b", "c")
PID = 1


@dataclass
class Room:
    """A node ``a`` of one worker, and the agents of two others; also all that the thread stands on."""

    clock: ManualClock = field(default_factory=ManualClock)
    document: RoundDocument | None = ROUND
    page: Reading = field(default_factory=lambda: reading(pid=PID))
    state: str = "sleeping"
    starved_s: float = 0.0
    """How long the worker has waited for a CPU since it was asked."""
    suspects_now: Suspects | None = None
    asked: int = 0
    suspected: list[tuple[Ghost, ...]] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    pings: int = 0
    forgotten: int = 0
    asked_at: float = -float("inf")
    """When another agent has asked this one."""

    def __post_init__(self) -> None:
        connection = cast("Any", SimpleNamespace(send=self._pinged))
        self.worker = Worker(connection, PID, 0, life=1)
        here = cast("Any", self)
        self.suspicion = Suspicion(here, here, here, here, self.clock)

    # what the thread asks of its conductor, pages, port and peers

    def at_work(self) -> tuple[RoundDocument | None, list[Worker]]:
        return self.document, [self.worker]

    def glance(self) -> list[Reading]:
        return [self.page]

    def ask(self, document: RoundDocument) -> None:
        self.asked += 1

    def suspects(self, now: float, awake_at: float) -> Suspects | None:
        self.awake_at = awake_at
        return self.suspects_now

    def forget(self, but: Sequence[str] = ()) -> None:
        self.forgotten += not but

    def suspect(self, document: RoundDocument, ghosts: tuple[Ghost, ...], reason: str) -> None:
        self.suspected.append(ghosts)

    def exclude(self, worker: Worker, why: str) -> None:
        worker.stuck = True
        self.excluded.append(why)

    def _pinged(self, message: object) -> None:
        self.pings += 1

    # what happens

    def turns(self, seconds: float) -> None:
        """Turns in time, for this long."""
        for _ in range(round(seconds / TURN_S)):
            self.clock.advance(TURN_S)
            self.suspicion.turn()

    def waits(self) -> None:
        self.page = replace(self.page, waits=True)

    def asked_by_others(self) -> None:
        self.asked_at = self.clock.monotonic()


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    room = Room()
    monkeypatch.setattr(module, "process_state", lambda pid: room.state)
    monkeypatch.setattr(module, "starved_s", lambda now, before: room.starved_s)
    return room


def test_nobody_is_asked_while_steps_come_in_time(room: Room) -> None:
    """Each waits for the others in each of its steps; no message is sent, no process looked at."""
    room.waits()
    for _ in range(50):
        room.turns(hang_rules.LEAST_WAIT_S - TURN_S)
        room.page = replace(room.page, pulse=replace(room.page.pulse, moved_at=room.clock.monotonic()))
    assert (room.asked, room.pings) == (0, 0)


def test_who_waits_for_too_long_asks_and_the_silent_are_suspected_once(room: Room) -> None:
    """When that had no effect, they are asked anew before they are suspected again."""
    room.waits()
    room.turns(2 * hang_rules.LEAST_WAIT_S)
    assert (room.asked, room.suspected) == (1, [])
    room.suspects_now = Suspects((Ghost(node="b", mod_revision=2),), "b is silent")
    room.turns(0.9)
    assert room.suspected == [room.suspects_now.nodes]
    assert room.forgotten == 0
    room.turns(0.5)
    assert (len(room.suspected), room.forgotten, room.asked) == (2, 1, 2)


def test_steps_of_long_are_given_longer(room: Room) -> None:
    room.page = reading(pid=PID, waits=True, step_s=0.5)
    room.turns(1.2)
    assert room.asked == 0
    room.turns(0.6)
    assert room.asked == 1


def test_time_in_which_this_agent_stood_still_counts_for_nobody(room: Room) -> None:
    room.waits()
    room.turns(0.9 * hang_rules.LEAST_WAIT_S)
    room.clock.advance(10.0 + LATE_S)
    room.turns(0.9 * hang_rules.LEAST_WAIT_S)
    assert room.asked == 0
    room.turns(hang_rules.LEAST_WAIT_S)
    assert room.asked == 1
    assert room.awake_at > 10.0


def test_a_round_that_is_new_is_waited_for_from_its_beginning(room: Room) -> None:
    room.page = reading(Phase.RENDEZVOUS, pid=PID)
    room.document = round_of(3, "a", "b", "c", state=RoundState.BROKEN)
    room.turns(5.0)
    room.document = round_of(4, "a", "b")
    room.turns(0.9 * hang_rules.LEAST_WAIT_S)
    assert room.asked == 0


def test_a_node_in_no_round_asks_nobody(room: Room) -> None:
    room.document = None
    room.waits()
    room.asked_by_others()
    room.turns(2.0)
    assert (room.asked, room.pings, room.excluded) == (0, 0, [])


def test_a_stopped_worker_is_excluded_when_others_ask(room: Room) -> None:
    """Not before: as long as nobody waits it harms nobody. And not for the blink of an eye."""
    room.state = "stopped"
    room.turns(5.0)
    room.asked_by_others()
    room.turns(TURN_S)
    room.state = "sleeping"
    room.turns(TURN_S)
    assert room.excluded == []
    room.state = "stopped"
    room.turns(2 * TURN_S)
    assert room.excluded == ["its process is stopped"]


def test_a_worker_that_answers_nothing_is_excluded(room: Room) -> None:
    for answers in (True, False):
        for _ in range(4):
            room.asked_by_others()
            room.turns(0.2)
            if answers:
                room.worker.ponged(room.clock.monotonic())
    assert len(room.excluded) == 1
    assert "answered nothing" in room.excluded[0]
    assert room.pings > 1


def test_a_worker_that_gets_no_cpu_is_given_longer(room: Room) -> None:
    room.starved_s = 0.4
    for seconds, found in ((0.85, 0), (0.2, 1)):
        room.asked_by_others()
        room.turns(seconds)
        assert len(room.excluded) == found


def test_in_a_round_that_is_over_those_are_looked_at_who_are_not_free(room: Room) -> None:
    room.document = round_of(3, "a", "b", "c", state=RoundState.BROKEN)
    room.state = "stopped"
    room.turns(2 * TURN_S)
    assert room.excluded == ["its process is stopped"]


# ---- who is silent


@dataclass
class Line:
    """An asker that hears what the test says."""

    clock: ManualClock
    asked: dict[str, float] = field(default_factory=dict)
    heard: list[PeerReply] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    frozen_s: float = 0.0
    """For how long this node stands still while it listens next."""

    @property
    def open(self) -> dict[str, float]:
        return dict(self.asked)

    def accepts(self, node: str) -> bool:
        return node in self.accepted

    def ask(self, node: str, address: Address) -> None:
        self.asked.setdefault(node, self.clock.monotonic())

    def receive(self, timeout_s: float) -> list[PeerReply]:
        self.clock.advance(self.frozen_s)
        self.heard = [replace(each, after_s=each.after_s + self.frozen_s) for each in self.heard]
        self.frozen_s = 0.0
        heard, self.heard = self.heard, []
        return heard

    def forget(self, node: str) -> None:
        self.asked.pop(node, None)

    def answer(self, *nodes: str, dead: bool = False) -> None:
        now = self.clock.monotonic()
        self.heard += [PeerReply(name, now - self.asked.pop(name), dead=dead) for name in nodes]


@dataclass
class Around:
    """The agents around node ``a``, which were asked just now."""

    clock: ManualClock = field(default_factory=ManualClock)
    store: bool = True
    addresses: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.line = Line(self.clock)
        self.peers = Peers("run", "a", self._nodes, self.clock, cast("Any", self.line))
        self.peers.ask(ROUND)

    def _nodes(self, names: Sequence[str], deadline: Deadline) -> dict[str, NodeView]:
        if not self.store:
            raise StoreUnavailableError("no store")
        own = self.addresses
        return {name: node(name, ord(name), mod=7, address=own.get(name, "127.0.0.1")) for name in names}

    def after(self, seconds: float, *answering: str, dead: bool = False) -> list[str]:
        """Those answer after ``seconds``; who is suspected then."""
        self.clock.advance(seconds)
        self.line.answer(*answering, dead=dead)
        self.peers.receive(0.0)
        found = self.peers.suspects(self.clock.monotonic(), awake_at=0.0)
        return [each.node for each in found.nodes] if found is not None else []


def test_who_answers_too_late_is_suspected() -> None:
    """By the key that it has now, so that whatever it writes next withdraws it. A dead agent is suspected at once."""
    around = Around()
    assert around.after(0.01, "a", "b") == []
    assert around.after(hang_rules.ANSWER_S) == ["c"]
    found = around.peers.suspects(around.clock.monotonic(), 0.0)
    assert found is not None
    assert found.nodes == (node("c", ord("c"), mod=7).ghost,)
    assert found.reason.startswith("node c does not answer its peer a at 127.0.0.1:1 (0.2")
    assert found.reason.endswith(" s)")
    around.line.accepted = ["c"]
    found = around.peers.suspects(around.clock.monotonic(), 0.0)
    assert found is not None
    assert found.reason.endswith(" s), though its machine accepts connections")
    assert Around().after(0.01, "c", dead=True) == ["c"]


def test_a_node_behind_a_loopback_address_is_not_asked_from_another_host() -> None:
    """What listens there, or refuses, is this host's; so it is not suspected either."""
    around = Around(addresses={"a": "10.0.0.1", "b": "10.0.0.2", "c": "127.0.0.1"})
    assert set(around.line.asked) == {"a", "b"}
    assert around.after(0.01, "a", "b") == []
    assert around.after(hang_rules.ANSWER_S) == []


def test_a_node_without_the_store_or_that_does_not_answer_itself_suspects_nobody() -> None:
    around = Around()
    around.after(0.01, "a", "b")
    around.store = False
    assert around.after(1.0) == []
    around = Around()
    assert around.after(60.0) == []
    around = Around()
    assert around.after(0.2, "a") == []
    assert around.after(0.5) == []
    assert sorted(around.after(0.2)) == ["b", "c"]


def test_who_was_late_before_is_given_longer() -> None:
    around = Around()
    around.after(0.01, "a", "b")
    assert around.after(0.5) == ["c"]
    assert around.after(0.0, "c") == []
    around.peers.ask(ROUND)
    assert around.after(0.01, "a", "b") == []
    assert around.after(0.9) == []
    assert around.after(0.2) == ["c"]


def test_who_was_left_out_teaches_nothing() -> None:
    around = Around()
    around.after(0.01, "a", "b")
    assert around.after(0.5) == ["c"]
    around.peers.forget(but=["a", "b"])
    assert around.line.open == {}
    around.peers.ask(ROUND)
    assert around.after(0.01, "a", "b") == []
    assert around.after(0.25) == ["c"]


def test_answers_that_this_agent_could_not_hear_teach_nothing() -> None:
    """It was frozen itself: neither its own answer nor those of others had been late, and none counts as silent."""
    around = Around()
    around.line.frozen_s = 0.9
    around.after(0.0, "a", "b", "c")
    around.peers.ask(ROUND)
    assert around.after(0.01, "a", "b") == []
    assert around.after(0.25) == ["c"]
    now = around.clock.monotonic()
    assert around.peers.suspects(now, awake_at=now - 0.1) is None


def test_in_another_round_all_are_asked_anew() -> None:
    """A connection that was begun while the network was cut may stay silent long after that was mended."""
    around = Around()
    assert around.after(0.01, "a", "b") == []
    around.clock.advance(2.0)
    around.peers.ask(round_of(4, "a", "b", "c"))
    assert around.after(0.1, "a") == []
    assert around.after(0.05, "b", "c") == []
    assert around.line.open == {}
