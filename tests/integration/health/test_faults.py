"""Critical alerts fire on their real faults, and are told to those on call. One job for all, in this order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.drills.job import CHECKPOINTS, Wedge, ask
from elastic_trainer.drills.measure import Standing
from elastic_trainer.drills.stage import Setting
from elastic_trainer.drills.strikes import broken_rounds, freeze, worker
from elastic_trainer.local import processes
from elastic_trainer.local.cluster import kill
from tests.integration.health.watched import Watched, watched
from tests.support.deployment import RUNBOOK_URL
from tests.support.watch import WAIT_S, FiringAlert

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("etcd_binary")]

NO_LIMITS = {"hang_timeout": "0", "step_timeout": "0", "first_step_timeout": "0", "phase_timeout": "0"}
OPTIONS = NO_LIMITS | {"failure_limit": "2", "regroup_grace": "10"}
SETTING = Setting(
    nodes=3, min_nodes=2, max_nodes=3, pause_s=0.05, wedges=True, save_every_s=3.0, options=OPTIONS, limit_s=180.0
)
SCALES = {"run:elastic_trainer_failures:increase15m": 1 / 3}
"""Five minutes: six workers are killed and come back in them on a slow machine too; no other rule looks back so far."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Three nodes that train, whose watchdog ends nobody."""
    with watched(SETTING, tmp_path_factory.mktemp("faults"), SCALES) as started:
        started.wait_value("elastic_trainer_checkpoints_total{RUN,op='save',result='ok'} > 0")
        assert started.watch.fired() == set()
        yield started


class Alarm:
    """What is critical after a fault, and was not before."""

    def __init__(self, job: Watched) -> None:
        self._job, self._before = job, job.critical()

    def told(self, *names: str, unsent: tuple[str, ...] = ()) -> list[FiringAlert]:
        """Wait until just these alerts fire, and somebody on call has heard of each but those ``unsent``, which follow
        from the others."""
        job, full = self._job, [f"ElasticTrainer{name}" for name in names + unsent]
        fired = [job.watch.wait_alert(name, run=job.run) for name in full]
        assert job.critical() - self._before == set(full), job.watch.alerts()
        for name in full[: len(names)]:
            message = job.watch.wait_message(name, run=job.run)
            assert message.receiver == "on-call"
            assert message.annotations["runbook_url"] == f"{RUNBOOK_URL}/{name}.md"
        return fired

    def over(self, *names: str) -> None:
        """Wait until they fire no more."""
        for name in names:
            self._job.watch.wait_resolved(f"ElasticTrainer{name}", run=self._job.run)


def test_all_workers_are_frozen(job: Watched) -> None:
    """Stalled, with what the ranks are in, while nothing ends the fault; it is over when they go on."""
    before, alarm = job.settled(), Alarm(job)
    frozen = [worker(job.stage, before, name) for name in before.nodes]
    freeze(job.stage, frozen)
    try:
        alarm.told("Stalled")
        job.watch.wait("all ranks are told of", lambda: "Ranks seen: 3. They are in: " in _stalled(job))
    finally:
        processes.send(frozen, signal.SIGCONT)
    alarm.over("Stalled")
    job.watch.wait_message("ElasticTrainerStalled", "resolved", run=job.run)
    assert job.settled().pids == before.pids


def test_the_checkpoint_directory_cannot_be_written(job: Watched, tmp_path: Path) -> None:
    """CheckpointFailing, and then CheckpointStale; the training goes on, and the next save that succeeds ends it."""
    before, alarm = job.settled(), Alarm(job)
    directory = job.stage.directory / CHECKPOINTS
    directory.rename(tmp_path / "away")
    directory.touch()  # not even root can write below a file
    try:
        alarm.told("CheckpointFailing", unsent=("CheckpointStale",))
    finally:
        directory.unlink()
        (tmp_path / "away").rename(directory)
    alarm.over("CheckpointStale")
    assert job.settled().pids == before.pids


def test_workers_fail_again_and_again(job: Watched) -> None:
    alarm, deadline, kills = Alarm(job), Deadline.after(WAIT_S), 0
    while not job.critical() & {"ElasticTrainerRestartLoop"}:
        assert not deadline.expired, f"{kills} workers were killed, and nobody was told"
        _kill_two(job, job.settled())
        kills += 2
    (alert,) = alarm.told("RestartLoop")
    job.stage.until(lambda: len(broken_rounds(job.stage)) >= 6, "six rounds that a fault has ended")
    assert "worker_lost (" in alert.annotations["description"]
    job.watch.wait_alert("ElasticTrainerRestartsExhausting", run=job.run)


def test_the_loss_is_nan_and_ends_the_run(job: Watched) -> None:
    """NonFiniteLoss although each worker that finds it dies of it, and RunFailed when the run is given up for it.

    Each fault of all these tests that ended a round has been counted once.
    """
    before, alarm = job.settled(), Alarm(job)
    ask(job.stage.directory, before.nodes[-1], Wedge.NAN)
    for name in before.nodes:
        job.stage.retire(name)
    alarm.told("NonFiniteLoss", "RunFailed")
    job.stage.until(lambda: not job.stage.cluster.running, "the end of all nodes")
    assert {job.stage.node(name).exit_code() for name in before.nodes} == {1}
    job.wait_value("elastic_trainer_run_state{RUN,state='failed'} == 1")
    job.wait_value("absent(elastic_trainer_step{RUN})")
    faults = "elastic_trainer_restarts_total{RUN,reason!~'node_joined|node_left|finished'}"
    job.wait_value(f"sum({faults}) == {len(broken_rounds(job.stage))}")


def _stalled(job: Watched) -> str:
    return job.watch.wait_alert("ElasticTrainerStalled", run=job.run).annotations["description"]


def _kill_two(job: Watched, before: Standing) -> None:
    """SIGKILL a worker, and another one when the rest has gone on: two rounds that end by a fault."""
    victim, *others = reversed(before.nodes)
    t = kill([worker(job.stage, before, victim)]).t
    job.stage.await_resumed([before.pids[name] for name in others], t, before.round + 1, f"a step without {victim}")
    left = job.stage.observe()
    assert left is not None
    kill([worker(job.stage, left, others[0])])
