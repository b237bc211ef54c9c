"""The decoded documents of one run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from elastic_trainer.ipc.messages import Progress
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import (
    GONE,
    Departure,
    Incident,
    JournalEntry,
    NodeHealth,
    RoundDocument,
    RoundState,
    Saved,
    Spec,
    added_up,
)


@dataclass(frozen=True)
class RunDocuments:
    """One run as last read. ``journal`` and ``incidents`` hold the newest entries, oldest first.

    Without slots, so that sums over a thousand nodes can be cached.
    """

    run: str
    spec: Spec | None = None
    round: RoundDocument | None = None
    progress: Progress | None = None
    departure: Departure | None = None
    """How the last node left, if it left by itself."""
    nodes: Mapping[str, NodeView] = field(default_factory=dict)
    health: Mapping[str, NodeHealth] = field(default_factory=dict)
    journal: tuple[JournalEntry, ...] = ()
    incidents: tuple[Incident, ...] = ()
    unreadable: tuple[str, ...] = ()
    """Keys that this version cannot read."""
    round_revision: int = 0
    """Mod-revision of the round document; 0: there is none."""
    serial: int = 0
    """Increases when anything of the run changes."""

    @property
    def is_run(self) -> bool:
        """Whether the documents make up a run."""
        return bool(self.spec or self.round or self.nodes or self.unreadable)

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self.round is not None and self.round.state is RoundState.CLOSED

    @cached_property
    def live(self) -> dict[str, NodeView]:
        """The present nodes, without keys of excluded nodes."""
        ghosts = self.round.ghosts if self.round is not None else ()
        return {name: node for name, node in self.nodes.items() if node.ghost not in ghosts}

    @cached_property
    def counters(self) -> dict[str, float]:
        """The counters summed over all nodes, including those that have left."""
        return added_up(health.counters for health in self.health.values())

    @cached_property
    def happened(self) -> tuple[Incident, ...]:
        """The incidents, the newest first. One fault is one: why a worker died goes into the end of its round."""
        ends = {each.round for each in self.incidents if each.kind == "round" and not each.planned}
        died: dict[int, list[str]] = {}
        for each in self.incidents:
            if each.kind == "worker_died" and each.round in ends:
                died.setdefault(each.round, []).append(each.reason)
        told = []
        for each in sorted(self.incidents, key=lambda each: each.wall, reverse=True):
            if each.kind == "round" and not each.planned:
                why = [reason for reason in died.get(each.round, ()) if reason not in each.reason]
                told.append(each.model_copy(update={"reason": "; ".join([each.reason, *why])}) if why else each)
            elif each.kind != "worker_died" or each.round not in died:
                told.append(each)
        return tuple(told)

    @property
    def last_fault(self) -> Incident | None:
        """The newest incident that is no planned change."""
        return next((each for each in self.happened if not each.planned), None)

    @property
    def first_node(self) -> str | None:
        """The node of rank 0, now or in the last round."""
        members = self.round.members if self.round is not None else ()
        return next((member.node for member in members if member.first_rank == 0), None)

    @property
    def first_health(self) -> NodeHealth | None:
        """The health of the node of rank 0."""
        return self.health.get(self.first_node or "")

    @cached_property
    def saved(self) -> Saved | None:
        """The last checkpoint: that of rank 0's node, otherwise the one of the highest step that any node reports."""
        first = self.first_health
        if first is not None and first.saved is not None:
            return first.saved
        told = (each.saved for each in self.health.values() if each.saved is not None)
        return max(told, key=lambda saved: saved.step, default=None)

    @property
    def saves_failing(self) -> int:
        """Saves of rank 0's node that failed since the last one that succeeded."""
        first = self.first_health
        return first.saves_failing if first is not None else 0

    def folded(self) -> RunDocuments:
        """The same without the nodes' details, which is kept of a run that is over."""
        total = NodeHealth(node=GONE, wall=0.0, counters=self.counters, saved=self.saved)
        return replace(self, nodes={}, health={GONE: total} if self.health else {})
