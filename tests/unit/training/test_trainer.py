"""What the loop decides when the membership changes: by the state that all ranks share, and nothing twice."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_trainer.jobs import trainer
from elastic_trainer.jobs.config import load_job
from elastic_trainer.jobs.files import History
from elastic_trainer.jobs.task import RunLength
from elastic_trainer.jobs.trainer import Run
from elastic_trainer.model import Cursor

LENGTH = RunLength(samples=100, steps_per_epoch=4, epochs=2, steps=8)


def _run(*, step: int = 4, cursor: Cursor | None = None) -> Any:
    """A run without processes: where it stands and what it remembers."""
    run: Any = Run.__new__(Run)
    run.config = load_job("mnist", ["logging.loss_every=10"])
    run.history = History()
    run.session = SimpleNamespace(round=3, step_number=step, cursor=cursor or Cursor(0, 100))
    run.job = SimpleNamespace(length=LENGTH, mesh={})
    return run


def _peer(run: Any) -> Any:
    """A rank that joined just now: its state is that of ``run``, as it travels between ranks."""
    joined = _run(step=run.session.step_number, cursor=run.session.cursor)
    joined.history.load_state_dict(json.loads(json.dumps(run.history.state_dict())))
    return joined


@pytest.mark.parametrize("known", [0.5, None])
def test_a_loss_is_counted_a_step_later_unless_the_ranks_have_changed_since(known: float | None) -> None:
    """Then it is this rank's own at best, and the history may be a peer's, which has counted that step."""
    run, told = _run(), list[tuple[int, float]]()
    run._loss = 0.9
    run.reporter = SimpleNamespace(looked=lambda moment, loss, lr: told.append((moment, loss)))
    run.history.await_loss(partial(run._looked, lambda: known, 10, 0.1, 32))
    assert run.history.add(11, 0, 0, 0.1, {}).train_loss == known
    assert told == ([] if known is None else [(10, 0.5)])
    assert run._loss == (known or 0.9)


def test_a_rank_that_joins_before_a_save_takes_part_in_it() -> None:
    """Whether a save is due follows from the shared state: survivor and newcomer agree before it and after it."""
    survivor = _run()
    assert not survivor._save_due()
    survivor.history.add(4, 1, 0, 0.1, {"accuracy": 0.9})
    assert survivor._save_due()
    assert _peer(survivor)._save_due()
    survivor.history.saved_step = 4
    assert not survivor._save_due()
    assert not _peer(survivor)._save_due()


def test_a_model_that_rank_0_did_not_come_to_write_is_written_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed between the checkpoint, which all have agreed on, and the file of the model."""
    exported = list[tuple[str, int]]()

    def export(_: object, path: Path, step: int, notes: object) -> None:
        exported.append((path.name, step))
        path.touch()

    monkeypatch.setattr(trainer, "export", export)
    monkeypatch.setattr(trainer, "exported_step", lambda path: 8 if path.exists() else None)
    killed = _run(step=8, cursor=Cursor(1, 100))
    killed.history.add(8, 2, 0, 0.1, {"accuracy": 0.9})
    killed.history.saved_step = 8
    survivor = _peer(killed)
    survivor.session.is_rank0, survivor.session.phase = True, lambda _: nullcontext()
    survivor.session.module, survivor.job.directory = None, tmp_path
    survivor._settle()
    survivor._settle()
    assert exported == [("best_model.safetensors", 8), ("final_state.safetensors", 8)]


def test_behind_the_last_step_all_meet_once_and_whoever_is_rank_0_then_makes_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may die in its last writes while the others wait for it. A rank that gets the state of one which has met
    the others already does not wait: they would not come again."""
    exported, met = list[str](), list[str]()
    monkeypatch.setattr(trainer, "export", lambda _, path, *__: exported.append(path.name))
    run = _run(step=8, cursor=Cursor(1, 100))
    run.history.add(8, 2, 0, 0.1, {"accuracy": 0.9})
    run.history.saved_step = 8

    def barrier() -> None:
        met.append("survivor")
        run.session.is_rank0 = True

    run.session = SimpleNamespace(**vars(run.session), is_rank0=False, phase=lambda _: nullcontext(), barrier=barrier)
    run.session.module, run.session.world_size, run.job.directory = None, 1, tmp_path
    run._conclude()
    assert exported == ["best_model.safetensors", "final_state.safetensors"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    joined = _peer(run)
    joined.session = SimpleNamespace(**vars(joined.session), is_rank0=False, barrier=lambda: met.append("newcomer"))
    joined._conclude()
    assert met == ["survivor"]


def test_only_the_best_and_the_last_state_are_saved_on_purpose() -> None:
    run = _run(step=3, cursor=Cursor(0, 75))
    run.history.add(2, 0, 50, 0.1, {"accuracy": 0.9})
    run.history.add(3, 0, 75, 0.1, {"accuracy": 0.8})
    assert not run._save_due()
    run.session.step_number, run.session.cursor = 8, Cursor(1, 100)
    run.history.add(8, 2, 0, 0.1, {"accuracy": 0.7})
    assert run._save_due()
