"""Members of one run on the memory store: rounds formed, broken, followed up and closed."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from elastic_trainer.errors import JoinTimeoutError, RunClosedError
from elastic_trainer.membership.documents import RoundDocument, RoundState, RunResult
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.presence import Presence
from elastic_trainer.store.session import LeaseSession
from tests.support.crew import KEYS, LIMIT_S, QUICK, TTL_S, Crew, eventually, soon
from tests.support.memory_store import MemoryStore

ALL_OF_THREE = replace(QUICK, max_nodes=3, last_call_s=LIMIT_S)
"""However slow the machine is, the first round waits for the third node."""


def three() -> Crew:
    """Nodes a, b and c of 2 to 3."""
    crew = Crew(ALL_OF_THREE)
    crew.join("a", "b", "c")
    return crew


def test_members_read_the_same_first_round() -> None:
    """All of max: one round, the same document for all, ranks in the order of arrival."""
    with three() as crew:
        first = crew.await_round("abc")
        assert first.number == 1
        assert [agent.newest for agent in crew.agents.values()] == [first] * 3
        assert [member.first_rank for member in first.members] == [0, 1, 2]


def test_too_few_nodes_give_up_with_the_reason() -> None:
    """Below min a node waits no longer than its join timeout, and says who was there."""
    with Crew() as crew:
        (agent,) = crew.join("a")
        eventually(lambda: "a" in agent.member.look().nodes, "a does not see itself")
        with pytest.raises(JoinTimeoutError, match=r"fewer than 2 nodes were ready within 0.2 s \(present: a\)"):
            agent.member.await_round(0.2)


def test_all_workers_failing_at_once_is_one_round_more() -> None:
    """A failed collective fails every node at the same moment; that is still one failure."""
    with three() as crew:
        crew.await_round("abc")
        for agent in crew.agents.values():
            agent.fail_worker()
        assert crew.await_round("abc", after=1).number == 2


def test_a_round_that_was_broken_before_a_member_saw_it_is_passed_over() -> None:
    """A member that was slow to look is waited for no longer than it takes to say that it is free again."""
    with three() as crew:
        crew.await_round("abc")
        slow = crew.agents["b"]
        reached = threading.Event()

        def hold_news() -> None:
            """The decider is about to write: stop b from hearing of it."""
            if crew.history[-1].state is RoundState.BROKEN and not reached.is_set():
                slow.store.inner.cut_off(True)
                reached.set()

        crew.agents["a"].store.before_round_write = hold_news
        crew.agents["c"].fail_worker()
        assert reached.wait(LIMIT_S)
        eventually(lambda: crew.agents["c"].newest is not None and crew.agents["c"].newest.number == 2, crew.describe)
        crew.agents["c"].fail_worker()
        crew.await_document(lambda found: found.number == 2 and found.state is RoundState.BROKEN, "not broken")
        crew.backend.compact()  # so that it is told the newest state alone
        slow.store.inner.cut_off(False)
        third = crew.await_round("abc", after=2)
        assert third.number == 3
        assert 2 not in [each.document.number for each in slow.trained]


def test_a_newcomer_below_max_is_taken_in_behind_the_others() -> None:
    """A planned change: the round is opened, everybody joins again, the newcomer gets the last rank."""
    with Crew() as crew:
        crew.join("a", "b")
        crew.await_round("ab")
        crew.join("c")
        joined = crew.await_round("abc", after=1)
        assert joined.reason == "node c joins"
        assert RoundState.DRAINING in [document.state for document in crew.history]
        assert RoundState.BROKEN not in [document.state for document in crew.history]


def test_a_node_that_leaves_is_missed_at_once() -> None:
    """No lease time passes: the key of a node that leaves goes with it."""
    with three() as crew:
        crew.await_round("abc")
        crew.agents["c"].leave()
        assert crew.await_round("ab", after=1).number == 2


def test_the_run_is_closed_when_all_are_done_and_stays_closed() -> None:
    """All finish: closed with success. Whoever comes later is told, and nothing changes any more."""
    with three() as crew:
        crew.await_round("abc")
        for agent in crew.agents.values():
            agent.finish()
        for agent in crew.agents.values():
            assert agent.ended.wait(LIMIT_S)
            assert agent.error is None
        closed = crew.document
        assert closed is not None
        assert (closed.state, closed.result) == (RoundState.CLOSED, RunResult.SUCCEEDED)
        (late,) = crew.join("late")
        assert late.ended.wait(LIMIT_S)
        assert isinstance(late.error, RunClosedError)
        assert late.error.succeeded
        crew.expire()
        assert crew.document == closed


def test_a_done_node_stays_until_the_others_are_done() -> None:
    """The first to finish waits, and its neighbours' work is not disturbed."""
    with three() as crew:
        crew.await_round("abc")
        crew.agents["b"].finish()
        crew.expire()
        assert not crew.agents["b"].ended.is_set()
        assert len(crew.history) == 1
        crew.agents["a"].finish()
        crew.agents["c"].finish()
        assert crew.agents["b"].ended.wait(LIMIT_S)


