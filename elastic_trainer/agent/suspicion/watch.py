"""Detects frozen nodes and hung workers long before a lease or a time limit ends, by asking when workers wait.

While steps finish in time nothing is sent. When a worker of this node waits in a collective for longer than usual, this
agent asks those of the neighbouring nodes what their workers do. It suspects an agent that does not answer in time, and
breaks the round without that node. Each agent that is asked checks its own workers, and excludes one that hangs.

*Runs in* the agent: a thread named ``suspicion``, which blocks on no peer. *Owns* that thread and the open questions.
*Fails by* nothing: nodes that it cannot ask because of the store or the network stay unknown, and without an answer,
leases and time limits still apply.
*Invariant*: time in which this agent was frozen counts against no node or worker; a node counts as silent only after
more time than recent answers took, this node's own included.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from elastic_trainer.agent.health.pages import Pages
from elastic_trainer.agent.suspicion.peers import Address, Asker, StatusBoard, WorkerActivity
from elastic_trainer.agent.workers import hang_rules
from elastic_trainer.agent.workers.conductor import SUSPECTED_S, Worker
from elastic_trainer.agent.workers.conductor_shell import ConductorShell
from elastic_trainer.agent.workers.hang_rules import Waiting, starved_s
from elastic_trainer.agent.workers.periodic import PeriodicThread
from elastic_trainer.agent.workers.watchdog import ping, process_state, queued_s
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.ipc.address import LOOPBACK, refusal_proves
from elastic_trainer.ipc.page import Reading
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import Ghost, RoundDocument, join_address
from elastic_trainer.telemetry.logs import logger

TURN_S: Final = 0.03
IDLE_S: Final = 0.25
"""Seconds between two looks while this node trains, and while it does not."""
ASKED_EVERY_S: Final = 0.5
LOOKED_AT_S: Final = 2 * ASKED_EVERY_S
"""Seconds after another agent's question during which this node checks its own workers."""
PINGED_EVERY_S: Final = 0.1


