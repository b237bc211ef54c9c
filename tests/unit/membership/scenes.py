"""Builds views of a run for the tests of the rules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.membership.cluster_view import ClusterView, Limits, NodeView, Tracker
from elastic_trainer.membership.documents import (
    NodeRecord,
    NodeState,
    RoundDocument,
    RoundMember,
    RoundState,
)
from elastic_trainer.membership.rules import Action, Decision, decide

LIMITS = Limits(min_nodes=2, max_nodes=4, last_call_s=3.0, join_batch_s=1.0, join_interval_s=5.0, deputy_delay_s=0.25)


def node(name: str, created: int, *, size: int = 1, mod: int | None = None, **record: Any) -> NodeView:
    """A ready node unless ``record`` says otherwise."""
    values: dict[str, Any] = {
        "host": name,
        "address": "127.0.0.1",
        "local_world_size": size,
        "store_port": 1000 + created,
        "probe_port": 1,
        "state": NodeState.READY,
        "life": 1,
    } | record
    return NodeView(name, created, created if mod is None else mod, NodeRecord(**values))


def round_of(
    number: int, nodes: Iterable[NodeView], state: RoundState = RoundState.ACTIVE, **more: Any
) -> RoundDocument:
    """The round in which ``nodes`` take part as they are."""
    members, first = [], 0
    for each in nodes:
        size = each.record.local_world_size
        members.append(
            RoundMember(
                node=each.id,
                create_revision=each.create_revision,
                life=each.record.life,
                first_rank=first,
                local_world_size=size,
            )
        )
        first += size
    return RoundDocument(number=number, nonce=f"r{number}", state=state, members=tuple(members), **more)


@dataclass
class Scene:
    """One node's eyes on a run, over a clock that the test moves."""

    me: str = "a"
    limits: Limits = LIMITS
    nodes: dict[str, NodeView] = field(default_factory=dict)
    round: RoundDocument | None = None
    revision: int = 0
    suspects: frozenset[str] = frozenset()
    now: float = 100.0
    tracker: Tracker = field(default_factory=Tracker)

    def show(self, *views: NodeView) -> Scene:
        """Nodes appear or change."""
        self.nodes |= {view.id: view for view in views}
        return self

    def lose(self, name: str) -> Scene:
        """A node's lease ends."""
        del self.nodes[name]
        return self

    def adopt(self, document: RoundDocument | None) -> Scene:
        """The round document changes."""
        self.round = document
        self.revision += 1
        return self

    def view(self) -> ClusterView:
        """What the rules are given."""
        return ClusterView(
            self.me, dict(self.nodes), self.round, self.limits, self.tracker.sightings, "fresh", self.suspects
        )

    def forms(self, after_s: float = 0.0) -> RoundDocument:
        """The next round, which the decision must form."""
        return made(self.decide(after_s), Action.FORM)

    def said(self, after_s: float = 0.0) -> str:
        """The decision in one line (see :func:`outcome`)."""
        return outcome(self.decide(after_s))

    def follow(self, after_s: float = 0.0) -> str:
        """The same; and the round document becomes what was decided."""
        decision = self.decide(after_s)
        self.adopt(decision.round)
        return outcome(decision)

    def decide(self, after_s: float = 0.0) -> Decision:
        """Let ``after_s`` seconds pass (looking at both ends) and decide."""
        self.tracker = self.tracker.advance(self.view(), self.revision, self.now)
        self.now += after_s
        self.tracker = self.tracker.advance(self.view(), self.revision, self.now)
        return decide(self.view(), self.now)


def names(document: RoundDocument | None) -> str:
    """The members in rank order."""
    assert document is not None
    return " ".join(member.node for member in document.members)


def made(decision: Decision, action: Action) -> RoundDocument:
    """The document of a decision that must be ``action``."""
    assert decision.action is action, decision
    assert decision.round is not None
    return decision.round


def outcome(decision: Decision) -> str:
    """``form 2: a c``, ``break 1: REASON``, ``drain to a x: REASON``, ``drain: REASON``, ``close failed: REASON``, or
    why to wait."""
    document, action = decision.round, decision.action
    if action is Action.WAIT or document is None:
        return decision.reason
    what = f"{action} {document.result}" if action is Action.CLOSE else f"{action} {document.number}"
    if action is Action.DRAIN:
        what = f"drain to {names(document.next)}" if document.next is not None else "drain"
    return f"{what}: {names(document) if action is Action.FORM else decision.reason}"
