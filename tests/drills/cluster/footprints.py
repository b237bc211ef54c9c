"""What a job holds of its machine, noted again and again through a storm, and what of it grows.

*Runs in* the main thread of the test. *Owns* its notes. *Fails by* nothing: a process that ends meanwhile is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from elastic_trainer.drills.job import CHECKPOINTS
from elastic_trainer.drills.stage import Stage
from elastic_trainer.local import processes

MIB = 1 << 20
LIMITS = {"descriptors": 24.0, "threads": 16.0, "processes": 1.0, "memory": 24.0, "etcd": 4.0, "files": 12.0}
"""By how much the last third of the notes may be above the first: a group whose collective was cut holds some of each
until its timeout, allocators keep some, and this etcd compacts nothing. A leak of one descriptor, or of 0.2 MiB, for
each of a hundred rounds is above that."""
FEWEST = 6
"""Notes that a comparison of thirds needs."""
_SHARED = Path("/dev/shm")
_TORCHS = "torchelastic_"
"""torchrun's own folders of logs, which a torchrun that is killed leaves."""


@dataclass(slots=True)
class Footprints:
    """Of the node ``spared`` and of the whole job on ``stage``; memory in MiB, what processes share counts for each.

    (What only one process has changes whenever a template ends that its pages came from.)
    """

    stage: Stage
    spared: str
    temporary: Path
    notes: list[Mapping[str, float]] = field(default_factory=list)

    def note(self) -> None:
        """Take a note, now that everybody trains."""
        family = self.stage.node(self.spared).family()
        held = [(process.num_fds(), process.num_threads(), _memory(process)) for process in family]
        status = self.stage.server.call("maintenance/status")
        self.notes.append(
            {
                "processes": len(family),
                "descriptors": sum(descriptors for descriptors, _, _ in held),
                "threads": sum(threads for _, threads, _ in held),
                "memory": sum(memory for _, _, memory in held),
                "etcd": int(status["dbSizeInUse"]) / MIB,
                "files": sum(1 for _ in self._files()),
            }
        )

    def grown(self) -> list[str]:
        """What is more in the last third of the notes than in the first, beyond its limit."""
        third = len(self.notes) // 3
        if len(self.notes) < FEWEST:
            return [f"only {len(self.notes)} notes were taken"]
        return [
            f"{name} of {self.spared} grew from {before:g} to {after:g}"
            for name, limit in LIMITS.items()
            if (after := _middle(self.notes[-third:], name)) > (before := _middle(self.notes[:third], name)) + limit
        ]

    def _files(self) -> Iterable[Path]:
        """In the directory of checkpoints, for temporary files, and in shared memory but for what others have open."""
        yield from (self.stage.directory / CHECKPOINTS).rglob("*")
        yield from (path for path in self.temporary.rglob("*") if _TORCHS not in str(path))
        here = {process.pid for process in processes.marked(self.stage.cluster.ledger_marks)}
        others = {name for process in psutil.process_iter() if process.pid not in here for name in _shared_by(process)}
        yield from (path for path in _SHARED.iterdir() if path.name not in others)


def orphans(stage: Stage) -> list[str]:
    """Processes of the job that belong to none of its running nodes."""
    found = processes.marked(stage.cluster.ledger_marks)
    families = {process.pid for node in stage.cluster.running for process in node.family()}
    return [f"{process.pid}: {' '.join(process.cmdline())[:80]}" for process in found if process.pid not in families]


def _shared_by(process: psutil.Process) -> Iterable[str]:
    """The names of what ``process`` has open in shared memory, or in a directory there."""
    with suppress(psutil.Error):
        for file in process.open_files():
            if _SHARED in Path(file.path).parents:
                yield Path(file.path).relative_to(_SHARED).parts[0]


def _memory(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / MIB


def _middle(notes: Sequence[Mapping[str, float]], name: str) -> float:
    return float(median(each[name] for each in notes))