class Suspicion(PeriodicThread):
    """The thread ``suspicion``; see the module."""

    def __init__(
        self, conductor: ConductorShell, pages: Pages, status_board: StatusBoard, peers: Peers, clock: Clock = SYSTEM
    ) -> None:
        self._conductor, self._pages, self._status_board, self._peers = conductor, pages, status_board, peers
        super().__init__("suspicion", self._listen, clock)
        self._document: RoundDocument | None = None
        self._since: dict[int, Waiting] = {}
        """For each worker that waits for others: its last progress, and when it was first seen to wait since then."""
        self._looks: dict[int, tuple[str, float]] = {}
        """The state of each worker's process at the last check, and how long it had been silent."""
        self._counts_from = self._looked_at = clock.monotonic()
        """Nothing before this time counts: this agent was frozen, or in another round."""
        self._asked_at = self._accused_at = self._pinged_at = -math.inf
        self._told_of = -1
        """The round in which the last suspicion was logged."""
        self._pause_s = IDLE_S

    def close(self) -> None:
        super().close()
        self._peers.close()

    def _listen(self) -> float:
        """Process the peers' answers until the next look, then look."""
        self._peers.receive(self._pause_s)
        self.turn()
        return 0.0

    def turn(self) -> None:
        now = self._clock.monotonic()
        document, workers = self._conductor.at_work()
        if now - self._looked_at > self._pause_s + LATE_S or document is not self._document:
            self._counts_from = now
        if document is not self._document and (document is None or hang_rules.needed(document)):
            self._peers.forget(but=() if document is None else [each.node for each in hang_rules.needed(document)])
        self._looked_at, self._document = now, document
        readings = {each.pid: each for each in self._pages.glance()}
        waits = self._waits(readings, now)
        self._show(document, readings, waits)
        self._pause_s = IDLE_S if document is None else TURN_S
        if document is None:
            return
        if not hang_rules.needed(document) or now - self._status_board.asked_at < LOOKED_AT_S:
            self._look_at(document, workers, readings, now)
        left_s = min(
            (hang_rules.patience_s(readings[pid].pulse.step_s) - waits[pid] for pid in waits), default=math.inf
        )
        if left_s <= 0.0 and hang_rules.needed(document):
            self._find_out(document, now)
        else:
            self._asked_at = -math.inf
            self._pause_s = min(TURN_S, left_s)

    def _waits(self, readings: Mapping[int, Reading], now: float) -> dict[int, float]:
        """How long each worker that waits for others has done so."""
        seeking = [each for each in readings.values() if hang_rules.seeks_others(each)]
        self._since = Waiting.seen(self._since, seeking, now)
        return {pid: now - max(each.since, self._counts_from) for pid, each in self._since.items()}

    def _show(
        self, document: RoundDocument | None, readings: Mapping[int, Reading], waits: Mapping[int, float]
    ) -> None:
        """Set the answer to other agents."""
        standings = []
        for pid, each in readings.items():
            state, silent_s = self._looks.get(pid, ("unknown", 0.0))
            what = {"phase": each.phase, "waits": pid in waits, "waits_s": waits.get(pid, 0.0)}
            standings.append(WorkerActivity(local_rank=each.local_rank, **what, state=state, silent_s=silent_s))
        self._status_board.show(0 if document is None else document.number, tuple(standings))

    # ---- other nodes

    def _find_out(self, document: RoundDocument, now: float) -> None:
        """Ask the neighbours: this node's workers have waited for others for too long."""
        if self._accused_at >= self._counts_from:
            if now - self._accused_at < SUSPECTED_S:
                return  # the last suspicion may still be in progress
            self._peers.forget()  # it had no effect: start over
            self._accused_at = self._asked_at = -math.inf
        if now - self._asked_at >= ASKED_EVERY_S:
            self._asked_at = now
            self._peers.ask(document)
        suspects = self._peers.suspects(now, self._counts_from)
        if suspects is not None:
            self._accused_at = now
            names = [each.node for each in suspects.ghosts]
            again, self._told_of = self._told_of == document.number, document.number
            log = logger().debug if again else logger().warning  # a node that is itself cut off suspects all others
            log("node.suspected", nodes=names, round=document.number, reason=suspects.reason)
            self._conductor.accuse(document, suspects.ghosts, suspects.reason)

    # ---- this node

    def _look_at(
        self, document: RoundDocument, workers: list[Worker], readings: Mapping[int, Reading], now: float
    ) -> None:
        """Others wait: exclude a worker of this node that hangs."""
        before, self._looks = self._looks, {}
        asks = now - self._pinged_at >= PINGED_EVERY_S
        self._pinged_at = now if asks else self._pinged_at
        for worker in workers:
            if worker.stuck or (not hang_rules.needed(document) and worker.free_for() > document.number):
                continue
            state = process_state(worker.pid)
            silent_s = now - max(worker.pinged_at, self._counts_from) if worker.pinged_at else 0.0
            limit_s = worker.delays.limit_s(hang_rules.PONG_S, now)
            if silent_s > limit_s:  # do not blame the worker for a busy machine
                silent_s -= starved_s(queued_s(worker.pid), worker.queued)
            self._looks[worker.pid] = (state, silent_s)
            why = hang_rules.stuck(readings.get(worker.pid), state, silent_s, limit_s)
            if why is not None and before.get(worker.pid, ("", 0.0))[0] == state:  # twice in a row
                self._conductor.exclude(worker, why)
            elif asks and not worker.pinged_at:
                ping(worker, now)


# ---- the neighbours


STORE_S: Final = 0.5
LATE_S: Final = 0.1
"""This agent was frozen if a turn comes this much later than planned, in seconds."""
FORGOTTEN_S: Final = 5.0
"""A longer answer says nothing about normal delays."""
Nodes = Callable[[Sequence[str], Deadline], Mapping[str, NodeView]]


@dataclass(frozen=True, slots=True)
class Suspects:
    """Keys of nodes that do not answer, and the evidence."""

    ghosts: tuple[Ghost, ...]
    reason: str


