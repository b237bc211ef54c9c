"""One job at a time writes in a directory: the process that saves holds a lock there while it lives.

The kernel releases the lock with the process. It is a record lock: children do not inherit it, and network file systems
extend it to other hosts. On file systems without locks nobody is refused.

*Runs in* the worker of rank 0. *Owns* the lock, until :meth:`Claim.release`.
*Fails by* InUseError while another job holds it.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass

from elastic_trainer.checkpoint.faults import InUseError
from elastic_trainer.checkpoint.storage import Storage
from elastic_trainer.clock import Clock, Deadline, pause

_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Owner:
    """The job of a process. ``run`` is the name in its checkpoints, None without one.

    ``job`` is shared by all its processes, now and after a restart; None if the launcher does not say.
    """

    run: str | None = None
    job: str | None = None


class Claim:
    """The right of ``owner`` to write in ``storage``."""

    def __init__(self, storage: Storage, owner: Owner, clock: Clock) -> None:
        self._storage, self._owner, self._clock = storage, owner, clock
        self._words = json.dumps({**asdict(owner), "host": socket.gethostname(), "pid": os.getpid()})
        self._held = False

    def take(self, patience_s: float = 0.0) -> None:
        """Hold the lock; InUseError if another job still has it after ``patience_s``.

        A process of the same job is tolerated: its peers have left it behind, and nonces keep checkpoint names apart.
        """
        patience = Deadline.after(patience_s, self._clock)
        while not self._held:
            holder = self._storage.hold(self._words)
            if holder is None:
                self._held = True
            elif self._same_job(holder):
                return
            elif patience.expired:
                raise InUseError(
                    f"checkpoint directory {self._storage.location} is in use by {_named(holder)}",
                    hint="give each job a directory of its own, or wait until that one has ended",
                )
            else:
                pause(_AGAIN_S, clock=self._clock)

    def release(self) -> None:
        self._held = False
        self._storage.let_go()

    def _same_job(self, holder: str) -> bool:
        return self._owner.job is not None and _read(holder).get("job") == self._owner.job


def _named(holder: str) -> str:
    read = _read(holder)
    who = f"run {read['run']!r}" if read.get("run") else "another job"
    return f"{who} (process {read.get('pid', 'unknown')} on {read.get('host', 'an unknown host')})"


def _read(holder: str) -> dict[str, object]:
    try:
        read = json.loads(holder)
    except ValueError:  # it has the lock, and is about to write who it is
        return {}
    return read if isinstance(read, dict) else {}
