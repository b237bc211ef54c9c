"""When a checkpoint is saved, in how many files, and what a request for one is answered."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.errors import ConfigError, StorageError
from elastic_trainer.ipc.page import SAVE_SUFFIX, PageReader, PageWriter
from elastic_trainer.worker.comm.groups import RankAssignment
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.saver import (
    FIELD,
    FIRST_S,
    LONGEST_S,
    MOST_WRITERS,
    SHARED_FROM,
    SHORTEST_S,
    Cadence,
    Experience,
    OnDemand,
    Shares,
    Writers,
    best_interval_s,
    following,
)


def lost(interval_s: float, seen: Experience) -> float:
    """Time that a training takes for each second of progress, with restarts that take none (Daly, equation 20)."""
    assert seen.cost_s is not None
    mean_s = seen.mean_time_to_failure_s
    return mean_s * math.expm1((interval_s + seen.cost_s) / mean_s) / interval_s


@given(cost_s=st.floats(0.01, 60.0), trained_s=st.floats(0.0, 1e6), failures=st.integers(0, 200))
def test_no_other_interval_loses_noticeably_less(cost_s: float, trained_s: float, failures: int) -> None:
    """Within the bounds, of all intervals between a quarter and four times as long."""
    seen = Experience(cost_s, trained_s, failures)
    best_s = best_interval_s(seen)
    assert SHORTEST_S <= best_s <= LONGEST_S
    others = (min(LONGEST_S, max(SHORTEST_S, best_s * 2.0 ** (power / 4))) for power in range(-8, 9))
    assert lost(best_s, seen) <= 1.001 * min(lost(each, seen) for each in others)


def test_known_intervals() -> None:
    """Before a save is measured; for a cheap one; for a dear one; and where a failure comes every half minute."""
    assert best_interval_s(Experience()) == FIRST_S
    assert best_interval_s(Experience(0.1)) == pytest.approx(65.7, abs=0.5)
    assert best_interval_s(Experience(2.0)) == pytest.approx(292.6, abs=1.0)
    assert best_interval_s(Experience(2.0, trained_s=2 * 86400.0)) == pytest.approx(880.0, rel=0.02)
    assert best_interval_s(Experience(600.0)) == LONGEST_S
    assert best_interval_s(Experience(0.1, trained_s=3000.0, failures=800)) == SHORTEST_S


def test_a_life_that_resumes_behind_its_last_save_has_failed() -> None:
    """One that had saved all before it ended has not, nor one that is known to have gone no further. A checkpoint
    without such a field says nothing. The cost follows the saves, and outlives no life."""
    seen = Experience(1.0, 5000.0, 2)
    assert Experience.from_checkpoint({FIELD: seen.kept(settled=False)}) == Experience(None, 5000.0, 3)
    assert Experience.from_checkpoint({FIELD: seen.kept(settled=True)}) == Experience(None, 5000.0, 2)
    assert Experience.from_checkpoint({FIELD: seen.kept(settled=False)}, lost=False) == Experience(None, 5000.0, 2)
    assert Experience.from_checkpoint({"length": 5}) == Experience()
    seen = Experience().after_save(1.0)
    assert seen.cost_s == 1.0
    assert seen.after_save(3.0).cost_s == pytest.approx(1.6)


def test_a_cadence_is_checked() -> None:
    seen = Experience(0.1)
    assert Cadence(None, None).interval_s(seen) is None
    assert Cadence(None, 5.0).interval_s(seen) == 5.0
    assert Cadence(None, "auto").interval_s(seen) == best_interval_s(seen)
    for wrong in (0.0, -1.0, math.nan, "often"):
        with pytest.raises(ConfigError, match="checkpoint_every_s"):
            Cadence(None, wrong)
    with pytest.raises(ConfigError, match="checkpoint_every_steps"):
        Cadence(0)


@pytest.mark.parametrize(
    ("rank", "world", "local", "expected"),
    [
        (0, 1, 1, Shares(1, 0)),
        (3, 4, 4, Shares(1, 0)),
        (4, 12, 4, Shares(3, 1)),
        (8, 12, 4, Shares(3, 2)),
        (20, 64, 1, Shares(MOST_WRITERS, 20)),
    ],
)
def test_each_node_has_a_file_up_to_a_limit(rank: int, world: int, local: int, expected: Shares) -> None:
    """Unless rank 0 is to write alone, or the model is small."""
    assignment = RankAssignment(1, rank, world, rank % local, local)
    assert Shares.among(assignment) == expected
    assert Shares.among(assignment, Writers.RANK0) == Shares()
    small, large = torch.nn.Linear(8, 8), torch.nn.Linear(SHARED_FROM // 4, 1, device="meta")
    assert [expected.worthwhile(each) for each in (small, large)] == [False, expected.parts > 1]


def test_copies_go_to_the_next_node() -> None:
    """Of nodes of two ranks each; past those without an agent of this package, and to nobody from or among such."""
    rows = ["a", "a", "b", "b", "", "", "c", "c"]
    assert [following(rows, rank) for rank in range(8)] == ["b", "b", "c", "c", "", "", "a", "a"]
    assert following(["a", "a"], 1) == ""


class Side:
    """The agent's side: writes requests, reads answers."""

    def __init__(self, directory: Path, *, saves: bool = True) -> None:
        page = directory / "0-1.page"
        self.worker = OnDemand(HeartbeatReporter(PageWriter.create(page)), saves=saves)
        self.worker._tracker.beat()
        self._reader, self._file = PageReader(page), page.with_suffix(SAVE_SUFFIX)

    def asks(self, name: str) -> None:
        self._file.write_text(name)

    @property
    def answer(self) -> Any:
        reading = self._reader.read()
        return None if reading is None else reading.notes.get("on_demand")


