"""Agreement at boundaries: all ranks act at the same one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.steps.engine import EVERY_S, LONGEST_INTERVAL, Consensus, Flags, interval, smoothed
from tests.support.memory_store import ManualClock
from tests.unit.worker.ranks import run_ranks


class SteppedClock(ManualClock):
    """Advances by ``step_s`` whenever it is read."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s

    def monotonic(self) -> float:
        self.advance(self.step_s)
        return super().monotonic()


@given(boundary_s=st.floats(0.0, 1000.0))
def test_sums_are_about_four_a_second_and_at_every_boundary_when_steps_are_slow(boundary_s: float) -> None:
    """Never rarer than every fiftieth boundary, never more often than each."""
    count = interval(boundary_s)
    assert 1 <= count <= LONGEST_INTERVAL
    assert count == 1 or count * boundary_s <= EVERY_S * 1.001


def test_one_long_pause_moves_the_average_little_and_a_lasting_change_soon() -> None:
    """A checkpoint between two steps must not make the sums more frequent; steps that stay ten times longer must."""
    assert smoothed(0.0, 0.02) == 0.02
    assert smoothed(0.02, 5.0) <= 0.02 * 1.61
    average = 0.02
    for _ in range(12):
        average = smoothed(average, 0.2)
    assert average == pytest.approx(0.2, rel=0.1)
    for _ in range(12):
        average = smoothed(average, 0.02)
    assert average == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("step_s", [0.001, 0.02, 0.1, 3.0])
def test_a_wish_of_one_rank_reaches_all_at_the_same_boundary(step_s: float) -> None:
    """Rank 1 wants to stop at boundary 60; all learn it at one and the same later boundary, soon after."""

    def body(control: Control) -> list[tuple[int, Flags]]:
        consensus, heard = Consensus(control, SteppedClock(step_s * (1 + control.rank))), []
        for boundary in range(1, 200):
            late, early = control.rank == 1 and boundary >= 60, control.rank == 0 and boundary == 1
            wishes = Flags(stop=late, save=early, copy=control.rank > 0 and boundary >= 60)
            agreed = consensus.boundary(lambda wishes=wishes: wishes)  # type: ignore[misc]
            if agreed is not None and agreed != Flags():
                heard.append((boundary, agreed))
        consensus.drain()
        return heard

    first, *others = run_ranks(3, body)
    assert all(other == first for other in others)
    assert first[0] == (2, Flags(save=True))
    stops = [boundary for boundary, flags in first if flags.stop]
    assert 61 <= stops[0] <= 61 + LONGEST_INTERVAL
    assert not any(flags.save for _, flags in first[1:])
    assert all(flags.copy for _, flags in first[1:])


def test_a_new_phase_does_not_inherit_the_pace_of_the_old_one() -> None:
    """After fast steps, a slow phase agrees at its first boundaries at once, not after fifty of them."""

    def body(control: Control) -> int:
        clock = SteppedClock(0.001)
        consensus = Consensus(control, clock)
        for _ in range(120):
            consensus.boundary(Flags)
        consensus.reset()
        clock.step_s = 10.0
        for boundary in range(1, 60):
            agreed = consensus.boundary(lambda: Flags(stop=control.rank == 0))
            if agreed is not None and agreed.stop:
                consensus.drain()
                return boundary
        return 0

    assert set(run_ranks(2, body)) <= {2, 3}
    assert len(set(run_ranks(2, body))) == 1


def test_a_single_process_acts_at_once_when_urgent() -> None:
    """A signal is acted on at the next boundary; other wishes are asked for four times a second."""
    consensus, asked = Consensus(Control(), SteppedClock(0.01)), []

    def wishes() -> Flags:
        asked.append(True)
        return Flags(save=True)

    for _ in range(100):
        consensus.boundary(wishes)
    assert 3 <= len(asked) <= 8
    assert consensus.boundary(lambda: Flags(stop=True), urgent=True) == Flags(stop=True)
