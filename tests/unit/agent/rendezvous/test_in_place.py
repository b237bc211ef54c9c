"""The handler in place, and its threads: join timeout, shard slots, progress."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec

from elastic_trainer.agent.rendezvous import in_place
from elastic_trainer.agent.rendezvous.in_place import (
    LOOK_S,
    PATIENCE_S,
    PROGRESS_EVERY_S,
    STANDING_S,
    InPlaceHandler,
    InPlaceNode,
    JoinTimeout,
    ProgressWriter,
    ShardSlots,
)
from elastic_trainer.agent.rendezvous.restart import ArrivedNode
from elastic_trainer.agent.workers.conductor_shell import ConductorShell
from elastic_trainer.agent.workers.periodic import IDLE_S
from elastic_trainer.errors import EXIT_CONFIG, ConfigError, JoinTimeoutError
from elastic_trainer.ipc.channel import Progress
from elastic_trainer.membership.cluster_view import NodeView, Observation
from elastic_trainer.membership.documents import NodeRecord, NodeState, RoundDocument, RoundMember, RoundState
from elastic_trainer.membership.member import Member
from elastic_trainer.model import RecoveryMode
from elastic_trainer.settings import RendezvousOptions, worker_environment
from elastic_trainer.store.api import Put, RunKeys
from elastic_trainer.variables import (
    ENV_CHANNEL,
    ENV_FORM_TIMEOUT,
    ENV_MEMORY,
    ENV_NODE,
    ENV_RECOVERY,
    ENV_ROUND,
    ENV_SHARD_NODES,
    ENV_SHARD_PLACE,
)
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore
from tests.support.waiting import soon
from tests.unit.agent.stage import BASE
from tests.unit.membership.scenes import round_of
from tests.unit.membership.test_rules_in_place import PAIRS, at, held, training


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> InPlaceHandler:
    shard = (ENV_SHARD_NODES, ENV_SHARD_PLACE)
    for name in (ENV_NODE, ENV_ROUND, ENV_RECOVERY, ENV_CHANNEL, ENV_FORM_TIMEOUT, ENV_MEMORY, *shard):
        monkeypatch.setenv(name, "")
    options = RendezvousOptions(node_id="a", recovery=RecoveryMode.IN_PLACE)
    return InPlaceHandler(MemoryStore(), "run", options, min_nodes=2, max_nodes=2, address="127.0.0.1")


def spec(workers: int, max_restarts: int) -> WorkerSpec:
    nobody: Any = None
    return WorkerSpec("default", workers, nobody, entrypoint="none", max_restarts=max_restarts)


def test_workers_start_in_a_world_of_their_own(handler: InPlaceHandler) -> None:
    """Nobody else is there yet: the worker runs all the same, as rank 0 of 1, and knows where its agent listens.
    Healthy workers are never restarted."""
    nothing: Any = None
    memory: Any = SimpleNamespace(paths="/proc/1/fd/3:/proc/1/fd/4")
    port: Any = SimpleNamespace(port=4712)
    copies: Any = SimpleNamespace(key="ab")
    arrived = ArrivedNode(nothing, port, nothing, nothing, memory, copies)
    parts: dict[str, Any] = {
        "conductor": SimpleNamespace(life=3),
        "channel": SimpleNamespace(path="/tmp/agent.sock"),
        "guard": SimpleNamespace(port=4711),
        "arrived": arrived,
    }
    found = handler._provisional(spec(2, 100), cast("InPlaceNode", SimpleNamespace(**parts)), 1)
    assert (found.rank, found.world_size) == (0, 1)
    assert found.bootstrap_store_info is not None
    assert (found.bootstrap_store_info.master_addr, found.bootstrap_store_info.master_port) == ("127.0.0.1", 4711)
    assert [os.environ[name] for name in (ENV_NODE, ENV_ROUND, ENV_RECOVERY)] == ["a", "0", "in_place"]
    assert os.environ[ENV_CHANNEL] == "/tmp/agent.sock"
    assert worker_environment().memory == (Path("/proc/1/fd/3"), Path("/proc/1/fd/4"))
    assert worker_environment().copies_here == "127.0.0.1 4712 ab"
    assert (worker_environment().shard_nodes, worker_environment().shard_place) == (1, 1)
    assert handler.use_agent_store
    assert handler.num_nodes_waiting() == 0


class _EndedElsewhereError(Exception):
    """Another thread ends the process."""


def test_of_two_fatal_verdicts_one_is_reported(
    handler: InPlaceHandler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another thread may come to its own while workers are ended and the node leaves: it says nothing, and the main
    thread, which sees the workers die, starts none again."""

    def elsewhere() -> None:
        raise _EndedElsewhereError

    ended: list[int] = []
    monkeypatch.setattr(in_place, "kill_workers", lambda *_: None)
    monkeypatch.setattr(in_place, "_await_the_end", elsewhere)
    monkeypatch.setattr(os, "_exit", ended.append)
    handler._fatal(ConfigError("the first"))
    with pytest.raises(_EndedElsewhereError):
        handler._fatal(ConfigError("the second"))
    for then in (handler.next_rendezvous, handler.shutdown):  # the latter where no restart is left
        with pytest.raises(_EndedElsewhereError):
            then()
    assert ended == [EXIT_CONFIG]
    assert capsys.readouterr().err.splitlines()[-1] == "elastic-trainer: the first"


