"""A night in which much goes wrong at once: exactly the right pages come, each once, and each is resolved.

Real nodes, etcd, monitor, Prometheus and Alertmanager, with the shipped rules and routes; a minute of the rules takes
three seconds, and more on a loaded machine. ``OPERATIONS_NIGHT=1`` adds the runs that need a Session: a full disk, a
slow rank, a worker that dies.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.local.etcd import EtcdServer
from tests.drills.operations.night import SAVES, STEPS, Night, Plan, night

LONG = os.environ.get("OPERATIONS_NIGHT", "") not in ("", "0")
PLANS = (
    Plan("ends"),
    Plan("fails", nodes=0),
    Plan("freezes", nodes=2, least=2),
    Plan("scales", nodes=2),
    Plan("shrinks", nodes=2, least=2),
    Plan("steady"),
    Plan("stops"),
)
SESSIONS = (
    Plan("disk", entry=SAVES),
    Plan("heals", nodes=2, entry=SAVES, options={"recovery": "in_place"}),
    Plan("straggles", workers=3, script=STEPS),
)
BELOW, FAILED, FULL, NO_ETCD = "BelowMinNodes", "RunFailed", "CheckpointFailing", "StoreUnreachable"
ENDED = {"ends": "Succeeded", "stops": "Stopped on request"}
SAID = {
    (BELOW, "freezes"): "Run freezes has too few nodes to train",
    (BELOW, "shrinks"): "Run shrinks has too few nodes to train",
    (FAILED, "fails"): "Run fails was closed as failed",
    (FULL, "disk"): "Run disk cannot save its checkpoints",
    (NO_ETCD, ""): "etcd does not answer: no run can change",
}


@pytest.mark.timeout(900)
def test_each_fault_pages_once(own_etcd: EtcdServer, tmp_path: Path) -> None:
    """One run is stopped on purpose, one fails at its start, one loses a node for good, one has a frozen node for a
    while, one is scaled down, one ends well and one has nothing; then etcd is away for three minutes. In the morning
    what is missing is replaced, and all is well."""
    with night(own_etcd, tmp_path, PLANS) as watched:
        goes_by(watched, own_etcd)


@pytest.mark.skipif(not LONG, reason="OPERATIONS_NIGHT=1 lets ten runs go through a night, some three minutes")
@pytest.mark.timeout(900)
def test_ten_runs_go_through_a_night(own_etcd: EtcdServer, tmp_path: Path) -> None:
    """The same with a full disk, which pages; a slow rank, which is a message for the morning; and a worker that dies
    and is replaced, of which nobody hears."""
    disk = tmp_path / "disk" / "checkpoints"
    with night(own_etcd, tmp_path, (*PLANS, *SESSIONS), {disk: 64 << 20}) as watched:
        goes_by(watched, own_etcd)
        assert watched.messages() - Counter({("on-call", *page): 1 for page in SAID}) == {
            ("team", "Straggler", "straggles"): 1
        }


def goes_by(night: Night, etcd: EtcdServer) -> None:
    """The night, from the evening on. ``on``: the runs that train, but for those with a fault."""
    runs = night.runs
    on = {name for name in runs if name != "fails"}
    night.shows({}, training(on))
    night.watch.wait_value(f"count(run:elastic_trainer_under_way:fresh == 1) == {len(on)}")
    pages = evening(night, on - {"ends", "stops"})
    etcd.kill()
    try:
        pages.add((NO_ETCD, ""))
        night.until_paged(pages)
        night.goes_blind()
        pause(night.minute_s)
    finally:
        etcd.start()
    night.until_paged({(BELOW, "freezes"), (NO_ETCD, "")}, "resolved")
    morning(night)
    night.until_paged(pages, "resolved")
    assert night.pages() == dict.fromkeys(pages, 1)
    assert night.summaries() == {page: SAID[page] for page in pages}


def evening(night: Night, on: set[str]) -> set[tuple[str, str]]:
    """What is planned wakes nobody, each fault one of on-call. The frozen node comes back."""
    runs, pages = night.runs, {(BELOW, "freezes"), (BELOW, "shrinks"), (FAILED, "fails")}
    few = "1 of 2 nodes needed"
    bad, warned = {"freezes": few, "shrinks": few}, {}
    mark(night, "fails", "wrong")
    runs["fails"].start(1)
    runs["stops"].node("n0").terminate()
    runs["scales"].node("n1").terminate()
    mark(night, "ends", "end")
    runs["shrinks"].node("n1").kill()
    frozen = runs["freezes"].node("n1")
    frozen.freeze()
    if "disk" in runs:
        fill(night)
        mark(night, "straggles", "slow")
        assert runs["heals"].node("n1").kill_worker() is not None
        bad, warned = {"disk": "saves fail", **bad}, {"straggles": "1 slow"}
        pages.add((FULL, "disk"))
    night.shows({**bad, "fails": "failed", **warned}, {**training(on - {*bad, *warned}), **ENDED})
    night.until_paged(pages)
    frozen.thaw()
    night.until_paged({(BELOW, "freezes")}, "resolved")
    del bad["freezes"]
    night.shows({**bad, "fails": "failed", **warned}, {**training(on - {*bad, *warned}), **ENDED})
    return pages


def morning(night: Night) -> None:
    """A node in the place of the lost one, the failed run opened again without its mistake, room on the disk."""
    runs = night.runs
    runs["shrinks"].start(1)
    assert runs["fails"].wait(Deadline.after(60.0))
    mark(night, "fails", "wrong", there=False)
    night.reopen("fails")
    if "disk" in runs:
        fill(night, there=False)
        mark(night, "straggles", "slow", there=False)
    night.shows({}, {**training(set(runs) - ENDED.keys()), **ENDED})


def training(runs: set[str]) -> dict[str, str]:
    return dict.fromkeys(sorted(runs), "Training")


def mark(night: Night, run: str, name: str, *, there: bool = True) -> None:
    file = night.runs[run].spec.directory / name
    file.touch() if there else file.unlink()


def fill(night: Night, *, there: bool = True) -> None:
    rest = night.runs["disk"].spec.directory / "checkpoints" / "rest"
    if not there:
        rest.unlink()
        return
    with suppress(OSError), rest.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
