"""``elastic-trainer init``: new files, and the four changes to a script that is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from elastic_trainer import tasks
from elastic_trainer.cli.conversion import converted
from elastic_trainer.cli.main import main
from elastic_trainer.errors import EXIT_CONFIG, ConfigError
from elastic_trainer.training.loading import load_job

PLAIN = Path(tasks.__file__).with_name("scripts") / "ddp_script.py"
TOP_LEVEL = '''\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group(backend="nccl")
data = make(text="""two
lines""")
net = Net()
ddp = DDP(net, device_ids=[0])
opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
loader = DataLoader(
    data,
    64,
    num_workers=2,
    sampler=DistributedSampler(data),
)
for images, labels in loader:
    # one step
    opt.zero_grad()
    loss = ddp(images).sum()
    loss.backward()
    opt.step()
print("done")
dist.destroy_process_group()
'''
CHANGED = '''\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from elastic_trainer import Session

with Session(checkpoint_dir="runs/x") as session:
    data = make(text="""two
lines""")
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    ddp = session.wrap(net, optimizer=opt)
    for batch in session.batches(data, global_batch_size=64, workers=2, epochs=1):
        # one step
        with session.step() as step:
            images, labels = batch.x, batch.y
            opt.zero_grad()
            loss = ddp(images).sum()
            step.backward(loss)
            opt.step()
    print("done")
'''


def test_a_script_of_one_piece_is_changed_as_a_person_would() -> None:
    """The optimizer comes before wrap, of the bare model; what lies in a string stays where it is."""
    assert converted(TOP_LEVEL, "runs/x") == CHANGED


def test_the_plain_script_becomes_one_with_a_session() -> None:
    """A loop in a function of its own finds the session that is open."""
    text = converted(PLAIN.read_text(), "runs/x")
    ast.parse(text)
    for line in ("session = Session.opened()", "session.epochs(arguments.epochs)", "global_batch_size=64)"):
        assert line in text
    for gone in ("DistributedSampler(", "DataLoader(", "process_group", "set_epoch"):
        assert gone not in text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x =", "this is not a Python script"),
        ("import elastic_trainer", "uses elastic_trainer already"),
        ("print(1)", "the script has no call of init_process_group()"),
        (TOP_LEVEL.replace("ddp = DDP(net, device_ids=[0])", ""), "has no `model = DistributedDataParallel(model)`"),
        (TOP_LEVEL.replace("    loss.backward()", "    train(loss)"), "has no `loss.backward()`"),
        (TOP_LEVEL.replace("opt = torch.optim.SGD(ddp.parameters(), lr=0.1)", ""), "has no optimizer beside the model"),
        (TOP_LEVEL.replace('print("done")', "print(len(loader))"), "'loader' is used for more than the loop"),
        (TOP_LEVEL.replace("in loader:", "in zip(a, b):"), "has no `zip(a, b) = DataLoader"),
        (TOP_LEVEL + "for _ in loader:\n    loss.backward()\n", "has 2 `loss.backward()`"),
    ],
)
def test_what_cannot_be_changed_is_one_sentence(text: str, sentence: str) -> None:
    """That names what was not found."""
    with pytest.raises(ConfigError) as caught:
        converted(text, "runs/x")
    assert sentence in str(caught.value)


def test_a_change_is_shown_first_and_written_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The diff on standard output, as `patch` takes it."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text(TOP_LEVEL)
    assert main(["init", "x.py"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("--- x.py")
    assert "nothing is written yet: elastic-trainer init x.py --write" in said.err
    assert Path("x.py").read_text() == TOP_LEVEL
    assert main(["init", "x.py", "--write"]) == 0
    assert Path("x.py").read_text() == CHANGED
    assert main(["init", "x.py"]) == EXIT_CONFIG


def test_new_files_are_whole_and_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script, and a job with its task."""
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
        (["new.py", "--write"], "there is no script 'new.py' to change"),
        (["nowhere/a.py"], "nowhere/a.py: cannot be written: No such file"),
    ):
        assert main(["init", *words]) != 0
        assert sentence in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "spirals.py", "train.py"]
