"""The view of a run while it goes over from one feed to another."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_trainer.clock import Deadline
from elastic_trainer.membership.documents import RoundDocument, RoundState
from elastic_trainer.membership.view import RunView
from elastic_trainer.store.api import Put, Snapshot, Watch, WatchEvent, WatchListener
from tests.support.crew import KEYS, Gate, eventually, soon
from tests.support.memory_store import MemoryBackend, MemoryStore
from tests.unit.membership.scenes import node, round_of


class HeldStore(MemoryStore):
    """Its watches on the whole run deliver nothing while the gate is shut."""

    def __init__(self, backend: MemoryBackend) -> None:
        super().__init__(backend)
        self.gate = Gate()

    def watch(self, prefix: str, listener: WatchListener, *, exact: bool = False) -> Watch:
        return super().watch(prefix, listener if exact else _Held(listener, self.gate), exact=exact)


class _Held:
    def __init__(self, inner: WatchListener, gate: Gate) -> None:
        self._inner, self._gate = inner, gate

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self._gate.pass_through()
        self._inner.on_snapshot(snapshot)

    def on_events(self, events: Sequence[WatchEvent]) -> None:
        self._gate.pass_through()
        self._inner.on_events(events)

    def on_connected(self, connected: bool) -> None:
        self._inner.on_connected(connected)


class Scene:
    """A view on a store, with a writer beside it."""

    def __init__(self) -> None:
        self.backend = MemoryBackend()
        self.store, self.writer = HeldStore(self.backend), MemoryStore(self.backend)
        self.view = RunView(KEYS)
        self.view.start(self.store)
        assert self.view.wait_loaded(60.0)

    def write_round(self, number: int) -> int:
        document = round_of(number, [node("a", 1)])
        return self.writer.transact([], [Put(KEYS.round, document.encode())], deadline=soon()).revision

    def show(self, name: str) -> None:
        self.writer.transact([], [Put(KEYS.node(name), node(name, 1).record.encode())], deadline=soon())

    def sees(self, number: int) -> None:
        eventually(lambda: (seen := self.view.look().round) is not None and seen.number == number, f"no {number}")

    def follow(self, nodes: bool) -> None:
        self.view.change(self.store, nodes=nodes)
        eventually(lambda: not self.view.look().changing, "the other feed did not take over")
        self.view.tidy()

    def close(self) -> None:
        self.store.gate.open()
        self.view.close()
        self.store.close()
        self.writer.close()


def test_a_view_of_the_round_alone_knows_no_nodes_and_decides_nothing() -> None:
    """Changes of nodes do not reach it; rounds do."""
    scene = Scene()
    scene.show("a")
    scene.write_round(1)
    scene.sees(1)
    assert scene.view.look().nodes == {}
    assert not scene.view.look().decidable
    scene.close()


def test_a_view_goes_over_to_the_nodes_and_back() -> None:
    """The nodes come with the wider feed and go with it; the round stays known throughout."""
    scene = Scene()
    scene.show("a")
    scene.write_round(1)
    scene.sees(1)
    scene.follow(nodes=True)
    assert set(scene.view.look().nodes) == {"a"}
    assert scene.view.look().decidable
    scene.show("b")
    eventually(lambda: set(scene.view.look().nodes) == {"a", "b"}, "b does not show")
    scene.follow(nodes=False)
    assert scene.view.look().nodes == {}
    scene.write_round(2)
    scene.sees(2)
    scene.close()


def test_a_change_of_feeds_counts_as_reading_all_anew() -> None:
    """The store may have gone back between the two, which neither of them sees: the node shows its record again."""
    scene = Scene()
    before = scene.view.look().reloads
    scene.follow(nodes=True)
    assert scene.view.look().reloads == before + 1
    scene.follow(nodes=False)
    assert scene.view.look().reloads == before + 2
    scene.close()


def test_a_feed_that_is_behind_does_not_take_over() -> None:
    """Read before a round was written and delivered after it: the view waits until the feed has come to that round."""
    scene = Scene()
    scene.write_round(1)
    scene.sees(1)
    scene.store.gate.shut()
    scene.view.change(scene.store, nodes=True)
    eventually(lambda: scene.store.gate.waiting == 1, "the snapshot was not read")
    numbers = []
    for number in range(2, 6):
        scene.write_round(number)
        scene.sees(number)
        numbers.append(_number(scene.view.look().round))
        assert not scene.view.look().follows_nodes
    scene.store.gate.open()
    eventually(lambda: scene.view.look().follows_nodes, "the feed did not take over")
    assert numbers == [2, 3, 4, 5]
    assert _number(scene.view.look().round) == 5
    assert scene.view.look().decidable
    scene.close()


def test_nothing_is_decided_on_nodes_older_than_the_round() -> None:
    """A round that this node has committed itself counts at once; decisions wait until the watch has come so far."""
    scene = Scene()
    scene.follow(nodes=True)
    scene.store.gate.shut()
    revision = scene.write_round(1)
    scene.view.note_round(round_of(1, [node("a", 1)]), revision, scene.view.look())
    assert _number(scene.view.look().round) == 1
    assert not scene.view.look().decidable
    scene.store.gate.open()
    eventually(lambda: scene.view.look().decidable, "the watch did not catch up")
    scene.close()


def test_an_answer_that_comes_after_the_store_went_back_is_not_believed() -> None:
    """Its revision may be greater than all that the restored store will have for long: nothing newer would show."""
    scene = Scene()
    before = scene.view.look()
    revision = scene.write_round(5)
    scene.sees(5)
    scene.backend.wipe()
    eventually(lambda: scene.view.look().reloads > before.reloads, "the wiped store is not read")
    scene.view.note_round(round_of(5, [node("a", 1)]), revision + 100, before)
    assert scene.view.look().round is None
    scene.write_round(1)
    scene.sees(1)
    scene.close()


def test_a_wiped_store_does_not_keep_the_wider_feed_out() -> None:
    """Small revisions again: the old round is forgotten, and the nodes are followed all the same."""
    scene = Scene()
    for number in range(1, 8):
        scene.write_round(number)
    scene.sees(7)
    scene.backend.wipe()
    scene.view.change(scene.store, nodes=True)
    eventually(lambda: scene.view.look().follows_nodes, "the feed did not take over")
    assert scene.view.look().round is None
    scene.close()


def _number(document: RoundDocument | None) -> int:
    assert document is not None
    assert document.state is RoundState.ACTIVE
    return document.number


def test_a_closed_view_leaves_no_watch() -> None:
    """Also in the middle of a change."""
    scene = Scene()
    scene.view.change(scene.store, nodes=True)
    scene.view.close()
    scene.write_round(1)
    assert scene.backend.settle()
    assert scene.view.look().round is None
    assert scene.writer.get(KEYS.round, Deadline.after(30.0)).first is not None
    scene.close()
