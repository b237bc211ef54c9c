"""Workers that run the product's recovery: a toy script and a toy state behind its ports, on virtual time.

Each worker's main thread is a greenlet. One runs at a time, and only a wait in a port gives way to another, so a seed
replays to the same trace. What is simulated is what the ports hide: the agent's channel, connections between ranks,
storage, and a state of four numbers whose digest is a fold over the samples of all its committed steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from elastic_trainer.errors import CheckpointError, ConfigError, ElasticTrainerError, RoundBrokenError, TransientError
from elastic_trainer.ipc.channel import Exit, Formation, Identity, Leaving, Message, Over, Ping, Pong, Welcome
from elastic_trainer.model import Cursor, Phase, StateIdentity
from elastic_trainer.worker.comm.control import JSON, Control, Pending, Purpose
from elastic_trainer.worker.comm.groups import Group, RankAssignment
from elastic_trainer.worker.recovery import AgentLink, InPlaceRecovery, Recovery
from elastic_trainer.worker.state.restore import elect
from elastic_trainer.worker.state.training_state import Position
from elastic_trainer.worker.steps.engine import Consensus, Flags
from tests.simulation.agents import Agent
from tests.simulation.invariants import ALIKE, NO_RESTART, Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

FIRST_PID = 2**30
"""No process has this id."""
FORM_LIMIT_S = 2.0
START_LIMIT_S = 5.0
LINGER_S = 1.0
GROUP_TIMEOUT_S = 60.0
"""Of a collective whose peer is silent: nobody else may find that out in restart mode."""
BATCH = 8
MASK = (1 << 60) - 1
ONE_WAY_S = 0.001
HALF = -1
"""The digest of a state in the middle of an update."""
COMPUTES, KEEPS = 4, 3
"""After how many steps an update has a collective, and rank 0 saves and the script reads the loss inside the step."""


def after(digest: int, first: int) -> int:
    """The digest after a step about the batch from sample ``first``."""
    return hash((digest, first, BATCH)) & MASK


class MainThread:
    """``body()`` as a thread of ``agent``'s host, which runs until it waits."""

    def __init__(self, agent: Agent, runs: Callable[[], bool], body: Callable[[], None]) -> None:
        self._agent, self._runs, self._loop = agent, runs, agent.loop
        self._greenlet = greenlet(body)
        self.strikes_in = 0
        """After how many waits ``strike`` happens; 0: never."""
        self.strike: Callable[[], None] = lambda: None

    def resume(self) -> None:
        """Something has happened that it may wait for."""
        if self._runs() and not self._greenlet.dead:
            self._greenlet.parent = getcurrent()
            self._greenlet.switch()

    def resume_in(self, seconds: float) -> None:
        self._agent.host.after(seconds, self.resume)

    def wait(self, holds: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Whether ``holds()`` within ``timeout_s``."""
        if self.strikes_in:
            self.strikes_in -= 1
            if not self.strikes_in:
                self.strike()
                self.resume_in(0.0)  # if it runs still, or at the thaw of its host
                self._switch()
        if holds():
            return True
        end = math.inf
        if timeout_s is not None:
            end = self._loop.now + timeout_s
            self.resume_in(timeout_s)
        while not holds():
            if self._loop.now >= end:
                return False
            self._switch()
        return True

    def pause(self, seconds: float) -> None:
        """Compute: nothing interrupts it."""
        end = self._loop.now + seconds
        self.resume_in(seconds)
        self.wait(lambda: self._loop.now >= end)

    def _switch(self) -> None:
        self._greenlet.parent.switch()

    def end(self) -> None:
        """The process has ended."""
        if not self._greenlet.dead:
            if getcurrent() is self._greenlet:
                raise GreenletExit
            if self._greenlet:
                self._greenlet.parent = getcurrent()
                self._greenlet.throw()


# ---- connections between ranks


@dataclass(slots=True, eq=False)
class Operation:
    """A collective. ``done``: the ranks that have its result."""

    kind: str
    came: dict[int, Any] = field(default_factory=dict)
    complete: bool = False
    """Whether all have sent their part: it is on its way, and arrives unless the one that passes it on is lost."""
    sources: dict[int, int] = field(default_factory=dict)
    """Who passes the result on to a rank, where that takes long."""
    done: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    _rows: list[Any] = field(default_factory=list)
    _sums: list[float] = field(default_factory=list)

    def rows(self) -> list[Any]:
        """The parts, by rank; the same list for all."""
        self._rows = self._rows or [self.came[rank] for rank in sorted(self.came)]
        return self._rows

    def tolist(self) -> list[float]:
        """Their sum."""
        self._sums = self._sums or [sum(each) for each in zip(*self.rows(), strict=True)]
        return self._sums


class SimGroup:
    """A process group over ``ranks`` of a meeting; ``failed`` are those that have lost a connection."""

    def __init__(self, meeting: Meeting, ranks: Sequence[int]) -> None:
        self.meeting, self.ranks = meeting, tuple(ranks)
        self.operations: dict[tuple[Any, ...], Operation] = {}
        self.failed: set[int] = set()
        self.passing: list[Operation] = []
        """Those that take long to arrive."""

    def lose(self, rank: int, other: int) -> None:
        """``other`` notices that ``rank`` has gone."""
        if other in self.ranks and rank in self.ranks:
            self.failed.add(other)
            for each in self.passing:
                if each.sources.get(other) == rank and rank not in each.done:
                    each.lost.add(other)

    def begin(self, rank: int, key: tuple[Any, ...], kind: str, payload: Any, needs: Sequence[int]) -> Operation:
        """``rank`` begins the operation ``key``, which is complete when those that it ``needs`` have begun it."""
        operation = self.operations.get(key)
        if operation is None:
            operation = self.operations[key] = Operation(kind)
        elif operation.kind != kind:
            raise Violation(ALIKE, f"{kind} of {self.meeting.name(rank)} meets {operation.kind}")
        operation.came[rank] = payload
        if len(operation.came) == len(needs):
            self.complete(operation, needs, key)
        return operation

    def complete(self, operation: Operation, needs: Sequence[int], key: tuple[Any, ...]) -> None:
        meeting = self.meeting
        world, names = meeting.world, {meeting.members[each].agent.name for each in needs}
        if world.cuts and any(not world.reaches(one, other) for one in names for other in names):
            meeting.stuck.append(lambda: self.complete(operation, needs, key))
            return
        meeting.moved_at = world.loop.now
        late: list[int] = []
        if len(needs) > 1 and world.chance.random() < 0.1:
            late = world.chance.sample(needs, 2)
            operation.sources[late[1]] = late[0]
            seconds = world.chance.uniform(0.01, 0.4)
            world.loop.after(seconds, self._arrive, operation, late[:1])
            world.loop.after(seconds + ONE_WAY_S, self._arrive, operation, late[1:])
            self.passing = [each for each in self.passing if len(each.done) < len(needs)] + [operation]
        world.loop.after(ONE_WAY_S, self._arrive, operation, [each for each in needs if each not in late])
        operation.complete = True
        self.operations.pop(key)

    def _arrive(self, operation: Operation, ranks: Sequence[int]) -> None:
        for rank in ranks:
            worker = self.meeting.members[rank]
            worker.agent.host.deliver(self._done, operation, rank, worker)

    def _done(self, operation: Operation, rank: int, worker: SimWorker) -> None:
        if rank not in operation.lost:
            operation.done.add(rank)
            worker.thread.resume()


class Meeting:
    """The ranks that form a round, by its nonce."""

    def __init__(self, world: World, assignment: SimAssignment) -> None:
        self.world, self.assignment = world, assignment
        self.members: dict[int, SimWorker] = {}
        self.held: dict[int, tuple[int, int] | None] = {}
        self.prepared: dict[int, tuple[int, int]] = {}
        self.here: set[int] = set()
        """Those that have not left."""
        self.formed_at: dict[int, float] = {}
        self.groups: dict[tuple[str, int], SimGroup] = {}
        self.stuck: list[Callable[[], None]] = []
        self.moved_at = world.loop.now
        self.step = 0
        self.saved: tuple[int, int] | None = None
        """The newest state in storage when the groups were formed."""

    def name(self, rank: int) -> str:
        return self.members[rank].who

    def come(self, worker: SimWorker, assignment: SimAssignment) -> None:
        if assignment.rank in self.members:
            raise Violation(ALIKE, f"{worker.who} and {self.name(assignment.rank)} are rank {assignment.rank}")
        self.members[assignment.rank] = worker
        self.held[assignment.rank], self.prepared[assignment.rank] = worker.state.held, worker.state.prepares
        self.here.add(assignment.rank)
        self.try_to_form()
        if assignment.rank == 0:
            for each in self.members.values():
                each.thread.resume_in(ONE_WAY_S)

    def try_to_form(self) -> None:
        """If all are there and reach each other."""
        if self.formed_at or len(self.here) < self.assignment.world_size:
            return
        world, names = self.world, {each.agent.name for each in self.members.values()}
        if world.cuts and any(not world.reaches(one, other) for one in names for other in names):
            self.stuck.append(self.try_to_form)
            return
        self.saved = world.newest_saved()
        world.invariants.stepped([each.groups.assignment for each in self.members.values() if each.groups.assignment])
        self.moved_at = world.loop.now
        for rank, worker in self.members.items():
            takes_s = 0.004 if world.chance.random() < 0.9 else world.chance.uniform(0.02, 0.4)
            self.formed_at[rank] = world.loop.now + takes_s
            worker.thread.resume_in(takes_s)

    def group(self, kind: str, number: int, ranks: Sequence[int]) -> SimGroup:
        return self.groups.setdefault((kind, number), SimGroup(self, ranks))

    def leave(self, rank: int, after_s: float) -> None:
        """The connections of ``rank`` are closed; those that it reaches notice."""
        if rank not in self.here:
            return
        self.here.discard(rank)
        mine = self.members[rank].agent.name
        for other in sorted(self.here):
            worker = self.members[other]
            if self.world.reaches(mine, worker.agent.name):
                seconds = after_s + (
                    0.0005 if self.world.chance.random() < 0.8 else self.world.chance.uniform(0.0, 0.2)
                )
                worker.agent.host.after(seconds, self.lose, rank, other)

    def lose(self, rank: int, other: int) -> None:
        """``other`` notices that ``rank`` has gone."""
        for group in self.groups.values():
            group.lose(rank, other)
        self.members[other].thread.resume()

    def unstick(self) -> None:
        """Networks have changed."""
        stuck, self.stuck = self.stuck, []
        for each in stuck:
            each()


class SimControl(Control):
    """The collectives of one rank of ``group``."""

    def __init__(self, group: SimGroup, rank: int, groups: SimGroups) -> None:
        super().__init__(group, group.ranks.index(rank), len(group.ranks))
        self._mine, self._groups = rank, groups
        self._pairs: dict[tuple[int, int], int] = {}

    def start(self, purpose: Purpose, values: Sequence[float]) -> Pending:
        vector = self.vector(purpose, values)
        self.newest = purpose.name.lower()
        work = Operation("alone", {0: vector}) if self.alone else self._op(self.newest, vector)
        return Pending(self, None if self.alone else work, work, purpose)

    def finish(self, work: Any, what: str) -> None:
        rank, group, groups = self._mine, self.group, self._groups
        if group is None or group.meeting is not groups.meeting:
            raise RoundBrokenError("the round has been left")
        groups.worker.thread.wait(
            lambda: (
                rank in work.done
                or bool(groups.why)
                or (rank in group.failed and (not work.complete or rank in work.lost))
            ),
            GROUP_TIMEOUT_S,
        )
        if rank not in work.done:
            raise RoundBrokenError(groups.why or f"a peer was lost ({what}: closed)")

    def all_of(self, kind: str, payload: Any) -> list[Any]:
        """The payloads of all ranks."""
        if self.alone:
            return [payload]
        work = self._op(kind, payload)
        self.finish(work, kind)
        return work.rows()

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        return self.all_of("gather", list(values))

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self.all_of("gather bytes", data)

    def broadcast_bytes(self, data: bytes, source: int) -> bytes:
        found: bytes = self.all_of(f"broadcast {source}", data)[source]
        return found

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self.all_of(f"broadcast {source}", tensor.clone())[source])

    def send(self, tensor: torch.Tensor, target: int) -> None:
        self.finish(self._pair(self.rank, target, tensor.clone()), "send")

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        work = self._pair(source, self.rank, None)
        self.finish(work, "receive")
        tensor.copy_(work.came[self.group.ranks[source]])

    def _op(self, kind: str, payload: Any) -> Operation:
        self._check()
        self.begun += 1
        found: Operation = self.group.begin(self._mine, (self.begun,), kind, payload, self.group.ranks)
        return found

    def _pair(self, source: int, target: int, payload: Any) -> Operation:
        self._check()
        number = self._pairs[source, target] = self._pairs.get((source, target), 0) + 1
        ranks = self.group.ranks[source], self.group.ranks[target]
        found: Operation = self.group.begin(self._mine, (source, target, number), "pass", payload, ranks)
        return found

    def _check(self) -> None:
        if self._groups.why or self._mine in self.group.failed or self.group.meeting is not self._groups.meeting:
            raise RoundBrokenError(self._groups.why or "a peer was lost (begin: closed)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimAssignment(RankAssignment):
    """A worker's assignment in a round as it has read it."""

    nonce: str
    nodes: tuple[str, ...]

    @property
    def number(self) -> int:
        return self.round


class SimGroups:
    """The port to groups: the meetings of one worker, one after the other."""

    leave_garbage = False

    def __init__(self, worker: SimWorker) -> None:
        self.worker, self.number, self.in_round, self.why = worker, 0, False, ""
        self.meeting: Meeting | None = None
        self.assignment: SimAssignment | None = None
        self.formed = False

    def form(self, assignment: RankAssignment, broken: Callable[[int], str | None]) -> Group:
        assert isinstance(assignment, SimAssignment)
        worker, world, number = self.worker, self.worker.world, assignment.round
        self.number, self.in_round, self.why, self.formed = number, True, "", False
        world.entered(worker.who, number)
        if broken(number) is not None:
            raise RoundBrokenError(f"round {number} is broken already")
        self.assignment, self.meeting = assignment, world.meeting(assignment)
        worker.state.check_assignment(assignment)
        self.meeting.come(worker, assignment)
        meeting = self.meeting
        limit_s = GROUP_TIMEOUT_S if worker.state.recovery.led else START_LIMIT_S
        worker.thread.wait(lambda: bool(self.why) or 0 in meeting.members, limit_s)
        formed = worker.thread.wait(
            lambda: bool(self.why) or world.loop.now >= meeting.formed_at.get(assignment.rank, math.inf), FORM_LIMIT_S
        )
        if self.why:
            raise RoundBrokenError(self.why)
        if not formed:
            away = [each for each in assignment.nodes if not world.reaches(worker.agent.name, each)]
            raise TransientError("not formed in time" + (f", remote=[{away[0]}]:1" if away else ""))
        self.formed = True
        return Group(
            assignment, SimControl(meeting.group("all", 0, range(assignment.world_size)), assignment.rank, self)
        )

    def part(self, kind: str, number: int, ranks: Sequence[int]) -> SimControl:
        """The control of some ranks of the round."""
        assert self.meeting is not None
        assert self.assignment is not None
        return SimControl(self.meeting.group(kind, number, ranks), self.assignment.rank, self)

    def sever(self) -> None:
        self.why = self.why or "severed"
        self.close(0.0)

    def abandon(self, *, planned: bool = False) -> None:
        self.close(LINGER_S if planned else 0.0)
        self.in_round, self.meeting, self.assignment = False, None, None

    def close(self, after_s: float) -> None:
        if self.meeting is not None and self.assignment is not None:
            self.meeting.leave(self.assignment.rank, after_s)

    def over(self, number: int) -> None:
        """In the link's thread: rounds up to ``number`` are over."""
        if self.in_round and number >= self.number:
            self.why = self.why or "the round ended in the middle of a collective"
            self.close(0.0)


class SimLink(AgentLink):
    """The port to the agent."""

    def __init__(self, worker: SimWorker) -> None:
        super().__init__(worker.agent.loop)
        self._worker = worker

    def send(self, message: Message) -> None:
        self._worker.say(message)

    def wait(self, holds: Callable[[], bool], timeout_s: float | None) -> None:
        self._worker.thread.wait(holds, timeout_s)

    def assignment(self, formation: Formation) -> SimAssignment:
        return SimAssignment(
            round=formation.number,
            rank=formation.rank,
            world_size=formation.world_size,
            local_rank=self._worker.local_rank,
            local_world_size=1,
            nonce=formation.nonce,
            nodes=formation.nodes,
        )


# ---- what is trained


@dataclass(slots=True)
class SimBatch:
    """Samples ``first`` to ``first + BATCH``."""

    first: int
    used: bool = False


@dataclass(slots=True)
class SimStep:
    """As the product's."""

    number: int
    generation: int
    rank: int
    world_size: int
    batch: SimBatch
    committed: bool = False


class SimState:
    """The port to the state. ``shard`` of ``size`` is what this rank holds."""

    def __init__(self, worker: SimWorker, shard: int, size: int) -> None:
        self.worker, self.shard, self.size = worker, shard, size
        self.position = Position()
        self.digest = 0
        self.whole, self.trained, self.apart = True, False, False
        self._prepared: SimStep | None = None
        self.batch: SimBatch | None = None
        self.phase = Phase.STARTING
        self.unsaved = self.found_nothing = False
        """Whether it holds what the storage lacks; whether no rank found a state in storage when it looked last."""
        self.control: SimControl = None  # type: ignore[assignment]
        self.peers: SimControl | None = None
        self.consensus: Consensus = None  # type: ignore[assignment]
        self.recovery: Recovery = None  # type: ignore[assignment]

    next_size = BATCH

    @property
    def sharded(self) -> bool:
        return self.size > 1

    @property
    def prepared(self) -> int:
        return self._prepared.number if self._prepared is not None else 0

    @property
    def span_s(self) -> float:
        return self.consensus.boundary_s if self.consensus is not None else 0.0

    @property
    def leaves(self) -> bool:
        return self.worker.evicted

    @property
    def held(self) -> tuple[int, int] | None:
        """The moment of a whole state that others may receive."""
        return (self.position.lineage, self.position.step) if self.trained and self.whole else None

    @property
    def prepares(self) -> tuple[int, int]:
        """The moment that it can come to if a peer has."""
        return self.position.generation, self.prepared

    def check_assignment(self, assignment: SimAssignment) -> None:
        if assignment.rank % self.size != self.shard:
            raise Violation(
                ALIKE, f"{self.worker.who} holds shard {self.shard} of {self.size} at rank {assignment.rank}"
            )

    def show(self, phase: Phase) -> Phase:
        before, self.phase = self.phase, phase
        return before

    # ---- the end of a round

    def parted_by(self, error: BaseException) -> ConfigError | None:
        return None

    def gives_up(self, step: SimStep, error: BaseException) -> BaseException:
        return error

    def undo(self) -> None:
        """Nothing is left of a step but an update that has begun; and a prepared one stays."""

    def release(self) -> None:
        pass

    def rewind(self) -> None:
        pass

    def doubts_gradients(self) -> bool:
        return False

    # ---- the next one

    def join(self, group: Group) -> None:
        assignment, groups = group.formation, self.worker.groups
        if self.sharded:
            first = assignment.rank - self.shard
            self.peers = groups.part("shards", first, range(first, first + self.size))

    def alike(self, control: Control) -> SimControl:
        return self.worker.groups.part("copies", self.shard, range(self.shard, control.world_size, self.size))

    def settle(self, *, committed: bool) -> SimStep | None:
        step, self._prepared = self._prepared, None
        if step is None or not committed:
            return None
        self.commit(step)
        return step

    def committed(self) -> dict[str, Any]:
        return {"digest": self.digest, "shard": self.shard}

    def notes(self) -> dict[str, Any]:
        return {}

    def collect(self) -> dict[str, Any]:
        position = self.position
        return {
            "step": position.step,
            "lineage": position.lineage,
            "samples": position.cursor.samples,
            "digest": self.digest,
            "shard": self.shard,
        }

    def take_over(self, state: Mapping[str, Any], *, first_rank: bool = False) -> None:
        if state["shard"] != self.shard:
            raise Violation(ALIKE, f"{self.worker.who} of shard {self.shard} takes over shard {state['shard']}")
        self.whole = False
        self.worker.thread.pause(0.002)
        position = self.position
        position.step, position.lineage, self.digest = state["step"], state["lineage"], state["digest"]
        position.cursor = Cursor(0, state["samples"])
        self.whole, self.unsaved = True, False

    def healed(self, notes: Mapping[str, Any]) -> None:
        self._prepared = None

    def resume_alone(self) -> None:
        """In restart mode: in the round for which this process was started."""
        group = self.worker.groups.form(self.worker.assigned, lambda number: None)
        self.join(group)
        self.resume(group, None)

    def resume(self, group: Group, unfit: CheckpointError | None) -> None:
        """As Training.resume: all ranks come to one state from storage, or begin from that of rank 0."""
        worker, control, chance = self.worker, group.control, self.worker.world.chance
        worker.thread.pause(chance.choice([0.005, 0.005, 0.3]))  # looks at the storage
        newest = worker.world.newest_saved()
        rows = control.gather([1, *newest] if newest is not None else [0, 0, 0])
        candidates = [StateIdentity(r, s) if known else None for known, r, s in rows]
        election = elect(candidates)
        self.found_nothing = election is None
        if election is None:
            control.agree(unfit)
            given = control.broadcast_bytes(json.dumps(self.collect()).encode(), 0)
            state, lasts = json.loads(given), 0
        else:
            found = candidates[election.sources[0]]
            assert found is not None
            state, lasts = worker.world.storage[found.round, found.step], found.round + 1
            worker.thread.pause(chance.choice([0.01, 0.01, 0.2]))
        self.take_over({**state, "shard": self.shard})
        generation = max(row[0] for row in control.gather([max(group.formation.round, lasts)]))
        self.take_part(group, generation, None)

    def take_part(self, group: Group, generation: int, given: Mapping[str, Any] | None) -> None:
        control = group.control
        assert isinstance(control, SimControl)
        self.position.generation, self.control = generation, control
        control.gather([generation])
        self.consensus = Consensus(control, self.worker.agent.loop)
        self.trained = True

    def agree_on_batch(self, control: Control) -> None:
        pass

    def redraw(self) -> None:
        batch = self.batch
        if batch is not None and not batch.used:
            batch.first = self.position.cursor.samples

    def record(self, step: SimStep) -> None:
        pass

    # ---- saving and leaving

    def save_due(self, step: int) -> None:
        pass

    def save(self) -> None:
        """Write what this rank holds, which takes time."""
        world, thread = self.worker.world, self.worker.thread
        state = self.collect()
        self.worker.busy = "saving"
        thread.pause(world.chance.choice([0.01, 0.01, 0.1, 1.0]))
        self.worker.busy = ""
        world.save(state, self.shard, self.size)
        self.unsaved = False

    def save_alone(self) -> None:
        if self.unsaved:
            self.save()

    def save_before_waiting(self) -> None:
        before = self.show(Phase.CHECKPOINT)
        if self.unsaved and self.writes:
            self.save()
        self.control.sum(Purpose.STOP)
        self.show(before)

    @property
    def writes(self) -> bool:
        return self.control.rank < self.size

    def leave_now(self) -> NoReturn:
        self.worker.say(Leaving(status="stopped", step=0))
        raise SystemExit(0)

    # ---- a step

    def draw(self) -> SimBatch:
        self.batch = SimBatch(self.position.cursor.samples)
        return self.batch

    def commit(self, step: SimStep) -> None:
        worker, position = self.worker, self.position
        if step.batch.first != position.cursor.samples or step.number != position.step + 1:
            raise Violation(ALIKE, f"{worker.who} commits step {step.number} about {step.batch} at {position}")
        self.digest = after(self.digest, step.batch.first)
        position.step += 1
        position.lineage, position.cursor = position.generation, Cursor(0, step.batch.first + BATCH)
        self._prepared, self.whole = None, True
        step.committed = step.batch.used = self.unsaved = True
        worker.world.committed(worker, position, self.digest)

    def train(self, step: SimStep) -> None:
        """The block of a step, and its end."""
        worker, recovery, error = self.worker, self.recovery, None
        recovery.lost = None
        try:
            self._body(step)
        except Exception as raised:  # noqa: BLE001 - as the end of a step
            error = raised
        error = error or recovery.lost
        if error is None:
            try:
                self._boundary()
            except RoundBrokenError as raised:
                error = raised
        if error is not None and not recovery.absorb(step, error):
            raise error
        worker.progressed()

    def _body(self, step: SimStep) -> None:
        worker, control = self.worker, self.control
        worker.thread.pause(worker.world.step_s)
        if worker.script_fails:
            raise RuntimeError("S3 GET: socket timeout")
        rows = control.all_of("gradients", (step.number, step.batch.first, self.digest, self.position.lineage))
        worker.world.one_state(worker, rows)
        self.recovery.check_gradients()
        if self.peers is not None:
            self._prepared = step
            self.peers.sum(Purpose.COMMIT, [step.number])
        before, self.whole, self.digest = self.digest, False, HALF
        if step.number % COMPUTES == 0 and not self.sharded:
            control.sum(Purpose.COUNT, [1.0])  # in the middle of the update, as some optimizers of whole models need
        self.digest = before
        self.commit(step)
        if step.number % KEEPS == 0:
            try:
                control.sum(Purpose.LOSS, [1.0])  # step.loss inside the block
            except RoundBrokenError as error:
                self.recovery.postpone(error)

    def _boundary(self) -> None:
        recovery = self.recovery
        if self.position.step % KEEPS == 0 and self.writes:
            self.worker.save_later()
        agreed = self.consensus.boundary(lambda: Flags(switch=recovery.knows_change()))
        if agreed is not None and agreed.switch:
            recovery.note_change()


# ---- the process


class SimWorker:
    """A worker as its agent sees it, and the script that it runs, over a channel that takes its time."""

    def __init__(self, agent: Agent, world: World, pid: int, local_rank: int, shard: int = 0, size: int = 1) -> None:
        self.agent, self.world, self.pid, self.local_rank = agent, world, pid, local_rank
        self.who = f"{agent.name}.{local_rank}" if local_rank else agent.name
        self.code: int | None = None
        """Its exit code."""
        self.hung = self.blocked = self.evicted = self.script_fails = False
        """Whether it answers nothing; whether its main thread is in a call that nothing interrupts."""
        self.busy = ""
        self.seat: Any = None
        self.assigned: RankAssignment = None  # type: ignore[assignment]
        self._arrivals = [0.0, 0.0]
        """When the last message arrives at the agent, and at the worker."""
        self.thread = MainThread(agent, lambda: self.alive and not (self.hung or self.blocked), self._run)
        self.groups, self.state, self.link = SimGroups(self), SimState(self, shard, size), SimLink(self)

    @property
    def alive(self) -> bool:
        return self.code is None and not self.agent.host.dead

    @property
    def still(self) -> bool:
        return self.hung or self.blocked or self.agent.host.frozen

    @property
    def step(self) -> Identity | None:
        """The newest step that it holds."""
        held = self.state.held
        return Identity(round=held[0], step=held[1]) if held is not None else None

    # ---- the script

    def begin(self, recovery: Recovery) -> None:
        self.state.recovery = recovery
        self.thread.resume_in(0.0)

    def _run(self) -> None:
        try:
            self._script()
        except SystemExit as leaving:
            self.end(int(str(leaving.code)))
        except GreenletExit:
            pass
        except (ElasticTrainerError, RuntimeError) as error:
            if not (self.script_fails or self.restarts(error)):
                raise Violation(NO_RESTART, f"{self.who} ends: {error!r}") from error
            self.end(1)

    def restarts(self, error: BaseException) -> bool:
        """Whether ``error`` ends a process that its launcher starts anew, or nothing is left to go on from."""
        torn = isinstance(error, CheckpointError) and (self.state.found_nothing or not self.world.storage)
        return torn or (not self.state.recovery.led and isinstance(error, (RoundBrokenError, TransientError)))

    def _script(self) -> None:
        state, recovery = self.state, self.state.recovery
        recovery.begin()
        while state.position.step < self.world.last_step:
            if recovery.make_change():
                continue
            batch = state.draw()
            control, number = state.control, state.position.step + 1
            step = SimStep(number, state.position.generation, control.rank, control.world_size, batch)
            state.train(step)
            if step.committed and number % self.world.evaluates_every == 0:
                with recovery.deferring_changes():
                    self._call("evaluation", self._evaluate)
            if step.committed and number % self.world.saves_every == 0:
                self._call("save", self._save)
        recovery.call(lambda: state.control.sum(Purpose.FINISH), JSON)
        self.say(Leaving(status="done", step=0))
        self.end(0)

    def _call(self, name: str, attempt: Callable[[], int]) -> None:
        phase = Phase.EVALUATION if name == "evaluation" else Phase.CHECKPOINT
        before = self.state.show(phase)
        self.world.called(self, name, self.state.recovery.call(attempt, JSON))
        if self.state.show(before) is not phase:
            raise Violation(NO_RESTART, f"{self.who} shows another phase in {name}, and may be taken for hung")

    def _evaluate(self) -> int:
        """Long, on each rank by itself; the same result on all."""
        state = self.state
        state.control.sum(Purpose.EVALUATE)
        self.busy = "evaluating"
        self.thread.pause(self.world.chance.choice([0.05, 0.05, 0.05, 0.05, 0.5, 0.5, 3.0]))
        self.busy = ""
        return sum(row[0] for row in state.control.gather([state.position.step])) // state.control.world_size

    def _save(self) -> int:
        self.state.control.sum(Purpose.SAVE)
        if self.state.writes:
            self.state.save()
        return self.state.control.broadcast_bytes(b"saved", 0).count(b"s")

    def save_later(self) -> None:
        """In the background."""
        state, shard, size = self.state.collect(), self.state.shard, self.state.size

        def written() -> None:
            if self.alive:
                self.world.save(state, shard, size)

        self.agent.host.after(self.world.chance.choice([0.02, 0.5]), written)

    def progressed(self) -> None:
        if self.state.recovery.led:
            self.link.report(self.state.position, self.state.span_s)

    # ---- the channel: the agent's end of the connection

    def send(self, message: Message) -> None:
        self.agent.sends(self, message)
        self.agent.host.after(self._takes_s(1), self._hear, message)

    def peer(self) -> tuple[int, int]:
        return self.pid, 0

    def close(self) -> None:
        pass

    def _takes_s(self, way: int) -> float:
        """In order, mostly at once."""
        now = self.agent.loop.now
        self._arrivals[way] = max(self._arrivals[way], now + (0.001 if self.agent.chance.random() < 0.9 else 0.05))
        return self._arrivals[way] - now

    def say(self, message: Message) -> None:
        def arrive() -> None:
            if self.seat is not None:
                self.agent.heard(self, message)

        self.agent.host.after(self._takes_s(0), arrive)

    def _hear(self, message: Message) -> None:
        """In the link's thread."""
        if not self.alive or self.hung:
            return
        if isinstance(message, Exit):
            self.end(message.code)
        elif isinstance(message, Ping):
            self.say(Pong())
        elif isinstance(message, Welcome):
            self.begin(InPlaceRecovery(self.link, self.groups, self.state, self.agent.loop))
        else:
            self.link.hear(message)
            if isinstance(message, Over):
                self.groups.over(message.number)
            self.thread.resume()

    # ---- what happens to it

    def end(self, code: int) -> None:
        """The process ends. The agent reads to the end of the connection first, or the kernel tells it before."""
        if self.code is not None:
            return
        self.code = code
        world = self.agent.world
        world.verdicts.died(
            self.agent.name, self.groups.in_round, self.step.step if self.step else 0, code, world.round
        )
        self.groups.close(0.0)
        self.groups.in_round = False
        gone_s = self._takes_s(0) if code == 0 or self.agent.chance.random() < 0.5 else 0.0
        self.agent.host.after(gone_s, self.agent.ended, self)
        self.thread.end()

    def evict(self) -> None:
        self.evicted = True
        self.link.evicted("SIGTERM")
