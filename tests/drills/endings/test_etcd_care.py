"""What operators do to etcd under a running job, with the commands of their page: restore, make room, defragment."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from elastic_trainer.clock import pause
from elastic_trainer.errors import EXIT_LEFT, StoreUnavailableError
from elastic_trainer.local.etcd import EtcdCluster, EtcdServer
from elastic_trainer.local.ledger import audit
from elastic_trainer.membership.documents import RoundState
from tests.drills.endings.job import LASTING, Job
from tests.support.operating import Tools, commands, etcd_tools

PAGE = "operations.md"
QUOTA_BYTES = 4 << 20
JUNK_BYTES = 400 << 10


@pytest.fixture(scope="module")
def tools() -> Tools:
    return etcd_tools()


@pytest.mark.timeout(300)
def test_a_job_goes_on_with_an_etcd_that_was_restored_from_a_backup(tmp_path: Path, tools: Tools, run_id: str) -> None:
    """The backup is two rounds old. No step is lost or repeated, the survivor keeps its process, and the next round has
    a higher number than any before: the round document of the backup is not believed."""
    data, places = tmp_path / "etcd" / "data", {"/var/backups/etcd": tmp_path, "/var/lib/etcd": tmp_path / "lib"}
    server = EtcdServer(tmp_path / "etcd", binary=tools.etcd)
    with server as etcd, Job(tmp_path / "job", etcd.endpoint, run_id, most=2, options=LASTING) as job:
        job.start(2)
        first = reached = job.await_world("n0", "n1")
        tools.carry_out(commands(PAGE, "Backup"), etcd.endpoint, places)
        for _ in range(2):
            assert job.node("n1").kill_worker() is not None
            reached = job.await_world("n0", "n1", after=reached)
        worker = job.node("n0").worker()
        etcd.wipe()
        tools.carry_out(commands(PAGE, "Restore"), etcd.endpoint, places)
        shutil.move(tmp_path / "lib" / "elastic-trainer", data)
        etcd.start()
        job.await_world("n0", "n1", after=reached)
        assert job.node("n0").worker() == worker
        assert job.finish() == {"n0": 0, "n1": 0}
        job.check_lossless()
        ended = {entry.round: entry.reason for entry in job.journal() if entry.state is RoundState.BROKEN}
        assert ended[reached] == f"the store was rolled back to an older state (round {first}, active)"
        assert job.closed().number == reached + 1, "what the backup says of nodes was believed"
        assert min(ended) == reached, "a number was used twice"
        rounds = [line.round for line in job.steps("n0")]
        assert rounds == sorted(rounds)


@pytest.mark.timeout(300)
def test_a_run_goes_on_from_its_checkpoint_where_all_of_etcd_was_lost(
    tmp_path: Path, own_etcd: EtcdServer, run_id: str
) -> None:
    """Its nodes left in round 2 or later; in an empty etcd its rounds begin with 1 again. It resumes all the same, and
    what it saves then counts as newer than all that was saved before."""
    with Job(tmp_path, own_etcd.endpoint, run_id, least=1, most=1) as job:
        job.start(1)
        reached = job.await_world("n0")
        assert job.node("n0").kill_worker() is not None
        job.await_world("n0", after=reached)
        job.node("n0").terminate()
        assert job.exit_codes() == {"n0": EXIT_LEFT}
        saved = job.saved_step()
        assert saved is not None
    own_etcd.wipe()
    own_etcd.start()
    with Job(tmp_path, own_etcd.endpoint, run_id, least=1, most=1) as job:
        job.start(1)
        job.wait_for(lambda: job.newest() > saved + 10, "it does not resume")
        assert job.finish() == {"n0": 0}
        assert job.closed().number == 1
        assert audit(job.lines(), size=None).exact
        last = job.saved_step()
        assert last is not None
        assert last > saved


@pytest.mark.timeout(300)
def test_a_job_trains_on_while_etcd_is_full(tmp_path: Path, tools: Tools, run_id: str) -> None:
    """etcd refuses all writes: steps go on, and the nodes say what is wrong. A worker that is killed meanwhile is
    mastered once there is room again."""
    quota = [f"--quota-backend-bytes={QUOTA_BYTES}"]
    server = EtcdServer(tmp_path / "etcd", binary=tools.etcd, arguments=quota)
    with server as etcd, Job(tmp_path / "job", etcd.endpoint, run_id, most=2) as job:
        job.start(2)
        before = job.await_world("n0", "n1")
        _fill(etcd)
        job.await_steps(50)
        said = "has no space left (compact and defragment etcd"
        job.wait_for(lambda: said in job.log("n0"), "nobody says that etcd is full")
        assert job.node("n1").kill_worker() is not None
        pause(3.0)
        document = job.document()
        assert (document.number, document.state) == (before, RoundState.ACTIVE)
        tools.carry_out(commands(PAGE, "A full etcd"), etcd.endpoint, {})
        job.await_world("n0", "n1", after=before)
        assert job.finish() == {"n0": 0, "n1": 0}
        job.check_lossless()


def _fill(etcd: EtcdServer) -> None:
    """Write one key again and again until etcd has no room for it."""
    for _ in range(4 * QUOTA_BYTES // JUNK_BYTES):
        with suppress(StoreUnavailableError):
            etcd.call("kv/put", key="anVuaw==", value="A" * JUNK_BYTES)
        if etcd.call("maintenance/alarm", action="GET").get("alarms"):
            return
    pytest.fail("etcd took it all")


@pytest.mark.timeout(300)
def test_a_job_does_not_notice_that_etcd_is_defragmented(tmp_path: Path, tools: Tools, run_id: str) -> None:
    """Each of three members in turn: the round stays, no worker is restarted, no step is lost."""
    server = EtcdCluster(3, directory=tmp_path / "etcd")
    with server as etcd, Job(tmp_path / "job", etcd.endpoint, run_id, most=2, options=LASTING) as job:
        job.start(2)
        job.await_world("n0", "n1")
        tools.carry_out(commands(PAGE, "Defragmentation"), etcd.endpoint, {})
        job.await_steps(20)
        assert [entry.state for entry in job.journal()] == [RoundState.ACTIVE]
        assert job.finish() == {"n0": 0, "n1": 0}
        job.check_lossless()
