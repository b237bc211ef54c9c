"""``elastic-trainer local``: from options to what is run."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from elastic_trainer.cli import run as local
from elastic_trainer.drills.entry import entry
from elastic_trainer.drills.faults import Fault, FaultKind
from elastic_trainer.drills.local_run import named_directories
from elastic_trainer.errors import ConfigError
from elastic_trainer.local.cluster import ClusterSpec, threads_per_worker, torchrun


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    local.configure_local(parser)
    return parser.parse_args(argv)


def test_a_first_round_of_all_is_waited_for_unless_something_else_is_said() -> None:
    """On a slow machine nodes that are started together come seconds apart."""
    assert local.patient({"ttl": "3"}) == {"last_call": "60", "ttl": "3"}
    assert local.patient({"last_call": "1"}) == {"last_call": "1"}


def test_everything_after_the_dashes_belongs_to_the_job() -> None:
    """Also options that look like ours."""
    assert parsed("--nodes", "2", "--", "train.py", "--keep", "--", "x").words[-4:] == ["train.py", "--keep", "--", "x"]


def test_faults_may_be_repeated() -> None:
    arguments = parsed("--nodes=2", "--kill-worker-at=3", "--kill-worker-at=9:n1:0", "--join-at=4", "--", "x.py")
    assert local.faults(arguments) == (
        Fault(FaultKind.KILL_WORKER, 3),
        Fault(FaultKind.KILL_WORKER, 9, "n1", 0),
        Fault(FaultKind.JOIN, 4),
    )


def test_the_number_of_nodes_at_the_start_leaves_room_for_those_that_join() -> None:
    assert local.starting(None, 2, 4, joins=0) == 4
    assert local.starting(None, 2, 4, joins=1) == 3
    assert local.starting(None, 2, 4, joins=5) == 2
    assert local.starting(3, 2, 4, joins=5) == 3


def test_one_number_of_nodes_is_both_limits() -> None:
    assert local.nodes("3") == (3, 3)
    assert local.nodes("2:4") == (2, 4)


def test_recovery_is_an_option_of_the_rendezvous() -> None:
    """Checked together with the others; torchrun's own backend knows none."""
    assert local.rendezvous("ttl=3, last_call=1", "in_place", "etcd3") == {
        "ttl": "3",
        "last_call": "1",
        "recovery": "in_place",
    }
    with pytest.raises(ConfigError, match="'ttl'"):
        local.rendezvous("ttl=0.1", None, "etcd3")
    with pytest.raises(ConfigError, match="etcd3"):
        local.rendezvous("", "restart", "c10d")


def test_a_script_is_run_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert entry([str(script), "a", "b"], tmp_path) == (str(script), "a", "b")


def test_a_task_keeps_its_checkpoints_in_the_run_directory_by_default(tmp_path: Path) -> None:
    """A job file that names a directory, or an argument that does, wins."""
    ours, theirs = f"checkpoint.directory={tmp_path / 'checkpoints'}", "checkpoint.directory=elsewhere"
    run = ("-m", "elastic_trainer.training")
    assert entry(["mnist", "epochs=2"], tmp_path) == (*run, "mnist", ours, "epochs=2")
    assert entry(["mnist", theirs], tmp_path) == (*run, "mnist", theirs)
    job = tmp_path / "job.yaml"
    job.write_text("task: mnist\nepochs: 1\nglobal_batch: 64\n")
    assert entry([str(job)], tmp_path) == (*run, str(job), ours)
    job.write_text("task: mnist\nepochs: 1\nglobal_batch: 64\ncheckpoint:\n  directory: kept\n")
    assert entry([str(job)], tmp_path) == (*run, str(job))


def test_a_mistake_in_the_job_is_found_before_anything_is_started(tmp_path: Path) -> None:
    """Overrides are checked here, not in each of the workers."""
    with pytest.raises(ConfigError, match="epohcs"):
        entry(["mnist", "epohcs=2"], tmp_path)


def test_the_command_of_a_node(tmp_path: Path) -> None:
    """What a user would type on each machine; the node's name makes logs and ledger readable."""
    spec = ClusterSpec("r1", tmp_path, "127.0.0.1:2379", ("train.py", "x"), 2, 4, workers=2, options={"ttl": "3"})
    command = torchrun(spec, "n1", first=False)
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert command[3:] == [
        "--nnodes=2:4",
        "--nproc-per-node=2",
        "--max-restarts=3",
        "--rdzv-id=r1",
        "--rdzv-backend=etcd3",
        "--rdzv-endpoint=127.0.0.1:2379",
        "--local-addr=127.0.0.1",
        "--rdzv-conf=ttl=3,node_id=n1",
        "train.py",
        "x",
    ]


def test_threads_share_the_cores() -> None:
    assert [threads_per_worker(8, workers) for workers in (1, 3, 8, 100)] == [8, 2, 1, 1]


def test_hosts_of_their_own_need_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is started or written."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    (tmp_path / "train.py").touch()
    arguments = parsed("--nodes=2", "--hosts", f"--run-dir={tmp_path}/run", "--", str(tmp_path / "train.py"))
    with pytest.raises(ConfigError, match="hosts of their own for the nodes need root"):
        local.run_local(arguments)
    assert not (tmp_path / "run").exists()


def test_hosts_see_the_directories_that_the_command_names(tmp_path: Path) -> None:
    """Of a script, of options with a value, of a file that is still to be written; not all of /tmp."""
    (tmp_path / "data").mkdir()
    words = (str(tmp_path / "train.py"), f"--data={tmp_path}/data", "/tmp/new", "/dev/shm", "--epochs", "3")
    assert named_directories(words)[:2] == [tmp_path, tmp_path / "data"]
    assert not {Path("/tmp/new"), Path("/dev/shm")} & {*named_directories(words)}
    assert Path("/tmp") not in named_directories(words)
