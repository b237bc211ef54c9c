"""The health of this node: looks at its workers' pages, kills those that hang, and publishes their status.

The node of rank 0 also finds slow ranks, brings requested saves to its worker, and asks nodes to leave whose ranks are
slow or compute wrong results: through a key of the other node, which then leaves as after a SIGTERM, by a planned
change with exit code 143.

*Runs in* the agent: a thread named ``health`` looks several times a second, one named ``health-writer`` writes to the
store every few seconds, so that an outage of the store does not stop the watchdog; the watch's thread hears of requests
for saves.
*Owns* both threads, that watch, and the file beside the page of rank 0's worker that holds a request's id.
*Fails by* nothing: a failed turn is logged and the next one comes.
*Invariant*: time in which the agent itself was frozen counts against no worker. A requested save is answered once; one
whose worker died before it answered goes to the next rank 0. A request to an earlier node of the same name to leave is
ignored.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from elastic_trainer.agent.health.incidents import Incidents
from elastic_trainer.agent.health.pages import Pages
from elastic_trainer.agent.health.verdicts import Clues, KernelLog, Verdicts
from elastic_trainer.agent.workers import hang_rules
from elastic_trainer.agent.workers.machine import LogTails, Machine
from elastic_trainer.agent.workers.periodic import PeriodicThread
from elastic_trainer.agent.workers.watchdog import HungWorkers, process_state
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ElasticTrainerError, OutcomeUnknownError, PermanentError
from elastic_trainer.ipc.page import ORDER_SUFFIX, SAVE_SUFFIX, Reading, observed, stacks_of
from elastic_trainer.membership.documents import (
    GONE,
    DocumentError,
    Incident,
    LeaveRequest,
    NodeHealth,
    NodeRecord,
    NodeState,
    RankHealth,
    RestartRequest,
    RoundDocument,
    RoundState,
    RunProgress,
    Saved,
    SaveRequest,
    added_up,
)
from elastic_trainer.membership.stragglers import find_stragglers
from elastic_trainer.model import RunOrder
from elastic_trainer.store.api import (
    Delete,
    EventKind,
    KeyValue,
    Operation,
    Put,
    Read,
    RunKeys,
    Snapshot,
    Store,
    Watch,
    WatchEvent,
    absent,
    created_at,
    unchanged,
)
from elastic_trainer.store.session import Slot
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry.families import RECOVERY_BUCKETS, RankGauges
from elastic_trainer.telemetry.logs import logger

LOOKS_PER_LIMIT: Final = 8
LONGEST_PAUSE_S: Final = 0.25
LATE: Final = 4.0
"""The agent stood still if a turn comes this many times later than planned."""
NODES_PER_SECOND: Final = 125
LEAST_INTERVAL_S: Final = 2.0
"""Each node writes at most this often; NODES_PER_SECOND bounds the writes of all nodes together."""
REPEATED_INCIDENT_S: Final = 600.0
ALIVE_EVERY_S: Final = 5.0
_STOPS_KEPT: Final = 100
_NOTICED: Final = (
    ("save.failed", "checkpoint_failed", "a checkpoint could not be saved", "save_error", "the log of rank 0 says why"),
    ("nonfinite_steps", "nonfinite_loss", "the loss was NaN or infinite", "", ""),
    ("differences", "ranks_differ", "ranks held different parameters", "", "the workers' logs name the first"),
)
"""Counters that people should hear of: name, kind of incident, what it means, the note of a worker that says why, and
where to look without one."""


@dataclass(frozen=True, slots=True)
class HealthSubject:
    """Whose health it is. ``metrics``: the URL of its endpoint; ``max_nodes``: the most that the run can have;
    ``alive``: the file whose time shows a kubelet that this agent works, which no client of a port can prevent;
    ``logs``: where its output goes.
    """

    node: str
    limits: hang_rules.HangLimits
    host: str = ""
    metrics: str = ""
    max_nodes: int = 0
    alive: Path | None = None
    logs: str = ""
    evicts_mismatched: bool = False
    min_nodes: int = 1
    machine: str = ""


@dataclass(frozen=True, slots=True)
class HealthPorts:
    """``round_now()`` is the newest round document known here; ``give_up(number, reason)`` breaks that round."""

    pages: Pages
    store: HealthStore
    incidents: Incidents
    evictions: Evictions
    stragglers: StragglerWatch
    saves: SaveRequests
    orders: RunOrders
    hung: HungWorkers
    machine: Machine
    tails: LogTails
    clues: Clues
    kernel_log: KernelLog
    verdicts: Verdicts
    round_now: Callable[[], RoundDocument | None]
    give_up: Callable[[int, str], None]


class Health:
    """The threads ``health`` and ``health-writer``; see the module."""

    def __init__(self, subject: HealthSubject, ports: HealthPorts, clock: Clock = SYSTEM) -> None:
        self._subject, self._ports, self._node, self._pages = subject, ports, subject.node, ports.pages
        self._round_now, self._clock = ports.round_now, clock
        self._pause_s = LONGEST_PAUSE_S
        if subject.limits.least_s:
            self._pause_s = min(LONGEST_PAUSE_S, subject.limits.least_s / LOOKS_PER_LIMIT)
        self._looked_at = clock.monotonic()
        self._stood: deque[tuple[float, float]] = deque(maxlen=_STOPS_KEPT)
        """When the agent went on after it had stood still, and for how long it had."""
        self._waited: dict[int, float] = {}
        """When each worker was last seen to wait for others."""
        self._waiting: dict[int, hang_rules.Waiting] = {}
        self._all_victims = False
        self._reported_at: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._audited: dict[int, int] = {}
        """The newest finding of an audit that was reported, by process."""
        self._pending: list[Incident] = []
        self._awaits_clues = False
        self._failed = set[int]()
        """The workers whose Session is known to have failed, as long as their pages are here."""
        self._stacks_of = set[tuple[int, float]]()
        """The waits (process id and last progress) whose stacks are known, or about to be."""
        self._waits_unseen: deque[Reading] = deque()
        self._saved: Saved | None = None
        self._saves_failing = 0
        self._loss: float | None = None
        self._last_incident = ""
        self._asked_at = self._touched_at = -math.inf
        self._publishing = threading.Lock()
        self._closed = False
        self._looking = PeriodicThread("health", self.turn, clock)
        self._writing = PeriodicThread("health-writer", self._turn, clock)

    def start(self) -> None:
        self._looked_at = self._clock.monotonic()
        self._looking.start(self._pause_s)
        self._writing.start(self.every_s())

    def close(self) -> None:
        """Publish for the last time, and end."""
        if self._closed:
            return
        self._closed = True
        self._looking.close()
        self._writing.close()
        self._ports.saves.close()
        self._meet_all(self._pages.living(), self._clock.monotonic())
        self.publish(last=True)
        self._ports.kernel_log.close()

    def known_progress(self) -> tuple[RunProgress, float | None, str] | None:
        """How far the run is, its loss and its last incident; None where another node has rank 0."""
        head = head_of(self._pages.living())
        return None if head is None else (progress_of(head), self._loss, self._last_incident)

    def every_s(self) -> float:
        current = self._round_now()
        takes_part = current is not None and current.member(self._node) is not None
        nodes = len(current.members) if current is not None and takes_part else self._subject.max_nodes
        return max(LEAST_INTERVAL_S, nodes / NODES_PER_SECOND)

    # ---- the watchdog

    def turn(self) -> float:
        """One turn: kill the workers that hang; seconds until the next."""
        now = self._clock.monotonic()
        late_s = now - self._looked_at
        self._looked_at = now
        if self._subject.alive is not None and now - self._touched_at >= ALIVE_EVERY_S:
            self._touched_at = now
            self._subject.alive.touch()
        readings = self._pages.living()
        self.look_at_kernel()
        self._look_at_failures()
        self._meet_all(readings, now)
        if self._ports.saves.pass_on(readings):
            self._writing.wake()
        if late_s > max(1.0, LATE * self._pause_s):
            self._stood.append((now, late_s))
            self._waiting = {}
        self._waited = {each.pid: self._waited[each.pid] for each in readings if each.pid in self._waited}
        self._waited |= {each.pid: now for each in readings if each.waits}
        self._waiting = hang_rules.Waiting.seen(self._waiting, [each for each in readings if each.waits], now)
        found = hang_rules.hung(readings, self._subject.limits, now, self._stood, self._waited)
        for each in found:
            if not each.is_victim and process_state(each.reading.pid) != "traced":  # by a debugger
                self._ports.hung.kill(each.reading.pid, each.reason, local_rank=each.reading.local_rank)
        victims = [each for each in found if each.is_victim]
        self._look_at_waits([each.reading for each in victims])
        before, self._all_victims = self._all_victims, bool(victims) and len(victims) == len(found)
        if self._all_victims:
            if not before:
                self._writing.wake()  # the node of rank 0 has to know, and the next turn may be seconds away
            self._consider_giving_up(victims)
        return self._pause_s

    def _look_at_failures(self) -> None:
        """Keep how Sessions ended, each once: others may judge before the process has exited."""
        failed = self._pages.failed()
        for each in failed:
            if each.pid not in self._failed:
                self._ports.clues.failed(each)
        self._failed = {each.pid for each in failed}

    def _look_at_waits(self, readings: list[Reading]) -> None:
        """Have the writer look where these workers wait for others, once for each wait: a stack may take seconds."""
        known, self._stacks_of = self._stacks_of, {(each.pid, each.pulse.moved_at) for each in readings}
        fresh = [each for each in readings if (each.pid, each.pulse.moved_at) not in known]
        self._waits_unseen.extend(fresh)
        if fresh:
            self._writing.wake()

    def _consider_giving_up(self, victims: list[hang_rules.Hung]) -> None:
        """All here wait for others; if all ranks of the round do, nobody is to blame, and nobody will end it."""
        current = self._round_now()
        if current is None or current.state is not RoundState.ACTIVE or not current.is_first(self._node):
            return
        if self._looked_at - self._asked_at < len(current.members) / NODES_PER_SECOND:
            return  # each time the documents of all nodes are read
        self._asked_at = self._looked_at
        if hang_rules.all_wait(current, self._ports.store.told(), max(each.limit_s for each in victims)):
            still_s = min(each.still_s for each in victims)
            self._ports.give_up(current.number, f"all ranks have waited for each other for {still_s:.1f} s")

    def _meet_all(self, readings: list[Reading], now: float) -> None:
        for incident in self._ports.incidents.complete(readings, now):
            self._meet(incident)

    def _meet(self, incident: Incident) -> None:
        pages = self._pages
        if incident.cause is not None:
            pages.count_event(f"ended.{incident.cause}")
        if (total_s := incident.total_s) is not None:
            kind = "planned" if incident.planned else "failure"
            for name, amount in observed(f"recovery_s.{kind}", total_s, RECOVERY_BUCKETS).items():
                pages.count_event(name, amount)
        logger().info(
            "incident.closed",
            cause=incident.cause,
            round=incident.round,
            next_round=incident.next_round,
            reason=incident.reason,
            steps_lost=incident.steps_lost,
            total_s=None if incident.total_s is None else round(incident.total_s, 3),
        )
        self._pending.append(incident)
        self._last_incident = incident.reason
        self._writing.wake()

    def add_note(self, kind: str, reason: str, ranks: tuple[int, ...] = (), number: int | None = None) -> None:
        """Something that people should know of, for the next time that is published.

        ``number``: the round in which it happened, if that is not the newest.
        """
        current = self._round_now()
        self._pending.append(
            Incident(
                wall=self._clock.wall(),
                by=self._node,
                kind=kind,
                round=number if number is not None else current.number if current is not None else 0,
                reason=reason,
                nodes=(self._node,),
                ranks=ranks,
                step=self._pages.reached,
            )
        )
        self._writing.wake()

    # ---- publishing

    def look_at_kernel(self) -> None:
        """Keep what the kernel has logged of faults since the last look."""
        self._ports.clues.logged(self._ports.kernel_log.read())

    def publish_soon(self) -> None:
        """There is something new."""
        self._writing.wake()

    def publish(self, *, last: bool = False) -> None:
        """Publish this node's workers and new incidents with their verdicts; incidents wait while the store is away.

        ``last``: this node leaves.
        """
        with self._publishing:
            while self._waits_unseen:
                each = self._waits_unseen.popleft()
                self._ports.clues.waits(each, stacks_of(each.pid, each.path))
            readings, counters = self._pages.living(), self._pages.counters()
            self._notice(readings, counters)
            self._notice_audits(readings)
            self._ports.store.write(self.report(readings, counters))  # first: others judge by its clues
            self._awaits_clues = False
            try:
                while self._pending:
                    judged = self._ports.verdicts.judged(self._pending[0], self._round_now(), last=last)
                    if judged is None:
                        self._awaits_clues = True
                        break
                    key = self._ports.store.write_incident(judged)
                    self._pending.pop(0)
                    self._count_verdict(judged)
                    if not last:
                        self._act(key, judged)
                while not last and (better := self._ports.verdicts.better(self._round_now())) is not None:
                    key, before, judged = better
                    self._ports.store.replace_incident(key, before, judged)
                    self._ports.verdicts.drop_early(key)
                    if _said(before) != _said(judged):
                        self._count_verdict(judged)
            except PermanentError as error:  # it will not be taken later either
                lost = self._pending.pop(0) if self._pending else None
                logger().warning("incident.refused", round=lost.round if lost else 0, error=str(error))
            except ElasticTrainerError as error:
                logger().debug("incident.not_written", error=str(error))

    def _act(self, key: str, judged: Incident) -> None:
        """What the verdict asks for; its sentence then says what was done."""
        try:
            done = self._ports.verdicts.act(key, judged, self._round_now())
            if done is not None:
                self._ports.store.replace_incident(key, judged, done)
        except ElasticTrainerError as error:
            logger().warning("verdict.not_followed", round=judged.round, error=str(error))

    def _count_verdict(self, judged: Incident) -> None:
        if judged.verdict is not None:
            self._pages.count_event(_said(judged))
            self._last_incident = judged.verdict.sentence

    def _turn(self) -> float:
        self.publish()
        try:
            self._ports.saves.follow_round(self._round_now())
            self._ports.evictions.obey()
            self._ports.orders.follow(self._round_now(), self._pages.living())
            slow = self._ports.stragglers.judge(self._round_now(), self._ports.store.told)
            if slow is not None:
                self._pending.append(slow)
        except ElasticTrainerError as error:
            logger().debug("stragglers.unknown", error=str(error))
        return min(self.every_s(), LONGEST_PAUSE_S) if self._awaits_clues else self.every_s()

    def report(self, readings: list[Reading], counters: Mapping[str, float]) -> NodeHealth:
        now, current = self._clock.monotonic(), self._round_now()
        head = head_of(readings)
        if head is not None and math.isfinite(head.pulse.loss):
            self._loss = head.pulse.loss
        for saved in (each.notes.get("saved") for each in readings):
            if saved is not None and (self._saved is None or saved["wall"] > self._saved.wall):
                self._saved = Saved.model_validate(saved)
        # A worker that has not tried to save says nothing: what the one before it said still holds.
        told = [each.notes["saves_failing"] for each in readings if "saves_failing" in each.notes]
        self._saves_failing = max(told, default=self._saves_failing)
        return NodeHealth(
            node=self._node,
            host=self._subject.host,
            wall=self._clock.wall(),
            every_s=self.every_s(),
            metrics=self._subject.metrics,
            logs=self._subject.logs,
            round=current.number if current is not None else 0,
            ranks=tuple(row(each, now, self._waiting.get(each.pid)) for each in readings if each.pulse.rank >= 0),
            counters={name: round(value, 3) for name, value in counters.items()},
            loss=self._loss,
            saved=self._saved,
            saves_failing=self._saves_failing,
            save_interval_s=head.pulse.save_interval_s if head is not None else 0.0,
            progress=progress_of(head) if head is not None else None,
            load=self._ports.machine.usage(),
            tails=self._ports.tails.read(readings),
            clues=self._ports.clues.all(),
            machine=self._subject.machine,
        )

    def _notice(self, readings: list[Reading], counters: Mapping[str, float]) -> None:
        """What went wrong without ending a round; rank 0's node reports what all ranks see."""
        current, now = self._round_now(), self._clock.monotonic()
        if current is not None and current.members and not current.is_first(self._node):
            self._seen = dict(counters)
            return
        for name, kind, text, note, hint in _NOTICED:
            value, before = counters.get(name, 0.0), self._seen.get(name, 0.0)
            self._seen[name] = value
            if value > before and now - self._reported_at.get(kind, -math.inf) >= REPEATED_INCIDENT_S:
                self._reported_at[kind] = now
                why = next((each.notes[note] for each in readings if note in each.notes), "")
                self.add_note(kind, text + (f": {why}" if why else f"; {hint}" if hint else ""))

    def _notice_audits(self, readings: list[Reading]) -> None:
        """Which ranks compute wrong results, as the worker of rank 0 has found."""
        current, now = self._round_now(), self._clock.monotonic()
        for reading in readings:
            for each in reading.notes.get("audits", ()):
                if each["number"] <= self._audited.get(reading.pid, 0):
                    continue
                self._audited[reading.pid] = each["number"]
                named = f"audit_mismatch {each['nodes']}"
                if now - self._reported_at.get(named, -math.inf) >= REPEATED_INCIDENT_S:
                    self._reported_at[named] = now
                    self._pending.append(
                        Incident(
                            wall=self._clock.wall(),
                            by=self._node,
                            kind="audit_mismatch",
                            round=current.number if current is not None else 0,
                            reason=each["reason"] + self._evict_mismatched(current, each["nodes"], each["reason"]),
                            nodes=tuple(each["nodes"]),
                            ranks=tuple(each["ranks"]),
                            step=each["step"],
                        )
                    )

    def _evict_mismatched(self, current: RoundDocument | None, nodes: Sequence[str], reason: str) -> str:
        """Ask the one node that was found to be wrong to leave, if enough others remain; what to say of it."""
        if not self._subject.evicts_mismatched or current is None or len(nodes) != 1:
            return ""
        if len(current.members) <= self._subject.min_nodes:
            return "; its node stays, since --nnodes needs it"
        try:
            asked = self._ports.evictions.ask(current, nodes[0], reason)
        except ElasticTrainerError as error:
            logger().warning("eviction.failed", node=nodes[0], error=str(error))
            return ""
        return "; its node was asked to leave" if asked else ""


