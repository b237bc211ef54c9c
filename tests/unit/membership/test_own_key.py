"""What a node's key holds when the store was restored to an older state, does a write late, or loses an answer."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import (
    EXIT_FAILURE,
    ConfigError,
    ElasticTrainerError,
    OutcomeUnknownError,
    ReplacedError,
    StoreUnavailableError,
)
from elastic_trainer.membership.documents import NodeRecord, NodeState
from elastic_trainer.membership.writes import OwnKey, Pause, ProbePort, Renew, Steps, Transaction
from elastic_trainer.store.api import Put, RunKeys, TransactionResult
from tests.simulation.node import Flag
from tests.support.late import LateStore
from tests.support.memory_store import ManualClock, MemoryBackend

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


def test_a_record_that_went_back_is_shown_again() -> None:
    """A backup holds what the node said then: its owner writes what is so now, under the same incarnation. Where the
    backup does not know its lease, that counts as lost, and the node returns under another."""
    owner = Owner()
    owner.perform(owner.key.publishing_again(owner.limit()))
    assert not owner.store.get(KEYS.node("a"), owner.limit()).items, "nothing was shown yet"
    owner.publish(NEW)
    created = owner.key.create_revision
    owner.store.transact([], [Put(KEYS.node("a"), OLD.encode(), owner.lease_id)], deadline=owner.limit())
    owner.perform(owner.key.publishing_again(owner.limit()))
    assert owner.held == (NEW, created)
    assert owner.key.create_revision == created

    owner.store.revoke(owner.lease_id, owner.limit())
    owner.perform(owner.key.publishing_again(owner.limit()))
    assert owner.key.lost
    assert owner.key.away
    owner.perform(owner.key.returning(owner.limit()))
    assert owner.held == (NEW, owner.key.create_revision)
    assert owner.key.create_revision > created


@pytest.mark.parametrize("began", [False, True])
def test_a_life_at_work_does_not_return_as_ready(began: bool) -> None:
    """Its workers could not join the round that it would be offered for. One that waits for a round returns as it was;
    and so does one that has announced its next life."""
    owner = Owner()
    owner.publish(NEW)
    owner.key.at_work = began
    owner.lose()
    owner.perform(owner.key.returning(owner.limit()))
    state = NodeState.WARMING if began else NodeState.READY
    assert owner.held == (NEW.model_copy(update={"state": state}), owner.key.create_revision)
    assert owner.key.record == owner.held[0]
    following = NEW.model_copy(update={"life": 4})
    owner.publish(following)
    owner.lose()
    owner.perform(owner.key.returning(owner.limit()))
    assert owner.held == (following, owner.key.create_revision)


@pytest.mark.parametrize("arrives", ["before the next write", "after it"])
def test_a_write_whose_answer_was_lost_never_undoes_a_newer_one(arrives: str) -> None:
    """It may come late, from a frozen store; or it went through unnoticed: its owner reads what is there, and writes
    on."""
    owner = Owner()
    owner.publish(OLD)
    created, newest = owner.key.create_revision, NEW.model_copy(update={"life": 4})
    owner.store.holds_back = True
    with pytest.raises(OutcomeUnknownError):
        owner.publish(NEW, 0.0)
    assert owner.key.published is None, "the outcome is not known"
    if arrives == "after it":
        owner.store.holds_back = False
        owner.publish(newest)
        assert owner.store.thaw() == [False]
    else:
        assert owner.store.thaw() == [True]
        owner.publish(newest)
    assert owner.held == (newest, created)
    assert owner.key.published == newest


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
