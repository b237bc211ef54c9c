"""How often a run has failed at one step: a poison batch or a dead network must not keep it retrying for ever.

Pure. The round document carries the count, for the whole run: a poison batch would kill one node after another.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.membership.cluster_view import ClusterView, Limits, NodeView, live_members
from elastic_trainer.membership.documents import Identity, RoundDocument, RoundState
from elastic_trainer.model import Cause


@dataclass(frozen=True, slots=True)
class FailureBudget:
    """Failures since the job last made progress, which was to ``step`` (None: no step yet)."""

    step: int | None
    failures: int
    stalled: int
    place: Identity | None = None
    """The job's position in the data, with the samples of the next step."""
    culprits: tuple[str, ...] = ()
    """In restart mode: the nodes whose own workers failed there."""
    fewest: int = 0
    """The size in nodes of the smallest round that was tried since then; 0 for none."""

    def verdict(self, limits: Limits) -> str:
        """Why the run has to end; empty if it may continue."""
        if self.failures >= limits.failure_limit:
            what = f"{self.failures} worker failures"
        elif self.stalled >= limits.stalled_rounds:
            what = f"{self.stalled} consecutive rounds ended"
        else:
            return ""
        if self.step is None:
            return f"{what} before the first step"
        return f"{what} after step {self.step}, without a step committed since{_samples(self.place)}"


UNSPENT = FailureBudget(None, 0, 0)
"""The budget of a run that starts."""


def carried(current: RoundDocument) -> FailureBudget:
    """The counts as ``current`` carries them."""
    fewest = current.fewest or len(current.members)
    return FailureBudget(current.last_step, current.failures, current.stalled, fewest=fewest)


def count(view: ClusterView, current: RoundDocument, ready: list[NodeView]) -> FailureBudget:
    """The counts after the end of the present round, whose successor will consist of ``ready``."""
    if current.state is RoundState.DRAINING:
        return carried(current)
    ended = [node for member, node in live_members(view) if node.record.life > member.life]
    # Live nodes know the exact progress; of a dead node it is known only if its workers had heartbeat pages.
    known = [node.record.identity for node in ready if node.record.identity is not None]
    known = known or [node.record.reached for node in ended if node.record.reached is not None]
    place = max(known, key=lambda each: each.step, default=None)
    failed = int(current.worker_failed or bool(ended))
    if place is not None and (current.last_step is None or place.step > current.last_step):
        return FailureBudget(place.step, failed, 0, place)
    fewest = carried(current).fewest
    return FailureBudget(current.last_step, current.failures + failed, current.stalled + 1, place, fewest=fewest)


def count_lives(view: ClusterView, current: RoundDocument) -> FailureBudget:
    """The counts in restart mode: consecutive lives that ended with a worker failure after the same step.

    Each life starts at a checkpoint, so one that ends before that step says nothing about it: such failures come from
    machines, at any step. A life that ended with the loss of a node says nothing about the step either.
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
    """The samples that come next at ``place``, for people: each epoch has its own order."""
    if place is None or not place.batch:
        return ""
    last = place.samples + place.batch - 1
    return f" (epoch {place.epoch}, samples {place.samples} to {last} of its order)"
