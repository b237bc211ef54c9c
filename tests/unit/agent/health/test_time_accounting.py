"""What became of a node's time: every second is booked once, and no sum ever becomes smaller."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.agent.health.pages import HELD_BACK_S, TimeAccounting
from elastic_trainer.ipc.page import PHASES, Reading
from elastic_trainer.model import Phase
from tests.unit.agent.readings import reading

BEGAN = 1000.0


def told(accounts: TimeAccounting, living: list[Reading], now: float) -> dict[str, float]:
    """The seconds that are not 0, by phase."""
    accounts.settle(living, now)
    total = accounts.total(living, now)
    return {
        name.removeprefix("seconds."): value for name, value in total.items() if name.startswith("seconds.") and value
    }


def test_every_phase_is_there_from_the_start() -> None:
    """So that rates of it exist."""
    assert TimeAccounting(0.0).total([], 0.0) == {f"seconds.{phase}": 0.0 for phase in Phase}


def test_the_time_before_a_worker_is_that_of_its_agent() -> None:
    """What the agent did between, phase by phase, up to the beginning of the worker's process."""
    accounts = TimeAccounting(BEGAN)
    accounts.employ(1)
    accounts.mode(Phase.RENDEZVOUS, BEGAN + 5.0)
    accounts.mode(Phase.STARTING, BEGAN + 7.0)
    assert told(accounts, [], BEGAN + 10.0) == {}
    worker = reading(Phase.STARTING, born_at=BEGAN + 8.0, phase_at=BEGAN + 8.0)
    assert told(accounts, [worker], BEGAN + 10.0) == {"waiting": 5.0, "rendezvous": 2.0, "starting": 3.0}


def test_a_worker_that_dies_leaves_its_counts_and_a_gap() -> None:
    """The step that it was in is lost; the gap ends where the next one begins."""
    accounts = TimeAccounting(BEGAN)
    accounts.employ(1)
    accounts.mode(Phase.STARTING, BEGAN)
    first = reading(
        pid=1,
        born_at=BEGAN,
        phase_at=BEGAN + 10.0,
        seconds={Phase.TRAINING: 10.0},
        samples=40,
        steps=10,
        nonfinite=2,
        notes={"counts": {"save.ok": 1}},
    )
    told(accounts, [first], BEGAN + 11.0)
    accounts.bury(first, BEGAN + 12.0)
    accounts.mode(Phase.RENDEZVOUS, BEGAN + 12.0)
    second = reading(Phase.STARTING, pid=2, born_at=BEGAN + 15.0, phase_at=BEGAN + 15.0, samples=4, steps=1)
    assert told(accounts, [second], BEGAN + 16.0) == {
        "training": 10.0,
        "repeated": 2.0,
        "rendezvous": 3.0,
        "starting": 1.0,
    }
    total = accounts.total([second], BEGAN + 16.0)
    assert [total[name] for name in ("samples", "steps", "nonfinite_steps", "save.ok")] == [44, 11, 2, 1]


def test_a_slot_that_stays_empty_is_that_of_a_script_that_reports_nothing() -> None:
    """A minute later its time counts as training, once its agent has started it; before that, as what the agent did."""
    accounts = TimeAccounting(BEGAN)
    accounts.employ(1)
    accounts.mode(Phase.STARTING, BEGAN + 30.0)
    assert told(accounts, [], BEGAN + HELD_BACK_S) == {}
    assert told(accounts, [], BEGAN + HELD_BACK_S + 40.0) == {"waiting": 30.0, "training": 10.0}
    accounts.close(BEGAN + HELD_BACK_S + 50.0)
    assert sum(told(accounts, [], BEGAN + 500.0).values()) >= HELD_BACK_S + 50.0


def test_a_worker_that_reports_late_is_not_booked_twice() -> None:
    """Its imports took minutes: what was given to its slot meanwhile is not given to it again, neither at its death."""
    accounts = TimeAccounting(BEGAN)
    accounts.employ(1)
    accounts.mode(Phase.STARTING, BEGAN)
    told(accounts, [], BEGAN + 200.0)
    worker = reading(Phase.STARTING, born_at=BEGAN, phase_at=BEGAN)
    assert told(accounts, [worker], BEGAN + 210.0) == {"training": 140.0, "starting": 70.0}
    worker = reading(Phase.HEALING, born_at=BEGAN, phase_at=BEGAN + 220.0, seconds={Phase.STARTING: 220.0})
    assert sum(told(accounts, [worker], BEGAN + 230.0).values()) == 230.0
    accounts.bury(worker, BEGAN + 240.0)
    assert sum(told(accounts, [], BEGAN + 240.0).values()) == 240.0