LIMIT_S = 8.0
READY = BASE.model_copy(update={"state": NodeState.READY})
MEMBER = RoundMember(node="a", create_revision=3, life=1, first_rank=0, local_world_size=1)
NOTHING = Observation(nodes={}, round=None, round_revision=0, connected=True, serial=1)


def seen(state: RoundState, *, lives: bool = True, record: NodeRecord = READY, **more: object) -> Observation:
    document = RoundDocument(number=4, nonce="x", state=state, members=(MEMBER,)).model_copy(update=more)
    nodes = {"a": NodeView("a", 3, 9, record)} if lives else {}
    return replace(NOTHING, nodes=nodes, round=document, round_revision=9)


class Onlooker:
    """A member in so far as its timeout asks it, and what comes of that."""

    def __init__(self, observation: Observation, shown: NodeRecord | None = READY) -> None:
        self.seen, self.record = observation, shown
        self.clock, self.given_up = ManualClock(), list[JoinTimeoutError]()
        self.timeout = JoinTimeout(cast("Member", self), LIMIT_S, self.given_up.append, self.clock)

    def observation(self) -> Observation:
        return self.seen

    def published(self) -> NodeRecord | None:
        return self.record

    def join_timeout(self, join_timeout_s: float) -> JoinTimeoutError:
        return JoinTimeoutError(f"fewer than 2 nodes were ready within {join_timeout_s:g} s")

    def after(self, seconds: float) -> bool:
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end and not self.given_up:
            self.clock.advance(self.timeout.turn())
        return bool(self.given_up)


FOLLOWING = RoundDocument(number=5, nonce="y", state=RoundState.ACTIVE, members=(MEMBER,))


@pytest.mark.parametrize(
    ("observation", "shown", "gives_up"),
    [
        (NOTHING, READY, True),
        (seen(RoundState.BROKEN), READY, True),
        (seen(RoundState.DRAINING, next=None), READY, True),  # too few are left
        (seen(RoundState.ACTIVE, lives=False), READY, True),  # all members are dead
        (seen(RoundState.ACTIVE), READY, False),  # others train
        (seen(RoundState.DRAINING, next=FOLLOWING), READY, False),
        (seen(RoundState.CLOSED), READY, False),
        (replace(seen(RoundState.BROKEN), connected=False), READY, False),
        (seen(RoundState.BROKEN, record=READY.model_copy(update={"busy": "in checkpoint"})), READY, False),
        (NOTHING, BASE, False),  # its own workers warm up
        (NOTHING, None, False),  # it is not shown yet
    ],
)
def test_a_ready_node_without_a_round_gives_up_in_time(
    observation: Observation, shown: NodeRecord | None, gives_up: bool
) -> None:
    """Spares wait as long as others train; an outage of the store, and slow workers of its own, end no node."""
    onlooker = Onlooker(observation, shown)
    assert not onlooker.after(LIMIT_S)
    assert onlooker.after(1.0 if gives_up else 3 * LIMIT_S) is gives_up


def test_the_count_begins_anew_with_each_round() -> None:
    onlooker = Onlooker(NOTHING)
    for _ in range(4):
        assert not onlooker.after(LIMIT_S / 2)
        onlooker.seen = seen(RoundState.ACTIVE)
        assert not onlooker.after(LIMIT_S / 4)
        onlooker.seen = NOTHING
    assert onlooker.after(LIMIT_S + 1.0)


