"""``elastic-trainer run`` and ``local``: from options to what is run."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from elastic_trainer.cli import run
from elastic_trainer.cli.main import main
from elastic_trainer.drills.faults import Fault, FaultKind
from elastic_trainer.drills.local_run import entry, named_directories
from elastic_trainer.errors import ConfigError
from elastic_trainer.local.cluster import ClusterSpec, threads_per_worker, torchrun


def command(*argv: str) -> list[str]:
    parser = argparse.ArgumentParser()
    run.configure_run(parser)
    return run.command(parser.parse_args(argv))


def script(directory: Path, text: str) -> str:
    path = directory / "train.py"
    path.write_text(text)
    return str(path)


def test_torchrun_understands_the_command(tmp_path: Path) -> None:
    """With the endpoint, the run's name, one worker where there is no GPU, and restarts for weeks."""
    path = script(tmp_path, "print()\n")
    words = command("--nodes", "2:4", "--endpoint", "etcd:2379", "--", path, "--lr", "0.1")
    parsed = get_args_parser().parse_args(words)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("2:4", "1", 100)
    assert (parsed.rdzv_backend, parsed.rdzv_endpoint, parsed.rdzv_id) == ("etcd3", "etcd:2379", "train")
    assert (parsed.training_script, parsed.training_script_args) == (path, ["--lr", "0.1"])


def test_a_dry_run_prints_the_command_alone_and_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rdzv-conf", "user=u,password=geheim-1,ttl=9", "--", "-m", "my.train", "two words"]
    assert any("password=geheim-1,ttl=9" in word for word in command(*words))
    assert main(["run", "--dry-run", *words]) == 0
    said = capsys.readouterr()
    assert "user=u,password=***,ttl=9" in said.err
    assert said.err.endswith("-m my.train 'two words'\n")
    assert "geheim" not in said.err + said.out


def test_etcd_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_TRAINER_ENDPOINT", "there:2379")
    assert "--rdzv-endpoint=there:2379" in command("--", "script")
    assert "--rdzv-endpoint=a:2379,b:1" in command("--endpoint", "a,b:1", "--", "script")


def test_modules_and_tasks_run_too() -> None:
    """A module as it is; a task with a directory for its checkpoints."""
    assert command("--", "-m", "my.train", "x")[-3:] == ["-m", "my.train", "x"]
    assert "--rdzv-id=train" in command("--", "-m", "my.train")
    task = ["-m", "elastic_trainer.training", "mnist", "checkpoint.directory=runs/a/checkpoints"]
    assert command("--name", "a", "--", "mnist")[-4:] == task


@pytest.mark.parametrize(
    ("text", "recovery"),
    [
        ("from elastic_trainer import Session\n", "in_place"),
        ("from elastic_trainer.jobs.trainer import Trainer\n", "in_place"),
        ("import elastic_trainer as et\nwith et.Session() as session: pass\n", "in_place"),
        ("from elastic_trainer import Task\n", "restart"),
        ("import elastic_trainer\n", "restart"),
        ("class Session: pass\nfoo.Session()\n", "restart"),
        ("this is not a python\n", "restart"),
    ],
)
def test_a_script_with_a_session_recovers_in_place(tmp_path: Path, text: str, recovery: str) -> None:
    """Others are restarted, since their processes cannot follow a round. What the user says counts."""
    path = script(tmp_path, text)
    assert f"--rdzv-conf=recovery={recovery}" in command("--", path)
    assert "--rdzv-conf=recovery=restart" in command("--rdzv-conf", "recovery=restart", "--", path)
    assert "--rdzv-conf=ttl=9,recovery=restart" in command("--recovery=restart", "--rdzv-conf", "ttl=9", "--", path)


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run.configure_local(parser)
    return parser.parse_args(argv)


