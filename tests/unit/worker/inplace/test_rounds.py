"""What a worker says about a round that it could not enter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_trainer.errors import RoundBrokenError
from elastic_trainer.ipc.messages import Ready
from elastic_trainer.worker.comm.groups import RankAssignment
from elastic_trainer.worker.recovery import Formed, Rounds

REFUSED = RoundBrokenError("connect: refused, remote=[10.0.0.2]:25001$1")


class Link:
    """An agent that listens."""

    over = 0

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def ready(self, offer: Ready) -> None:
        pass

    def await_formation(self, first: int, idle: object) -> RankAssignment:
        return RankAssignment(first, 0, 2, 0, 1)

    def failed(self, number: int, error: str, **more: Any) -> None:
        self.said.append({"number": number} | more)

    def await_over(self, number: int) -> bool:
        return True


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def rounds(link: Link) -> Rounds:
    nothing: Any = SimpleNamespace(number=3, leave=lambda planned: None)
    agent: Any = link
    return Rounds(agent, nothing, nothing, nothing)


def test_only_groups_that_do_not_form_are_a_matter_of_the_network(rounds: Rounds, link: Link) -> None:
    """What fails later, while the ranks come to one state, fails between ranks that reached each other."""
    rounds.give_up(4, REFUSED)
    assert link.said == [{"number": 4}]


def test_the_address_that_was_tried_in_vain_is_named(
    rounds: Rounds, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its groups form. The worker tries again in the next round."""
    formed: Any = Formed(SimpleNamespace(), 0.0)  # type: ignore[arg-type]
    outcomes = [REFUSED, formed]

    def form(rounds: Rounds, place: RankAssignment) -> Formed:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    monkeypatch.setattr(Rounds, "_form", form)
    assert rounds.enter(Ready(number=0), lambda: None, lambda: None) is formed
    assert link.said == [{"number": 4, "forming": True, "tried": "10.0.0.2", "loopback": ""}]
