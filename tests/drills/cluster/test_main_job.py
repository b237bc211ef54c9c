"""The main job: ``mnist`` in place, whose workers and nodes die, leave and join, and which is stopped and resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.cli.main import main
from elastic_trainer.errors import EXIT_LEFT
from elastic_trainer.local.cluster import Node
from elastic_trainer.local.etcd import EtcdServer
from tests.drills.endings.job import Job
from tests.integration.training.launch import ran
from tests.unit.checkpoint.states import newest_of, same

SMALL = ("data.limit=600", "data.test_size=100", "model.width=4", "global_batch=32", "micro_batch=16")
QUIET = ("epochs=1000000", "scheduler={name: none}", "evaluation={every_epochs: null}", "checkpoint.every_s=600")


def trained(directory: Path, *more: str) -> list[str]:
    job = ["-m", "elastic_trainer.training", "mnist", "reduction=tree", *SMALL, *QUIET]
    return [*job, f"checkpoint.directory={directory}", *more]


def workers(nodes: Sequence[Node]) -> list[int | None]:
    return [each.pid if (each := node.worker()) is not None else None for node in nodes]


@pytest.mark.timeout(400)
def test_mnist_lives_through_a_day_and_has_the_bits_of_one_quiet_process(
    tmp_path: Path, own_etcd: EtcdServer, run_id: str
) -> None:
    """A worker is killed, then the node of rank 0, a worker is frozen, one is killed while etcd is away: the others go
    on in their processes. The run is asked for a checkpoint, a node leaves by plan, all leave, and others resume. Each
    sample is used once, no step is made twice, and model and optimizer are those of one process without faults, bit by
    bit."""
    entry = trained(tmp_path / "checkpoints")
    options = {"hang_timeout": "8", "ttl": "10"}
    with Job(tmp_path, own_etcd.endpoint, run_id, most=3, entry=entry, options=options) as job:
        job.start(2)
        after = job.await_world("n0", "n1")
        first, second = map(job.node, job.order())
        others = workers([first])
        assert second.kill_worker() is not None
        after = job.await_world("n0", "n1", after=after)
        assert workers([first]) == others

        third = job.add()
        after = job.await_world("n0", "n1", "n2", after=after)
        others = workers([second, third])
        assert job.order()[0] == first.name
        assert first.kill() is not None
        left = (second.name, third.name)
        after = job.await_world(*left, after=after)
        assert workers([second, third]) == others

        frozen = second.worker()
        assert frozen is not None
        frozen.suspend()
        after = job.await_world(*left, after=after)
        assert workers([third]) == others[1:]
        assert not frozen.is_running()

        own_etcd.kill()
        job.await_steps(20)
        others = workers([second])
        assert third.kill_worker() is not None
        own_etcd.restart()
        after = job.await_world(*left, after=after)
        assert workers([second]) == others

        assert main(["checkpoints", "save", run_id, "--endpoint", own_etcd.endpoint]) == 0
        asked = job.saved_step()
        assert asked is not None
        job.add()
        after = job.await_world(*left, "n3", after=after)
        second.terminate()
        assert job.exit_code(second) == EXIT_LEFT
        after = job.await_world("n2", "n3", after=after)
        for name in ("n2", "n3"):
            job.node(name).terminate()
        assert [job.exit_code(job.node(name)) for name in ("n2", "n3")] == [EXIT_LEFT] * 2
        stopped = job.saved_step()
        assert stopped is not None
        assert stopped > asked

        job.start(2)
        job.await_world("n4", "n5", after=after)
        for name in ("n4", "n5"):
            job.node(name).terminate()
        assert [job.exit_code(job.node(name)) for name in ("n4", "n5")] == [EXIT_LEFT] * 2
        job.check_lossless()
    found = newest_of(CheckpointManager(tmp_path / "checkpoints"))
    assert found.manifest.step > stopped
    done = ran([*trained(tmp_path / "quiet"), f"max_steps={found.manifest.step}"])
    assert done.code == 0, done.err
    expected = newest_of(CheckpointManager(tmp_path / "quiet"))
    assert expected.manifest.step == found.manifest.step
    for part in ("model", "optimizer"):
        assert same(found.state[part], expected.state[part])
