"""What a node writes: its own key, whatever answers are lost or late, and how the last node of a run leaves."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import (
    EXIT_FAILURE,
    ConfigError,
    ElasticTrainerError,
    ReplacedError,
    StoreUnavailableError,
)
from elastic_trainer.membership.documents import (
    Departure,
    Incident,
    NodeRecord,
    NodeState,
    RoundDocument,
    RoundMember,
    RoundState,
    RunResult,
)
from elastic_trainer.membership.rules import broken
from elastic_trainer.membership.writes import (
    Author,
    OwnKey,
    Pause,
    ProbePort,
    Renew,
    Steps,
    Transaction,
    closing,
    is_left,
    parting,
    round_write,
)
from elastic_trainer.model import Cause
from elastic_trainer.store.api import Delete, Put, RunKeys, TransactionResult
from tests.simulation.node import Flag
from tests.support.late import LateStore
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore

KEYS = RunKeys("/p", "run")
TTL_S = 2.0
OLD = NodeRecord(host="h", address="127.0.0.1", local_world_size=1, store_port=1, probe_port=1)
NEW = OLD.model_copy(update={"state": NodeState.READY, "life": 3})


@dataclass
class Owner:
    """The owner of node a's key, on a store that can be slow."""

    clock: ManualClock = field(default_factory=ManualClock)
    lease_id: int = 0
    ttl_s: float = TTL_S
    lost: Flag = field(default_factory=Flag)
    others_live: bool = True

    def __post_init__(self) -> None:
        self.store = LateStore(MemoryBackend(self.clock))
        self.key = OwnKey(KEYS, "a", self, self.clock)
        self.renew()

    def renew(self) -> None:
        self.lease_id, self.lost = self.store.grant(TTL_S, self.limit()).id, Flag()

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
                self.perform(self.key.returning(self.limit(min(5.0, limit_s))))
            with suppress(StoreUnavailableError):
                self.publish(NEW, min(5.0, limit_s))

    def limit(self, seconds: float = 5.0) -> Deadline:
        return Deadline.after(seconds, self.clock)

    def publish(self, record: NodeRecord, limit_s: float = 5.0) -> None:
        self.perform(self.key.publishing(record, self.limit(limit_s)))

    def perform(self, steps: Steps) -> None:
        """Answer all requests, as Member does."""
        answer: TransactionResult | bool | None = None
        error: ElasticTrainerError | None = None
        while True:
            try:
                request = steps.throw(error) if error is not None else steps.send(answer)
            except StopIteration:
                return
            answer, error = None, None
            try:
                if isinstance(request, Transaction):
                    answer = self.store.transact(
                        request.guards, request.success, request.failure, deadline=self.limit()
                    )
                elif isinstance(request, Renew):
                    self.renew()
                elif isinstance(request, ProbePort):
                    answer = not self.others_live
                elif isinstance(request, Pause):
                    self.clock.advance(request.seconds)
            except ElasticTrainerError as raised:
                error = raised

    @property
    def held(self) -> tuple[NodeRecord, int]:
        """The record in the node's key, and that key's create-revision."""
        found = self.store.get(KEYS.node("a"), self.limit()).first
        assert found is not None
        return NodeRecord.decode(found.value, found.key), found.create_revision


@pytest.mark.parametrize("lives", [True, False])
def test_the_key_of_an_earlier_node_of_this_name_goes_only_where_that_is_dead(lives: bool) -> None:
    """Its port refuses connections: the key is taken over at once. A live node keeps its name."""
    owner = Owner(others_live=lives)
    owner.take()
    if lives:
        with pytest.raises(ConfigError, match="another live node of this run has the id 'a'"):
            owner.publish(NEW, 60.0)
    else:
        owner.publish(NEW)
    assert owner.held[0] == (OLD if lives else NEW)


def test_a_node_whose_name_another_one_took_while_it_was_away_learns_so_in_short_attempts() -> None:
    """Frozen for longer than its lease: each attempt ends before a key left behind would be gone, but they add up. Not
    with the exit code of a wrong configuration, which would end the other one's job."""
    owner = Owner()
    owner.publish(NEW)
    owner.lose()
    owner.take()
    began = owner.clock.monotonic()
    with pytest.raises(ReplacedError, match="another live node of this run has the id 'a'") as raised:
        owner.return_within(60.0)
    assert owner.clock.monotonic() - began <= 2 * TTL_S + 2.0 + 0.2
    assert raised.value.exit_code == EXIT_FAILURE
    assert owner.held[0] == OLD


