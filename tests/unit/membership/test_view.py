"""The view of a run while it goes over from one feed to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from elastic_trainer.membership.view import Feed, RunView
from elastic_trainer.store.api import EventKind, KeyValue, RunKeys, Snapshot, Store, WatchEvent
from tests.unit.membership.scenes import node, round_of

KEYS = RunKeys("/p", "run")


class Scene:
    """A view on a store whose watches deliver what the test says, when it says so."""

    def __init__(self) -> None:
        self.feeds: list[Feed] = []
        self.closed = 0
        self.view = RunView(KEYS)
        self.view.start(cast("Store", self))
        self.alone.on_snapshot(Snapshot((), 1))

    def watch(self, prefix: str, listener: Feed, *, exact: bool = False) -> Scene:
        assert (prefix, exact) == ((KEYS.root, False) if listener.follows_nodes else (KEYS.round, True))
        self.feeds.append(listener)
        return self

    def close(self) -> None:
        self.closed += 1

    @property
    def alone(self) -> Feed:
        """The first feed: of the round alone."""
        return self.feeds[0]

    def change(self, *, nodes: bool) -> Feed:
        self.view.switch(cast("Store", self), nodes=nodes)
        return self.feeds[-1]

    @property
    def number(self) -> int | None:
        current = self.view.observation().round
        return current.number if current is not None else None


def round_at(revision: int, number: int) -> KeyValue:
    return KeyValue(KEYS.round, round_of(number, [node("a", 1)]).encode(), 1, revision)


def node_at(revision: int, name: str) -> KeyValue:
    return KeyValue(KEYS.node(name), node(name, 1).record.encode(), 1, revision)


def put(item: KeyValue) -> list[WatchEvent]:
    return [WatchEvent(EventKind.PUT, item)]


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.view.close()
    assert scene.closed == len(scene.feeds)


def test_a_view_goes_over_to_the_nodes_and_back(scene: Scene) -> None:
    """The nodes come and go with the wider feed; the round stays known. The store may have been restored between the
    two feeds, which neither sees: each change counts as a reload, and the node shows its record again."""
    scene.alone.on_events(put(round_at(2, 1)))
    wide = scene.change(nodes=True)
    assert scene.view.observation().changing
    wide.on_snapshot(Snapshot((node_at(1, "a"), round_at(2, 1)), 2))
    wide.on_events(put(node_at(3, "b")))
    seen = scene.view.observation()
    assert (set(seen.nodes), seen.decidable, seen.changing, seen.reloads) == ({"a", "b"}, True, False, 1)
    narrow = scene.change(nodes=False)
    narrow.on_snapshot(Snapshot((round_at(2, 1),), 3))
    narrow.on_events(put(round_at(4, 2)))
    seen = scene.view.observation()
    assert (seen.nodes, scene.number, seen.reloads) == ({}, 2, 2)


def test_a_feed_that_cannot_begin_is_not_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be started for its watch: the next change opens another one."""

    def refuse(*arguments: object, **named: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(scene, "watch", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            scene.change(nodes=True)
    assert not scene.view.observation().changing
    scene.change(nodes=True).on_snapshot(Snapshot((node_at(1, "a"),), 4))
    assert set(scene.view.observation().nodes) == {"a"}


@pytest.mark.parametrize("junk", [b"no JSON", b'{"version": 1}'])
def test_what_cannot_be_read_is_passed_over(scene: Scene, junk: bytes) -> None:
    wide = scene.change(nodes=True)
    wide.on_snapshot(Snapshot((node_at(1, "a"), KeyValue(KEYS.nodes + "x y", junk, 1, 1), round_at(2, 1)), 2))
    wide.on_events([*put(KeyValue(KEYS.node("b"), junk, 3, 3)), *put(KeyValue(KEYS.round, junk, 1, 4))])
    assert (set(scene.view.observation().nodes), scene.number) == ({"a"}, 1)
