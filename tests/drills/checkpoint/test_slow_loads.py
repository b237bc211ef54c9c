"""Storage takes long for a load: a rank that dies meanwhile costs the load, not the job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_trainer.clock import SYSTEM
from tests.drills.checkpoint.test_rescued import SCRIPT
from tests.drills.endings.job import LASTING, Job
from tests.integration.training.launch import ran
from tests.support.slowstorage import SLOW

SAVED_AT, STEPS = 30, 60
SLOW_S, SOON_S = 180.0, 60.0
"""A read takes the first; who waits for a dead rank or a read would take longer than the second."""


@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_while_all_load_does_not_hold_the_others(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """First the one that reads, then one that waits for it: each time another load begins at once. In the end the
    parameters have the bits of a run without any of it."""
    alone, directory = tmp_path / "alone", tmp_path / "job"
    for where, steps in ((alone, STEPS), (directory, SAVED_AT)):
        assert ran([str(SCRIPT), str(where), str(steps)]).code == 0
    slow = tmp_path / "slow"
    slow.write_text(str(SLOW_S))
    entry, seen = [str(SCRIPT), str(directory), str(STEPS)], set[Path]()
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SLOW), "SLOW_READ": str(slow)}
    with Job(directory, etcd_endpoint, run_id, entry=entry, options=LASTING, environment=environment) as job:
        job.start(3)

        def reader() -> int:
            """The process that has begun to read since the last look."""
            new = {path for path in tmp_path.glob("reading-*") if path not in seen}
            seen.update(new)
            return int(new.pop().name.partition("-")[2]) if new else 0

        def workers() -> dict[int, str]:
            return {worker.pid: node.name for node in job.nodes if (worker := node.worker()) is not None}

        reading: int = job.wait_for(reader, "nobody loads")
        names = workers()  # the round's: a worker that comes back is not a member while they load
        for waits in (False, True):
            began, victim = SYSTEM.monotonic(), next(pid for pid in names if (pid != reading) is waits)
            node = job.node(names.pop(victim))
            if waits:
                seen.discard(tmp_path / f"reading-{reading}")
                (tmp_path / f"reading-{reading}").unlink()
            node.kill_worker()
            reading = job.wait_for(reader, "no other load begins")
            assert SYSTEM.monotonic() - began < SOON_S
        slow.write_text("0")
        assert job.exit_codes() == {"n0": 0, "n1": 0, "n2": 0}, job.describe()
        logs = "".join(job.log(node.name) for node in job.nodes)
        loaded = [json.loads(line) for line in logs.splitlines() if '"checkpoint.loaded"' in line]
        assert [each["step"] for each in loaded] == [SAVED_AT], job.describe()
    digests = {path.read_text() for path in directory.glob("digest-*")}
    assert digests == {(alone / "digest-0").read_text()}