def test_the_time_of_another_node_of_this_name_is_counted_anew_after_an_outage_and_after_a_return() -> None:
    """Leases last longer when the store was away; and a node that is back has its name."""
    owner = Owner()
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


def departure(*, planned: bool) -> Departure:
    return Departure(wall=5.0, node="a", planned=planned, reason="SIGTERM" if planned else "no peer", exit_code=143)


def leave(
    store: MemoryStore, departure: Departure, current: RoundDocument | None = None, revision: int = 0, **more: bool
) -> TransactionResult:
    guards, if_last, else_ = parting(KEYS, departure, current, revision, **more)
    return store.transact(guards, if_last, else_, deadline=Deadline.after(5.0))


def left(store: MemoryStore, *, planned: bool) -> tuple[Departure | None, list[str]]:
    """What is in the store when node a has left: the departure, and what incidents say."""
    leave(store, departure(planned=planned))
    found = store.get(KEYS.departure, Deadline.after(5.0)).first
    incidents = store.range(KEYS.incidents, Deadline.after(5.0)).items
    said = [Incident.decode(each.value, each.key).reason for each in incidents]
    return None if found is None else Departure.decode(found.value, found.key), said


@pytest.mark.parametrize("planned", [True, False])
def test_the_last_node_says_how_the_run_was_left(planned: bool) -> None:
    """Whether somebody stopped it or it was given up is one key, and one incident for people."""
    found, (said,) = left(MemoryStore(), planned=planned)
    assert found == departure(planned=planned)
    assert said == ("the last node left on request: SIGTERM" if planned else "node a gave up: no peer (exit code 143)")


@pytest.mark.parametrize("planned", [True, False])
def test_a_node_that_leaves_others_behind_is_no_end(planned: bool) -> None:
    """While another key stands nothing says that the run is left; a node that gave up is still recorded."""
    store = MemoryStore()
    record: NodeRecord = OLD
    store.transact([], [Put(KEYS.node("b"), record.encode())], deadline=Deadline.after(5.0))
    found, said = left(store, planned=planned)
    assert found is None
    assert len(said) == (0 if planned else 1)
    store.transact([], [Delete(KEYS.node("b"))], deadline=Deadline.after(5.0))
    assert left(store, planned=planned)[0] is not None


def begun(store: MemoryStore) -> tuple[RoundDocument, int]:
    """Round 1 of a and b is in the store; its document and revision."""
    members = (RoundMember("a", 11, 1, 0, 1), RoundMember("b", 12, 1, 1, 1))
    active = RoundDocument(number=1, nonce="n", state=RoundState.ACTIVE, members=members)
    put = store.transact([], [Put(KEYS.round, active.encode())], deadline=Deadline.after(5.0))
    return active, put.revision


@pytest.mark.parametrize("planned", [True, False])
def test_the_last_node_of_a_training_that_is_over_closes_the_run(planned: bool) -> None:
    """All ranks had passed its end: whatever the scripts did afterwards, no replacement has anything to train."""
    store = MemoryStore()
    leave(store, departure(planned=planned), *begun(store), passed=True)
    found = store.get(KEYS.round, Deadline.after(5.0)).first
    assert found is not None
    closed = RoundDocument.decode(found.value, found.key)
    assert (closed.state, closed.result) == (RoundState.CLOSED, RunResult.SUCCEEDED)
    assert store.get(KEYS.departure, Deadline.after(5.0)).first is None
    incidents = store.range(KEYS.incidents, Deadline.after(5.0)).items
    kinds = [Incident.decode(each.value, each.key).kind for each in incidents]
    assert kinds == ([] if planned else ["node_gave_up"])


def test_a_run_that_was_closed_meanwhile_is_not_said_to_be_stopped() -> None:
    """Another node closed it when this one's key went: the older view writes nothing, and gets the newer document."""
    store = MemoryStore()
    active, revision = begun(store)
    closed = active.model_copy(update={"state": RoundState.CLOSED, "result": RunResult.SUCCEEDED})
    store.transact([], [Put(KEYS.round, closed.encode())], deadline=Deadline.after(5.0))
    result = leave(store, departure(planned=True), active, revision)
    found = result.reads[0].first
    assert found is not None
    assert RoundDocument.decode(found.value, found.key) == closed
    assert not store.range(KEYS.incidents, Deadline.after(5.0)).items
    assert store.get(KEYS.departure, Deadline.after(5.0)).first is None


