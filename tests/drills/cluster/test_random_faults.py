"""Faults by chance on real processes: kills, joins, drains, freezes, outages and clocks that jump, often before the
last one is dealt with.

``ELASTIC_TRAINER_SOAK_MINUTES=N`` lets each kind of job live through N minutes of them, and looks for what grows; the
seed is printed, and ``ELASTIC_TRAINER_SOAK_SEED`` plays it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import psutil
import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.drills.job import CHECKPOINTS, Sharded
from elastic_trainer.drills.measure import compared
from elastic_trainer.drills.run import conclusions
from elastic_trainer.drills.stage import Setting, Stage, now, staged
from elastic_trainer.local import processes
from elastic_trainer.local.ledger import LineKind
from tests.drills.cluster.clocks import MovedClocks
from tests.drills.cluster.schedule import Blow
from tests.drills.cluster.storm import SETTING, Storm
from tests.support import seeds

LENGTH = "ELASTIC_TRAINER_SOAK_MINUTES"
MINUTES = float(os.environ.get(LENGTH, "0"))
FAULTS_IN_CI = 10
WATCHED_S, FREE_S = 900.0, 300.0
"""Seconds in which one node is never struck, so that growth in it shows; then seconds in which any may be."""
_LONG = replace(SETTING, group_timeout_s=60.0)  # the longest that a cut collective holds its group
SETTINGS: Mapping[str, Setting] = {
    "in place": _LONG,
    "restarted": replace(_LONG, save_every_s=1.0, options={**SETTING.options, "recovery": "restart"}),
    "sharded": replace(_LONG, workers=2, sharded=Sharded.GROUP),
}

pytestmark = pytest.mark.usefixtures("etcd_binary")


@pytest.mark.timeout(900)
def test_a_storm_of_faults_costs_no_sample(tmp_path: Path) -> None:
    """Whatever happens in whatever order: every sample of every epoch counts once, the parameters of all ranks are
    bitwise equal, there is one round of each number, round numbers only grow, and no node ends by itself."""
    with staged(SETTING, tmp_path) as stage:
        storm = Storm(stage, 1)
        storm.rage(lambda: storm.done.total() >= FAULTS_IN_CI)
        _concluded(stage, storm)


@pytest.mark.timeout(300)
def test_clocks_that_jump_change_nothing(tmp_path: Path) -> None:
    """Wall clocks of two of three nodes jump by an hour or two, forward and back, and a worker dies meanwhile: nobody
    else is lost, and all is as if the clocks were right."""
    clocks = MovedClocks(tmp_path)
    with staged(replace(SETTING, max_nodes=3), tmp_path / "job", clocks.cluster) as stage:
        before = stage.await_steps()
        for jumps in ({"n0": 3600.0, "n1": -7200.0}, {"n0": -60.0, "n1": 0.0}):
            t = now()
            for node, seconds in jumps.items():
                clocks.move(node, seconds)
            stage.await_resumed(before.pids.values(), t, 0, "steps after the jumps")
            assert {node: round(_ahead_s(stage, node), -1) for node in jumps} == jumps
        assert stage.await_steps().pids == before.pids
        stage.node("n0").kill_worker()
        after = stage.await_steps()
        assert {node: pid for node, pid in after.pids.items() if before.pids[node] != pid}.keys() == {"n0"}
        assert conclusions(stage) == []


def _ahead_s(stage: Stage, node: str) -> float:
    """By how much the clock of ``node`` was ahead of n2's at the last steps of both."""
    offsets = {line.node: line.wall - line.t for line in stage.book.lines if line.event is LineKind.STEP}
    return offsets[node] - offsets["n2"]


# ---- what a job holds of its machine, noted again and again through a storm, and what of it grows

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


@pytest.mark.skipif(not MINUTES, reason=f"a soak: {LENGTH}=60")
@pytest.mark.timeout(60 * MINUTES + 3600)
@pytest.mark.parametrize("kind", SETTINGS)
def test_nothing_grows_in_a_long_storm(kind: str, tmp_path: Path) -> None:
    """As in the short one; and no process, descriptor, thread, memory, file or key is left behind by any fault."""
    seed = seeds.seed(soak=True)
    clocks, whole = MovedClocks(tmp_path), Deadline.after(60.0 * MINUTES)
    with staged(SETTINGS[kind], tmp_path / "job", clocks.cluster) as stage:
        storm = Storm(stage, seed, clocks)
        while not whole.expired:
            leg = Deadline.after(min(WATCHED_S, 60.0 * MINUTES))
            storm.spared = stage.await_steps().nodes[-1]
            feet = Footprints(stage, storm.spared, clocks.temporary)
            storm.rage(lambda leg=leg: leg.expired, feet.note)  # type: ignore[misc]
            notes = tmp_path / f"notes-{storm.spared}.json"
            notes.write_text(json.dumps(feet.notes))
            print(f"{kind}: {dict(storm.done)}; {feet.notes[0]} -> {feet.notes[-1]}", flush=True)
            assert feet.grown() == [], notes
            assert orphans(stage) == []
            storm.spared, leg = None, Deadline.after(min(FREE_S, whole.remaining_s()))
            storm.rage(lambda leg=leg: leg.expired)  # type: ignore[misc]
        _concluded(stage, storm)
        assert set(storm.done) >= set(Blow) - {Blow.FULL_DISK}


def _concluded(stage: Stage, storm: Storm) -> None:
    assert conclusions(stage) == [], storm.told
    assert storm.done.total() >= FAULTS_IN_CI
    assert compared(stage.digests()) > 0
    numbers = [document.number for document in stage.history]
    assert numbers[-1] > numbers[0], "no fault ever ended a round"