def _said(judged: Incident) -> str:
    """The counter of its verdict."""
    verdict = judged.verdict
    return f"verdict.{verdict.culprit}.{verdict.advice}" if verdict is not None else ""


def head_of(readings: Sequence[Reading]) -> Reading | None:
    """The page of rank 0, if that is on this node."""
    return next((each for each in readings if each.pulse.rank == 0), None)


def tell(path: Path, words: str) -> None:
    """Have the worker find ``words`` in the file ``path``, whole. Raises OSError."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(words, encoding="ascii", errors="replace")
    fresh.rename(path)


def progress_of(head: Reading) -> RunProgress:
    """How far the run is, by the page of rank 0."""
    pulse, notes = head.pulse, head.notes
    length, batch = int(notes.get("length") or 0), int(notes.get("batch") or 0)
    epochs, last = notes.get("epochs"), notes.get("last_step")
    part, steps = None, None
    if last:
        part, steps = pulse.step / last, last - pulse.step
    elif epochs and length and batch:
        done = pulse.epoch * length + pulse.used
        part, steps = done / (epochs * length), math.ceil((epochs * length - done) / batch)
    return RunProgress(
        step=pulse.step,
        epoch=pulse.epoch,
        epochs=epochs,
        last_step=last,
        part=None if part is None else min(1.0, max(0.0, part)),
        left_s=None if steps is None or not pulse.step_s else round(max(0, steps) * pulse.step_s, 1),
        lr=notes.get("lr"),
        paused=bool(notes.get("paused")),
    )


def row(reading: Reading, now: float, waiting: hang_rules.Waiting | None = None) -> RankHealth:
    """How one rank is; ``waiting``: since when it has been seen to wait for others."""
    pulse = reading.pulse
    return RankHealth(
        **{each.name: round(getattr(pulse, each.name), 6) for each in fields(RankGauges)},
        local_rank=reading.local_rank,
        pid=reading.pid,
        phase=str(reading.phase),
        phase_s=round(max(0.0, now - pulse.phase_at), 3),
        still_s=round(reading.still_s(now), 3),
        device=str(reading.notes.get("device", "cpu")),
        waits=reading.waits,
        waits_s=round(max(0.0, now - waiting.since), 3) if waiting is not None and reading.waits else 0.0,
    )


# ---- slow ranks


LOOKS_IN_A_ROW: Final = 3
"""A rank must be slow in this many looks: smoothed times need some steps, and a busy minute is not a broken machine."""
LOOK_EVERY_S: Final = 5.0
REPORTED_AGAIN_S: Final = 600.0


class StragglerWatch:
    """Finds ranks that compute much longer than the others; asks their node to leave where another is ready.

    Only the node of rank 0 judges, from what all nodes publish. ``records()`` are those of all nodes; ``evicts``:
    whether slow nodes are to go.
    """

    def __init__(
        self,
        node: str,
        evictions: Evictions,
        records: Callable[[], Mapping[str, NodeRecord]],
        *,
        evicts: bool,
        clock: Clock = SYSTEM,
    ) -> None:
        self._node, self._evictions, self._records = node, evictions, records
        self._evicts, self._clock = evicts, clock
        self._looked_at = clock.monotonic()
        self._slow: Counter[int] = Counter()
        self._round = 0
        self._reported_at: dict[str, float] = {}

    def judge(
        self, current: RoundDocument | None, published: Callable[[], Mapping[str, NodeHealth]]
    ) -> Incident | None:
        """Judge, if a look is due and this node has rank 0; the incident to report, if any."""
        now = self._clock.monotonic()
        if current is None or current.state is not RoundState.ACTIVE or not current.is_first(self._node):
            self._slow.clear()
            return None
        if now - self._looked_at < LOOK_EVERY_S or current.world_size < 3:
            return None
        self._looked_at = now
        if current.number != self._round:
            self._round = current.number
            self._slow.clear()
            return None  # the figures may still be those of the round before
        return self._judge(current, published(), now)

    def _judge(self, current: RoundDocument, published: Mapping[str, NodeHealth], now: float) -> Incident | None:
        here = {
            name: health for name, health in published.items() if current.member(name) and health.round == self._round
        }
        found = find_stragglers({rank.rank: rank.compute_s for health in here.values() for rank in health.ranks})
        self._slow = Counter({rank: self._slow[rank] + 1 for rank in found.ranks})
        lasting = {rank for rank, looks in self._slow.items() if looks >= LOOKS_IN_A_ROW}
        nodes = sorted(name for name, health in here.items() if any(rank.rank in lasting for rank in health.ranks))
        if not lasting:
            return None
        asked = self._evict(current, nodes, found.reason) if self._evicts else False
        fresh = [name for name in nodes if now - self._reported_at.get(name, -REPORTED_AGAIN_S) >= REPORTED_AGAIN_S]
        if not fresh and not asked:
            return None
        self._reported_at |= dict.fromkeys(nodes, now)
        logger().warning("ranks.slow", ranks=sorted(lasting), nodes=nodes, reason=found.reason)
        return Incident(
            wall=self._clock.wall(),
            by=self._node,
            kind="straggler",
            round=current.number,
            reason=found.reason + ("; its node was asked to leave, since another is ready" if asked else ""),
            nodes=tuple(nodes),
            ranks=tuple(sorted(lasting)),
            world_before=current.world_size,
            world_after=current.world_size,
        )

    def _evict(self, current: RoundDocument, nodes: list[str], reason: str) -> bool:
        """Ask one slow node to leave, if another is ready; never this one, which hosts the rendezvous store."""
        records = self._records()
        ready = [name for name, each in records.items() if each.state is NodeState.READY and not current.member(name)]
        victims = [name for name in nodes if name != self._node and current.member(name) is not None]
        if not ready or not victims:
            return False
        self._slow.clear()
        return self._evictions.ask(current, victims[0], reason)


# ---- nodes that are asked to leave


_LIMIT_S: Final = 3.0


def leave_as_asked() -> None:
    """Have this node leave, as after a SIGTERM from outside."""
    os.kill(os.getpid(), signal.SIGTERM)


class Evictions:
    """Asks nodes to leave, and has this one leave when it is asked to.

    ``obeys``: whether this node goes when another node asks it to; ``leave_workers()`` has its workers leave as after a
    SIGTERM, so that torchrun starts others; ``created()`` is the revision of the store at which its key was created;
    ``told`` gets the reason when it goes.
    """

    def __init__(
        self,
        node: str,
        store: Store,
        keys: RunKeys,
        created: Callable[[], int],
        leave_workers: Callable[[], None],
        *,
        obeys: bool,
        leave: Callable[[], None] = leave_as_asked,
        told: Callable[[str, bool], None] = lambda reason, workers: None,
    ) -> None:
        self._node, self._store, self._keys, self._created = node, store, keys, created
        self._obeys, self._leave, self._leave_workers, self._told = obeys, leave, leave_workers, told

    def obey(self) -> None:
        """Leave, if this node was asked to; a request older than its key was for an earlier node of its name."""
        created = self._created()
        if not created:  # its key is not there yet: nobody can mean this node
            return
        asked = self._store.get(self._keys.eviction(self._node), Deadline.after(_LIMIT_S)).first
        if asked is None:
            return
        guard = unchanged(asked.key, asked.mod_revision)
        try:
            self._store.transact([guard], [Delete(asked.key)], deadline=Deadline.after(_LIMIT_S))
        except OutcomeUnknownError:
            logger().info("eviction.kept", node=self._node)  # it may be gone from the store: nobody would ask again
        if asked.mod_revision <= created:
            return
        try:
            request = LeaveRequest.decode(asked.value, asked.key)
        except DocumentError:  # of a node of before, which wrote the reason alone
            request = LeaveRequest(reason=asked.value.decode(errors="replace"))
        if request.workers:
            logger().warning("workers.evicted", node=self._node, reason=plain(request.reason))
            self._told(plain(request.reason), True)
            self._leave_workers()
        elif request.ordered or self._obeys:
            self._go(plain(request.reason))

    def ask(self, current: RoundDocument, node: str, reason: str) -> bool:
        """Ask ``node``, a member of the round ``current``, to leave; this one does so at once. Whether it was asked."""
        member = current.member(node)
        if member is None:
            return False
        if node == self._node:
            self._go(reason)
            return True
        # A write that etcd does late must not send away who comes back under this name.
        return self._request(node, member.create_revision, reason)

    def ask_any(self, node: str, reason: str) -> bool:
        """Ask ``node``, which may be in no round, to leave; this one does so at once. Whether it was there."""
        if node == self._node:
            self._go(reason)
            return True
        there = self._store.get(self._keys.node(node), Deadline.after(_LIMIT_S)).first
        return there is not None and self._request(node, there.create_revision, reason)

    def _request(self, node: str, created: int, reason: str) -> bool:
        """Ask the node of this name whose key was created at the revision ``created``; whether it is still there."""
        guard = created_at(self._keys.node(node), created)
        put = Put(self._keys.eviction(node), LeaveRequest(reason=reason).encode())
        return self._store.transact([guard], [put], deadline=Deadline.after(_LIMIT_S)).succeeded

    def _go(self, reason: str) -> None:
        logger().warning("node.evicted", node=self._node, reason=reason)
        self._told(reason, False)
        self._leave()


# ---- requested saves


class SaveRequests:
    """Brings a request for a save to rank 0's worker, and its answer back: ``elastic-trainer checkpoints save``.

    A listener of its own watch, whose thread hears of requests; the health thread passes them on, the health writer
    opens and closes the watch and writes the answer.
    """

    def __init__(self, store: Store, keys: RunKeys, node: str) -> None:
        self._store, self._keys, self._node = store, keys, node
        self._watch: Watch | None = None
        self._open: tuple[SaveRequest, int] | None = None
        """The request without an answer, and the revision of its key."""
        self._passed_on: tuple[Path, str] | None = None
        self._answer: SaveRequest | None = None

    # ---- the watch's thread

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self._open = None
        for item in snapshot.items:
            self._take(item)

    def on_events(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            self._open = None
            if event.kind is EventKind.PUT:
                self._take(event.item)

    def on_connected(self, connected: bool) -> None:
        """An outage is waited out."""

    def _take(self, item: KeyValue) -> None:
        try:
            request = SaveRequest.decode(item.value, item.key)
        except DocumentError as error:
            logger().error("document.refused", key=plain(item.key), error=str(error))
            return
        if not request.answered:
            self._open = (request, item.mod_revision)

    # ---- the health thread

    def pass_on(self, readings: Sequence[Reading]) -> bool:
        """Pass on what is asked; whether there is an answer to be written."""
        asked, head = self._open, head_of(readings)
        if asked is None or head is None or self._watch is None:
            return False
        request = asked[0]
        said = head.notes.get("on_demand") or {}
        if said.get("id") == request.id:
            found = {name: said[name] for name in ("name", "problem", "code") if name in said}
            before, self._answer = self._answer, request.model_copy(update=found)
            return self._answer != before  # else its writing waits for the store
        if self._passed_on != (head.path, request.id):
            with contextlib.suppress(OSError):  # the worker has just ended: the next one gets it
                tell(head.path.with_suffix(SAVE_SUFFIX), request.id)
                self._passed_on = (head.path, request.id)
                logger().info("save.requested", request=request.id, pid=head.pid)
        return False

    # ---- the health writer

    def follow_round(self, current: RoundDocument | None) -> None:
        """Follow the requests while this node has rank 0, and write the answer."""
        over = current is None or current.state is RoundState.CLOSED
        leads = not over and current is not None and current.is_first(self._node)
        if leads and self._watch is None:
            self._watch = self._store.watch(self._keys.save, self, exact=True)
        elif not leads and self._watch is not None:
            self.close()
        asked, answer = self._open, self._answer
        if asked is None or answer is None or answer.id != asked[0].id:
            return
        put, guard = Put(self._keys.save, answer.encode()), unchanged(self._keys.save, asked[1])
        self._store.transact([guard], [put], deadline=Deadline.after(_LIMIT_S))
        if self._open is asked:
            self._open = None

    def close(self) -> None:
        """Follow no requests any more."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        self._open = None


