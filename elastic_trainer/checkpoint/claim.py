"""Lets only one job at a time write to a directory or bucket prefix: the saving process holds a lock while it lives.

In a directory the kernel releases the lock with the process. It is a record lock: children do not inherit it, and
network file systems extend it to other hosts. On file systems without locks no job is refused. In an object store the
lock is a lease (see ``storage/lease.py``), which a holder that died leaves behind for a while.

*Runs in* the worker of rank 0. *Owns* the lock, until :meth:`Claim.release`.
*Fails by* InUseError while another job holds it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastic_trainer.checkpoint.faults import InUseError
from elastic_trainer.checkpoint.layout import WriterIdentity
from elastic_trainer.checkpoint.storage import Holder, Storage
from elastic_trainer.checkpoint.writers import alive, this_process
from elastic_trainer.clock import Clock, Deadline, pause

_AGAIN_S = 0.1
_SLOWLY_S = 1.0
"""Seconds between two looks at a lease, each of which is a request."""


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
        process = this_process()
        self._words = json.dumps({**asdict(owner), **asdict(process), "host": socket.gethostname()})

    def take(self, patience_s: float = 0.0) -> None:
        """Take the lock; InUseError if another job still holds it after ``patience_s`` seconds.

        With patience, waits for a holder that may be dead until it writes or its lease expires. A process of the same
        job is tolerated: its peers have left it behind, and nonces keep checkpoint names apart.
        """
        patience = Deadline.after(patience_s, self._clock)
        before: Holder | None = None
        while (holder := self._storage.hold(self._words, self._gives_way)) is not None:
            if self._same_job(holder.words):
                return
            showed_itself = before is not None and holder.shown_at != before.shown_at
            maybe_dead = patience_s > 0 and holder.expires_in_s > 0 and not showed_itself
            if patience.expired and not maybe_dead:
                raise InUseError(
                    f"checkpoint directory {self._storage.location} is in use by {_named(holder.words)}",
                    hint="give each job a directory of its own, or wait until that one has ended",
                )
            before = holder
            pause(_SLOWLY_S if holder.expires_in_s else _AGAIN_S, clock=self._clock)

    def release(self) -> None:
        self._storage.let_go()

    def _same_job(self, holder: str) -> bool:
        return self._owner.job is not None and _read(holder).get("job") == self._owner.job

    def _gives_way(self, holder: str) -> bool:
        """Whether the holder is of this job, or dead according to this machine's kernel."""
        return self._same_job(holder) or _dead(_read(holder))


def _dead(read: Mapping[str, Any]) -> bool:
    try:
        process = WriterIdentity(*(read[field] for field in ("pid", "start", "boot", "namespace", "host")))
        return alive(process, this_process()) is False
    except (KeyError, TypeError):  # another version's words
        return False


def _named(holder: str) -> str:
    read = _read(holder)
    who = f"run {read['run']!r}" if read.get("run") else "another job"
    return f"{who} (process {read.get('pid', 'unknown')} on {read.get('host', 'an unknown host')})"


def _read(holder: str) -> dict[str, Any]:
    try:
        read = json.loads(holder)
    except ValueError:  # the holder has the lock but has not written its identity yet
        return {}
    return read if isinstance(read, dict) else {}
