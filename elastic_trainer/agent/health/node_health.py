"""The health of this node: looks at its workers' pages, kills those that hang, and publishes their status.

*Runs in* the agent: a thread named ``health`` looks several times a second, one named ``health-writer`` writes to the
store every few seconds, so that an outage of the store does not stop the watchdog.
*Owns* both threads. *Fails by* nothing: a failed turn is logged and the next one comes.
*Invariant*: time in which the agent itself was frozen counts against no worker.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from elastic_trainer.agent.health.evictions import Evictions
from elastic_trainer.agent.health.health_store import HealthStore
from elastic_trainer.agent.health.incidents import Incidents
from elastic_trainer.agent.health.pages import Pages
from elastic_trainer.agent.health.save_requests import SaveRequests
from elastic_trainer.agent.health.stragglers import StragglerWatch
from elastic_trainer.agent.workers import hang_rules
from elastic_trainer.agent.workers.periodic import PeriodicThread
from elastic_trainer.agent.workers.watchdog import HungWorkers, process_state
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.ipc.page import Reading
from elastic_trainer.membership.documents import RoundDocument, RoundState
from elastic_trainer.membership.health import Incident, NodeHealth, RankHealth, Saved
from elastic_trainer.telemetry.families import RECOVERY_BUCKETS, observed
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.telemetry.rank import RankGauges

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
    ("save.failed", "checkpoint_failed", "a checkpoint could not be saved; the log of rank 0 says why"),
    ("nonfinite_steps", "nonfinite_loss", "the loss was NaN or infinite"),
    ("differences", "ranks_differ", "ranks held different parameters; the workers' logs name the first"),
)
"""Counters that people should hear of: name, kind of incident, and what it means."""


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


@dataclass(frozen=True, slots=True)
class HealthPorts:
    """``round_now()`` is the newest round document known here; ``give_up(number, reason)`` breaks that round."""

    pages: Pages
    store: HealthStore
    incidents: Incidents
    evictions: Evictions
    stragglers: StragglerWatch
    saves: SaveRequests
    hung: HungWorkers
    round_now: Callable[[], RoundDocument | None]
    give_up: Callable[[int, str], None]


class Health:
    """See the module."""

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
        self._saved: Saved | None = None
        self._saves_failing = 0
        self._loss: float | None = None
        self._asked_at = self._touched_at = -math.inf
        self._publishing = threading.Lock()
        self._closed = False
        self._looking = PeriodicThread("health", self.look, clock)
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
        self._meet_all(self._pages.look(), self._clock.monotonic())
        self.publish()

    def every_s(self) -> float:
        current = self._round_now()
        takes_part = current is not None and current.member(self._node) is not None
        nodes = len(current.members) if current is not None and takes_part else self._subject.max_nodes
        return max(LEAST_INTERVAL_S, nodes / NODES_PER_SECOND)

    # ---- the watchdog

    def look(self) -> float:
        """One turn: kill the workers that hang; seconds until the next."""
        now = self._clock.monotonic()
        late_s = now - self._looked_at
        self._looked_at = now
        if self._subject.alive is not None and now - self._touched_at >= ALIVE_EVERY_S:
            self._touched_at = now
            self._subject.alive.touch()
        readings = self._pages.look()
        self._meet_all(readings, now)
        if self._ports.saves.look(readings):
            self._writing.wake()
        if late_s > max(1.0, LATE * self._pause_s):
            self._stood.append((now, late_s))
            self._waiting = {}
        self._waited = {each.pid: self._waited[each.pid] for each in readings if each.pid in self._waited}
        self._waited |= {each.pid: now for each in readings if each.waits}
        self._waiting = hang_rules.Waiting.seen(self._waiting, [each for each in readings if each.waits], now)
        found = hang_rules.hung(readings, self._subject.limits, now, self._stood, self._waited)
        for each in found:
            if not each.waits and process_state(each.reading.pid) != "traced":  # by a debugger
                self._ports.hung.kill(each.reading.pid, each.reason, local_rank=each.reading.local_rank)
        victims = [each for each in found if each.waits]
        before, self._all_victims = self._all_victims, bool(victims) and len(victims) == len(found)
        if self._all_victims:
            if not before:
                self._writing.wake()  # the node of rank 0 has to know, and the next turn may be seconds away
            self._consider_giving_up(victims)
        return self._pause_s

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
        for incident in self._ports.incidents.look(readings, now):
            self._meet(incident)

    def _meet(self, incident: Incident) -> None:
        pages = self._pages
        if incident.cause is not None:
            pages.count(f"ended.{incident.cause}")
        if (total_s := incident.total_s) is not None:
            kind = "planned" if incident.planned else "failure"
            for name, amount in observed(f"recovery_s.{kind}", total_s, RECOVERY_BUCKETS).items():
                pages.count(name, amount)
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

    def note(self, kind: str, reason: str, ranks: tuple[int, ...] = (), number: int | None = None) -> None:
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

    def publish(self) -> None:
        """Publish this node's workers and new incidents; incidents wait while the store is away."""
        with self._publishing:
            readings, counters = self._pages.look(), self._pages.counters()
            self._notice(counters)
            self._notice_audits(readings)
            try:
                while self._pending:
                    self._ports.store.write_incident(self._pending[0])
                    self._pending.pop(0)
            except ElasticTrainerError as error:
                logger().debug("incident.not_written", error=str(error))
            self._ports.store.write(self.report(readings, counters))

    def _turn(self) -> float:
        self.publish()
        try:
            self._ports.saves.turn(self._round_now())
            self._ports.evictions.obey()
            slow = self._ports.stragglers.look(self._round_now(), self._ports.store.told)
            if slow is not None:
                self._pending.append(slow)
        except ElasticTrainerError as error:
            logger().debug("stragglers.unknown", error=str(error))
        return self.every_s()

    def report(self, readings: list[Reading], counters: Mapping[str, float]) -> NodeHealth:
        now, current = self._clock.monotonic(), self._round_now()
        head = next((each for each in readings if each.pulse.rank == 0), None)
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
        )

    def _notice(self, counters: Mapping[str, float]) -> None:
        """What went wrong without ending a round; rank 0's node reports what all ranks see."""
        current, now = self._round_now(), self._clock.monotonic()
        if current is not None and current.members and not current.is_first(self._node):
            self._seen = dict(counters)
            return
        for name, kind, text in _NOTICED:
            value, before = counters.get(name, 0.0), self._seen.get(name, 0.0)
            self._seen[name] = value
            if value > before and now - self._reported_at.get(kind, -math.inf) >= REPEATED_INCIDENT_S:
                self._reported_at[kind] = now
                self.note(kind, text)

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