def test_the_step_at_which_a_run_was_stopped_is_the_newest_known() -> None:
    store = MemoryStore()
    leave(store, departure(planned=True).model_copy(update={"step": 30}), *begun(store))
    (said,) = store.range(KEYS.incidents, Deadline.after(5.0)).items
    assert Incident.decode(said.value, said.key).step == 30


def test_the_last_node_closes_what_no_round_will() -> None:
    """A round was broken and none followed: its incident says how the run ended, and is not open for ever."""
    store = MemoryStore()
    lost = Incident(wall=3.0, by="a", cause=Cause.NODE_LOST, reason="b is gone", nodes=("b",), open=True)
    store.transact([], [Put(KEYS.open_incident, lost.encode())], deadline=Deadline.after(5.0))
    found = leave(store, departure(planned=False)).reads[0].first
    assert found is not None
    store.transact(*closing(KEYS, found, departure(planned=False)), deadline=Deadline.after(5.0))
    items = store.range(KEYS.incidents, Deadline.after(5.0)).items
    closed, gave_up = (Incident.decode(each.value, each.key) for each in items)
    assert gave_up.kind == "node_gave_up"
    assert closed == lost.model_copy(
        update={"open": False, "reason": "b is gone; node a gave up: no peer (exit code 143)"}
    )


def test_a_round_of_other_nodes_closes_what_nobody_else_can() -> None:
    """All nodes of a broken round were killed: its incident is in the history, with the round that followed."""
    store, author = MemoryStore(), Author(KEYS, "c", 1)
    active = RoundDocument(number=1, nonce="n", state=RoundState.ACTIVE, members=(RoundMember("a", 11, 1, 0, 1),))
    gone = broken(active, "a is silent", cause=Cause.NODE_LOST, lost=("a",))
    following = active.model_copy(update={"number": 2, "members": (RoundMember("a", 21, 1, 0, 1),)})
    assert is_left(gone, following)
    assert not is_left(gone, active.model_copy(update={"number": 2}))
    assert not is_left(active, following)
    for document, left_ in ((gone, False), (following, True)):
        write = round_write(author, document, 0, 5.0, left=left_)
        assert write is not None
        result = store.transact([], write.success, deadline=Deadline.after(5.0))
    (read,) = result.reads
    assert read.first is not None
    store.transact(*closing(KEYS, read.first, None, following), deadline=Deadline.after(5.0))
    (item,) = store.range(KEYS.incidents, Deadline.after(5.0)).items
    told = Incident.decode(item.value, item.key)
    assert (told.open, told.next_round, told.world_after, told.nodes) == (False, 2, 1, ("a",))
    assert told.reason == "a is silent; all its nodes were lost"
    assert store.get(KEYS.open_incident, Deadline.after(5.0)).first is None


def test_the_fault_that_ends_a_run_is_recorded_at_once() -> None:
    """Who breaks a round opens its incident, with the lost node; the round that follows takes its place."""
    author = Author(KEYS, "a", 11)
    members = tuple(RoundMember(name, 11 + place, 1, place, 1) for place, name in enumerate(("a", "b")))
    active = RoundDocument(number=1, nonce="n", state=RoundState.ACTIVE, members=members)

    def opened(document: RoundDocument) -> list[Incident]:
        write = round_write(author, document, 7, 5.0)
        assert write is not None
        puts = [each for each in write.success if isinstance(each, Put) and each.key == KEYS.open_incident]
        return [Incident.decode(each.value, each.key) for each in puts]

    (lost,) = opened(broken(active, "node b is gone", cause=Cause.NODE_LOST, lost=("b",)))
    assert (lost.open, lost.cause, lost.nodes, lost.world_before) == (True, Cause.NODE_LOST, ("b",), 2)
    (own,) = opened(broken(active, "node a left the round", worker_failed=True, cause=Cause.WORKER_LOST))
    assert own.nodes == ("a",)
    following = round_write(author, active.model_copy(update={"number": 2}), 7, 5.0)
    assert following is not None
    assert Delete(KEYS.open_incident) in following.success
