"""How often a run has failed at one place: a poison batch, or a dead network, must not keep it going for ever.

Pure. The count travels in the round document, job-wide: a poison batch would kill one node after another.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.membership.cluster_view import ClusterView, Limits, NodeView, live_members
from elastic_trainer.membership.documents import Identity, RoundDocument, RoundState
from elastic_trainer.model import Cause


@dataclass(frozen=True, slots=True)
class FailureBudget:
    """What has gone wrong since the job last came further: that was to ``step`` (None: it has not begun)."""

    step: int | None
    failures: int
    stalled: int
    place: Identity | None = None
    """Where the job stands, with what it would do next."""
    culprits: tuple[str, ...] = ()
    """In restart mode: the nodes whose own workers failed there."""

    def verdict(self, limits: Limits) -> str:
        """Why the run has to end, or nothing."""
        if self.failures >= limits.failure_limit:
            what = f"{self.failures} failures of workers"
        elif self.stalled >= limits.stalled_rounds:
            what = f"{self.stalled} rounds in a row ended"
        else:
            return ""
        if self.step is None:
            return f"{what} before the training had begun"
        return f"{what} after step {self.step}, without a step committed since{_samples(self.place)}"


UNSPENT = FailureBudget(None, 0, 0)
"""That of a run that begins."""


def count(view: ClusterView, current: RoundDocument, ready: list[NodeView]) -> FailureBudget:
    """The tally after the end of the present round, whose successor ``ready`` will make up."""
    if current.state is RoundState.DRAINING:
        return FailureBudget(current.last_step, current.failures, current.stalled)
    ended = [node for member, node in live_members(view) if node.record.life > member.life]
    # Whoever lives knows exactly how far the job has come; of the dead that is known only where they had a page.
    known = [node.record.identity for node in ready if node.record.identity is not None]
    known = known or [node.record.reached for node in ended if node.record.reached is not None]
    place = max(known, key=lambda each: each.step, default=None)
    failed = int(current.worker_failed or bool(ended))
    if place is not None and (current.last_step is None or place.step > current.last_step):
        return FailureBudget(place.step, failed, 0, place)
    return FailureBudget(current.last_step, current.failures + failed, current.stalled + 1, place)


def count_lives(view: ClusterView, current: RoundDocument) -> FailureBudget:
    """The tally in restart mode: lives in a row that ended by a failure of workers after the very same step.

    Each begins at a checkpoint, so one that ends before that step says nothing of it: such failures are those of
    machines, which may come at any step. Nor does a life that ended with the loss of a node.
    """
    before = FailureBudget(current.last_step, current.failures, current.stalled, culprits=current.culprits)
    ended = [node for member, node in live_members(view) if node.record.life > member.life]
    reached = [node.record.reached for node in ended if node.record.reached is not None]
    place = max((each for each in reached if each.round == current.number), key=lambda each: each.step, default=None)
    culprits = {node.id for node in ended if node.record.ended_by is Cause.WORKER_LOST}
    if current.state is RoundState.DRAINING or place is None or not culprits or len(ended) < len(current.members):
        return before
    if place.step != current.last_step:
        return FailureBudget(place.step, 1, 0, place, tuple(sorted(culprits)))
    return FailureBudget(place.step, current.failures + 1, 0, place, tuple(sorted(culprits.union(current.culprits))))


def _samples(place: Identity | None) -> str:
    """Which samples come next at ``place``, for people: each epoch has an order of its own."""
    if place is None or not place.batch:
        return ""
    last = place.samples + place.batch - 1
    return f" (epoch {place.epoch}, samples {place.samples} to {last} of its order)"
