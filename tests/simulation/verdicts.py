"""The verdict on each round that ends, as the node that reports it would judge: none of them says "stop"."""

from __future__ import annotations

import signal

from elastic_trainer.membership.cluster_view import Limits
from elastic_trainer.membership.documents import Batch, Clue, ClueKind, Incident, RoundDocument, RoundState
from elastic_trainer.membership.verdict import Case, judge
from elastic_trainer.model import Advice
from tests.simulation.invariants import NO_FALSE_STOP, Violation

SAMPLES = 8
"""Of a step, as far as clues name them."""
HISTORY = 40


class Verdicts:
    """Follows one run: how its workers ended, and what is made of that."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._clues: list[Clue] = []
        self._before: list[Incident] = []
        self._broken: RoundDocument | None = None
        self.judged = 0

    def died(self, node: str, in_round: bool, step: int, code: int, current: RoundDocument | None) -> None:
        """A worker has ended by itself; a crash is one of native code as often as not."""
        if code in (0, -signal.SIGTERM) or current is None or not in_round:
            return
        code = -signal.SIGSEGV if code > 0 and step % 2 else code
        kind = ClueKind.SIGNAL if code < 0 else ClueKind.EXIT
        batch = Batch(0, step * SAMPLES, (step + 1) * SAMPLES - 1)
        text = f"rank 0 on {node} ended with {code}: RuntimeError"
        clue = Clue(kind=kind, node=node, text=text, rank=0, round=current.number, step=step, batch=batch, code=code)
        self._clues.append(clue)

    def wrote(self, document: RoundDocument, wall: float) -> None:
        """The round document has changed."""
        broken = self._broken
        if document.state is RoundState.BROKEN:
            self._broken = document
        elif document.state is RoundState.ACTIVE:
            self._broken = None
            if broken is not None and document.number > broken.number:
                self._judge(broken, document, wall)

    def _judge(self, broken: RoundDocument, following: RoundDocument, wall: float) -> None:
        members = {each.node for each in broken.members}
        incident = Incident(
            wall=wall,
            by=following.members[0].node,
            cause=following.cause or broken.cause,
            round=broken.number,
            next_round=following.number,
            reason=following.reason,
            nodes=tuple(sorted(members ^ {each.node for each in following.members})),
            step=following.last_step or 0,
            resumed=False,
        )
        clues = [each for each in self._clues if each.round == broken.number]
        older = [each for each in self._clues if each.round < broken.number]
        nodes = sorted(members | {each.node for each in following.members})
        limits = self._limits
        case = Case(incident, clues, self._before, nodes, older, least=limits.min_nodes, limit=limits.failure_limit)
        verdict = judge(case)
        self.judged += 1
        if verdict.advice is Advice.STOP:
            raise Violation(NO_FALSE_STOP, f"round {broken.number}: {verdict.sentence} {verdict.evidence}")
        self._before = [incident.model_copy(update={"verdict": verdict}), *self._before][:HISTORY]
