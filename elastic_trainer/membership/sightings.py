"""Tracks since when each condition of the rules holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_trainer.membership.cluster_view import ClusterView, Sightings, candidates, losses, newcomers
from elastic_trainer.membership.shard_groups import in_groups


@dataclass(frozen=True, slots=True)
class Tracker:
    """The sightings, and the state that they were derived from."""

    sightings: Sightings = field(default_factory=Sightings)
    candidates: frozenset[tuple[str, int, int]] = frozenset()
    round_revision: int = -1

    def advance(self, view: ClusterView, round_revision: int, now: float) -> Tracker:
        before = self.sightings
        ready = candidates(view)
        names = frozenset((node.id, node.create_revision, node.record.life) for node in ready)
        round_changed = round_revision != self.round_revision
        after = Sightings(
            candidates_since=now if names != self.candidates else before.candidates_since,
            enough_since=_since(
                before.enough_since, len(in_groups(view, ready)) >= view.limits.min_nodes, now, restart=round_changed
            ),
            newcomers_since=_since(before.newcomers_since, bool(newcomers(view)), now, restart=round_changed),
            round_since=now if round_changed else before.round_since,
            failing_since=_since(before.failing_since, bool(losses(view)), now, restart=round_changed),
        )
        return Tracker(after, names, round_revision)


def _since(before: float | None, holds: bool, now: float, *, restart: bool) -> float | None:
    if not holds:
        return None
    return now if before is None or restart else before