class Peers:
    """The neighbouring agents: asks what their workers do, and finds those that do not answer.

    ``nodes(names, deadline)`` reads the keys of those nodes.
    """

    def __init__(self, run: str, node: str, nodes: Nodes, clock: Clock = SYSTEM, asker: Asker | None = None) -> None:
        self._node, self._nodes, self._clock = node, nodes, clock
        self._asker = asker if asker is not None else Asker(run, node, clock)
        self._number = -1
        self._around: dict[str, Address] = {}
        """The nodes that this one asks in the round of that number, including itself."""
        self._delays: dict[str, hang_rules.AnswerDelays] = {}
        self._dead: set[str] = set()
        self._own_s = float("inf")
        """Seconds that this node's last answer to itself took."""

    def ask(self, document: RoundDocument) -> None:
        """Ask the neighbours in the round of ``document`` to which no question is pending."""
        if document.number != self._number:
            self._meet(document)
        for name, address in self._around.items():
            self._asker.ask(name, address)

    def forget(self, but: Iterable[str] = ()) -> None:
        """Drop all open questions except those to ``but``.

        A connection attempted while the network was cut says nothing about its present state, and the delay of a
        process that was frozen is no measure.
        """
        for name in set(self._asker.open) - set(but):
            self._asker.forget(name)
        self._dead &= set(but)

    def _meet(self, document: RoundDocument) -> None:
        """Look up the neighbours' addresses. One that announces a loopback address, unlike this node, stays unknown."""
        self.forget()
        names = hang_rules.neighbours(document, self._node)
        keys = self._read((*names, self._node))
        own = keys[self._node].record.address if self._node in keys else LOOPBACK
        known = {name: each.record for name, each in keys.items() if refusal_proves(own, each.record.address)}
        found = {name: _address(each.address, each.probe_port) for name, each in known.items()}
        self._around = {name: address for name, address in found.items() if address is not None}
        if self._around:
            self._number = document.number

    def receive(self, timeout_s: float) -> None:
        """Process the answers that arrive within ``timeout_s`` seconds."""
        before = self._clock.monotonic()
        heard = self._asker.receive(timeout_s)
        now = self._clock.monotonic()
        stood_still = now - before > timeout_s + LATE_S
        for each in heard:
            if each.dead:
                self._dead.add(each.node)
                continue
            self._dead.discard(each.node)
            if not stood_still:
                self._delays.setdefault(each.node, hang_rules.AnswerDelays()).note(each.after_s, now)
            if each.node == self._node:
                self._own_s = each.after_s
            elif each.answer is not None and not all(worker.waits for worker in each.answer.workers):
                logger().debug("peer.awaited", node=each.node, workers=[each.answer.model_dump()["workers"]])
        for name, since in self._asker.open.items():
            if now - since > FORGOTTEN_S:
                self._asker.forget(name)

    def suspects(self, now: float, awake_at: float) -> Suspects | None:
        """The nodes that are dead, or silent for too long; silence before ``awake_at`` does not count."""
        asked = {name: since for name, since in self._asker.open.items() if name in self._around}
        open_ = {name: now - max(since, awake_at) for name, since in asked.items()}
        at = {name: join_address(str(place[0]), int(place[1])) for name, (_, place) in self._around.items()}
        reasons = {
            name: f"node {name} does not answer its peer {self._node} at {at[name]} ({silent_s:.2f} s)"
            for name, silent_s in open_.items()
        }
        silent = [name for name, silent_s in open_.items() if silent_s > self._limit_s(name, now)]
        reasons |= {name: f"the agent of node {name} is dead" for name in self._dead}
        accused = [name for name in self._around if name in (*silent, *self._dead) and name != self._node]
        keys = self._read(accused) if accused else {}
        if not keys:
            return None
        return Suspects(tuple(each.ghost for each in keys.values()), "; ".join(reasons[name] for name in keys))

    def _limit_s(self, name: str, now: float) -> float:
        own_s = self._asker.open.get(self._node)
        own_s = self._own_s if own_s is None else now - own_s
        lately = [self._delays.get(each, hang_rules.AnswerDelays()) for each in (name, self._node)]
        return max(hang_rules.TIMES_OWN * own_s, *(each.limit_s(hang_rules.ANSWER_S, now) for each in lately))

    def close(self) -> None:
        self._asker.close()

    def _read(self, names: Sequence[str]) -> Mapping[str, NodeView]:
        try:
            return self._nodes(names, Deadline.after(STORE_S, self._clock))
        except ElasticTrainerError as error:
            logger().debug("peers.unknown", error=str(error))
            return {}


def _address(host: str, port: int) -> Address | None:
    """The socket address; None if the host cannot be resolved or has no port."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None
    return (family, target) if port else None
