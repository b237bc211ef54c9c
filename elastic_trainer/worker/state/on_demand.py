"""Saves that somebody asks a training run for: ``elastic-trainer checkpoints save RUN``, through the agent of rank 0.

The agent writes a request into a file beside the heartbeat page, in place and in restart mode alike, and reads in the
page's notes what became of it. The checkpoint is named once it is durable.

*Runs in* the worker's main thread, on rank 0. *Owns* nothing: the agent removes the file.
*Fails by* nothing: what goes wrong with the save is its answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from elastic_trainer.errors import CheckpointError, ConfigError, ElasticTrainerError
from elastic_trainer.ipc.page import SAVE_SUFFIX
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter

_NOWHERE: Final = ConfigError("the job has no checkpoint directory", hint="give its session a checkpoint_dir")


class OnDemand:
    """See the module. ``saves``: whether there is a checkpoint directory."""

    def __init__(self, tracker: HeartbeatReporter, *, saves: bool) -> None:
        self._tracker, self._saves = tracker, saves
        self._file: Path | None = None if tracker.page.path is None else tracker.page.path.with_suffix(SAVE_SUFFIX)
        self._answered = self._pending = ""
        self._step: int | None = None
        """The snapshot that answers the pending request as soon as it is durable."""
        self._newest: tuple[int, str] | None = None
        """Step and name of the newest durable checkpoint."""

    def wanted(self, step: int) -> bool:
        """Whether a request waits for a save that has not begun; the state at hand is that of ``step``."""
        self._look()
        if not self._pending or self._step is not None:
            return False
        if not self._saves:
            self._answer(problem=_NOWHERE)
        elif self._newest is not None and self._newest[0] == step:
            self._answer(self._newest[1])
        return bool(self._pending)

    def covered(self, step: int) -> None:
        """A save of the state of ``step`` begins; without memory for a copy it ends before training goes on."""
        if self._pending and self._step is None:
            self._step = step

    def given_up(self, step: int) -> None:
        """The save of ``step`` made room for a newer one."""
        if self._step == step:
            self._step = None

    def settled(self, step: int, name: str, error: BaseException | None) -> None:
        """The checkpoint ``name`` of ``step`` is durable, or was not written because of ``error``."""
        if error is None:
            self._newest = (step, name)
        if self._step == step:
            known = error if isinstance(error, ElasticTrainerError) else CheckpointError(str(error))
            self._answer(name) if error is None else self._answer(problem=known)

    def _look(self) -> None:
        if self._file is None or self._pending:
            return
        try:
            asked = self._file.read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            return
        if asked and asked != self._answered:
            self._pending = asked

    def _answer(self, name: str = "", problem: ElasticTrainerError | None = None) -> None:
        self._answered, self._pending, self._step = self._pending, "", None
        answer: dict[str, str | int] = {"id": self._answered, "name": name}
        if problem is not None:
            answer |= {"problem": str(problem)[:500], "code": problem.exit_code}
        self._tracker.describe(on_demand=answer)
