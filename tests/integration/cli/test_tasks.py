"""Ready-made tasks and scripts on a local cluster whose workers are killed and whose nodes join, in place."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from elastic_trainer import jobs
from elastic_trainer.cli.main import main
from elastic_trainer.jobs.curves import read_curves
from tests.integration.cli.test_local import Local
from tests.integration.training.launch import ran
from tests.support.pages import DOCS, ROOT, blocks
from tests.support.requirements import missing

pytestmark = [pytest.mark.timeout(500), pytest.mark.usefixtures("etcd_binary")]

SCRIPTS = Path(jobs.__file__).with_name("scripts")
VERSE = "Row, row, row your boat, gently down the stream; merrily, merrily, merrily, life is but a dream.\n"


def _needs(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        missing(f"{module} is not installed: it brings the digits")


def _survived(started: list[Local], directory: Path, options: tuple[str, ...], job: tuple[str, ...]) -> Local:
    """Run ``job`` in place through the faults in ``options``; what every such run has to show."""
    command = Local(directory, "--recovery", "in_place", *options, job=job)
    started.append(command)
    assert command.wait() == 0, command.said()
    summary = command.summary()
    assert summary["audit"]["exact"], summary["audit"]
    for fault in summary["faults"]:
        assert fault["recovery"] is not None, summary["faults"]
    assert command.committed_again() == 0
    assert command.left() == []
    return command


def _said_by_workers(command: Local) -> str:
    return "".join(path.read_text() for path in (command.run_dir / "logs").glob("n*.log"))


def test_a_language_model_trains_through_kills_and_a_join(tmp_path: Path, started: list[Local]) -> None:
    """No step is lost or repeated, every sample of the budget is used once, and the model has learnt its verse."""
    text = tmp_path / "verse.txt"
    text.write_text(VERSE * 400)
    sizes = ("model.layers=2", "model.width=32", "model.heads=2", "model.context=32", "data.tokenizer=bytes")
    tokens = ("options.batch_tokens=256", "options.max_tokens=76800", "evaluation.every_steps=null")
    job = ("gpt", f"data.files={text}", *sizes, *tokens, "optimizer.lr=0.01", "epochs=50")
    # Two nodes are the fewest: the job cannot end before the worker is back, nor before the third node has joined.
    faults = ("--kill-worker-at", "20", "--join-at", "40", "--kill-node-at", "60:n1")
    summary = _survived(started, tmp_path, ("--nodes", "2:3", "--start", "2", *faults), job).summary()
    assert [fault["what"].split(" ")[0] for fault in summary["faults"]] == ["worker", "node", "node"]
    assert summary["audit"]["steps"] == 300
    assert summary["rounds"][0]["nodes"] == ["n0", "n1"]
    assert "n2" in summary["rounds"][-1]["nodes"]
    assert summary["metrics"]["loss"] < 2.0


def test_key_points_are_found_after_faults(tmp_path: Path, started: list[Local]) -> None:
    """With the statistics of all ranks in every norm: a killed worker and a newcomer cost no step and no sample."""
    # A node comes, one of the first two loses its worker, the other one is killed: none trains on without the new one.
    faults = ("--join-at", "4", "--kill-worker-at", "20:n0", "--kill-node-at", "40:n1")
    network = ("model.channels=[8, 16]", "model.stages=[{branches: 1, blocks: 1}, {branches: 2, blocks: 1}]")
    data = ("data.count=400", "data.test_count=60", "epochs=5", "global_batch=10", "scheduler.milestones=[4]")
    quick = ("evaluation.every_epochs=null", "checkpoint.every_steps=40")
    command = _survived(
        started, tmp_path, ("--nodes", "2:3", "--start", "2", *faults), ("keypoints", *data, *network, *quick)
    )
    summary = command.summary()
    assert len(summary["faults"]) == 3
    assert "n2" in summary["rounds"][-1]["nodes"], summary["rounds"]
    assert [epoch["used"] for epoch in summary["audit"]["epochs"]] == [400] * 5
    assert summary["metrics"]["point_f1"] > 0.6
    assert summary["metrics"]["heat_loss"] < 0.003


def test_the_session_script_survives_a_kill(tmp_path: Path, started: list[Local]) -> None:
    """The script to start from, by its name: in place, evaluated on the ranks there are, resumed when run again."""
    _needs("mlxtend")
    options = ("--nodes", "1:2", "--kill-worker-at", "20")
    command = _survived(started, tmp_path, options, ("script", "--epochs", "3"))
    assert command.summary()["audit"]["steps"] == 189
    reached = re.findall(r"epoch 3: ([\d.]+)% on \d ranks?", _said_by_workers(command))
    assert [float(percent) > 90.0 for percent in reached] == [True]
    again = _alone("session_script.py", "--directory", str(command.run_dir / "checkpoints"), "--epochs", "4")
    seen = re.findall(r"epoch (\d)", again)
    assert seen in (["4"], ["3", "4"]), again  # a save may come in the last step, before epoch 3 is evaluated


def test_the_sharded_script_survives_a_node_and_resumes_in_one_process(tmp_path: Path, started: list[Local]) -> None:
    """FSDP2 over two processes of each node: the other node's processes go on, and one process takes all shards up."""
    _needs("shakespeare")
    options = ("--nodes", "1:2", "--nproc-per-node", "2", "--kill-node-at", "20")
    small = ("--width", "32", "--steps")
    job = (str(SCRIPTS / "sharded_script.py"), *small, "60", "--directory", str(tmp_path / "run"))
    command = _survived(started, tmp_path, options, job)
    assert len(command.summary()["faults"]) == 1
    before = _loss_of_sharded(_said_by_workers(command))
    after = _loss_of_sharded(_alone("sharded_script.py", *small, "60", "--directory", str(tmp_path / "run")))
    assert after == pytest.approx(before, abs=2e-3)
    assert after < 3.5


