"""What a node writes: its own key, whatever answers are lost or late, and how the last node of a run leaves."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TypeVar, cast

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import EXIT_FAILURE, ConfigError, ReplacedError, StoreUnavailableError
from elastic_trainer.membership import member as module
from elastic_trainer.membership.core import Return
from elastic_trainer.membership.documents import (
    Departure,
    Document,
    Incident,
    NodeRecord,
    NodeState,
    RoundDocument,
    RoundMember,
    RoundState,
    RunResult,
)
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.rules import broken
from elastic_trainer.membership.writes import Author, closing, is_left, parting, round_write
from elastic_trainer.model import Cause
from elastic_trainer.store.api import Delete, Operation, Put, RunKeys, TransactionResult
from elastic_trainer.store.session import LeaseSession
from tests.support.memory_store import LateStore, MemoryBackend, MemoryStore
from tests.support.waiting import soon
from tests.unit.agent.stage import Jumping
from tests.unit.membership.scenes import LIMITS

KEYS = RunKeys("/p", "run")
TTL_S = 2.0
OLD = NodeRecord(host="h", address="127.0.0.1", local_world_size=1, store_port=1, probe_port=1)
NEW = OLD.model_copy(update={"state": NodeState.READY, "life": 3})


class Owner:
    """Node a, whose threads do not run, on a store that can be slow; its time passes while it waits."""

    ttl_s = TTL_S  # as its session has it

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.others_live, self.errors = Jumping(), True, list[ReplacedError]()
        self.store = LateStore(MemoryBackend(self.clock))
        self.renew(self.limit())
        session = cast("LeaseSession", self)
        self.member = Member(self.store, KEYS, "a", session, LIMITS, self.errors.append, self.clock)
        self.key = self.member._key
        monkeypatch.setattr(module, "refuses", lambda host, port, timeout_s: not self.others_live)

    def renew(self, deadline: Deadline) -> None:
        self.lease_id, self.lost = self.store.grant(TTL_S, deadline).id, threading.Event()

    def lose(self) -> None:
        """The lease ends, and the owner learns of it."""
        self.store.revoke(self.lease_id, self.limit())
        self.lost.set()

    def take(self) -> int:
        """Another node takes this one's name; its lease."""
        other = self.store.grant(3600.0, self.limit()).id
        self.store.transact([], [Put(KEYS.node("a"), OLD.encode(), other)], deadline=self.limit())
        return other

    def return_within(self, limit_s: float) -> None:
        """As the deciding thread and the record writer try in turn, which give up after some seconds each."""
        end = self.limit(limit_s)
        while not end.expired and self.key.away:
            with suppress(StoreUnavailableError):
                self.key.come_back(self.limit(min(5.0, limit_s)))
            with suppress(StoreUnavailableError):
                self.publish(NEW, min(5.0, limit_s))

    def limit(self, seconds: float = 5.0) -> Deadline:
        return Deadline.after(seconds, self.clock)

    def publish(self, record: NodeRecord, limit_s: float = 5.0) -> None:
        self.member.announce(record, self.limit(limit_s))

    @property
    def held(self) -> tuple[NodeRecord, int]:
        """The record in the node's key, and that key's create-revision."""
        found = self.store.get(KEYS.node("a"), self.limit()).first
        assert found is not None
        return NodeRecord.decode(found.value, found.key), found.create_revision


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Owner:
    return Owner(monkeypatch)


@pytest.mark.parametrize("began", [False, True])
def test_a_life_at_work_does_not_return_as_ready(owner: Owner, began: bool) -> None:
    """Its workers could not join the round that it would be offered for. One that waits for a round returns as it was;
    and so does one that has announced its next life."""
    owner.publish(NEW)
    owner.key.at_work = began
    owner.lose()
    owner.member._perform(Return())
    state = NodeState.WARMING if began else NodeState.READY
    assert owner.held == (NEW.model_copy(update={"state": state}), owner.key.create_revision)
    assert owner.key.record == owner.held[0]
    following = NEW.model_copy(update={"life": 4})
    owner.publish(following)
    owner.lose()
    owner.member._perform(Return())
    assert owner.held == (following, owner.key.create_revision)


