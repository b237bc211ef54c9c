"""What a training does while storage is behind, and with saves that fail behind its back."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
import torch

from elastic_trainer.errors import NonFiniteError, StorageError
from elastic_trainer.model import Cursor
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter
from elastic_trainer.worker.state.cadence import Cadence, Memory
from elastic_trainer.worker.state.saver import Saver, WhenBehind
from elastic_trainer.worker.state.training_state import Position, TrainingState
from tests.integration.checkpoint.test_background import LIMIT_S, Gated


class Trained:
    """A model whose weights hold its step number, saved to storage that takes as long as the test wants."""

    def __init__(self, directory: Path, when_behind: WhenBehind) -> None:
        self.manager, self.tracker = Gated(directory), HeartbeatReporter()
        self.module = torch.nn.Linear(100, 100)
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.position = Position(cursor=Cursor())
        device = torch.device("cpu")
        state = TrainingState(self.module, optimizer, None, None, self.position, {}, {}, device)
        self.saver = Saver(
            self.manager, Cadence(every_steps=1), state, dict, lambda done: None, self.tracker, when_behind, Memory()
        )
        self.saver.serve(saves=True)

    def step(self, value: float | None = None) -> None:
        self.position.step += 1
        with torch.no_grad():
            self.module.weight.fill_(self.position.step if value is None else value)

    def counted(self, name: str) -> float:
        return self.tracker._counts.get(name, 0.0)

    def end(self) -> list[int]:
        """The steps whose checkpoints are there, oldest first; each holds what its step held."""
        self.manager.gate.release(100)
        self.saver.close(LIMIT_S)
        entries = self.manager.entries()[::-1]
        for entry in entries:
            assert bool((self.manager.load(entry).state["model"]["weight"] == entry.step).all())
        return [entry.step for entry in entries]


@pytest.mark.parametrize(
    ("when_behind", "given_up", "kept"), [("skip", [3, 4, 5], [1, 2]), ("replace", [2, 3, 4], [1, 5])]
)
def test_what_is_given_up_while_storage_is_behind_is_logged_and_counted(
    tmp_path: Path, when_behind: str, given_up: list[int], kept: list[int]
) -> None:
    """Storage takes the first save for as long as five steps take; a second one waits."""
    trained = Trained(tmp_path, WhenBehind(when_behind))
    with structlog.testing.capture_logs() as logs:
        for number in range(5):
            trained.step()
            assert trained.saver.attempt() is None
            assert number or trained.manager.began.acquire(timeout=LIMIT_S)
        assert [each["step"] for each in logs if each["event"] == "checkpoint.given_up"] == given_up
    assert trained.counted("save.failed") == 3
    assert trained.end() == kept
    assert trained.counted("save.ok") == 2


def test_a_background_save_that_fails_shows_in_log_and_metric_and_the_state_counts_as_unsaved(tmp_path: Path) -> None:
    trained = Trained(tmp_path, WhenBehind.WAIT)
    trained.manager.full = {1}
    trained.manager.gate.release(100)
    trained.step()
    assert trained.saver.attempt() is None
    trained.saver.wait()
    assert trained.saver.failed
    assert trained.saver.unsaved
    assert trained.counted("save.failed") == 1
    assert isinstance(trained.saver.settle(), StorageError)
    trained.step()
    assert trained.saver.settle() is None
    assert trained.end() == [2]


def test_a_snapshot_with_a_nan_is_refused_though_training_has_gone_on(tmp_path: Path) -> None:
    """Also one that was finite again a moment later; the ranks learn of it once, at the next boundary."""
    trained = Trained(tmp_path, WhenBehind.WAIT)
    trained.manager.gate.release(100)
    with structlog.testing.capture_logs() as logs:
        for value in (None, float("nan"), None):
            trained.step(value)
            assert trained.saver.attempt() is None
        trained.saver.wait()
    (failed,) = [each for each in logs if each["event"] == "checkpoint.failed"]
    assert (failed["step"], "'weight' is not finite" in failed["reason"]) == (2, True)
    assert (trained.saver.refused(), trained.saver.refused()) == (True, False)
    assert trained.counted("save.failed") == 1
    trained.step(float("inf"))
    with pytest.raises(NonFiniteError, match="'weight'"):
        trained.saver.save({}, wait=True)
    assert trained.end() == [1, 3]
