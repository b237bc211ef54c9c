"""Few watch the nodes, whoever decides may die, and keys that no node has written stop nobody: on virtual time."""

from __future__ import annotations

import pytest

from elastic_trainer.membership.cluster_view import Limits
from elastic_trainer.membership.core import SENIORS
from elastic_trainer.membership.member import roll_call
from elastic_trainer.membership.writes import Author, round_write
from elastic_trainer.store.api import Put, RunKeys, absent, created_at, unchanged
from tests.simulation.node import KEYS
from tests.simulation.world import World
from tests.support.memory_store import MemoryStore
from tests.support.monitored import record
from tests.support.waiting import soon
from tests.unit.membership.scenes import node, round_of

EIGHT = Limits(min_nodes=1, max_nodes=8, last_call_s=60.0)
JUNK = {
    "junk": b"no JSON",
    "older-version": b'{"version": 1}',
    "huge": record().encode().replace(b'"local_world_size":2', b'"local_world_size":99999999'),
    "a b": record().encode(),
    "../n9": record().encode(),
    "\x1b[31m": record().encode(),
}
PAIR = [node("a", 11), node("b", 12)]


def world_of(count: int, limits: Limits) -> World:
    """A world in which ``count`` nodes train."""
    world = World(1, limits=limits)
    for _ in range(count):
        world.join()
    world.wait_until(world.settled, "the run does not begin")
    return world


def followers(world: World) -> set[str]:
    """The live nodes that watch the nodes."""
    return {name for name, each in world.agents.items() if each.alive and each.node.view.observation().follows_nodes}


def test_the_three_most_senior_watch_the_nodes_and_the_next_in_line_replaces_a_lost_one() -> None:
    """The others see the round alone. The round that follows names its members, so the fourth learns its place."""
    world = world_of(8, EIGHT)
    oldest = sorted(world.agents, key=lambda name: world.agents[name].node.key.create_revision)
    assert followers(world) == set(oldest[:SENIORS])
    assert all(world.agents[name].node.view.observation().nodes == {} for name in oldest[SENIORS:])
    world.agents[oldest[0]].node.die()
    world.run_for(10.0)
    world.wait_until(world.settled, "no round follows")
    assert followers(world) >= set(oldest[1 : SENIORS + 1])
    assert not followers(world) & set(oldest[6:])


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_nodes_form_rounds_among_keys_that_are_none(when: str) -> None:
    """Older than all nodes, in the places of those who decide, or written while they train: nobody waits for them, and
    none of them becomes a member."""
    world = World(1, limits=Limits(min_nodes=2, max_nodes=4, last_call_s=0.5))
    puts = [Put(f"{KEYS.nodes}{name}", value) for name, value in JUNK.items()]
    if when == "before":
        world.etcd.transact([], puts, [])
    for _ in "abc":
        world.join()
    world.wait_until(world.settled, "the run does not begin")
    if when == "meanwhile":
        world.etcd.transact([], puts, [])
    world.join()
    world.wait_until(world.settled, "the fourth node is not taken in")
    world.agents["a"].crash_worker()
    world.run_for(5.0)
    world.wait_until(world.settled, "no round follows")
    assert world.round is not None
    assert {member.node for member in world.round.members} == set("abcd")


# ---- what a node writes, and asks


def test_a_round_is_written_over_the_one_seen_and_by_a_node_whose_key_stands() -> None:
    """Whoever lost its lease between its decision and its write must not name a node that is gone. A node that has
    shown no key decides nothing."""
    document = round_of(2, PAIR)
    write = round_write(Author(KEYS, "a", 11), document, 7, 0.0, Put("more", b""))
    assert write is not None
    guards, operations = write
    assert guards == (unchanged(KEYS.round, 7), created_at(KEYS.node("a"), 11))
    assert [each.key for each in operations if isinstance(each, Put)] == [KEYS.round, KEYS.event(8), "more"]
    assert round_write(Author(KEYS, "a", 0), document, 7, 0.0) is None
    assert absent(KEYS.node("a")) == created_at(KEYS.node("a"), 0), "as a guard 0 would mean that"


@pytest.mark.parametrize("lives", [True, False])
def test_a_node_that_gives_up_asks_the_store_who_is_there(lives: bool) -> None:
    """It does not follow the nodes; a spare goes on waiting while the round has a live member."""
    store, keys = MemoryStore(), RunKeys("/p", "run")
    lease = store.grant(60.0, soon()).id
    for name in "ab":
        store.transact([], [Put(keys.node(name), node(name, 1).record.encode(), lease)], deadline=soon())
    created = [item.create_revision for item in store.range(keys.nodes, soon()).items]
    members = [node(name, revision if lives else 99) for name, revision in zip("ab", created, strict=True)]
    found = roll_call(store, keys, round_of(4, members), soon())
    assert (found.present, found.round_lives) == ("a, b", lives)
    store.backend.outage(True)
    away = roll_call(store, keys, None, soon())
    assert (away.present, away.round_lives) == ("not known: the memory store does not answer", False)
