"""What survives of a job, whether its data was used exactly once, and how files are read while they grow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.local.ledger import FileTail, LedgerTail, Line, LineKind, audit, end_of, last_error, lineage, parse
from tests.support.story import committed, epochs


def divide(samples: Sequence[int], world: int) -> list[tuple[int, ...]]:
    """A contiguous division of a batch over ranks, some of which may get nothing."""
    each = -(-len(samples) // world)
    return [tuple(samples[rank * each : (rank + 1) * each]) for rank in range(world)]


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Line], int, int]:
    """A correct job under an arbitrary schedule of failures: its lines, the data set's size, steps rolled back."""
    size, batch = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    plan = [step for epoch in epochs(size, batch, draw(st.integers(1, 3))) for step in epoch]
    lines: list[Line] = []
    done, round_, t, rolled_back = 0, 0, 0.0, 0
    while done < len(plan):
        round_ += 1
        world = draw(st.integers(1, 4))
        last = round_ >= 6
        until = len(plan) if last else draw(st.integers(done, len(plan)))
        for index in range(done, until):
            epoch, samples = plan[index]
            for rank, part in enumerate(divide(samples, world)):
                t += 0.01
                lines.append(
                    committed(index + 1, round_, t, samples=part, of=len(samples), epoch=epoch, rank=rank, world=world)
                )
        resume = until if until == len(plan) else draw(st.integers(done, until))
        rolled_back += until - resume
        done = resume
    return draw(st.permutations(lines)), size, rolled_back


@given(histories())
def test_any_schedule_of_failures_is_exact_when_each_round_resumes_where_it_says(
    history: tuple[list[Line], int, int],
) -> None:
    """Work that is rolled back and repeated in a later round counts once, in whatever order the lines are read."""
    lines, size, rolled_back = history
    result = audit(lines, size)
    assert result.exact, result.reason
    assert result.steps_rolled_back == rolled_back
    assert (result.repeated, result.missing, result.unrecorded, result.steps_skipped) == (0, 0, 0, 0)
    assert [commit.step for commit in lineage(lines)] == list(range(1, result.steps + 1))


@given(histories(), st.data())
def test_a_sample_that_a_living_rank_did_not_use_is_missing(
    history: tuple[list[Line], int, int], data: st.DataObject
) -> None:
    """Taking one sample out of one surviving line makes the audit say so, and how many."""
    lines, size, _ = history
    surviving = {(commit.round, commit.step) for commit in lineage(lines)}
    index = data.draw(
        st.sampled_from([i for i, line in enumerate(lines) if line.samples and (line.round, line.step) in surviving])
    )
    lines = list(lines)
    lines[index] = lines[index].model_copy(update={"samples": lines[index].samples[1:]})
    result = audit(lines, size)
    last = max(line.epoch for line in lines)
    if lines[index].epoch < last:
        assert result.missing == 1
    if result.exact:  # only where the job might have been stopped there: then it is not claimed to be whole
        assert not result.epochs[-1].ended


def test_a_rank_that_is_silent_in_the_middle_of_a_round_has_not_used_its_samples() -> None:
    """Others cannot commit a second step without it, so its samples are missing."""
    silent = [committed(step, samples=[2 * step - 2], of=2, rank=0, world=2) for step in (1, 2, 3)]
    result = audit([*silent, committed(4, 2, epoch=1)], size=6)
    assert (result.exact, result.unrecorded, result.missing) == (False, 1, 2)


def test_an_epoch_is_judged_whole_once_it_has_reached_its_smaller_last_batch() -> None:
    """A job that stops in an epoch before has missed nothing, and the reason says how far it came. A gap in the step
    numbers is never exact."""
    result = audit([committed(1, samples=range(4))], size=12)
    assert (result.exact, result.reason) == (True, "4 samples of epoch 0 once, then the job stopped in it")
    result = audit([committed(1, samples=[0, 1, 2]), committed(2, samples=[5])], size=6)
    assert (result.exact, result.missing) == (False, 2)
    result = audit([committed(1, samples=[0]), committed(3, samples=[1])])
    assert (result.exact, result.steps_skipped) == (False, 1)