@pytest.mark.parametrize("lives", [True, False])
def test_the_key_of_an_earlier_node_of_this_name_goes_only_where_that_is_dead(owner: Owner, lives: bool) -> None:
    """Its port refuses connections: the key is taken over at once. A live node keeps its name."""
    owner.others_live = lives
    owner.take()
    if lives:
        with pytest.raises(ConfigError, match="another live node of this run has the id 'a'"):
            owner.publish(NEW, 60.0)
    else:
        owner.publish(NEW)
    assert owner.held[0] == (OLD if lives else NEW)


def test_a_node_whose_name_another_one_took_while_it_was_away_learns_so_in_short_attempts(owner: Owner) -> None:
    """Frozen for longer than its lease: each attempt ends before a key left behind would be gone, but they add up. Not
    with the exit code of a wrong configuration, which would end the other one's job. The node gives up once."""
    owner.publish(NEW)
    owner.lose()
    owner.take()
    began = owner.clock.monotonic()
    with pytest.raises(ReplacedError, match="another live node of this run has the id 'a'") as raised:
        owner.return_within(60.0)
    assert owner.clock.monotonic() - began <= 2 * TTL_S + 2.0 + 0.2
    assert raised.value.exit_code == EXIT_FAILURE
    assert owner.held[0] == OLD
    assert owner.errors == []
    owner.member._perform(Return())
    (error,) = owner.errors
    assert str(error) == str(raised.value)


def test_the_time_of_another_node_of_this_name_is_counted_anew_after_an_outage_and_after_a_return(owner: Owner) -> None:
    """Leases last longer when the store was away; and a node that is back has its name."""
    owner.publish(NEW)
    owner.lose()
    other = owner.take()
    owner.return_within(2.0)
    owner.clock.advance(600.0)
    owner.return_within(2.0)
    owner.store.revoke(other, owner.limit())
    owner.return_within(1.0)
    assert owner.held == (NEW, owner.key.create_revision)
    owner.lose()
    owner.take()
    owner.return_within(2.0)
    with pytest.raises(ReplacedError):
        owner.return_within(60.0)


ACTIVE = RoundDocument(
    number=1,
    nonce="n",
    state=RoundState.ACTIVE,
    members=(RoundMember("a", 11, 1, 0, 1), RoundMember("b", 12, 1, 1, 1)),
)
CLOSED = ACTIVE.model_copy(update={"state": RoundState.CLOSED, "result": RunResult.SUCCEEDED})
Kind = TypeVar("Kind", bound=Document)


def departure(*, planned: bool) -> Departure:
    return Departure(wall=5.0, node="a", planned=planned, reason="SIGTERM" if planned else "no peer", exit_code=143)


class Documents(MemoryStore):
    """A store that node ``a`` leaves last, or is about to."""

    def put(self, key: str, document: Document) -> int:
        return self.transact([], [Put(key, document.encode())], deadline=soon()).revision

    def held(self, key: str, kind: type[Kind]) -> Kind | None:
        found = self.get(key, soon()).first
        return kind.decode(found.value, key) if found is not None else None

    def incidents(self) -> list[Incident]:
        return [Incident.decode(each.value, each.key) for each in self.range(KEYS.incidents, soon()).items]

    def leave(
        self, departure: Departure, current: RoundDocument | None = None, revision: int = 0, **more: bool
    ) -> TransactionResult:
        guards, if_last, else_ = parting(KEYS, departure, current, revision, **more)
        return self.transact(guards, if_last, else_, deadline=soon())


@pytest.mark.parametrize("planned", [True, False])
def test_the_last_node_says_how_the_run_was_left(planned: bool) -> None:
    """Whether somebody stopped it or it was given up is one key, and one incident for people. While another key stands
    nothing says that the run is left; a node that gave up is still recorded."""
    store, gone = Documents(), departure(planned=planned)
    store.put(KEYS.node("b"), OLD)
    store.leave(gone)
    assert store.held(KEYS.departure, Departure) is None
    assert len(store.incidents()) == (0 if planned else 1)
    store = Documents()
    store.leave(gone.model_copy(update={"step": 30}), ACTIVE, store.put(KEYS.round, ACTIVE))
    (told,) = store.incidents()
    found = store.held(KEYS.departure, Departure)
    assert found == gone.model_copy(update={"step": told.step})
    assert (told.step, told.round) == (30, 1)
    how = "the last node left on request: SIGTERM" if planned else "node a gave up: no peer (exit code 143)"
    assert told.reason == how


