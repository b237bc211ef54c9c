"""What is read from the store, and when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.membership.documents import GONE, RoundState, Saved
from elastic_trainer.monitor import reading as feeds
from elastic_trainer.monitor.reading import Pacing, Reader, RunFeed, run_names
from elastic_trainer.store.api import Compare, Delete, Operation, Put, TransactionResult
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore
from tests.support.monitored import PREFIX, Writer, health, incident, rank, record, soon


class CountingStore(MemoryStore):
    """Notes which keys each request reads; ``before`` is called ahead of each."""

    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__(backend)
        self.requests: list[list[str]] = []

    def before(self) -> None:
        """For a test to do something between two requests."""

    def transact(
        self,
        guards: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        *,
        deadline: Deadline,
    ) -> TransactionResult:
        self.before()
        self.requests.append([operation.key for operation in success])
        return super().transact(guards, success, failure, deadline=deadline)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> CountingStore:
    return CountingStore(MemoryBackend(clock))


@pytest.fixture
def writer(store: CountingStore) -> Writer:
    writer = Writer(MemoryStore(store.backend))
    writer.start()
    return writer


def test_a_run_is_read_with_all_that_belongs_to_it(store: CountingStore, writer: Writer) -> None:
    """Spec, round, nodes, health, journal, incidents: decoded, by their names."""
    writer.put(writer.keys.node_health("n0"), health("n0", [rank(0)], {"samples": 3.0}))
    writer.put(writer.keys.incident(1), incident(1))
    writer.round(2, {"n0": 2})
    documents = RunFeed(store, writer.keys).read(soon())
    assert documents.spec is not None
    assert documents.round is not None
    assert documents.round.number == 2
    assert (set(documents.nodes), set(documents.health)) == ({"n0", "n1"}, {"n0"})
    assert [each.round for each in documents.journal] == [1, 2]
    assert documents.incidents[0].round == 1
    assert documents.counters == {"samples": 3.0}
    assert documents.unreadable == ()


def test_nothing_is_decoded_or_read_twice_that_has_not_changed(store: CountingStore, writer: Writer) -> None:
    """One request finds that nothing has; the documents are the same objects, and the serial stays. A node that goes is
    gone, and what it counted stays."""
    writer.put(writer.keys.node_health("n1"), health("n1", counters={"samples": 3.0}))
    feed = RunFeed(store, writer.keys)
    first = feed.read(soon())
    store.requests.clear()
    second = feed.read(soon())
    assert len(store.requests) == 1
    assert second.health["n1"] is first.health["n1"]
    assert second.serial == first.serial
    writer.store.transact([], [Delete(writer.keys.node("n1"))], deadline=soon())
    after = feed.read(soon())
    assert (set(first.nodes), set(after.nodes)) == ({"n0", "n1"}, {"n0"})
    assert after.counters == {"samples": 3.0}
    assert after.serial > second.serial
    writer.put(writer.keys.node_health("n1"), health("n1"))
    assert feed.read(soon()).serial > after.serial


def test_large_runs_are_read_in_pages(store: CountingStore, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it arrives, whatever the size of a page."""
    monkeypatch.setattr(feeds, "PAGE", 3)
    for i in range(10):
        writer.put(writer.keys.node(f"m{i}"), record(1))
        writer.put(writer.keys.node_health(f"m{i}"), health(f"m{i}", counters={"samples": 1.0}))
    documents = RunFeed(store, writer.keys).read(soon())
    assert len(documents.nodes) == 12
    assert documents.counters == {"samples": 10.0}


