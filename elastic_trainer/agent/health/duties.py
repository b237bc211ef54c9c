"""This node's health duties: looks at its workers' pages, ends those that hang, and publishes how they are.

*Runs in* the agent: a thread named ``health`` looks several times a second, one named ``health-writer`` writes to the
store every few seconds, so that an outage of that blinds nobody.
*Owns* both threads. *Fails by* nothing: a failed turn is logged and the next one comes.
*Invariant*: time in which the agent itself stood still counts for nobody.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Final

from elastic_trainer.agent.health.incidents import Incidents
from elastic_trainer.agent.health.pages import Pages
from elastic_trainer.agent.health.stragglers import StragglerWatch
from elastic_trainer.agent.workers import hang_rules
from elastic_trainer.agent.workers.kill import Verdicts
from elastic_trainer.agent.workers.watchdog import process_state
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
"""The agent stood still if a turn comes so many times later than planned."""
NODES_PER_SECOND: Final = 125
LEAST_INTERVAL_S: Final = 2.0
"""Each node writes so often, and all of them together so many times a second at most."""
REPEATED_INCIDENT_S: Final = 600.0
_STOPS_KEPT: Final = 100
_JOIN_LIMIT_S: Final = 5.0


class Health:
    """See the module. ``round_now()`` is the newest round document that is known here."""

    def __init__(
        self,
        node: str,
        pages: Pages,
        limits: hang_rules.HangLimits,
        verdicts: Verdicts,
        incidents: Incidents,
        round_now: Callable[[], RoundDocument | None],
        write: Callable[[NodeHealth], None],
        write_incident: Callable[[Incident], None],
        told: Callable[[], Mapping[str, NodeHealth]],
        stalled: Callable[[int, str], None],
        straggling: StragglerWatch,
        clock: Clock = SYSTEM,
        *,
        host: str = "",
        max_nodes: int = 0,
        metrics: str = "",
    ) -> None:
        self._max_nodes = max_nodes
        """How many nodes may be there, where this one is in no round that would tell."""
        self._node, self._host, self._pages, self._limits, self._verdicts = node, host, pages, limits, verdicts
        self._incidents, self._round_now, self._clock = incidents, round_now, clock
        self._write, self._write_incident, self._told, self._stalled = write, write_incident, told, stalled
        self._straggling = straggling
        self._metrics = metrics
        """Where the node's endpoint is."""
        self._pause_s = LONGEST_PAUSE_S
        if limits.least_s:
            self._pause_s = min(LONGEST_PAUSE_S, limits.least_s / LOOKS_PER_LIMIT)
        self._stop = threading.Event()
        self._looked_at = clock.monotonic()
        self._stood: deque[tuple[float, float]] = deque(maxlen=_STOPS_KEPT)
        """When the agent went on after it had stood still, and for how long it had."""
        self._waited: dict[int, float] = {}
        """When each worker was last seen to wait for others."""
        self._waiting: dict[int, hang_rules.Waiting] = {}
        self._hurry = threading.Event()
        """Set: what is published now, others wait for."""
        self._all_victims = False
        self._told_at: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._pending: list[Incident] = []
        self._saved: Saved | None = None
        self._asked_at = -math.inf
        self._publishing = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(self.look, self._rest), name="health", daemon=True),
            threading.Thread(target=self._run, args=(self._turn, self._await_turn), name="health-writer", daemon=True),
        ]

    def start(self) -> None:
        """Begin."""
        self._looked_at = self._clock.monotonic()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Publish for the last time, and end."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._hurry.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(_JOIN_LIMIT_S)
        self._meet_all(self._pages.look(), self._clock.monotonic())
        self.publish()

    def every_s(self) -> float:
        """How often this node publishes."""
        current = self._round_now()
        takes_part = current is not None and current.member(self._node) is not None
        nodes = len(current.members) if current is not None and takes_part else self._max_nodes
        return max(LEAST_INTERVAL_S, nodes / NODES_PER_SECOND)

    def _rest(self) -> None:
        self._clock.wait(self._stop, self._pause_s)

    def _await_turn(self) -> None:
        self._clock.wait(self._hurry, self.every_s())
        self._hurry.clear()

    def _run(self, turn: Callable[[], None], wait: Callable[[], None]) -> None:
        while True:
            wait()
            if self._stop.is_set():
                return
            try:
                turn()
            except Exception:  # noqa: BLE001 - the edge of a thread: a dead watchdog would be silence
                logger().exception("health.failed")

    # ---- the watchdog

    def look(self) -> None:
        """One turn: end the workers that hang."""
        now = self._clock.monotonic()
        late_s = now - self._looked_at
        self._looked_at = now
        readings = self._pages.look()
        self._meet_all(readings, now)
        if late_s > max(1.0, LATE * self._pause_s):
            self._stood.append((now, late_s))
            self._waiting = {}
        self._waited = {each.pid: self._waited[each.pid] for each in readings if each.pid in self._waited}
        self._waited |= {each.pid: now for each in readings if each.waits}
        self._waiting = hang_rules.Waiting.seen(self._waiting, readings, now)
        found = hang_rules.hung(readings, self._limits, now, self._stood, self._waited)
        for each in found:
            if not each.waits and process_state(each.reading.pid) != "traced":  # by a debugger
                self._verdicts.end(each.reading.pid, each.reason, local_rank=each.reading.local_rank)
        victims = [each for each in found if each.waits]
        before, self._all_victims = self._all_victims, bool(victims) and len(victims) == len(found)
        if self._all_victims:
            if not before:
                self._hurry.set()  # the node of rank 0 has to know, and the next time may be seconds away
            self._consider_giving_up(victims)

    def _consider_giving_up(self, victims: list[hang_rules.Hung]) -> None:
        """All here wait for others; if all ranks of the round do, nobody is to blame, and nobody will end it."""
        current = self._round_now()
        if current is None or current.state is not RoundState.ACTIVE or not current.is_first(self._node):
            return
        if self._looked_at - self._asked_at < len(current.members) / NODES_PER_SECOND:
            return  # each time all that they tell is read
        self._asked_at = self._looked_at
        if hang_rules.all_wait(current, self._told(), max(each.limit_s for each in victims)):
            still_s = min(each.still_s for each in victims)
            self._stalled(current.number, f"all ranks have waited for each other for {still_s:.1f} s")

    def _meet_all(self, readings: list[Reading], now: float) -> None:
        for incident, kind in self._incidents.look(readings, now):
            self._meet(incident, kind)

    def _meet(self, incident: Incident, kind: str) -> None:
        pages = self._pages
        if incident.cause is not None:
            pages.count(f"ended.{incident.cause}")
        if kind and incident.next_round is not None:
            for name, amount in observed(f"recovery_s.{kind}", incident.total_s, RECOVERY_BUCKETS).items():
                pages.count(name, amount)
        logger().info(
            "incident.closed",
            cause=incident.cause,
            round=incident.round,
            next_round=incident.next_round,
            reason=incident.reason,
            steps_lost=incident.steps_lost,
            total_s=round(incident.total_s, 3),
        )
        self._pending.append(incident)

    # ---- telling

    def publish(self) -> None:
        """Write how this node's workers are, and what has happened; that waits while the store is away."""
        with self._publishing:
            readings, counters = self._pages.look(), self._pages.counters()
            self._notice(counters)
            try:
                while self._pending:
                    self._write_incident(self._pending[0])
                    self._pending.pop(0)
            except ElasticTrainerError as error:
                logger().debug("incident.unwritten", error=str(error))
            self._write(self.report(readings, counters))

    def _turn(self) -> None:
        """What the writing thread does each time."""
        self.publish()
        try:
            self._straggling.obey()
            slow = self._straggling.look(self._round_now(), self._told)
        except ElasticTrainerError as error:
            logger().debug("stragglers.unknown", error=str(error))
            return
        if slow is not None:
            self._pending.append(slow)

    def report(self, readings: list[Reading], counters: Mapping[str, float]) -> NodeHealth:
        """What is published."""
        now, current = self._clock.monotonic(), self._round_now()
        head = next((each for each in readings if each.pulse.rank == 0), None)
        loss = head.pulse.loss if head is not None else math.nan
        for saved in (each.notes.get("saved") for each in readings):
            if saved is not None and (self._saved is None or saved["wall"] > self._saved.wall):
                self._saved = Saved.model_validate(saved)
        return NodeHealth(
            node=self._node,
            host=self._host,
            wall=self._clock.wall(),
            every_s=self.every_s(),
            metrics=self._metrics,
            round=current.number if current is not None else 0,
            ranks=tuple(row(each, now, self._waiting.get(each.pid)) for each in readings if each.pulse.rank >= 0),
            counters={name: round(value, 3) for name, value in counters.items()},
            loss=loss if math.isfinite(loss) else None,
            saved=self._saved,
            save_interval_s=head.pulse.save_interval_s if head is not None else 0.0,
        )

    def _notice(self, counters: Mapping[str, float]) -> None:
        """What went wrong without ending a round; of what all ranks see, rank 0's node tells."""
        current = self._round_now()
        if current is not None and current.members and current.members[0].node != self._node:
            self._seen = dict(counters)
            return
        for name, kind, text in (
            ("save.failed", "checkpoint_failed", "a checkpoint could not be saved; the log of rank 0 says why"),
            ("nonfinite_steps", "nonfinite_loss", "the loss was NaN or infinite"),
            ("differences", "ranks_differ", "ranks held different parameters; the workers' logs name the first"),
        ):
            value, before = counters.get(name, 0.0), self._seen.get(name, 0.0)
            self._seen[name] = value
            now = self._clock.monotonic()
            if value > before and now - self._told_at.get(kind, -math.inf) >= REPEATED_INCIDENT_S:
                self._told_at[kind] = now
                self._pending.append(
                    Incident(
                        wall=self._clock.wall(),
                        by=self._node,
                        kind=kind,
                        round=current.number if current is not None else 0,
                        reason=text,
                        nodes=(self._node,),
                        step=self._pages.reached,
                    )
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