def test_two_workers_are_two_slots() -> None:
    """Each with gaps and lives of its own."""
    accounts = TimeAccounting(BEGAN)
    accounts.employ(2)
    one = reading(pid=1, slot=0, born_at=BEGAN, phase_at=BEGAN + 9.0, seconds={Phase.TRAINING: 9.0})
    two = reading(pid=2, slot=1, born_at=BEGAN + 4.0, phase_at=BEGAN + 9.0, seconds={Phase.TRAINING: 5.0})
    assert told(accounts, [one, two], BEGAN + 9.0) == {"waiting": 4.0, "training": 14.0}
    accounts.bury(two, BEGAN + 10.0)
    accounts.employ(2)
    assert told(accounts, [one], BEGAN + 10.0) == {"waiting": 4.0, "training": 14.0, "repeated": 1.0}
    accounts.close(BEGAN + 12.0)
    assert told(accounts, [one], BEGAN + 12.0) == {"waiting": 6.0, "training": 14.0, "repeated": 1.0}


def test_a_page_that_is_a_moment_behind_takes_nothing_back() -> None:
    """A worker ends a phase a moment before its page says so."""
    accounts = TimeAccounting(BEGAN)
    healing = reading(Phase.HEALING, born_at=BEGAN, phase_at=BEGAN)
    assert told(accounts, [healing], BEGAN + 5.0) == {"healing": 5.0}
    training = reading(born_at=BEGAN, phase_at=BEGAN + 4.5, seconds={Phase.HEALING: 4.5})
    assert told(accounts, [training], BEGAN + 6.0) == {"healing": 5.0}


@dataclass
class Worker:
    """One that comes, changes its phase, and dies, with no second untold."""

    pid: int
    slot: int
    born_at: float
    phase: Phase = Phase.STARTING
    phase_at: float = 0.0
    spent: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def __post_init__(self) -> None:
        self.phase_at = self.born_at

    def enter(self, phase: Phase, now: float) -> None:
        self.spent[self.phase] += now - self.phase_at
        self.phase, self.phase_at = phase, now

    def read(self) -> Reading:
        return reading(
            self.phase,
            pid=self.pid,
            slot=self.slot,
            born_at=self.born_at,
            phase_at=self.phase_at,
            seconds=self.spent,
            steps=int(self.phase_at),
        )


EVENTS = st.tuples(
    st.sampled_from(["start", "start", "die", "enter", "look", "mode", "employ"]),
    st.integers(0, 2),
    st.sampled_from(PHASES),
    st.sampled_from([0.0, 0.5, 3.0, 20.0, 100.0]),
    st.sampled_from([0.0, 0.25, 5.0, 90.0]),
)


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=40))
def test_sums_never_become_smaller_and_hold_each_second_once(
    events: list[tuple[str, int, Phase, float, float]],
) -> None:
    """Whatever comes, dies and is reported late: at the end the sum is the time of all slots, to the second."""
    accounts, now, workers, pids = TimeAccounting(BEGAN), BEGAN, dict[int, Worker](), 0
    ended = dict.fromkeys(range(3), BEGAN)
    shown: dict[str, float] = {}
    accounts.employ(3)

    def check() -> None:
        nonlocal shown
        living = [worker.read() for worker in workers.values()]
        accounts.settle(living, now)
        total = accounts.total(living, now)
        assert all(total[name] >= value - 1e-9 for name, value in shown.items())
        shown = total

    for what, slot, phase, pause_s, age_s in events:
        now += pause_s
        worker = workers.get(slot)
        if what == "start" and worker is None:
            pids += 1
            born_at = max(ended[slot], now - age_s)
            workers[slot] = Worker(pids, slot, born_at)
        elif what == "die" and worker is not None:
            check()
            accounts.bury(workers.pop(slot).read(), now)
            ended[slot] = now
        elif what == "enter" and worker is not None:
            worker.enter(phase, now)
        elif what == "mode":
            accounts.mode(phase, now)
        elif what == "employ":
            accounts.employ(3)
        check()
    for worker in workers.values():
        accounts.bury(worker.read(), now)
    accounts.close(now)
    assert sum(value for name, value in accounts.counters.items() if name.startswith("seconds.")) == pytest.approx(
        3 * (now - BEGAN)
    )
    workers.clear()
    check()