@pytest.mark.parametrize("planned", [True, False])
def test_the_last_node_of_a_training_that_is_over_closes_the_run(planned: bool) -> None:
    """All ranks had passed its end: whatever the scripts did afterwards, no replacement has anything to train."""
    store = Documents()
    store.leave(departure(planned=planned), ACTIVE, store.put(KEYS.round, ACTIVE), passed=True)
    closed = store.held(KEYS.round, RoundDocument)
    assert closed is not None
    assert (closed.state, closed.result) == (RoundState.CLOSED, RunResult.SUCCEEDED)
    assert store.held(KEYS.departure, Departure) is None
    assert [each.kind for each in store.incidents()] == ([] if planned else ["node_gave_up"])


def test_a_run_that_was_closed_meanwhile_is_not_said_to_be_stopped() -> None:
    """Another node closed it when this one's key went: the older view writes nothing, and gets the newer document."""
    store = Documents()
    revision = store.put(KEYS.round, ACTIVE)
    store.put(KEYS.round, CLOSED)
    found = store.leave(departure(planned=True), ACTIVE, revision).reads[0].first
    assert found is not None
    assert RoundDocument.decode(found.value, found.key) == CLOSED
    assert (store.incidents(), store.held(KEYS.departure, Departure)) == ([], None)


def test_the_last_node_closes_what_no_round_will() -> None:
    """A round was broken and none followed: its incident says how the run ended, and is not open for ever."""
    store = Documents()
    lost = Incident(wall=3.0, by="a", cause=Cause.NODE_LOST, reason="b is gone", nodes=("b",), open=True)
    store.put(KEYS.open_incident, lost)
    found = store.leave(departure(planned=False)).reads[0].first
    assert found is not None
    store.transact(*closing(KEYS, found, departure(planned=False)), deadline=soon())
    closed, gave_up = store.incidents()
    assert gave_up.kind == "node_gave_up"
    how = "b is gone; node a gave up: no peer (exit code 143)"
    assert closed.verdict is not None
    assert closed == lost.model_copy(update={"open": False, "reason": how, "verdict": closed.verdict})


def written(document: RoundDocument, *, left: bool = False) -> tuple[Operation, ...]:
    """What node a writes with the round document."""
    write = round_write(Author(KEYS, "a", 11), document, 7, 5.0, left=left)
    assert write is not None
    return write[1]


def test_the_fault_that_ends_a_run_is_recorded_at_once() -> None:
    """Who breaks a round opens its incident, with the lost node; the round that follows takes its place. If that is of
    other nodes only, nobody else can close the incident: it is in the history, with the round that followed."""

    def opened(document: RoundDocument) -> Incident:
        (put,) = (each for each in written(document) if isinstance(each, Put) and each.key == KEYS.open_incident)
        return Incident.decode(put.value, put.key)

    gone = broken(ACTIVE, "b is silent", cause=Cause.NODE_LOST, lost=("b",))
    lost = opened(gone)
    assert (lost.open, lost.cause, lost.nodes, lost.world_before) == (True, Cause.NODE_LOST, ("b",), 2)
    assert opened(broken(ACTIVE, "node a left", worker_failed=True, cause=Cause.WORKER_LOST)).nodes == ("a",)
    following = ACTIVE.model_copy(update={"number": 2})
    assert Delete(KEYS.open_incident) in written(following)
    others = following.model_copy(update={"members": (RoundMember("a", 21, 1, 0, 1),)})
    assert [is_left(*pair) for pair in ((gone, others), (gone, following), (ACTIVE, others))] == [True, False, False]

    store = Documents()
    store.put(KEYS.open_incident, lost)
    (read,) = store.transact([], written(others, left=True), deadline=soon()).reads
    assert read.first is not None
    store.transact(*closing(KEYS, read.first, None, others), deadline=soon())
    (told,) = store.incidents()
    assert (told.open, told.next_round, told.world_after, told.nodes) == (False, 2, 1, ("b",))
    assert told.reason == "b is silent; all its nodes were lost"
    assert store.held(KEYS.open_incident, Incident) is None


def test_the_next_node_that_comes_takes_the_departure_away(owner: Owner) -> None:
    owner.store.transact([], [Put(KEYS.departure, departure(planned=True).encode())], deadline=owner.limit())
    owner.publish(OLD)
    assert owner.store.get(KEYS.departure, owner.limit()).first is None
