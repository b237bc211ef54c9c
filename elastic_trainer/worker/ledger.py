"""One JSON line for each thing that a worker did, for whoever audits a run afterwards.

*Runs in* the worker's main thread. *Owns* one file per process.
*Invariant*: a line is written after what it tells has happened, and flushed, so a killed process leaves only truths.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import StorageError
from elastic_trainer.settings import WorkerEnvironment


class Ledger:
    """The file; does nothing when the environment names no directory."""

    def __init__(self, environment: WorkerEnvironment, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._file: TextIO | None = None
        self._identity: dict[str, Any] = {"run": environment.run_id, "node": environment.node}
        if environment.ledger_dir is not None:
            self._file = _create(
                environment.ledger_dir, f"{environment.node}-{environment.local_rank}-{os.getpid()}.jsonl"
            )

    @property
    def enabled(self) -> bool:
        """Whether lines are written; what costs something to find out need not be found out otherwise."""
        return self._file is not None

    def identify(self, *, rank: int, local_rank: int, world: int, round: int) -> None:
        """What every following line says about its writer."""
        place = {"rank": rank, "local_rank": local_rank, "world": world, "round": round, "pid": os.getpid()}
        self._identity.update(place)

    def write(self, event: str, **values: Any) -> None:
        """Add one line."""
        if self._file is None:
            return
        moment = {"event": event, "t": self._clock.monotonic(), "wall": self._clock.wall()}
        self._file.write(json.dumps({**moment, **self._identity, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _create(directory: Path, name: str) -> TextIO:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return (directory / name).open("a", encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"the ledger cannot be written in {directory}: {error.strerror}", hint="check the path"
        ) from error
