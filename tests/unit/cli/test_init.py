"""``elastic-trainer init``: new files, and by line what in a script a Session takes over."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from elastic_trainer import jobs
from elastic_trainer.cli.init import Topic, advice
from elastic_trainer.cli.main import main
from elastic_trainer.errors import EXIT_CONFIG, ConfigError
from elastic_trainer.jobs.config import load_job

SCRIPTS = Path(jobs.__file__).with_name("scripts")
TRAINER = """\
import os
import torch
from torch import save
from torch.distributed import all_reduce, init_process_group
from torch.nn.parallel import DistributedDataParallel as Wrapped
from torch.utils.data import DataLoader, WeightedRandomSampler

class Trainer:
    def __init__(self, model, loader, opt, plateau):
        self.gpu = int(os.environ["LOCAL_RANK"])
        self.opt = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model = Wrapped(model, device_ids=[self.gpu], find_unused_parameters=True)
        self.loader, self.sched = loader, plateau

    def _batch(self, x, y, step):
        loss = self.model(x, y)
        loss.backward()
        self.opt.step()
        all_reduce(loss)

    def _epoch(self, epoch):
        for step, (x, y) in enumerate(self.loader):
            self._batch(x, y, step)
        self.sched.step()

    def fit(self, epochs):
        for epoch in range(epochs):
            self._epoch(epoch)
            save(self.model.module.state_dict(), "last.pt")
        for name in os.listdir("."):
            print(name)

def main(data):
    init_process_group("nccl")
    sampler = WeightedRandomSampler([1.0], 1)
    Trainer(Net(), DataLoader(data, 64, drop_last=True, sampler=sampler), None, None).fit(3)
"""
"""A class with methods, names imported one by one, and a counter called ``step``."""


def _lines(source: bytes) -> dict[Topic, list[int]]:
    return {each.topic: sorted(each.found) for each in advice(source, "runs/x")}


def test_a_class_with_methods_is_understood() -> None:
    """Loops are found whose step is in a method that they call; other loops are none of ours."""
    assert _lines(TRAINER.encode()) == {
        Topic.RANKS: [10],
        Topic.MODEL: [12],
        Topic.STEP: [17, 18],
        Topic.COLLECTIVES: [19],
        Topic.DATA: [22, 27, 35, 36],
        Topic.SCHEDULE: [24],
        Topic.CHECKPOINTS: [29],
        Topic.GROUP: [34],
    }


def test_replacements_have_the_names_of_the_script() -> None:
    """Where they are plain; what a wrapper or loader was told is carried over or named, and no name is hidden."""
    instead = {each.topic: "\n".join(each.instead) for each in advice(TRAINER.encode(), "runs/x")}
    assert "checkpoint_dir='runs/x'" in instead[Topic.GROUP]
    wrap = 'self.model = session.wrap(model, optimizer=self.opt, ddp_options={"find_unused_parameters": True})'
    assert wrap in instead[Topic.MODEL]
    assert "as session_step:" in instead[Topic.STEP]
    for words in ("session.batches(data, ", "drop_last=", "# WeightedRandomSampler: "):
        assert words in instead[Topic.DATA]


def test_all_that_the_plain_script_has_is_found() -> None:
    """Each place that the elastic script lacks or has otherwise, and nothing of what they share."""
    source = (SCRIPTS / "ddp_script.py").read_bytes()
    found = {line for lines in _lines(source).values() for line in lines}
    text = dict(enumerate(source.decode().splitlines(), 1))
    same = {line.strip() for line in (SCRIPTS / "ddp_script_elastic.py").read_text().splitlines()}
    given = ("CosineAnnealingLR(", "GradScaler(", "autocast(")  # they stay, and the list says so
    assert [
        text[line] for line in found if text[line].strip() in same and not any(x in text[line] for x in given)
    ] == []
    for words in (
        *("DistributedDataParallel(", "DistributedSampler(", "DataLoader(", "in enumerate(loader", "set_epoch("),
        *("torch.load(", "torch.save(", "scaler.scale(", "unscale_(", "clip_grad_norm_(", "scaler.update()"),
        *("scheduler.step()", "number % 2", "get_rank()", "init_process_group(", "load_state_dict(state["),
    ):
        called = [line for line in text if words in text[line]]
        assert called, words
        assert set(called) <= found, words


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (b"x =", "this is not a Python script: invalid syntax"),
        (b"\x00", "this is not a Python script: source code string cannot contain null bytes"),
        (b"x = '\xff'", "this is not a Python script: (unicode error)"),
        (b"-" * 100_000 + b"1", "this is not a Python script: it is nested too deep"),
        (b"from elastic_trainer import Session", "the script has a Session already"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(source: bytes, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        advice(source, "runs/x")
    assert sentence in str(caught.value)


def test_a_script_is_listed_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By line; and ``--write`` says why it is refused, and what to do."""
    monkeypatch.chdir(tmp_path)
    source = b"\xef\xbb\xbf# -*- coding: utf-8 -*-\r\nloss.backward()\r\n\x0c\r\noptimizer.step()\r\n"
    Path("x.py").write_bytes(source)
    assert main(["init", "x.py"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == ["the step", "  2  loss.backward()", "  4  optimizer.step()"]
    assert main(["init", "x.py", "--write"]) == EXIT_CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert "init does not rewrite scripts: only their authors can tell" in line
    assert "change by hand the lines that elastic-trainer init x.py lists" in line
    Path("y.py").write_text("print(1)")
    assert main(["init", "y.py"]) == 0
    assert "y.py has nothing that a Session takes over" in capsys.readouterr().out
    assert Path("x.py").read_bytes() == source


def test_new_files_are_whole_and_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert "with Session(" in Path("train.py").read_text()
    assert main(["init", "job.yaml"]) == 0
    assert load_job("job.yaml").checkpoint.directory == "runs/job"
    ast.parse(Path("spirals.py").read_text())
    capsys.readouterr()
    for words, sentence in (
        (["job.yaml"], "'job.yaml' is there already"),
        (["other.yaml"], "'spirals.py' is there already"),
        (["notes.txt"], "'notes.txt' is neither a script.py nor a job.yaml"),
        (["nowhere/a.py"], "nowhere/a.py: cannot be written: No such file"),
    ):
        assert main(["init", *words]) != 0
        assert sentence in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "spirals.py", "train.py"]