def test_the_options_of_a_local_run() -> None:
    """Everything after the dashes belongs to the job. A first round of all is waited for unless something else is said:
    on a slow machine nodes that are started together come seconds apart. There is room for those that join. Recovery is
    an option of the rendezvous, which torchrun's own backend does not know."""
    assert parsed("--nodes", "2", "--", "train.py", "--keep", "--", "x").words[-4:] == ["train.py", "--keep", "--", "x"]
    assert run.faults(
        parsed("--nodes=2", "--kill-worker-at=3", "--kill-worker-at=9:n1:0", "--join-at=4", "--", "x.py")
    ) == (
        Fault(FaultKind.KILL_WORKER, 3),
        Fault(FaultKind.KILL_WORKER, 9, "n1", 0),
        Fault(FaultKind.JOIN, 4),
    )
    assert run.patient({"ttl": "3"}) == {"last_call": "60", "ttl": "3"}
    assert run.patient({"last_call": "1"}) == {"last_call": "1"}
    assert [run.starting(asked, 2, 4, joins) for asked, joins in ((None, 0), (None, 1), (None, 5), (3, 5))] == [
        4,
        3,
        2,
        3,
    ]
    found = run.rendezvous("ttl=3, last_call=1", "in_place", "etcd3")
    assert found == {"ttl": "3", "last_call": "1", "recovery": "in_place"}
    with pytest.raises(ConfigError, match="etcd3"):
        run.rendezvous("", "restart", "c10d")


def test_a_task_keeps_its_checkpoints_in_the_run_directory_by_default(tmp_path: Path) -> None:
    """A job file that names a directory, or an argument that does, wins. Overrides are checked here, not in each of the
    workers."""
    ours, theirs = f"checkpoint.directory={tmp_path / 'checkpoints'}", "checkpoint.directory=elsewhere"
    training = ("-m", "elastic_trainer.training")
    assert entry(["mnist", "epochs=2"], tmp_path) == (*training, "mnist", ours, "epochs=2")
    assert entry(["mnist", theirs], tmp_path) == (*training, "mnist", theirs)
    job = tmp_path / "job.yaml"
    job.write_text("task: mnist\nepochs: 1\nglobal_batch: 64\n")
    assert entry([str(job)], tmp_path) == (*training, str(job), ours)
    job.write_text("task: mnist\nepochs: 1\nglobal_batch: 64\ncheckpoint:\n  directory: kept\n")
    assert entry([str(job)], tmp_path) == (*training, str(job))
    with pytest.raises(ConfigError, match="epohcs"):
        entry(["mnist", "epohcs=2"], tmp_path)


def test_the_command_of_a_node(tmp_path: Path) -> None:
    """What a user would type on each machine; the node's name makes logs and ledger readable."""
    spec = ClusterSpec("r1", tmp_path, "127.0.0.1:2379", ("train.py", "x"), 2, 4, workers=2, options={"ttl": "3"})
    command = torchrun(spec, "n1", first=False)
    assert [threads_per_worker(8, workers) for workers in (1, 3, 8, 100)] == [8, 2, 1, 1]
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert " ".join(command[3:]) == (
        "--nnodes=2:4 --nproc-per-node=2 --max-restarts=3 --rdzv-id=r1 --rdzv-backend=etcd3"
        " --rdzv-endpoint=127.0.0.1:2379 --local-addr=127.0.0.1 --rdzv-conf=ttl=3,node_id=n1 train.py x"
    )


def test_hosts_of_their_own_need_root_and_see_the_directories_that_the_command_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a script, of options with a value, of a file that is still to be written; not all of /tmp."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    (tmp_path / "train.py").touch()
    arguments = parsed("--nodes=2", "--hosts", f"--run-dir={tmp_path}/run", "--", str(tmp_path / "train.py"))
    with pytest.raises(ConfigError, match="hosts of their own for the nodes need root"):
        run.run_local(arguments)
    assert not (tmp_path / "run").exists()
    (tmp_path / "data").mkdir()
    named = named_directories(
        (str(tmp_path / "train.py"), f"--data={tmp_path}/data", "/tmp/new", "/dev/shm", "--epochs")
    )
    assert named[:2] == [tmp_path, tmp_path / "data"]
    assert not {Path("/tmp/new"), Path("/dev/shm"), Path("/tmp")} & {*named}
