"""What rounds leave behind in a process that lives through many of them."""

from __future__ import annotations

import random
from pathlib import Path

import psutil
import pytest

from elastic_trainer.clock import pause
from tests.bench.sever import Notes, Trial
from tests.drills.inplace.leading import Worker, leading

pytestmark = pytest.mark.timeout(900)

GROUP_TIMEOUT_S = 25.0
"""Also how long a rank may stand still, or a bucket of 25 MB take, on a loaded machine: then nobody ends the round."""
ROUNDS = 16
"""So many that one descriptor or thread left by each is more than one group and a few."""
FEW = 6
"""What a round holds differs by threads that are just ending."""
ONE_GROUP = {"descriptors": 9, "threads": 7}
"""What is noted may be noted while the group of the round before is still there: it is kept for a second."""


def test_rounds_that_end_in_the_middle_of_messages_leave_nothing_behind(tmp_path: Path) -> None:
    """Each round ends with a frozen rank, in buckets so large that some are cut in the middle.

    Such a collective holds its group until the group's timeout, and no longer: after it there are as many descriptors
    and threads as in the beginning, in every process.
    """
    chance = random.Random(5)
    with leading(tmp_path) as lead:
        trial = Trial(lead, 32.0, 25.0, GROUP_TIMEOUT_S, stuck_s=60.0)
        trial.form()
        for number in range(ROUNDS):
            pause(chance.random() * 0.05)
            trial.freeze(trial.workers[number % 3])
        assert trial.result.stuck == 0
        lead.wait(lambda: all(_only_one_group(trial.notes[w.name], w) for w in trial.workers), "all other groups to go")
        trial.freeze(trial.workers[0])  # one more round, in which what is left is counted
    for notes in trial.notes.values():
        first, second, last = notes.rounds[0], notes.rounds[1], notes.rounds[-1]
        for name, group in ONE_GROUP.items():
            seen = [each[name] for each in notes.rounds]
            assert last[name] <= max(first[name] + group, second[name]) + FEW, (name, seen)


def _only_one_group(notes: Notes, worker: Worker) -> bool:
    process = psutil.Process(worker.pid)
    held = {"descriptors": process.num_fds(), "threads": process.num_threads()}
    return all(held[name] <= notes.rounds[0][name] + FEW for name in held)
