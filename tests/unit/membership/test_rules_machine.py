"""The in-place rules against random histories: nodes that crash, freeze, lose leases, leave, come back and decide late.

A model of each node does what its agent and workers would do; the store is a dictionary with revisions, in which the
round document is changed by the product's own compare only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from elastic_trainer.membership.cluster_view import ClusterView, Limits, NodeView
from elastic_trainer.membership.documents import Identity, NodeRecord, NodeState, RoundDocument, RoundState, RunResult
from elastic_trainer.membership.rules import Action, decide
from elastic_trainer.membership.sightings import Tracker
from elastic_trainer.model import Incarnation, RecoveryMode

LIMITS = Limits(
    min_nodes=2,
    max_nodes=3,
    recovery=RecoveryMode.IN_PLACE,
    last_call_s=0.5,
    regroup_grace_s=0.5,
    join_batch_s=0.2,
    join_interval_s=1.0,
    report_floor_s=4.0,
    failure_limit=1000,
    stalled_rounds=1000,
)
MOST = 5
ORDER = {RoundState.ACTIVE: 0, RoundState.DRAINING: 1, RoundState.BROKEN: 2, RoundState.CLOSED: 3}
QUIET_S = 40.0
"""By far longer than all times of the rules together."""


@dataclass
class Agent:
    """One node: what it shows, what it has seen, where its workers are."""

    name: str
    record: NodeRecord
    create_revision: int = 0
    frozen: bool = False
    dead: bool = False
    inside: int = 0
    """The round that its workers are in; 0: none."""
    nodes: dict[str, NodeView] = field(default_factory=dict)
    round: RoundDocument | None = None
    round_revision: int = 0
    tracker: Tracker = field(default_factory=Tracker)


class Run(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.revision, self.step = 100.0, 0, 0
        self.agents: dict[str, Agent] = {}
        self.nodes: dict[str, NodeView] = {}
        self.round: RoundDocument | None = None
        self.round_revision = 0
        self.history: list[RoundDocument] = []
        self.made = 0

    # ---- the store

    def put(self, agent: Agent) -> None:
        """Show the agent's record: under a new key where its lease was lost."""
        self.revision += 1
        shown = self.nodes.get(agent.name)
        if shown is None or shown.create_revision != agent.create_revision:
            agent.create_revision = self.revision
        self.nodes[agent.name] = NodeView(agent.name, agent.create_revision, self.revision, agent.record)

    def show(self, agent: Agent, **changes: object) -> None:
        record = agent.record.model_copy(update=changes)
        if record != agent.record or agent.name not in self.nodes:
            agent.record = record
            self.put(agent)

    def commit(self, agent: Agent, document: RoundDocument) -> bool:
        """The compare that the membership's safety rests on."""
        mine = self.nodes.get(agent.name)
        if self.round_revision != agent.round_revision or mine is None or mine.create_revision != agent.create_revision:
            return False
        self.revision += 1
        self.round, self.round_revision = document, self.revision
        self.history.append(document)
        self.check_history()
        return True

    # ---- what agents do

    def look(self, agent: Agent) -> None:
        agent.nodes, agent.round, agent.round_revision = dict(self.nodes), self.round, self.round_revision

    def act(self, agent: Agent) -> None:
        """Decide on what was seen last, which may be old."""

        def view() -> ClusterView:
            self.made += 1
            sightings = agent.tracker.sightings
            return ClusterView(agent.name, agent.nodes, agent.round, LIMITS, sightings, f"nonce{self.made}")

        agent.tracker = agent.tracker.advance(view(), agent.round_revision, self.now)
        decision = decide(view(), self.now)
        if decision.action is not Action.WAIT:
            assert decision.round is not None
            assert decision.reason
            self.commit(agent, decision.round)

    def follow(self, agent: Agent, *, free: bool) -> None:
        """Lead the workers as the round document says; ``free``: they get out of a round that is over."""
        document, record = self.round, agent.record
        if agent.name not in self.nodes:
            self.put(agent)
        if document is None or record.state is NodeState.WARMING or document.state is RoundState.CLOSED:
            return
        mine, place = self.entry(agent, document), self.entry(agent, document.next)
        over = document.number if document.state is RoundState.BROKEN else document.number - 1
        if document.state is RoundState.DRAINING:
            if mine and agent.inside < document.number and free:
                agent.inside = document.number  # it learns of its round and of the planned change at once
            planned = agent.inside == document.number and (place is not None or document.next is None)
            if mine and planned and free:
                agent.inside = place.number if place is not None else 0
                self.report(agent, document.number + 1, planned=True)
            elif place is not None and not mine:
                agent.inside = place.number
            return
        if record.acknowledged <= over:
            self.show(agent, acknowledged=over + 1)
        if agent.inside > over or not free:
            return
        if record.reported <= over and (agent.inside or self.entry(agent, document)):
            agent.inside = 0
            self.report(agent, over + 1, planned=False)
        if document.state is RoundState.ACTIVE and mine is not None:
            agent.inside = document.number

    def entry(self, agent: Agent, document: RoundDocument | None) -> RoundDocument | None:
        """``document`` if this life of the node has a place in it."""
        member = document.member(agent.name) if document is not None else None
        same = member is not None and member.incarnation == Incarnation(agent.create_revision, agent.record.life)
        return document if same else None

    def report(self, agent: Agent, number: int, *, planned: bool) -> None:
        lineage = self.round.number if self.round is not None else 0
        state = Identity(round=lineage, step=self.step)
        acknowledged = max(agent.record.acknowledged, number)
        self.show(agent, acknowledged=acknowledged, reported=number, planned=planned, identity=state)

    def awake(self) -> list[Agent]:
        return [agent for agent in self.agents.values() if not agent.frozen and not agent.dead]

    def some(self, data: st.DataObject, agents: list[Agent]) -> Agent | None:
        return data.draw(st.sampled_from(agents)) if agents else None

    # ---- what happens

    @initialize(count=st.integers(2, 4))
    def begin(self, count: int) -> None:
        for _ in range(count):
            self.join()
        for agent in self.agents.values():
            self.warm(agent)

    @precondition(lambda self: sum(not agent.dead for agent in self.agents.values()) < MOST)
    @rule()
    def join(self) -> None:
        """A new node comes up, its workers not started yet."""
        name = f"n{len(self.agents)}"
        record = NodeRecord(host=name, address="127.0.0.1", local_world_size=1, store_port=1, probe_port=1)
        self.agents[name] = Agent(name, record)
        self.put(self.agents[name])

    def warm(self, agent: Agent) -> None:
        if agent.record.state is NodeState.WARMING:
            self.show(agent, state=NodeState.READY, reported=max(1, agent.record.reported), planned=True)

    @rule(data=st.data())
    def get_ready(self, data: st.DataObject) -> None:
        """Some node's workers have built their model."""
        if agent := self.some(data, self.awake()):
            self.warm(agent)

    @rule(data=st.data(), waited_s=st.sampled_from([0.0, 0.1, 0.6, 1.5, 5.0]), fresh=st.booleans())
    def decide_somewhere(self, data: st.DataObject, waited_s: float, fresh: bool) -> None:
        """Some node looks (or not) and decides."""
        self.now += waited_s
        if agent := self.some(data, self.awake()):
            if fresh:
                self.look(agent)
            self.act(agent)

    @rule(data=st.data(), free=st.booleans())
    def follow_somewhere(self, data: st.DataObject, free: bool) -> None:
        """Some node takes notice of the round document."""
        if agent := self.some(data, self.awake()):
            self.follow(agent, free=free)

    @rule()
    def train(self) -> None:
        """The members commit a step, if all of them are in the round."""
        document = self.round
        on = document is not None and document.state in (RoundState.ACTIVE, RoundState.DRAINING)
        if on and document is not None and all(self.is_inside(m.node, document.number) for m in document.members):
            self.step += 1

    def is_inside(self, name: str, number: int) -> bool:
        return self.agents[name].inside == number and not self.agents[name].dead

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Some node's workers die; torchrun starts others."""
        if agent := self.some(data, self.awake()):
            known = max(agent.record.acknowledged, self.round.number + 2 if self.round and self.round.next else 0)
            number = max(known, self.round.number + 1 if self.round else 0)
            agent.inside = 0
            died = {"state": NodeState.WARMING, "life": agent.record.life + 1, "reported": 0, "identity": None}
            self.show(agent, **died, acknowledged=number, planned=False, cause="its worker 0 was lost")

    @rule(data=st.data())
    def lose_lease(self, data: st.DataObject) -> None:
        """Some node's key goes away under it."""
        agent = self.some(data, [each for each in self.agents.values() if each.name in self.nodes])
        if agent is not None:
            self.revision += 1
            del self.nodes[agent.name]

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """A whole node is lost; its key stays for a while."""
        if agent := self.some(data, self.awake()):
            agent.dead, agent.inside = True, 0

    @rule(data=st.data())
    def freeze_or_thaw(self, data: st.DataObject) -> None:
        """An agent stands still, or goes on with what it knew."""
        if agent := self.some(data, [each for each in self.agents.values() if not each.dead]):
            agent.frozen = not agent.frozen

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """A node is asked to leave."""
        if agent := self.some(data, [each for each in self.awake() if each.record.state is NodeState.READY]):
            self.show(agent, state=NodeState.DRAINING)

    # ---- what must hold

    def check_history(self) -> None:
        """The document only moves on; one round per number, the same for all who read it; no replaced life returns."""
        places = [(document.number, ORDER[document.state]) for document in self.history]
        assert places == sorted(set(places)), places
        by_number: dict[int, RoundDocument] = {}
        newest: dict[str, Incarnation] = {}
        for document in self.history:
            first = by_number.setdefault(document.number, document)
            assert (document.nonce, document.members) == (first.nonce, first.members)
            ranks = [rank for m in document.members for rank in range(m.first_rank, m.first_rank + m.local_world_size)]
            assert ranks == list(range(document.world_size))
            assert LIMITS.min_nodes <= len(document.members) <= LIMITS.max_nodes
            for member in document.members:
                before = newest.get(member.node, member.incarnation)
                assert member.incarnation >= before, f"a replaced life of {member.node} is in round {document.number}"
                newest[member.node] = member.incarnation

    def teardown(self) -> None:
        """All faults end: then all live nodes that can train do, up to max; and a closed run stays closed."""
        for agent in list(self.agents.values()):
            agent.frozen = False
            if agent.dead:
                self.nodes.pop(agent.name, None)
            elif agent.record.state is NodeState.DRAINING:
                self.leave(agent)
        end = self.now + QUIET_S
        while self.now < end:
            self.now += 0.3
            for agent in self.awake():
                self.warm(agent)
                self.follow(agent, free=True)
                self.look(agent)
                self.act(agent)
        able = len(self.awake())
        if able < LIMITS.min_nodes:
            assert self.round is None or self.round.state is not RoundState.CLOSED
            return
        document = self.round
        assert document is not None, "no round at all"
        assert document.state is RoundState.ACTIVE, document
        assert len(document.members) == min(able, LIMITS.max_nodes), (document, self.nodes)
        assert all(self.is_inside(member.node, document.number) for member in document.members), document
        self.check_closing(document)

    def leave(self, agent: Agent) -> None:
        """A node that was asked to go has gone."""
        agent.dead, agent.inside = True, 0
        self.nodes.pop(agent.name, None)

    def check_closing(self, document: RoundDocument) -> None:
        for member in document.members:
            self.show(self.agents[member.node], state=NodeState.DONE)
        for _ in range(3 * MOST):
            self.now += 0.3
            for agent in self.awake():
                self.look(agent)
                self.act(agent)
        assert self.round is not None
        assert (self.round.state, self.round.result) == (RoundState.CLOSED, RunResult.SUCCEEDED)
        closed = len(self.history)
        self.join()
        self.warm(next(reversed(self.agents.values())))
        for agent in self.awake():
            self.look(agent)
            self.act(agent)
        assert len(self.history) == closed


TestRun = pytest.mark.timeout(300)(Run.TestCase)
TestRun.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
