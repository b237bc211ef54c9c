"""The ledger: one JSON line for each action of a worker, for audits of a run.

*Runs in* the worker's main thread. *Owns* one file per process.
*Fails by* StorageError if the file cannot be created when training starts. If a later write fails, lines wait in memory
until the disk accepts them: a record is never worth stopping the training.
*Invariant*: a line is written right after the action that it records, so a killed process leaves only true lines.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import StorageError
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.telemetry.logs import logger

PROC: Final = "proc"
"""Where the ledger's directory shows the processes of its reader's host, if that is another one."""
MOST_WAITING: Final = 16 << 20
"""Upper bound on bytes that wait for the disk; further lines are dropped."""


def process_id(directory: Path | None) -> int:
    """This process's id, as the reader of the ledger in ``directory`` sees it.

    Both may be on different hosts, each with process ids of its own (see local/hosts.py).
    """
    try:
        return int(os.readlink(directory / PROC / "self")) if directory is not None else os.getpid()
    except (OSError, ValueError):
        return os.getpid()


class Ledger:
    """The file; does nothing when the environment names no directory."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        self._identity: dict[str, Any] = {"run": environment.run_id, "node": environment.node}
        self._directory = environment.ledger_dir
        self.enabled = environment.ledger_dir is not None
        """Whether lines are written at all."""
        self._path: Path | None = None
        self._descriptor: int | None = None
        self._waiting = bytearray()
        self._refused = ""
        """Why the disk refuses lines; empty while it accepts them."""
        if environment.ledger_dir is None:
            return
        self._path = environment.ledger_dir / f"{environment.node}-{environment.local_rank}-{os.getpid()}.jsonl"
        self._write_out()
        if self._refused and not environment.midway:
            where = environment.ledger_dir
            raise StorageError(f"the ledger cannot be written in {where}: {self._refused}", hint="check the path")

    def identify(self, *, rank: int, local_rank: int, world: int, round: int) -> None:
        """Set the identity of the writer that every later line carries."""
        place = {
            "rank": rank,
            "local_rank": local_rank,
            "world": world,
            "round": round,
            "pid": process_id(self._directory),
        }
        self._identity.update(place)

    def write(self, event: str, **values: Any) -> None:
        if self._path is None:
            return
        moment = {"event": event, "t": SYSTEM.monotonic(), "wall": SYSTEM.wall()}
        line = json.dumps({**moment, **self._identity, **values}) + "\n"
        if len(self._waiting) + len(line) <= MOST_WAITING:
            self._waiting += line.encode()
        self._write_out()

    def close(self) -> None:
        self._path = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write_out(self) -> None:
        """Write the waiting lines, starting at the first byte that the disk has not accepted."""
        try:
            descriptor = self._opened()
            while self._waiting:
                del self._waiting[: os.write(descriptor, self._waiting)]
        except OSError as error:
            before, self._refused = self._refused, error.strerror or str(error)
            if not before:
                logger().warning("ledger.not_written", path=str(self._path), error=self._refused)
            return
        self._refused = ""

    def _opened(self) -> int:
        if self._descriptor is None:
            if self._path is None:
                raise ValueError("the ledger is closed")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        return self._descriptor
