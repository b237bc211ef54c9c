"""How often a run has failed at one place: a poison batch, or a dead network, must not keep it going for ever.

Pure. The count travels in the round document, job-wide: a poison batch would kill one node after another.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_trainer.membership.documents import Identity, RoundDocument, RoundState
from elastic_trainer.membership.standing import Limits, NodeView, View, live_members


@dataclass(frozen=True, slots=True)
class Tally:
    """What has gone wrong since the job last came further: that was to ``step`` (None: it has not begun)."""

    step: int | None
    failures: int
    stalled: int
    place: Identity | None = None
    """Where the job stands, with what it would do next."""

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


def count(view: View, current: RoundDocument, ready: list[NodeView]) -> Tally:
    """The tally after the end of the present round, whose successor ``ready`` will make up."""
    if current.state is RoundState.DRAINING:
        return Tally(current.last_step, current.failures, current.stalled)
    ended = [node for member, node in live_members(view) if node.record.life > member.life]
    # Whoever lives knows exactly how far the job has come; of the dead that is known only where they had a page.
    known = [node.record.identity for node in ready if node.record.identity is not None]
    known = known or [node.record.reached for node in ended if node.record.reached is not None]
    place = max(known, key=lambda each: each.step, default=None)
    failed = int(current.worker_failed or bool(ended))
    if place is not None and (current.last_step is None or place.step > current.last_step):
        return Tally(place.step, failed, 0, place)
    return Tally(current.last_step, current.failures + failed, current.stalled + 1, place)


def _samples(place: Identity | None) -> str:
    """Which samples come next at ``place``, for people: each epoch has an order of its own."""
    if place is None or not place.batch:
        return ""
    last = place.samples + place.batch - 1
    return f" (epoch {place.epoch}, samples {place.samples} to {last} of its order)"