class RunOrders:
    """Brings what an operator asks all ranks to do to rank 0's worker: ``elastic-trainer pause`` and ``restart``.

    The worker reads it in a file beside its page. A pause lasts while its key does, also in later lives of the run; a
    restart is meant for one round, whose end removes its key.
    """

    def __init__(self, store: Store, keys: RunKeys, node: str) -> None:
        self._store, self._keys, self._node = store, keys, node

    def follow(self, current: RoundDocument | None, readings: Sequence[Reading]) -> None:
        """Pass on what is asked, if this node has rank 0 of a round in which steps are made; else nothing is asked."""
        head = head_of(readings)
        for each in readings:
            if each is not head:  # it was rank 0 once, and may be again
                with contextlib.suppress(OSError):
                    each.path.with_suffix(ORDER_SUFFIX).unlink(missing_ok=True)
        if head is None:
            return
        leads = current is not None and current.state is RoundState.ACTIVE and current.is_first(self._node)
        asked = self._asked(current.number) if leads and current is not None else ""
        path = head.path.with_suffix(ORDER_SUFFIX)
        with contextlib.suppress(OSError):  # the worker has just ended, or the disk is full: the next turn tries again
            there = path.read_text(encoding="ascii") if path.exists() else ""
            if there == asked:
                return
            if not asked:
                path.unlink()
                return
            tell(path, asked)
            logger().info("run.ordered", order=asked, pid=head.pid)

    def _asked(self, number: int) -> str:
        reads = [Read(self._keys.restart), Read(self._keys.pause)]
        restart, pause = self._store.transact([], reads, deadline=Deadline.after(_LIMIT_S)).reads
        if (item := restart.first) is not None:
            wanted = RestartRequest.decode(item.value, item.key).round
            if wanted == number:
                return f"{RunOrder.RESTART} {number}"
            if wanted < number:
                guard = unchanged(item.key, item.mod_revision)
                self._store.transact([guard], [Delete(item.key)], deadline=Deadline.after(_LIMIT_S))
        return str(RunOrder.PAUSE) if pause.first is not None else ""