@pytest.mark.parametrize("when", range(1, 8))
def test_counts_that_move_between_documents_while_pages_are_read_count_once(
    store: CountingStore, writer: Writer, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    """The sum is right wherever between two requests a node's counts become those of the nodes that are gone."""
    monkeypatch.setattr(feeds, "PAGE", 3)
    names = [*(f"A{i}" for i in range(4)), *(f"z{i}" for i in range(4))]  # before and behind the document of all others
    for name in names:
        writer.put(writer.keys.node_health(name), health(name, counters={"samples": 1.0}))
    writer.put(writer.keys.health + GONE, health(GONE, counters={"samples": 100.0}))

    def fold() -> None:
        if len(store.requests) == when:
            moved = health(GONE, counters={"samples": 102.0}).encode()
            deletes = [Delete(writer.keys.node_health(name)) for name in ("A0", "z3")]
            writer.store.transact([], [*deletes, Put(writer.keys.health + GONE, moved)], deadline=soon())

    monkeypatch.setattr(store, "before", fold)
    assert RunFeed(store, writer.keys).read(soon()).counters == {"samples": 108.0}


def test_a_document_that_cannot_be_read_costs_nothing_but_itself(store: CountingStore, writer: Writer) -> None:
    """It is named; what was last read there stays, so that sums do not go back; a good one mends it."""
    key = writer.keys.node_health("n0")
    writer.put(key, health("n0", counters={"samples": 3.0}))
    feed = RunFeed(store, writer.keys)
    feed.read(soon())
    writer.put(key, b'{"version": 99}')
    writer.put(writer.keys.incident(7), b"\xff\xfe")
    writer.put(writer.keys.progress, b"[]")
    documents = feed.read(soon())
    assert documents.unreadable == (writer.keys.progress, key, writer.keys.incident(7))
    assert documents.counters == {"samples": 3.0}
    assert documents.round is not None
    assert feed.read(soon()).serial == documents.serial
    writer.put(key, health("n0", counters={"samples": 4.0}))
    assert feed.read(soon()).counters == {"samples": 4.0}


def test_of_the_journal_the_newest_are_read(store: CountingStore, writer: Writer) -> None:
    """By when they were written: incidents are numbered by rounds or by times."""
    for number in range(2, 30):
        writer.round(number, {"n0": 2})
    for number in (1_700_000_000, 3, 2):
        writer.put(writer.keys.incident(number), incident(number % 1000))
    documents = RunFeed(store, writer.keys, journal=5, incidents=2).read(soon())
    assert [each.round for each in documents.journal] == [25, 26, 27, 28, 29]
    assert [each.round for each in documents.incidents] == [3, 2]


def test_runs_are_found_by_their_first_keys(store: CountingStore) -> None:
    """One small read each; what cannot be a run's name, and keys beside, are passed over."""
    other = Writer(store, "b")
    for key in ("/a/spec", "/a/nodes/n0", "/b/spec", "/a.b/round", "/.hidden/spec", "/lonely", "er/x/spec"):
        other.put(PREFIX + key, b"{}")
    assert sorted(run_names(store, PREFIX, 30.0)) == ["a", "a.b", "b"]


def test_many_runs_are_found_bit_by_bit_up_to_a_limit(
    store: CountingStore, writer: Writer, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store far away takes long for each: what was found so far is shown, and none is taken for removed."""
    for name in ("s", "t", "u"):
        Writer(writer.store, name).start()
    monkeypatch.setattr(feeds, "DISCOVER_LIMIT_S", 0.1)
    monkeypatch.setattr(store, "before", lambda: clock.advance(0.1))
    reader = Reader(store, PREFIX, clock=clock)
    shown = [set(reader.poll().runs) for _ in range(5)]
    assert shown == [{"r"}, {"r", "s"}, {"r", "s", "t"}, *[{"r", "s", "t", "u"}] * 2]
    writer.store.transact([], [Delete(writer.keys.root, f"{PREFIX}/r0")], deadline=soon())
    clock.advance(1000.0)
    assert [set(reader.poll().runs) for _ in range(4)][-1] == {"s", "t", "u"}
    monkeypatch.setattr(feeds, "MOST_RUNS", 1)
    limited = Reader(store, PREFIX, clock=clock)
    for _ in range(2):
        assert set(limited.poll().runs) == {"s"}
        clock.advance(60.0)


def test_runs_come_and_go(store: CountingStore, writer: Writer, clock: ManualClock) -> None:
    """New ones are found within seconds, removed ones are forgotten; a key that makes no run is none."""
    reader = Reader(store, PREFIX, clock=clock)
    assert set(reader.poll().runs) == {"r"}
    Writer(writer.store, "s").start()
    writer.put(f"{PREFIX}/odd/thing", b"x")
    clock.advance(feeds.DISCOVER_EVERY_S)
    assert set(reader.poll().runs) == {"r", "s"}
    writer.store.transact([], [Delete(writer.keys.root, f"{PREFIX}/r0")], deadline=soon())
    clock.advance(feeds.DISCOVER_EVERY_S)
    assert set(reader.poll().runs) == {"s"}


def test_a_store_that_is_away_leaves_what_was_read(store: CountingStore, writer: Writer, clock: ManualClock) -> None:
    """With its age, which grows until the store is back."""
    reader = Reader(store, PREFIX, clock=clock)
    assert reader.poll(0.1).store.connected
    store.cut_off(True)
    clock.advance(7.0)
    away = reader.poll(0.0)
    assert set(away.runs) == {"r"}
    assert (away.store.connected, away.store.age_s) == (False, 7.0)
    assert away.problem
    store.cut_off(False)
    back = reader.poll()
    assert (back.store.connected, back.store.age_s, back.problem) == (True, 0.0, "")


def test_a_run_that_is_over_rests_until_it_is_reopened(
    store: CountingStore, writer: Writer, clock: ManualClock
) -> None:
    """It is only asked for signs of life then, at once if it was over long before the first look; a new round, or a
    node, wakes it. After long its sums are kept, not its thousand nodes; when it goes on everything is read again."""
    for name in ("n0", "n1"):
        last = Saved(step=8, wall=1.0)
        writer.put(writer.keys.node_health(name), health(name, [rank(0)], {"samples": 3.0}, saved=last))
        writer.store.transact([], [Delete(writer.keys.node(name))], deadline=soon())
    writer.round(1, {}, RoundState.CLOSED, result="succeeded")
    reader = Reader(store, PREFIX, forget_s=3600.0, clock=clock)

    def looked_at_alone() -> None:
        store.requests.clear()
        assert reader.poll().runs["r"].seen.state == "succeeded"
        assert store.requests == [[writer.keys.round, writer.keys.nodes]]

    reader.poll()
    clock.advance(feeds.QUIET_S)
    reader.poll()
    looked_at_alone()
    writer.put(writer.keys.node("n5"), record())
    assert set(reader.poll().runs["r"].documents.nodes) == {"n5"}
    writer.store.transact([], [Delete(writer.keys.node("n5"))], deadline=soon())
    clock.advance(10_000.0)
    reader = Reader(store, PREFIX, forget_s=3600.0, clock=clock)
    reader.poll()
    looked_at_alone()
    for _ in range(3):
        clock.advance(3600.0)
        kept = reader.poll().runs["r"].documents
    assert (set(kept.health), kept.counters, kept.saved) == ({GONE}, {"samples": 6.0}, last)
    assert kept.closed
    writer.round(2, {"n0": 2}, RoundState.BROKEN)
    assert set(reader.poll().runs["r"].documents.health) == {"n0", "n1"}


def test_only_one_run_is_read_where_only_one_is_asked_for(store: CountingStore, writer: Writer) -> None:
    """A command about one run does not read the others."""
    Writer(writer.store, "s").start()
    assert set(Reader(store, PREFIX, only="s").poll().runs) == {"s"}
    assert not any(key.startswith(writer.keys.root) for keys in store.requests for key in keys)
    assert Reader(store, PREFIX, only="nobody").poll().runs == {}


def test_long_polls_are_followed_by_longer_pauses() -> None:
    """So that the store is never busy with a monitor for more than a fifth of the time; one in vain was no work."""
    pacing = Pacing()
    assert pacing.pause_s(1.0, True) == pytest.approx(4.0)
    assert pacing.pause_s(5.0, False) == 1.0
    assert pacing.pause_s(0.01, True) == pytest.approx(0.99)
    assert pacing.pause_s(2.0, True) == pytest.approx(0.04)  # the machine was frozen, perhaps
    assert pacing.pause_s(3.0, True) == pytest.approx(8.0)  # it was not
