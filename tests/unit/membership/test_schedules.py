"""What stays true of a run whatever happens to its members: random schedules of faults, judged by the whole history."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from elastic_trainer.clock import pause
from elastic_trainer.errors import RunClosedError
from elastic_trainer.membership.documents import RoundDocument, RoundState, RunResult
from elastic_trainer.model import Incarnation
from tests.support.crew import LIMIT_S, QUICK, Agent, Crew, eventually

STEPS = 14
MOST = 6
LIMITS = replace(QUICK, min_nodes=1, max_nodes=4)
ORDER = {RoundState.ACTIVE: 0, RoundState.DRAINING: 1, RoundState.BROKEN: 2, RoundState.CLOSED: 3}


class Schedule:
    """Faults in random order, each possible at that moment; ``told`` says what was done."""

    def __init__(self, crew: Crew, seed: int) -> None:
        self._crew, self._random = crew, random.Random(seed)
        self._away = False
        self._names = iter(f"n{number}" for number in range(1000))
        self.told: list[str] = []

    def begin(self) -> None:
        self._crew.join(*(next(self._names) for _ in range(3)))

    def step(self) -> None:
        """Do one thing, and let some time pass (often none)."""
        choices: list[tuple[Callable[[], None], int]] = [
            (self._fail_worker, 4),
            (self._kill, 2),
            (self._freeze, 3),
            (self._thaw, 3),
            (self._cut_off, 2),
            (self._join, 3),
            (self._leave, 1),
            (self._outage, 2),
            (self._lose_replies, 2),
            (self._compact, 1),
            (self._expire, 4),
        ]
        action = self._random.choices([each for each, _ in choices], [weight for _, weight in choices])[0]
        self.told.append(action.__name__)
        action()
        pause(self._random.choice([0.0, 0.0, 0.01, 0.05, 0.15]))

    def end(self) -> None:
        """All faults are over; what is dead is forgotten."""
        if self._away:
            self._outage()
        self._crew.backend.lose_replies(0)
        for agent in self._mine():
            agent.store.inner.cut_off(False)
            agent.thaw()
        self._crew.expire()
        if not self._crew.alive:
            self._join()

    def _mine(self) -> list[Agent]:
        return [a for a in self._crew.agents.values() if not (a.killed or a.left or a.ended.is_set())]

    def _some(self, agents: Iterable[Agent]) -> Agent | None:
        candidates = list(agents)
        return self._random.choice(candidates) if candidates else None

    def _fail_worker(self) -> None:
        if agent := self._some(self._crew.alive):
            agent.fail_worker()

    def _kill(self) -> None:
        if agent := self._some(self._mine()):
            agent.kill()

    def _freeze(self) -> None:
        if agent := self._some(self._crew.alive):
            agent.freeze()

    def _thaw(self) -> None:
        if agent := self._some(a for a in self._mine() if a.gate.is_shut):
            agent.thaw()

    def _cut_off(self) -> None:
        if agent := self._some(self._mine()):
            agent.store.inner.cut_off(agent.store.inner.reachable)

    def _join(self) -> None:
        if not self._away and len(self._mine()) < MOST:
            self._crew.join(next(self._names))

    def _leave(self) -> None:
        if not self._away and (agent := self._some(self._crew.alive)):
            agent.leave()

    def _outage(self) -> None:
        self._away = not self._away
        self._crew.backend.outage(self._away)

    def _lose_replies(self) -> None:
        self._crew.backend.lose_replies(self._random.randint(1, 4))

    def _compact(self) -> None:
        self._crew.backend.compact()

    def _expire(self) -> None:
        if not self._away:
            self._crew.expire(self._random.choice([0.5, 1.0, 2.5]))


def check_history(history: Sequence[RoundDocument]) -> None:
    """The round document only ever moved forward, one round per number, within the limits."""
    places = [(document.epoch, document.number, ORDER[document.state]) for document in history]
    assert places == sorted(places), "a round came back"
    by_number: dict[int, RoundDocument] = {}
    for document in history:
        first = by_number.setdefault(document.number, document)
        assert (document.nonce, document.members) == (first.nonce, first.members), f"two rounds {document.number}"
        assert LIMITS.min_nodes <= len(document.members) <= LIMITS.max_nodes
        ranks = [rank for m in document.members for rank in range(m.first_rank, m.first_rank + m.local_world_size)]
        assert ranks == list(range(document.world_size))
    newest: dict[str, Incarnation] = {}
    for number in sorted(by_number):
        for member in by_number[number].members:
            before = newest.get(member.node, member.incarnation)
            assert member.incarnation >= before, f"a replaced life of {member.node} is in round {number}"
            newest[member.node] = member.incarnation


def check_members(agents: Iterable[Agent], history: Sequence[RoundDocument]) -> None:
    """Whoever worked in a round read exactly what was committed, and never went back."""
    committed = {document.number: document for document in history if document.state is RoundState.ACTIVE}
    for agent in agents:
        numbers = [each.document.number for each in agent.trained]
        assert numbers == sorted(set(numbers)), f"{agent.name} worked in rounds {numbers}"
        for each in agent.trained:
            assert each.document == committed[each.document.number]
            assert each.entry(agent.name).incarnation == each.incarnation


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_of_faults_keeps_the_protocol_and_ends_in_one_round(seed: int) -> None:
    """At most one round per number, numbers only grow, all read the same ranks, no replaced life comes back; when
    the faults are over all that live work together, and a closed run stays closed."""
    with Crew(LIMITS) as crew:
        schedule = Schedule(crew, seed)
        schedule.begin()
        for _ in range(STEPS):
            schedule.step()
        schedule.end()
        eventually(crew.settled, lambda: f"{schedule.told} ended in\n{crew.describe()}")
        check_history(crew.history)
        check_members(crew.agents.values(), crew.history)
        _close(crew)
        check_history(crew.history)


def _close(crew: Crew) -> None:
    """Finish the run; afterwards nobody can change it any more."""
    members = [agent for agent in crew.alive if agent.newest == crew.document]
    for agent in members:
        agent.finish()
    closed = crew.await_document(lambda found: found.state is RoundState.CLOSED, "the run is not closed")
    assert closed.result is RunResult.SUCCEEDED
    for agent in members:
        assert agent.ended.wait(LIMIT_S)
        assert agent.error is None
    (late,) = crew.join("late")
    assert late.ended.wait(LIMIT_S)
    assert isinstance(late.error, RunClosedError)
    crew.expire()
    assert crew.document == closed
