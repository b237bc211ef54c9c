"""What was exported and imported is what a session resumes from: it ends as one that was never moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_trainer import Session
from elastic_trainer.checkpoint import CheckpointManager, SaveInfo
from elastic_trainer.cli.main import main
from tests.support.small_disk import mounted


def trained(directory: Path, epochs: int) -> tuple[int, dict[str, torch.Tensor]]:
    """The step at which it began, and the parameters in the end."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = [(torch.full((4,), number / 10), torch.tensor(float(number % 3))) for number in range(20)]
    with Session(directory, seed=1, device="cpu", checkpoint_every_s=None) as session:
        wrapped = session.wrap(model, optimizer=optimizer)
        began = session.step_number
        for batch in session.batches(data, global_batch_size=4, epochs=epochs):
            with session.step() as step:
                step.backward((wrapped(batch.x).squeeze(1) - batch.y).square().mean())
                optimizer.step()
    return began, {name: each.detach().clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize(("target", "name"), [("safetensors", "all.safetensors"), ("torch", "all.pt")])
def test_a_session_resumes_from_an_imported_state(target: str, name: str, tmp_path: Path) -> None:
    """At the step of the checkpoint, with optimizer and random numbers: the same bits in the end."""
    trained(tmp_path / "first", 2)
    goal = tmp_path / name
    assert main(["checkpoints", "export", str(tmp_path / "first"), str(goal), "--to", target, "--all"]) == 0
    assert main(["checkpoints", "import", str(goal), "--into", str(tmp_path / "second")]) == 0
    here, there = trained(tmp_path / "first", 4), trained(tmp_path / "second", 4)
    assert (here[0], there[0]) == (10, 10)
    assert all(torch.equal(there[1][key], each) for key, each in here[1].items())
    assert any(not torch.equal(each, trained(tmp_path / "third", 2)[1][key]) for key, each in here[1].items())


@pytest.mark.parametrize("target", ["safetensors", "torch", "huggingface"])
def test_an_export_to_a_full_disk_is_one_sentence(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 73, and nothing is left there; an import there says so too."""
    CheckpointManager(tmp_path / "run").save({"model": {"w": torch.randn(1000, 1000)}}, SaveInfo(1))
    theirs = tmp_path / "theirs.pt"
    torch.save({"w": torch.randn(1000, 1000)}, theirs)
    with mounted(tmp_path / "disk", 1 << 20) as disk:
        capsys.readouterr()
        assert main(["checkpoints", "export", str(tmp_path / "run"), str(disk / "goal"), "--to", target]) == 73
        error = capsys.readouterr().err
        assert f"{disk}/goal cannot be written: No space left on device" in error
        assert error.count("elastic-trainer: ") == 1
        assert list(disk.iterdir()) == []
        assert main(["checkpoints", "import", str(theirs), "--into", str(disk)]) == 73
        assert list(disk.iterdir()) == []
