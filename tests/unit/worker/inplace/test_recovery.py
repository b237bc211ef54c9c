"""What a worker says about a round that it could not enter; all else of recovery is played by the simulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_trainer.errors import RoundBrokenError
from elastic_trainer.ipc.channel import Failed
from elastic_trainer.worker.comm.control import summary
from elastic_trainer.worker.comm.groups import RankAssignment
from elastic_trainer.worker.recovery import AgentLink, InPlaceRecovery

REFUSED = RoundBrokenError("connect: refused, remote=[10.0.0.2]:25001$1")


@pytest.mark.parametrize(
    ("forms", "said"),
    [
        (False, {"number": 4, "forming": True, "tried": "10.0.0.2", "loopback": ""}),
        (True, {"number": 4}),
    ],
)
def test_only_groups_that_do_not_form_are_a_matter_of_the_network(
    forms: bool, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the address that was tried is named. What fails later, fails between ranks that reached each other."""
    heard: list[Failed] = []

    def form(place: RankAssignment, broken: object) -> None:
        if not forms:
            raise REFUSED

    def refuse(*_: object) -> None:
        raise REFUSED

    link: Any = AgentLink()
    monkeypatch.setattr(link, "send", heard.append)
    monkeypatch.setattr(link, "wait", lambda holds, timeout_s: None)
    groups: Any = SimpleNamespace(form=form, abandon=lambda: None)
    state: Any = SimpleNamespace(show=lambda phase: phase)
    recovery = InPlaceRecovery(link, groups, state)
    monkeypatch.setattr(recovery, "_come_to_one_state", refuse)
    assert not recovery._form(RankAssignment(4, 0, 2, 0, 1))
    assert heard == [Failed(error=summary(REFUSED), **said)]
