"""Who has gone another way than the other ranks, from counts alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_trainer.torch_internals import HashStore
from elastic_trainer.worker.comm.control import Stand, Whereabouts


class Rank:
    """Stays somewhere for long; ``look`` is what it does then."""

    def __init__(self, number: int, store: Any) -> None:
        control: Any = SimpleNamespace(rank=number, alone=True, begun=0)
        self._it = Whereabouts(store, control, f"n{number}", self._stand, lambda: 0.0, lambda: None)

    def _stand(self) -> Stand:
        raise AssertionError("its thread does not run")

    def look(self, collectives: int, stand: Stand) -> str:
        return self._it._compared(stand, collectives)


@pytest.mark.parametrize(
    ("begun", "collectives", "found"),
    [
        (7, 3, "rank 1 (node n1) evaluates after step 26, and rank 0 (node n0) is inside step 27"),
        (7, 4, ""),  # it has come by there: the other one is late
        (6, 3, ""),  # the same step, which the other one has given up
    ],
)
def test_a_rank_inside_a_later_step_that_has_made_fewer_calls_has_gone_another_way(
    begun: int, collectives: int, found: str
) -> None:
    """Then the other one is told the same, though it began first."""
    store = HashStore()
    outside, inside = Rank(1, store), Rank(0, store)
    assert outside.look(4, Stand(False, 6, 26, "evaluates")) == ""
    assert inside.look(collectives, Stand(True, begun, 26, "")) == found
    assert outside.look(4, Stand(False, 6, 26, "evaluates")) == found
