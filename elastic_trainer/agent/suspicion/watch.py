"""Finds nodes and workers that stand still long before a lease or a time limit ends, by asking when others wait.

While steps come in time nothing is sent. When a worker of this node waits in a collective for longer than usual, the
agents of the nodes around it are asked what theirs do. An agent that does not answer in time is suspected: the
round is broken without it. Each agent that is asked looks at its own workers, and drops one that stands still.

*Runs in* the agent: a thread named ``suspicion``. *Owns* that thread and the questions under way.
*Fails by* nothing: where nothing can be found out, leases and time limits do what they do without it.
*Invariant*: time in which this agent stood still counts for nobody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from elastic_trainer.agent.health.pages import Pages
from elastic_trainer.agent.suspicion.neighbours import LATE_S, Peers
from elastic_trainer.agent.suspicion.questions import Notice, WorkerStanding
from elastic_trainer.agent.workers import doubt
from elastic_trainer.agent.workers.conductor import SUSPECTED_S, Conductor
from elastic_trainer.agent.workers.duty import Duty
from elastic_trainer.agent.workers.hang_rules import Waiting
from elastic_trainer.agent.workers.roster import Worker
from elastic_trainer.agent.workers.watchdog import ping, process_state, starved_s
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.ipc.page import Reading
from elastic_trainer.membership.documents import RoundDocument
from elastic_trainer.telemetry.logs import logger

TURN_S: Final = 0.03
IDLE_S: Final = 0.25
"""Between two looks where this node trains, and where it does not."""
ASKED_EVERY_S: Final = 0.5
LOOKED_AT_S: Final = 2 * ASKED_EVERY_S
"""Seconds after a question during which this node looks at its own workers."""
PINGED_EVERY_S: Final = 0.1


class Suspicion:
    """See the module."""

    def __init__(self, conductor: Conductor, pages: Pages, notice: Notice, peers: Peers, clock: Clock = SYSTEM) -> None:
        self._conductor, self._pages, self._notice, self._peers = conductor, pages, notice, peers
        self._clock = clock
        self._document: RoundDocument | None = None
        self._since: dict[int, Waiting] = {}
        """When each worker that waits for others last moved, and when it was first seen to wait since."""
        self._looks: dict[int, tuple[str, float]] = {}
        """The state of each worker's process, and how long it had been silent, when that was last looked at."""
        self._counts_from = self._looked_at = clock.monotonic()
        """Before that nothing counts: this agent stood still, or the round was another."""
        self._asked_at = self._accused_at = self._pinged_at = -math.inf
        self._told_of = -1
        """The round in which a suspicion was logged."""
        self._pause_s = IDLE_S
        self._duty = Duty("suspicion", self._listen, clock)

    def start(self) -> None:
        self._duty.start()

    def close(self) -> None:
        self._duty.close()
        self._peers.close()

    def _listen(self) -> float:
        """Hear what the peers answer meanwhile, then look."""
        self._peers.hear(self._pause_s)
        self.turn()
        return 0.0

    def turn(self) -> None:
        now = self._clock.monotonic()
        document, workers = self._conductor.at_work()
        if now - self._looked_at > self._pause_s + LATE_S or document is not self._document:
            self._counts_from = now
        if document is not self._document and (document is None or doubt.needed(document)):
            self._peers.forget(but=() if document is None else [each.node for each in doubt.needed(document)])
        self._looked_at, self._document = now, document
        readings = {each.pid: each for each in self._pages.glance()}
        waits = self._waits(readings, now)
        self._show(document, readings, waits)
        self._pause_s = IDLE_S if document is None else TURN_S
        if document is None:
            return
        if not doubt.needed(document) or now - self._notice.asked_at < LOOKED_AT_S:
            self._look_at(document, workers, readings, now)
        left_s = min((doubt.patience_s(readings[pid].pulse.step_s) - waits[pid] for pid in waits), default=math.inf)
        if left_s <= 0.0 and doubt.needed(document):
            self._find_out(document, now)
        else:
            self._asked_at = -math.inf
            self._pause_s = min(TURN_S, left_s)

    def _waits(self, readings: Mapping[int, Reading], now: float) -> dict[int, float]:
        """How long each worker that waits for others has done so."""
        seeking = [each for each in readings.values() if doubt.seeks_others(each)]
        self._since = Waiting.seen(self._since, seeking, now)
        return {pid: now - max(each.since, self._counts_from) for pid, each in self._since.items()}

    def _show(
        self, document: RoundDocument | None, readings: Mapping[int, Reading], waits: Mapping[int, float]
    ) -> None:
        """What other agents are answered."""
        standings = []
        for pid, each in readings.items():
            state, silent_s = self._looks.get(pid, ("unknown", 0.0))
            what = {"phase": each.phase, "waits": pid in waits, "waits_s": waits.get(pid, 0.0)}
            standings.append(WorkerStanding(local_rank=each.local_rank, **what, state=state, silent_s=silent_s))
        self._notice.show(0 if document is None else document.number, tuple(standings))

    # ---- the others

    def _find_out(self, document: RoundDocument, now: float) -> None:
        """This node's workers wait for others for too long."""
        if self._accused_at >= self._counts_from:
            if now - self._accused_at < SUSPECTED_S:
                return  # the last word may be on its way
            self._peers.forget()  # it had no effect: find out anew
            self._accused_at = self._asked_at = -math.inf
        if now - self._asked_at >= ASKED_EVERY_S:
            self._asked_at = now
            self._peers.ask(document)
        suspects = self._peers.suspects(now, self._counts_from)
        if suspects is not None:
            self._accused_at = now
            names = [each.node for each in suspects.ghosts]
            again, self._told_of = self._told_of == document.number, document.number
            log = logger().debug if again else logger().warning  # a node that is cut off itself accuses all in vain
            log("node.suspected", nodes=names, round=document.number, reason=suspects.reason)
            self._conductor.accuse(document, suspects.ghosts, suspects.reason)

    # ---- this node

    def _look_at(
        self, document: RoundDocument, workers: list[Worker], readings: Mapping[int, Reading], now: float
    ) -> None:
        """Others wait: pass over a worker of this node that stands still."""
        before, self._looks = self._looks, {}
        asks = now - self._pinged_at >= PINGED_EVERY_S
        self._pinged_at = now if asks else self._pinged_at
        for worker in workers:
            if worker.stuck or (not doubt.needed(document) and worker.free_for() > document.number):
                continue
            state = process_state(worker.pid)
            silent_s = now - max(worker.pinged_at, self._counts_from) if worker.pinged_at else 0.0
            limit_s = worker.delays.limit_s(doubt.PONG_S, now)
            if silent_s > limit_s:  # a machine that is busy is no fault of the worker's
                silent_s -= starved_s(worker)
            self._looks[worker.pid] = (state, silent_s)
            why = doubt.stuck(readings.get(worker.pid), state, silent_s, limit_s)
            if why is not None and before.get(worker.pid, ("", 0.0))[0] == state:  # not for the blink of an eye
                self._conductor.pass_over(worker, why)
            elif asks and not worker.pinged_at:
                ping(worker, now)
