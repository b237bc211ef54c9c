"""Keeps a node out of rounds while it cannot reach all members; otherwise each of its joins would stop all nodes.

*Runs in* the conductor, one call at a time. *Owns* one timer at a time, and the open questions about reachability.
*Fails by* nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from elastic_trainer.agent.workers.backoff import Backoff
from elastic_trainer.agent.workers.periodic import Cancellable, Later
from elastic_trainer.agent.workers.reachability import Ask, Reached
from elastic_trainer.ipc.messages import Failed, Ready
from elastic_trainer.membership.documents import RoundDocument, RoundState
from elastic_trainer.membership.reachability import FAILED_ROUNDS, UNFORMED_ROUNDS, blamed, cannot_reach, misleads
from elastic_trainer.telemetry.logs import logger

SHORTEST_S = 1.0
TIMES_UNSEEN = 10.0
"""How much longer a node keeps out whose agent reaches the others while its workers do not: only a round could show
that they do again, and each try stops the others."""


class Quarantine:
    """See the module. ``present()`` is the present round; ``released()`` is called when its members can be reached;
    ``ask`` finds out who can, and ``call_later`` makes a call at a later time."""

    def __init__(
        self,
        node: str,
        ask: Ask,
        present: Callable[[], RoundDocument | None],
        released: Callable[[], None],
        call_later: Later,
    ) -> None:
        self._node, self._ask, self._present, self._released = node, ask, present, released
        self._later = call_later
        self.unreachable: tuple[str, ...] = ()
        """Nodes that this one could not reach when a round with them failed to form; itself if they cannot reach it."""
        self._unseen = False
        """Whether this node's agent reached those whom its workers did not."""
        self.active = False
        """Whether this node stays out of rounds."""
        self._closed = False
        self._asked_in, self._answer = -1, ""
        self._checks: deque[tuple[RoundDocument, Failed | Ready, Callable[[str], None]]] = deque()
        self._since_round = 0
        self._backoff = Backoff()
        self._timer: Cancellable | None = None

    def check(self, document: RoundDocument | None, message: Failed | Ready, then: Callable[[str], None]) -> None:
        """Find the nodes that this one cannot reach, if others could not reach it in the round of ``document``, or if
        that was not the first consecutive round that failed to form. ``message``: what a worker said about that round.

        Calls ``then`` with who was not reached, where, and what to do, for people; empty if nobody is known.
        """
        if document is None or (document.stalled < FAILED_ROUNDS - 1 and not document.accuses(self._node)):
            then("")
            return
        self._checks.append((document, message, then))
        if len(self._checks) == 1:  # of several workers that report one round, all get the answer
            self._check_next()

    def _check_next(self) -> None:
        document, message, _ = self._checks[0]
        news = isinstance(message, Failed) and bool(message.tried or message.loopback)
        if document.number == self._asked_in and (self._answer or not news):
            self._checked()
            return
        self._asked_in = document.number
        if isinstance(message, Failed) and message.loopback:
            self._note(document, message, Reached())
            return
        self._ask(self._others(document), partial(self._note, document, message))

    def _note(self, document: RoundDocument, message: Failed | Ready, reached: Reached) -> None:
        nodes, self._answer = self._find(document, message, reached)
        self.note_unreachable(nodes)
        if nodes:
            logger().warning(
                "node.cut_off", node=self._node, round=document.number, unreachable=nodes, reason=self._answer
            )
        self._checked()

    def _checked(self) -> None:
        _, _, then = self._checks[0]
        then(self._answer)  # may add one
        self._checks.popleft()
        if self._checks:
            self._check_next()

    def _others(self, document: RoundDocument) -> tuple[str, ...]:
        return tuple(member.node for member in document.members if member.node != self._node)

    def _find(self, document: RoundDocument, message: Failed | Ready, reached: Reached) -> tuple[tuple[str, ...], str]:
        """This node if its worker knows that others cannot reach it, the nodes that this agent does not reach, else the
        one that its worker did not; and the sentence about it."""
        if isinstance(message, Failed) and message.loopback:
            self._unseen = True
            return (self._node,), misleads(self._node, message.loopback)
        others = {name: reached.records[name] for name in self._others(document) if name in reached.records}
        self._unseen = False
        if missing := reached.missing:
            record = others[missing[0]]
            why = f"its agent does not answer at port {record.probe_port}"
            return missing, cannot_reach(self._node, missing[0], record.address, "", why)
        if isinstance(message, Failed) and (one := blamed(message.tried, others)) is not None:
            self._unseen = True
            return (one,), cannot_reach(self._node, one, others[one].address, message.tried, message.error)
        return (), ""

    @property
    def own_fault(self) -> str:
        """Why others cannot reach this node's workers, if it knows."""
        return self._answer if self._node in self.unreachable else ""

    def note_unreachable(self, nodes: tuple[str, ...]) -> None:
        """``nodes`` cannot be reached. If no round can form without them, check again until they can."""
        self.unreachable = nodes
        if nodes:
            self._after(SHORTEST_S, self._look_again, away=False)

    def clear(self) -> None:
        """Steps were committed, or the workers are new: forget earlier failures."""
        self.unreachable = ()
        if not self.active:
            self._backoff, self._unseen = Backoff(), False

    def enter(self, document: RoundDocument) -> None:
        """The round of ``document`` excludes this node as unreachable. Acts once for each round."""
        if document.number <= self._since_round:
            return
        self._since_round, self.active = document.number, True
        self._unseen |= document.unformed >= UNFORMED_ROUNDS
        self._wait()

    def close(self) -> None:
        self.active, self._closed = False, True
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._backoff = self._backoff.after(0)
        seconds = max(SHORTEST_S, self._backoff.back_off_s()) * (TIMES_UNSEEN if self._unseen else 1.0)
        logger().warning("node.quarantined", node=self._node, seconds=seconds, unreachable=self.unreachable)
        self._after(seconds, self._try_again, away=True)

    def _after(self, seconds: float, act: Callable[[], None], *, away: bool) -> None:
        """Schedule ``act``, unless the node has become a member (``away``) or was excluded, which has its own timer."""
        if self._closed or self.active is not away:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._later(seconds, act)

    def _look_again(self) -> None:
        document = self._present()
        if self.active or self._closed or not self.unreachable or document is None:
            return
        if document.state is RoundState.BROKEN:  # otherwise committed steps prove that all can be reached
            self._ask(self._others(document), self._looked_again)
        else:
            self._looked_again(Reached())

    def _looked_again(self, reached: Reached) -> None:
        if reached.missing == () and not self.active and not self._closed:
            self.unreachable = ()
            self._released()
        else:
            self._after(SHORTEST_S, self._look_again, away=False)

    def _try_again(self) -> None:
        document = self._present()
        if self.active and document is not None:
            self._ask(self._others(document), self._tried_again)

    def _tried_again(self, reached: Reached) -> None:
        if not self.active:
            return
        self.unreachable = reached.missing or ()
        if reached.missing != ():  # without the store no round could add this node either
            self._wait()
            return
        self.active = False
        logger().info("quarantine.ended", node=self._node)
        self._released()
