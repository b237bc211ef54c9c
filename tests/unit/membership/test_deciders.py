"""Whoever decides may die: a round is formed all the same, and few watch the nodes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from elastic_trainer.errors import ElasticTrainerError, JoinTimeoutError, RunClosedError
from elastic_trainer.membership.documents import RoundState
from elastic_trainer.membership.leader_priority import SENIORS
from tests.support.crew import QUICK, Agent, Crew, eventually

NAMES = "abcdefgh"
LIMITS = replace(QUICK, min_nodes=1, max_nodes=len(NAMES), last_call_s=60.0)


def crowd() -> Crew:
    """All of NAMES, joined in this order and in one round."""
    crew = Crew(LIMITS)
    crew.join(*NAMES)
    crew.await_round(NAMES)
    return crew


def followers(agents: Sequence[Agent]) -> set[str]:
    return {agent.name for agent in agents if agent.member.look().follows_nodes}


def test_only_the_three_most_senior_watch_the_nodes() -> None:
    """The others see the round alone, and work in it like everybody."""
    with crowd() as crew:
        eventually(lambda: followers(crew.alive) == set(NAMES[:SENIORS]), lambda: str(followers(crew.alive)))
        assert all(crew.agents[name].member.look().nodes == {} for name in NAMES[SENIORS:])


def test_the_next_in_line_takes_the_place_of_a_lost_decider() -> None:
    """The round that follows names the members, so the fourth learns from it that it is the third now."""
    with crowd() as crew:
        crew.agents["a"].kill()
        crew.expire()
        crew.await_round(NAMES[1:], after=1)
        eventually(lambda: followers(crew.alive) >= set("bcd"), lambda: str(followers(crew.alive)))
        assert not followers(crew.alive) & set("gh")


def test_a_junior_breaks_its_round_without_knowing_the_nodes() -> None:
    """Its worker fails: the round document is all that it needs."""
    with crowd() as crew:
        crew.agents["h"].fail_worker()
        after = crew.await_round(NAMES, after=1)
        assert "workers of h failed" in after.reason


def test_a_junior_that_loses_its_lease_comes_back() -> None:
    """It is told by its own keep-alive, not by a watch on the nodes."""
    with crowd() as crew:
        crew.agents["g"].freeze()
        crew.expire()
        crew.await_round("abcdefh", after=1)
        crew.agents["g"].thaw()
        crew.await_round("abcdefhg", after=2)


def test_a_junior_that_gives_up_says_who_is_there() -> None:
    """It asks the store, since it does not follow the nodes."""
    with Crew(replace(LIMITS, min_nodes=8)) as crew:
        crew.join(*NAMES[:5])
        junior = crew.agents["e"]
        assert not junior.member.look().follows_nodes
        with pytest.raises(JoinTimeoutError, match=r"present: a, b, c, d, e\)"):
            junior.member.await_round(0.2)


def test_a_spare_waits_as_long_as_the_others_train() -> None:
    """Without a view of the nodes it asks, when its time is over, whether the round still lives."""
    with Crew(replace(LIMITS, max_nodes=4)) as crew:
        crew.join(*"abcd")
        crew.await_round("abcd")
        (spare,) = crew.join("e")
        assert not spare.member.look().follows_nodes
        asked = spare.store.calls.count("transact")
        outcome: list[BaseException] = []

        def wait() -> None:
            try:
                spare.member.await_round(0.05)
            except ElasticTrainerError as error:
                outcome.append(error)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        eventually(lambda: spare.store.calls.count("transact") >= asked + 3, "the spare does not ask")
        assert waiting.is_alive(), outcome
        assert crew.document is not None
        assert crew.document.state is RoundState.ACTIVE
    waiting.join(60.0)
    assert [type(error) for error in outcome] == [RunClosedError]