def test_of_an_epoch_that_an_earlier_life_began_nothing_is_missing() -> None:
    """These lines cannot tell what was used before; what is repeated here still is."""
    lines = [committed(3, samples=[4, 5]), committed(4, epoch=1, samples=range(6))]
    result = audit(lines, size=6)
    assert (result.exact, result.missing) == (True, 0)
    assert "2 samples of epoch 0 once, an earlier life began it" in result.reason
    assert not audit([committed(3, samples=[4, 4]), *lines[1:]], size=6).exact


@pytest.mark.parametrize(
    ("lines", "reason"), [([], "no step was recorded"), ([committed(1)], "the steps list no samples")]
)
def test_nothing_recorded_is_not_exact(lines: list[Line], reason: str) -> None:
    result = audit(lines)
    assert (result.exact, result.reason) == (False, reason)


def test_lines_are_read_leniently_about_new_fields_and_strictly_about_the_rest() -> None:
    """An unknown field is passed over, NaN is a loss, and a torn or foreign line is None."""
    good = {"event": "step", "t": 1.5, "step": 3, "samples": [1, 2], "loss": float("nan"), "later": True}
    line = parse(json.dumps(good))
    assert line is not None
    assert (line.event, line.step, line.samples) == (LineKind.STEP, 3, (1, 2))
    assert parse(json.dumps(good)[:-5]) is None
    assert parse('{"event": "dance", "t": 1}') is None


def test_a_line_is_seen_once_and_only_when_it_is_complete(tmp_path: Path) -> None:
    """A line torn by a kill never appears; one that is completed later appears then."""
    path = tmp_path / "log"
    tail = FileTail(path)
    assert tail.read() == []
    path.write_text("one\ntwo")
    assert tail.read() == ["one"]
    assert tail.read() == []
    with path.open("a") as file:
        file.write(" more\nthree\n")
    assert tail.read() == ["two more", "three"]


def test_lines_of_all_processes_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    """New files are found, and what cannot be read hides no other line."""
    tail = LedgerTail(tmp_path)
    (tmp_path / "n0-0-1.jsonl").write_text('{"event": "step", "t": 2.0, "step": 2}\nnot json\n')
    (tmp_path / "n1-0-2.jsonl").write_text('{"event": "step", "t": 1.0, "step": 1}\n')
    assert [line.step for line in tail.read()] == [1, 2]
    (tmp_path / "n2-0-3.jsonl").write_text('{"event": "closed", "t": 3.0, "step": 2, "status": "done"}\n')
    assert [line.status for line in tail.read()] == ["done"]


TRACEBACK = """\
started
Traceback (most recent call last):
  File "train.py", line 1, in <module>
    import nosuchthing

ModuleNotFoundError: No module named 'nosuchthing'
E1124 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)
"""
SYNTAX = """\
  File "train.py", line 1
    x y
      ^
SyntaxError: invalid syntax
"""
TORCHRUN = """\
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1032, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
====
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ""),
        ("epoch 1: Error rate 5 %\n", ""),
        (TRACEBACK, "ModuleNotFoundError: No module named 'nosuchthing'"),
        (TRACEBACK + SYNTAX, "SyntaxError: invalid syntax"),
        (TRACEBACK + TORCHRUN, "ModuleNotFoundError: No module named 'nosuchthing'"),
        ("error: no such key (did you mean 'lr'?)\n" + TORCHRUN, "no such key (did you mean 'lr'?)"),
        (TORCHRUN, ""),
        (TORCHRUN.replace("errors.ChildFailedError:", "api.SignalException: Process 7 got signal: 15"), ""),
        (
            "".join(f"[rank3]: {line}\n" for line in TRACEBACK.splitlines()),
            "ModuleNotFoundError: No module named 'nosuchthing'",
        ),
        ("elastic-trainer: the run is full\n", "the run is full"),
    ],
)
def test_the_last_error_is_the_scripts_own(text: str, error: str) -> None:
    """Of a traceback, a syntax error or a sentence of this package; what torchrun adds is passed over."""
    assert last_error(text.splitlines()) == error


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    """64 KiB of it; a log that is not there has no lines."""
    log = tmp_path / "n0.log"
    log.write_text("first\n" + "x" * (64 << 10) + "\nlast\n")
    assert end_of(log)[-1] == "last"
    assert "first" not in end_of(log)
    assert end_of(tmp_path / "none") == []
