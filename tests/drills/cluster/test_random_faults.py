"""Faults by chance on real processes: kills, joins, drains, freezes, outages and clocks that jump, often before the
last one is dealt with.

``ELASTIC_TRAINER_SOAK_MINUTES=N`` lets each kind of job live through N minutes of them, and looks for what grows; the
seed is printed, and ``ELASTIC_TRAINER_SOAK_SEED`` plays it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.drills.job import Sharded
from elastic_trainer.drills.measure import compared
from elastic_trainer.drills.run import conclusions
from elastic_trainer.drills.stage import Setting, Stage, now, staged
from elastic_trainer.local.ledger import LineKind
from tests.drills.cluster.clocks import MovedClocks
from tests.drills.cluster.footprints import Footprints, orphans
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
