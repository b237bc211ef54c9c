"""One schedule: a seed makes the run, its faults and all delays; the invariants are checked at each event."""

from __future__ import annotations

import gc
import logging
import random
import traceback
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast
from unittest import mock

import structlog

from elastic_trainer.agent.rendezvous import in_place as rendezvous
from elastic_trainer.membership.cluster_view import Limits
from elastic_trainer.membership.documents import Ghost, JournalEntry, NodeRecord, RoundDocument, RoundState, RunResult
from elastic_trainer.model import Phase, RecoveryMode, StateIdentity
from elastic_trainer.store.api import EventKind, WatchEvent
from elastic_trainer.worker.state.restore import elect
from elastic_trainer.worker.state.training_state import Position
from tests.simulation.agents import Agent
from tests.simulation.etcd import Etcd
from tests.simulation.in_place import InPlace
from tests.simulation.invariants import (
    ALIKE,
    LIVENESS,
    NO_CRASH,
    NOTHING_LOST,
    PRESENT,
    STAYS_CLOSED,
    Invariants,
    Violation,
)
from tests.simulation.loop import Loop
from tests.simulation.node import KEYS, SimNode
from tests.simulation.restart import Restart
from tests.simulation.verdicts import Verdicts
from tests.simulation.workers import BATCH, Meeting, SimAssignment, SimWorker, after

TICK_S = 0.2
"""The duration of a step."""
SPARES = 2
"""Nodes above max."""
SUSPECTED_S = 1.5
SETTLE_S = 240.0
"""By far longer than all waits of the protocol together."""
STEADY_TICKS = 4
PATIENCE_S = 6.0
NAMES = "abcdefghijklmnopqrstuvwxyz"
gc.freeze()  # no collection of garbage needs to look at all of torch's objects


@dataclass(slots=True)
class Counts:
    """What happened, so that a test can show that the schedules are no idle ones."""

    rounds: int = 0
    steps: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    closed: int = 0
    judged: int = 0
    """Incidents with a verdict."""