class Spare:
    """Node b0 beside a round of a0 and a1, and what its agent does."""

    def __init__(self, *others: NodeView, mine: NodeView) -> None:
        self.limits, self.clock, self.begun = PAIRS, ManualClock(), list[str]()
        self.scene = training("a0", "a1").show(mine, *others)
        self.mine: NodeRecord = mine.record
        self.reads, self.dead = 0, set[str]()
        self.slot = ShardSlots(cast("Member", self), mine.id, self.nodes, cast("ConductorShell", self), self.clock)

    def observation(self) -> Observation:
        return Observation(nodes={}, round=self.scene.round, round_revision=1, connected=True, serial=1)

    def published(self) -> NodeRecord:
        return self.mine

    def nodes(self) -> dict[str, NodeView]:
        self.reads += 1
        return self.scene.nodes

    def found_dead(self, nodes: Mapping[str, NodeView]) -> frozenset[str]:
        return frozenset(self.dead & nodes.keys())

    def restart_workers(self, why: str) -> None:
        self.begun.append(why)

    def after(self, seconds: float) -> list[str]:
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end:
            self.clock.advance(self.slot.turn())
        return self.begun


def test_a_spare_without_state_begins_anew_where_it_is_needed() -> None:
    spare = Spare(at("c0", 4, identity=held(7)), mine=at("b0", 3))
    assert spare.after(LOOK_S) == []
    assert spare.after(2 * LOOK_S)[0] == "this spare is needed at place 1 of a shard group"


def test_while_nobody_trains_a_spare_hurries() -> None:
    """The agent of the node at slot 1 is dead, and its lease stands: the spare of slot 0 takes that slot."""
    spare = Spare(mine=at("b0", 3))
    spare.scene.adopt(round_of(2, [at("a0", 1), at("a1", 2)], RoundState.BROKEN))
    assert spare.after(10 * LOOK_S) == []
    spare.dead = {"a1"}
    assert spare.after(STANDING_S) == []
    assert spare.after(2 * STANDING_S)[0] == "this spare is needed at place 1 of a shard group"


def test_a_spare_that_holds_state_waits_for_another_node_first() -> None:
    spare = Spare(at("c0", 4, identity=held(9)), mine=at("b0", 3, identity=held(7)))
    assert spare.after(PATIENCE_S - 2 * LOOK_S) == []
    assert spare.after(4 * LOOK_S) != []


def test_nodes_that_train_or_have_no_slots_read_nothing() -> None:
    spare = Spare(mine=at("a0", 1))
    assert spare.after(10 * LOOK_S) == []
    spare.limits = replace(PAIRS, shard_nodes=1)
    assert spare.slot.turn() == IDLE_S
    assert spare.reads == 0


KEYS = RunKeys("/p", "run")


class Scene:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(MemoryBackend(self.clock))
        self.writer = ProgressWriter(self.store, KEYS, self.clock)
        self.round = self.begin_round()

    def begin_round(self) -> int:
        return self.store.transact([], [Put(KEYS.round, b"{}")], deadline=soon()).revision

    def offer(self, step: int, round_revision: int | None = None) -> None:
        progress = Progress(round=1, step=step, epoch=0, samples=0)
        self.writer.offer(progress, self.round if round_revision is None else round_revision)

    @property
    def written(self) -> int | None:
        found = self.store.get(KEYS.progress, soon()).first
        return Progress.model_validate_json(found.value).step if found is not None else None


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_progress_is_written_at_most_once_a_second(scene: Scene) -> None:
    """The first at once, then the newest of each second; the last one when it ends."""
    for step in (1, 2, 3):
        scene.offer(step)
        scene.writer.turn()
        assert scene.written == 1
    scene.clock.advance(PROGRESS_EVERY_S)
    scene.writer.turn()
    assert scene.written == 3
    scene.offer(9999)
    scene.writer.close()
    assert scene.written == 9999


def test_progress_of_a_round_that_is_over_is_not_written(scene: Scene) -> None:
    old, new = scene.round, scene.begin_round()
    scene.offer(7, new)
    scene.writer.turn()
    scene.offer(8, old)
    scene.writer.close()
    assert scene.written == 7


def test_an_outage_loses_nothing_but_old_progress(scene: Scene) -> None:
    scene.store.backend.outage(True)
    scene.offer(1)
    scene.writer.turn()
    scene.store.backend.outage(False)
    scene.offer(2)
    scene.clock.advance(PROGRESS_EVERY_S)
    scene.writer.turn()
    assert scene.written == 2