# ---- what nodes publish: each writes its own document


WRITE_S: Final = 3.0
READ_S: Final = 5.0
INCIDENTS_KEPT: Final = 1000
GONE_KEPT: Final = 256
"""Documents of nodes that are gone that stay; when there are more they are added up."""
_AT_ONCE: Final = 50


def told_by_all(store: Store, keys: RunKeys) -> dict[str, NodeHealth]:
    """The newest document of each node, by name, of those that are gone too. Empty if the store is away."""
    try:
        return read_all(store, keys)
    except ElasticTrainerError as error:
        logger().debug("health.unread", error=str(error))
        return {}


def read_all(store: Store, keys: RunKeys) -> dict[str, NodeHealth]:
    """The same. Raises ElasticTrainerError where the store does not answer."""
    found = {}
    for item in store.range(keys.health, Deadline.after(READ_S)).items:
        try:
            found[item.key.removeprefix(keys.health)] = NodeHealth.decode(item.value, item.key)
        except DocumentError as error:
            logger().debug("health.unreadable", key=plain(item.key), error=str(error))
    return found


class HealthStore:
    """The documents and incidents of ``node`` in the store. A document that cannot be written is replaced by the next
    one; the caller keeps an incident that could not be written."""

    def __init__(self, store: Store, keys: RunKeys, node: str) -> None:
        self._store, self._keys, self._node = store, keys, node
        self._mine = Slot(store, keys.node_health(node))

    def write(self, health: NodeHealth) -> None:
        try:
            self._mine.replace(health.encode(), Deadline.after(WRITE_S))
        except ElasticTrainerError as error:
            logger().debug("health.not_written", error=str(error))

    def told(self) -> dict[str, NodeHealth]:
        return told_by_all(self._store, self._keys)

    def write_incident(self, incident: Incident) -> str:
        """Add ``incident``, once however often it is tried; its key. Raises ElasticTrainerError when it could not be
        written."""
        number = int(incident.wall * 1000.0)
        while True:  # two incidents in one millisecond
            key, put = self._keys.incident(number), incident.encode()
            guards, deadline = [absent(key)], Deadline.after(WRITE_S)
            done = self._store.transact(guards, [Put(key, put)], [Read(key)], deadline=deadline)
            there = done.reads[0].first if not done.succeeded else None
            if done.succeeded or (there is not None and there.value == put):
                break
            number += 1
        kept = self._store.range(self._keys.incidents, Deadline.after(READ_S), keys_only=True).items
        if len(kept) > INCIDENTS_KEPT:
            first, last = kept[0].key, kept[-INCIDENTS_KEPT].key
            self._store.transact([], [Delete(first, range_end=last)], deadline=Deadline.after(WRITE_S))
        return key

    def replace_incident(self, key: str, before: Incident, incident: Incident) -> None:
        """Write ``incident``, which has a better verdict, over ``before``, if that is still there. Raises
        ElasticTrainerError."""
        there = self._store.get(key, Deadline.after(READ_S)).first
        if there is not None and there.value == before.encode():
            put = Put(key, incident.encode())
            self._store.transact([unchanged(key, there.mod_revision)], [put], deadline=Deadline.after(WRITE_S))

    def read(self) -> dict[str, NodeHealth]:
        """As :meth:`told`. Raises ElasticTrainerError where the store does not answer."""
        return read_all(self._store, self._keys)

    def fold(self, present: Mapping[str, object]) -> None:
        """If many nodes are gone, add up their counters: the sums stay, their documents are deleted.

        ``present`` are nodes known to be there; the store is asked too, as not every node follows all others.
        What this node counted in a life before is added at once, since its document is about to be replaced.
        """
        try:
            mine = self._store.get(self._keys.node_health(self._node), Deadline.after(READ_S)).first
            if mine is not None:
                self._fold([mine])
            # By name first: each node of many does this when it comes, and all documents are megabytes.
            documents = self._store.range(self._keys.health, Deadline.after(READ_S), keys_only=True).items
            there = self._store.range(self._keys.nodes, Deadline.after(READ_S), keys_only=True).items
            here = {*present, self._node, GONE, *(item.key.removeprefix(self._keys.nodes) for item in there)}
            names = {item.key for item in documents if item.key.removeprefix(self._keys.health) not in here}
            if len(names) <= GONE_KEPT:
                return
            items = self._store.range(self._keys.health, Deadline.after(READ_S)).items
            gone = [item for item in items if item.key in names]
            for begin in range(0, len(gone), _AT_ONCE):
                self._fold(gone[begin : begin + _AT_ONCE])
        except ElasticTrainerError as error:
            logger().debug("health.unfolded", error=str(error))

    def _fold(self, gone: list[KeyValue]) -> None:
        """In one write: the sum is only replaced where it, and all that goes into it, is as it was read."""
        key = self._keys.health + GONE
        before = self._store.get(key, Deadline.after(READ_S)).first
        documents = [NodeHealth.decode(item.value, item.key) for item in (*gone, *([before] if before else []))]
        total = NodeHealth(
            node=GONE,
            wall=max(document.wall for document in documents),
            counters=added_up(document.counters for document in documents),
        )
        guards = [unchanged(item.key, item.mod_revision) for item in gone]
        guards.append(unchanged(key, before.mod_revision if before else 0))
        writes: list[Operation] = [Delete(item.key) for item in gone]
        self._store.transact(guards, [Put(key, total.encode()), *writes], deadline=Deadline.after(WRITE_S))