def test_a_request_is_answered_when_its_checkpoint_is_durable(tmp_path: Path) -> None:
    """Once: the file stays, and asks for no second one. A save that makes room for a newer one leaves the request to
    that; a state that is durable already is the answer at once, amid an evaluation, say."""
    side = Side(tmp_path)
    worker = side.worker
    assert not worker.wanted(1)
    side.asks("a")
    assert worker.wanted(2)
    worker.covered(2)
    assert not worker.wanted(3)
    worker.report(1, "step-1", None)  # the one before, which was being written
    assert [side.answer] == [None]
    worker.report(2, "step-2", None)
    assert side.answer == {"id": "a", "name": "step-2"}
    assert not worker.wanted(4)
    side.asks("b")
    assert worker.wanted(4)
    worker.covered(4)
    worker.given_up(4)
    worker.covered(5)
    worker.report(5, "step-5", None)
    assert side.answer == {"id": "b", "name": "step-5"}
    side.asks("c")
    assert not worker.wanted(5)
    assert side.answer == {"id": "c", "name": "step-5"}


def test_a_save_that_fails_is_the_answer_with_its_exit_code(tmp_path: Path) -> None:
    """Whether it fails at once or while it is written; and so is the lack of a directory."""
    side = Side(tmp_path)
    for step, asked, error, code in ((2, "a", StorageError("disk full"), 73), (3, "b", OSError("gone"), 1)):
        side.asks(asked)
        assert side.worker.wanted(step)
        side.worker.covered(step)
        side.worker.report(step, "", error)
        assert side.answer == {"id": asked, "name": "", "problem": str(error), "code": code}
    (tmp_path / "none").mkdir()
    lacking = Side(tmp_path / "none", saves=False)
    lacking.asks("a")
    assert not lacking.worker.wanted(2)
    assert (lacking.answer["id"], lacking.answer["code"]) == ("a", 78)
    assert lacking.answer["problem"].startswith("the job has no checkpoint directory")