class World:
    """The schedule of ``seed``. ``tell`` gets a line for each event; ``limits`` replace those of the seed."""

    def __init__(self, seed: int, tell: Callable[[str], None] | None = None, limits: Limits | None = None) -> None:
        self.seed, self.chance = seed, random.Random(seed)
        self.tell = tell
        chance = self.chance
        in_place = chance.random() < 0.6
        least = chance.choice([1, 2, 2])
        most = chance.choice([3, 3, 4, 4, 6])
        some = chance.random() < 0.2  # only some sizes
        sizes = tuple(sorted({least, most, *chance.sample(range(least, most + 1), 1)})) if some else ()
        random_limits = Limits(
            min_nodes=least,
            max_nodes=most,
            sizes=sizes,
            recovery=RecoveryMode.IN_PLACE if in_place else RecoveryMode.RESTART,
            last_call_s=0.5,
            last_call_limit_s=5.0,
            regroup_grace_s=0.5 if in_place else 60.0,
            join_batch_s=0.2,
            join_interval_s=1.0,
            deputy_delay_s=chance.choice([0.25, 0.25, 0.0]),
            report_floor_s=4.0,
            failure_limit=chance.choice([3, 1000, 1000, 1000]),
            stalled_rounds=chance.choice([10, 1000, 1000, 1000]),
        )
        self.limits = limits if limits is not None else _grouped(random_limits, random.Random(f"groups {seed}"))
        self.loop = Loop()
        self.etcd = Etcd(self.loop, chance)
        self.etcd.on_write = self._wrote
        self.etcd.back_up()
        self.invariants = Invariants(self.limits, self._created, self._in_call)
        self.agents: dict[str, Agent] = {}
        self.cuts: set[tuple[str, str]] = set()
        self.round: RoundDocument | None = None
        self.verdicts = Verdicts(self.limits)
        self.counts = Counts()
        self.step_s = TICK_S
        self.evaluates_every, self.saves_every = 3, 4
        """Steps after which the script makes these calls of all ranks."""
        self.last_step = 1 << 40
        """Of the script."""
        self.storage: dict[tuple[int, int], dict[str, Any]] = {}
        """By the generation that committed the last step, and the step."""
        self._parts: dict[tuple[int, int], set[int]] = {}
        self._meetings: dict[str, Meeting] = {}
        self._digests = [0]
        """Of the state after each step: a fold over the samples that it has used, each once."""
        self._committed: set[tuple[int, int]] = set()
        """All states ever committed."""
        self._results: dict[tuple[int, int, str], int] = {}
        """Of calls of all ranks, by where the script made them."""
        self._steady: dict[str, int] = {}
        """Steps since the end of the faults, by round."""
        self._team = random.Random(f"team {seed}").choice([1, 1, 1, 2])
        """Workers of each node, where they hold shards."""
        self.loop.after(TICK_S, self._tick)

    # ---- the run

    def play(self) -> Counts:
        """Begin, suffer, recover, and sometimes finish. Raises Violation."""
        for _ in range(self.chance.randint(self.limits.min_nodes, self.limits.max_nodes + 1)):
            self.join()
        self.run_for(self.chance.choice([0.3, 2.0, 3.0, 3.0]))
        for _ in range(self.chance.randint(4, 12)):
            if self.chance.random() < 0.2:
                self.etcd.back_up()
            self._fault()
            self.run_for(self.chance.choice([0.0, 0.003, 0.02, 0.1, 0.3, 1.0, 2.5]))
        self._end_faults()
        self.wait_until(self.settled, "the run does not settle")
        if not self._closed() and self.chance.random() < 0.3:
            self._finish()
        self.counts.judged = self.verdicts.judged
        return self.counts

    def run_for(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.loop.run(self.loop.now + seconds)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Let time pass until ``condition`` holds; a Violation of liveness with ``what`` if that takes too long."""
        end = self.loop.now + SETTLE_S
        while not condition():
            if self.loop.now >= end:
                raise Violation(LIVENESS, f"{what} within {SETTLE_S:g} s\n{self.describe()}")
            self.run_for(TICK_S)

    def _finish(self) -> None:
        """The training ends: the run is closed with success, and a late node changes nothing."""
        self.last_step = max(step for _, step in self._committed) + 3
        self.wait_until(self._closed, "a run that has finished is not closed")
        if self.round is None or self.round.result is not RunResult.SUCCEEDED:
            raise Violation(LIVENESS, f"a run that has finished has failed\n{self.describe()}")
        self.join()
        self.run_for(4.0)
        if self.round.state is not RoundState.CLOSED:
            raise Violation(STAYS_CLOSED, f"a late node has reopened it\n{self.describe()}")
        self.wait_until(lambda: not any(agent.alive for agent in self.agents.values()), "nodes stay behind its end")

    def _closed(self) -> bool:
        return self.round is not None and self.round.state is RoundState.CLOSED

    def settled(self) -> bool:
        """Whether all that can train do, up to max, and have made some steps; or the run is closed with a reason."""
        current = self.round
        if current is not None and current.state is RoundState.CLOSED:
            self.counts.closed += 1
            return bool(current.reason)
        able = self._able()
        if len(able) < self.limits.min_nodes:
            return True
        if (
            current is None
            or current.state is not RoundState.ACTIVE
            or self._steady.get(current.nonce, 0) < STEADY_TICKS
        ):
            return False
        members = {member.node for member in current.members}
        least = self.limits.fitting(len(able))
        if current.left_out is not None and self.limits.recovery is RecoveryMode.RESTART:
            least = self.limits.fitting(len(able) - 1)  # the others are to show how they fare without it
        elif self.limits.recovery is RecoveryMode.RESTART and all(
            self._created(each.node) != each.create_revision for each in current.members
        ):
            least = len(members)  # all lost their leases, and train on: others join them when their round ends
        return members <= set(able) and len(members) >= least

    def _able(self) -> list[str]:
        return [agent.name for agent in self.agents.values() if agent.awake and not agent.evicted]

    # ---- what is checked

    def _created(self, name: str) -> int:
        found = self.etcd.read(KEYS.node(name), None)
        return found[0].create_revision if found else 0

    def _in_call(self, document: RoundDocument) -> bool:
        keys = [self.etcd.read(KEYS.node(member.node), None) for member in document.members]
        return any(not NodeRecord.decode(found[0].value, found[0].key).joinable for found in keys if found)

    def _wrote(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            grouped = self.limits.shard_nodes > 1 and event.kind is EventKind.PUT
            if grouped and (name := KEYS.node_id(event.item.key)) in self.agents:
                self.invariants.shows(name, NodeRecord.decode(event.item.value, event.item.key))
            if event.item.key == KEYS.round and event.kind is EventKind.PUT:
                self.round = RoundDocument.decode(event.item.value, event.item.key)
                self.counts.rounds += self.round.state is RoundState.ACTIVE
                self.say(f"round {self.round.number} {self.round.state} {_names(self.round)}: {self.round.reason}")
                self.invariants.wrote(self.round)
                self.verdicts.wrote(self.round, self.loop.wall())
                self._check_author(events)

    def _check_author(self, events: Sequence[WatchEvent]) -> None:
        """Who writes a round is in the run; but for the last node, which may close it behind itself."""
        for entry in (each.item for each in events if each.item.key.startswith(KEYS.events) and each.item.value):
            by = JournalEntry.decode(entry.value, entry.key).by
            if not self._created(by) and self.etcd.read(KEYS.nodes, KEYS.nodes + "\x7f"):
                raise Violation(PRESENT, f"{by} is not in the run, and writes a round")

    def entered(self, who: str, number: int) -> None:
        """The worker ``who`` has begun to form a round."""
        self.say(f"{who} enters round {number}")
        self.invariants.entered(who, number)

    # ---- what the workers do

    def meeting(self, assignment: SimAssignment) -> Meeting:
        """Where the ranks of a round form their groups."""
        return self._meetings.setdefault(assignment.nonce, Meeting(self, assignment))

    def newest_saved(self) -> tuple[int, int] | None:
        """The newest whole state in storage."""
        return max(self.storage, default=None)

    def save(self, state: dict[str, Any], shard: int, size: int) -> None:
        """A rank has written its shard of ``state``; it counts when all are there."""
        moment = state["lineage"], state["step"]
        shards = self._parts.setdefault(moment, set())
        shards.add(shard)
        if len(shards) == size:
            self.storage[moment] = state

    def committed(self, worker: SimWorker, position: Position, digest: int) -> None:
        """``worker`` has committed a step."""
        digests = self._digests
        while len(digests) <= position.step:
            digests.append(after(digests[-1], BATCH * (len(digests) - 1)))
        if digest != digests[position.step]:
            raise Violation(ALIKE, f"{worker.who} has not used each sample once by step {position.step}")
        self._committed.add((position.lineage, position.step))

    def one_state(self, worker: SimWorker, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """All ranks of a round have computed the gradients of a step: its number, first sample, and their state."""
        meeting, (number, _, _, lineage) = worker.groups.meeting, rows[0]
        if meeting is None or meeting.step >= number:
            return
        if any(row != rows[0] for row in rows):
            raise Violation(ALIKE, f"{worker.who} sums gradients of {sorted(set(rows))}")
        if not meeting.step:
            self._goes_on(meeting, (lineage, number - 1))
        meeting.step, nonce = number, meeting.assignment.nonce
        self.counts.steps += 1
        self._steady[nonce] = self._steady.get(nonce, 0) + 1

    def _goes_on(self, meeting: Meeting, moment: tuple[int, int]) -> None:
        """The first step of a round: nothing of its members' and of the storage is lost."""
        size = meeting.members[0].state.size
        ranks, there = sorted(meeting.held), set(meeting.held.values())
        able = [meeting.prepared[each] if meeting.prepared[each] in there else meeting.held[each] for each in ranks]
        election = elect([None if each is None else StateIdentity(*each) for each in able], size)
        least = [able[election.sources[0]]] if election is not None else [meeting.saved]
        if any(each is not None and moment < each for each in least):
            raise Violation(NOTHING_LOST, f"round {meeting.assignment.number} goes on from {moment}, not {least}")

    def called(self, worker: SimWorker, name: str, result: int) -> None:
        """A call of all ranks has given ``result``."""
        position = worker.state.position
        where = position.lineage, position.step, name
        if self._results.setdefault(where, result) != result:
            raise Violation(ALIKE, f"{worker.who} gets another result of {where}: {result}")

    def _tick(self) -> None:
        """Agents look at those that keep others waiting; both are in place."""
        self.loop.after(TICK_S, self._tick)
        for nonce, meeting in list(self._meetings.items()):
            here = [each for each in meeting.members.values() if each.groups.meeting is meeting and each.alive]
            if not here:
                del self._meetings[nonce]
            elif self.loop.now - meeting.moved_at > SUSPECTED_S:
                self._suspect(meeting, here)

    def _suspect(self, meeting: Meeting, here: Sequence[SimWorker]) -> None:
        nodes = meeting.assignment.nodes
        silent = list(dict.fromkeys(each.agent.name for each in here if each.still))
        if not silent and self.cuts:
            silent = [b for a in nodes for b in nodes if not self.reaches(a, b)][:1]
        first = next((each for each in here if not each.still and each.groups.formed), None)
        if first is None:
            return
        self._accuse(first.agent, silent)
        for name in silent:
            agent = self.agents[name]
            if isinstance(agent, InPlace) and agent.awake:
                agent.exclude()

    def _accuse(self, agent: Agent, silent: list[str]) -> None:
        away = [name for name in silent if not self.agents[name].awake or self.cuts]
        found = {name: self.etcd.read(KEYS.node(name), None) for name in away if name != agent.name}
        suspects = tuple(Ghost(node=name, mod_revision=items[0].mod_revision) for name, items in found.items() if items)
        if suspects and agent.node.link.whole and not self.etcd.down:
            agent.accuse(suspects)

    # ---- networks between nodes

    def reaches(self, one: str, other: str) -> bool:
        """Whether messages go both ways."""
        return (one, other) not in self.cuts and (other, one) not in self.cuts

    def _probe(self, one: str, other: str) -> bool:
        """Whether the other's kernel says that nobody listens."""
        return self.reaches(one, other) and other in self.agents and self.agents[other].host.dead

    # ---- faults

    def _fault(self) -> None:
        faults: list[tuple[Callable[[], bool], int]] = [
            (self._crash_worker, 5),
            (self._crash_in_forming, 2),
            (self._crash_in_call, 3),
            (self._hang_worker, 2),
            (self._kill, 2),
            (self._freeze, 3),
            (self._thaw, 3),
            (self.join, 3),
            (self._evict, 2),
            (self._go, 1),
            (self._cut_from_etcd, 3),
            (self._heal_etcd, 2),
            (self._cut_pair, 2),
            (self._isolate, 1),
            (self._heal_pairs, 1),
            (self._lose_leader, 2),
            (self._elect, 2),
            (self._compact, 1),
            (self._restore, 1),
            (self._lose_replies, 2),
            (self._lag, 1),
        ]
        chosen = self.chance.choices([each for each, _ in faults], [weight for _, weight in faults])[0]
        if chosen():
            name = chosen.__name__.strip("_")
            self.counts.faults[name] = self.counts.faults.get(name, 0) + 1
            self.say(f"-- {name}")

    def _some(self, wanted: Callable[[Agent], bool]) -> Agent | None:
        found = [agent for agent in self.agents.values() if wanted(agent)]
        return self.chance.choice(found) if found else None

    def join(self) -> bool:
        """One more node, if there is room."""
        if sum(agent.alive for agent in self.agents.values()) >= self.limits.max_nodes + SPARES or len(
            self.agents
        ) >= len(NAMES):
            return False
        name = NAMES[len(self.agents)]
        node = SimNode(self.etcd, name, self.limits, self.chance, self._probe)
        kind = InPlace if self.limits.recovery is RecoveryMode.IN_PLACE else Restart
        size = self.chance.choice([1, 1, 1, 2, 3]) if self.limits.shard_nodes == 1 else self._team
        self.agents[name] = kind(node, self, size)
        return True

    def _strike(self, what: str, wanted: Callable[[Agent], bool], strike: Callable[[Agent], object]) -> bool:
        agent = self._some(wanted)
        if agent is not None:
            self.say(f"{what} {agent.name}")
            strike(agent)
        return agent is not None

    def _crash_worker(self) -> bool:
        return self._strike("crash", lambda each: each.awake and bool(each.at_work), lambda a: a.crash_worker())

    def _crash_in_forming(self) -> bool:
        return self._crash_once("crash in forming", lambda each: not each.groups.formed)

    def _crash_in_call(self) -> bool:
        return self._crash_once(
            "crash in a call", lambda each: each.state.phase in (Phase.EVALUATION, Phase.CHECKPOINT)
        )

    def _crash_once(self, what: str, due: Callable[[SimWorker], bool]) -> bool:
        """A node that has a worker for whom it is ``due``, as soon as there is one."""

        def strike() -> None:
            there = lambda agent: agent.awake and any(map(due, agent.at_work))  # noqa: E731
            if not self._strike(what, there, lambda agent: agent.crash_worker()) and self.loop.now < end:
                self.loop.after(0.02, strike)

        end = self.loop.now + 2.0
        strike()
        return True

    def _hang_worker(self) -> bool:
        return self._strike(
            "hang", lambda each: each.awake and isinstance(each, InPlace), lambda a: cast("InPlace", a).hang_worker()
        )

    def _kill(self) -> bool:
        return self._strike("kill", lambda each: each.alive, lambda a: a.die(silently=self.chance.random() < 0.5))

    def _go(self) -> bool:
        return self._strike("leave", lambda each: each.awake, lambda a: a.leave())

    def _evict(self) -> bool:
        return self._strike("evict", lambda each: each.awake, lambda a: a.evict())

    def _freeze(self) -> bool:
        return self._strike("freeze", lambda each: each.awake, lambda a: a.host.freeze())

    def _thaw(self) -> bool:
        return self._strike("thaw", lambda each: each.alive and each.host.frozen, lambda a: a.host.thaw())

    def _cut_from_etcd(self) -> bool:
        agent = self._some(lambda each: each.alive and each.node.link.whole)
        if agent is None:
            return False
        link = agent.node.link
        link.out, link.back = self.chance.choice([(False, False), (False, True), (True, False)])
        self.say(f"cut {agent.name} out={link.out} back={link.back}")
        for watch in list(link.watches):
            watch.noticed_loss()
        return True

    def _heal_etcd(self) -> bool:
        return self._strike("heal", lambda each: each.alive and not each.node.link.whole, self._mend)

    @staticmethod
    def _mend(agent: Agent) -> None:
        link = agent.node.link
        link.out = link.back = True
        link.lag_s = link.lose_reply = 0.0
        for watch in list(link.watches):
            watch.reconnect()

    def _cut_pair(self) -> bool:
        names = [agent.name for agent in self.agents.values() if agent.alive]
        if len(names) < 2:
            return False
        one, other = self.chance.sample(names, 2)
        self.cuts.add((one, other))
        return True

    def _isolate(self) -> bool:
        """One node reaches no other, for long enough that a round is formed without it."""
        agent = self._some(lambda each: each.awake)
        if agent is None:
            return False
        self.cuts |= {(agent.name, other) for other in self.agents if other != agent.name}
        self.say(f"isolate {agent.name}")
        self.run_for(self.chance.choice([3.0, 12.0]))
        return True

    def _heal_pairs(self) -> bool:
        done = bool(self.cuts)
        self._mend_pairs()
        return done

    def _mend_pairs(self) -> None:
        self.cuts.clear()
        for meeting in self._meetings.values():
            meeting.unstick()

    def _lose_leader(self) -> bool:
        done = not self.etcd.down
        self.etcd.lose_leader()
        return done

    def _elect(self) -> bool:
        done = self.etcd.down
        self.etcd.elect()
        return done

    def _compact(self) -> bool:
        self.etcd.compact()
        return True

    def _restore(self) -> bool:
        if self._closed() or not self.etcd.restore():
            return False
        self.invariants.restored()
        return True

    def _lose_replies(self) -> bool:
        agent = self._some(lambda each: each.alive)
        if agent is not None:
            agent.node.link.lose_reply = 0.5
        return agent is not None

    def _lag(self) -> bool:
        agent = self._some(lambda each: each.alive)
        if agent is not None:
            agent.node.link.lag_s = self.chance.choice([0.1, 0.5, 1.5])
        return agent is not None

    def _end_faults(self) -> None:
        self.say("-- all faults are over")
        self._mend_pairs()
        self.etcd.elect()
        for agent in self.agents.values():
            if not agent.alive:
                continue
            if agent.evicted:
                agent.leave()
                continue
            self._mend(agent)
            if agent.host.frozen:
                agent.host.thaw()
        self._steady.clear()
        while len(self._able()) < self.limits.min_nodes:
            self.join()

    # ---- for people

    def say(self, what: str) -> None:
        if self.tell is not None:
            self.tell(f"{self.loop.now - 1000.0:9.3f} {what}")

    def describe(self) -> str:
        """How things stand."""
        lines = [f"round: {_names(self.round)} {self.round!r}"[:600] if self.round is not None else "no round"]
        for agent in self.agents.values():
            rounds = [(each.groups.number, str(each.state.phase)) for each in agent.at_work]
            lines.append(
                f"{agent.name}: alive={agent.alive} frozen={agent.host.frozen} rounds={rounds} "
                f"key={agent.node.key.create_revision} lost={agent.node.key.has_ended} {_short(agent)}"
            )
        return "\n".join(lines)


def _grouped(limits: Limits, chance: random.Random) -> Limits:
    """``limits``, of some schedules with shard groups of several nodes."""
    size = chance.choice([1, 1, 1, 2, 2, 3])
    if size == 1 or limits.recovery is RecoveryMode.RESTART:
        return limits
    least, most = chance.choice([(1, 1), (1, 2), (1, 2), (1, 3), (2, 3)])
    sizes = tuple(size * count for count in range(least, most + 1))
    return replace(limits, min_nodes=sizes[0], max_nodes=sizes[-1], sizes=sizes, shard_nodes=size)


def _short(agent: Agent) -> str:
    record = agent.node.key.record
    if record is None:
        return ""
    return f"{record.state} acknowledged={record.acknowledged} reported={record.reported} life={record.life}"


def _names(document: RoundDocument | None) -> str:
    return "" if document is None else ",".join(member.node for member in document.members)


@contextmanager
def _logged(say: Callable[[str], None] | None) -> Iterator[None]:
    """What the product logs becomes a part of the trace; an error that a thread only logs is a Violation."""

    def told(logger: object, method: str, event: MutableMapping[str, Any]) -> str:
        if event.get("exc_info"):
            raise Violation(NO_CRASH, traceback.format_exc())
        if say is not None:
            say(f"{event.pop('event')} " + " ".join(f"{key}={value}" for key, value in event.items()))
        raise structlog.DropEvent

    level = logging.INFO if say is not None else logging.ERROR
    before = structlog.get_config()
    structlog.configure(processors=[told], wrapper_class=structlog.make_filtering_bound_logger(level))
    try:
        yield
    finally:
        structlog.configure(**before)


@contextmanager
def _shortened() -> Iterator[None]:
    """What one node has decoded, the others need not; and a node waits less long for another one to take a place."""
    with (
        mock.patch.object(rendezvous, "PATIENCE_S", PATIENCE_S),
        mock.patch.object(RoundDocument, "decode", lru_cache(64)(RoundDocument.decode)),
        mock.patch.object(NodeRecord, "decode", lru_cache(256)(NodeRecord.decode)),
    ):
        yield


def play(seed: int, tell: Callable[[str], None] | None = None) -> Counts:
    """Play the schedule of ``seed``. A Violation names the seed."""
    world = World(seed, tell)
    gc.disable()  # what a schedule leaves goes at once after it
    try:
        with _logged(world.say if tell is not None else None), _shortened():
            return world.play()
    except Violation as violation:
        raise Violation(violation.rule, f"seed {seed}: {violation}") from violation
    finally:
        for agent in world.agents.values():
            agent.die(silently=True)
            agent.host.end()
        gc.enable()
