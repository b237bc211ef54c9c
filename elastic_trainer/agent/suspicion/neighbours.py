"""The neighbouring agents: asks what their workers do, and finds those that do not answer.

*Runs in* one thread, which blocks on none of them. *Owns* the open questions.
*Fails by* nothing: nodes that it cannot ask because of the store or the network stay unknown.
*Invariant*: a node counts as silent only after more time than recent answers took, this node's own included.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from elastic_trainer.agent.suspicion.asking import Address, Asker
from elastic_trainer.agent.workers import hang_rules
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.ipc.own_address import LOOPBACK, refusal_proves
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import Ghost, RoundDocument, join_address
from elastic_trainer.telemetry.logs import logger

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
    """See the module. ``nodes(names, deadline)`` reads the keys of those nodes."""

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
        reasons = {
            name: f"node {name} does not answer its peer {self._node} at {self._where(name)} ({silent_s:.2f} s)"
            for name, silent_s in open_.items()
        }
        silent = [name for name, silent_s in open_.items() if silent_s > self._limit_s(name, now)]
        reasons |= {name: f"the agent of node {name} is dead" for name in self._dead}
        accused = [name for name in self._around if name in (*silent, *self._dead) and name != self._node]
        keys = self._read(accused) if accused else {}
        if not keys:
            return None
        return Suspects(tuple(each.ghost for each in keys.values()), "; ".join(reasons[name] for name in keys))

    def _where(self, name: str) -> str:
        """The address that ``name`` announces, and the port of its agent."""
        _, place = self._around[name]
        return join_address(str(place[0]), int(place[1]))

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