def _loss_of_sharded(text: str) -> float:
    (loss,) = re.findall(r"step 60: loss ([\d.]+) on \d ranks", text)
    return float(loss)


@pytest.mark.parametrize(
    ("folder", "package", "arguments", "says"),
    [
        ("ddp", "torch", ("--epochs", "4"), "on the right spiral"),
        ("nanogpt", "torch", ("--steps", "60"), "validation loss"),
        ("moe", "torch", ("--steps", "60"), "after 60 steps"),
        ("accelerate", "accelerate", ("--epochs", "2"), "on the right spiral"),
        ("lightning", "lightning", ("--epochs", "2"), "on the right spiral"),
        ("transformers", "transformers", ("--steps", "60"), "step 60: mean loss"),
    ],
)
def test_an_example_loses_a_node_and_ends_well(
    folder: str, package: str, arguments: tuple[str, ...], says: str, tmp_path: Path, started: list[Local]
) -> None:
    """One script of each folder of examples (``fsdp2`` links to the script that is tested above)."""
    _needs(package)
    job = (str(ROOT / "examples" / folder / "train.py"), *arguments, "--directory", str(tmp_path / "run"))
    workers = "2" if folder == "moe" else "1"  # which share out the experts
    options = ("--nodes", "1:2", "--nproc-per-node", workers, "--kill-node-at", "20")
    command = _survived(started, tmp_path, options, job)
    assert len(command.summary()["faults"]) == 1
    assert _said_by_workers(command).count(says) == 1


def test_the_tutorials_script_logs_its_course_through_a_kill(tmp_path: Path, started: list[Local]) -> None:
    """Losses of all steps that are looked at, one line for each change of the ranks, and `plot` draws them."""
    for block in blocks(DOCS / "tutorials/train.md"):
        if block.file in ("spirals.py", "train.py"):
            text = block.text.replace('"runs/script"', repr(str(tmp_path / "script")))
            (tmp_path / str(block.file)).write_text(text)
    options = ("--nodes", "1:2", "--kill-worker-at", "100:n1")
    summary = _survived(started, tmp_path, options, (str(tmp_path / "train.py"),)).summary()
    curves = read_curves(tmp_path / "script")
    assert list(curves.losses)[-1] == 700
    assert set(range(10, 701, 10)) - set(curves.losses) <= {100, 110}  # the step that was interrupted has no loss
    assert [change.world_size for change in curves.changes] == [each["world"] for each in summary["rounds"]]
    assert "was lost" in curves.changes[1].reason
    assert list(curves.evaluations["accuracy"].values())[-1] >= 0.95
    assert main(["plot", str(tmp_path / "script"), "--output", str(tmp_path / "course.svg")]) == 0


def test_the_plain_and_the_elastic_script_learn_and_resume(tmp_path: Path) -> None:
    """The one is an ordinary DDP script under torchrun, without this package; the other learns as much alone."""
    script = (str(SCRIPTS / "ddp_script.py"), "--epochs", "6", "--directory", str(tmp_path / "plain"))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    plain = [_run(*launcher, ranks, *script) for ranks in ("2", "1")]
    assert [each.count("epoch 6 done") for each in plain] == [2, 0]
    words = ("ddp_script_elastic.py", "--epochs", "6", "--directory", str(tmp_path / "elastic"))
    elastic = [_alone(*words) for _ in range(2)]
    assert [each.count("done") for each in elastic] == [6, 0]
    assert min(map(_right, [*plain, *elastic])) > 90.0


def _alone(script: str, *arguments: str) -> str:
    return _run(str(SCRIPTS / script), *arguments)


def _run(*words: str) -> str:
    done = ran(words)
    assert done.code == 0, done.err
    return done.out


def _right(said: str) -> float:
    return min(float(percent) for percent in re.findall(r"([\d.]+)% of the points", said))