def test_an_outage_of_any_length_changes_nothing() -> None:
    """The store is away for ten lease times: afterwards the same round stands."""
    with three() as crew:
        first = crew.await_round("abc")
        crew.backend.outage(True)
        crew.clock.advance(10 * TTL_S)
        eventually(lambda: not any(a.member.look().connected for a in crew.agents.values()), "nobody saw the outage")
        crew.backend.outage(False)
        eventually(lambda: all(a.member.look().connected for a in crew.agents.values()), "not connected again")
        crew.expire()
        assert crew.document == first
        assert [agent.newest for agent in crew.agents.values()] == [first] * 3


def test_a_decider_whose_key_is_gone_writes_nothing() -> None:
    """Its lease ends between its decision and its write, and nobody else has acted yet: the write must fail, or the
    round would name a node that does not exist."""
    with Crew(ALL_OF_THREE) as crew:
        (leader,) = crew.join("a")
        crew.join("b", "c", limits=replace(ALL_OF_THREE, deputy_delay_s=LIMIT_S))
        crew.await_round("abc")
        old = leader.trained[0].incarnation.create_revision
        reached = threading.Event()

        def lose_the_lease() -> None:
            if crew.history[-1].state is RoundState.BROKEN and not reached.is_set():
                crew.observer.revoke(leader.session.lease_id, soon())
                reached.set()

        leader.store.before_round_write = lose_the_lease
        crew.agents["c"].fail_worker()
        assert reached.wait(LIMIT_S)
        crew.expire()
        second = crew.await_document(lambda found: found.number == 2, "no round was formed")
        assert old not in [member.create_revision for member in second.members]


def test_listeners_hear_of_rounds_in_order() -> None:
    """What the deciding thread tells never goes back, and ends with the newest."""
    with three() as crew:
        told: list[RoundDocument] = []
        crew.agents["c"].member.on_round(told.append)
        crew.await_round("abc")
        for number in range(1, 4):
            crew.agents["a"].fail_worker()
            crew.await_round("abc", after=number)
        eventually(lambda: bool(told) and told[-1] == crew.document, "the newest round was not told")
        order = {RoundState.ACTIVE: 0, RoundState.BROKEN: 1}
        places = [(document.number, order[document.state]) for document in told]
        assert places == sorted(set(places))


def test_nothing_is_decided_by_a_node_that_is_not_there() -> None:
    """A member that never announced itself watches and writes nothing."""
    with Crew(replace(QUICK, max_nodes=2)) as crew:
        store = MemoryStore(crew.backend)
        session = LeaseSession(store, TTL_S, soon(), clock=crew.clock)
        watcher = Member(store, KEYS, Presence(store, KEYS, "w", session), replace(QUICK, deputy_delay_s=0.0))
        watcher.start(soon())
        crew.join("a", "b")
        first = crew.await_round("ab")
        crew.agents["b"].fail_worker()
        crew.await_round("ab", after=first.number)
        entries = crew.observer.range(KEYS.events, soon()).items
        assert entries
        assert all(b'"by":"w"' not in entry.value for entry in entries)
        watcher.leave()
        store.close()
