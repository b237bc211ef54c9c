"""What was exported and imported is what a session resumes from: it ends as one that was never moved."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from elastic_trainer import Session
from elastic_trainer.checkpoint import CheckpointManager, SaveInfo
from elastic_trainer.cli.main import main
from tests.support.small_disk import mounted
from tests.unit.checkpoint.states import same


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


def weights() -> dict[str, torch.Tensor]:
    return {"module.up.weight": torch.randn(40, 30), "module.up.bias": torch.randn(40).bfloat16()}


def imported(source: Path, into: Path, *options: str) -> dict[str, torch.Tensor]:
    """What became of it: the weights."""
    assert main(["checkpoints", "import", str(source), "--into", str(into), *options]) == 0
    return dict(sorted(load_file(into / f"{source.name}.safetensors").items()))


def test_a_hugging_face_folder_of_several_files_is_imported(tmp_path: Path) -> None:
    """As it is exported here, and as others have it: prefixes go, a tensor comes from the file that the index says."""
    state = {"model": {f"w{number}": torch.randn(1000) for number in range(5)}}
    CheckpointManager(tmp_path / "run").save(state, SaveInfo(1))
    words = ["--to", "huggingface", "--shard-size", "9000"]
    assert main(["checkpoints", "export", str(tmp_path / "run"), str(tmp_path / "ours"), *words]) == 0
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) == 3
    assert same(imported(tmp_path / "ours", tmp_path / "into"), state["model"])
    theirs = tmp_path / "theirs-1.5"
    theirs.mkdir()
    (theirs / "config.json").write_text("{}")
    tensors, index = weights(), dict[str, str]()
    for number, name in enumerate(tensors):
        save_file({name: tensors[name], "module.stale": torch.zeros(number + 1)}, theirs / f"{number}.safetensors")
        index |= {name: f"{number}.safetensors", "module.stale": "0.safetensors"}
    (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found = imported(theirs, tmp_path / "into")
    assert found.keys() == {"up.weight", "up.bias", "stale"}
    assert found["stale"].shape == (1,)
    assert all(torch.equal(each, found[name.removeprefix("module.")]) for name, each in tensors.items())


def dcp_of(directory: Path, state: dict[str, Any]) -> Path:
    """As torch saves ``state``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_dcp(state, checkpoint_id=directory, no_dist=True)
    return directory


def test_a_directory_of_torchs_distributed_checkpoint_is_imported(tmp_path: Path) -> None:
    """The model that is found there, or the part that is named; no other tensor is read."""
    state: dict[str, Any] = {"model": weights(), "ema": {"w": torch.ones(3)}, "optimizer": {"lr": 0.1}, "step": 7}
    folder = dcp_of(tmp_path / "dcp", state)
    expected = {name.removeprefix("module."): state["model"][name] for name in sorted(state["model"])}
    assert same(imported(folder, tmp_path / "one"), expected)
    assert same(imported(folder, tmp_path / "two", "--part", "ema"), {"w": torch.ones(3)})
    assert set(imported(dcp_of(tmp_path / "flat", weights()), tmp_path / "three")) == set(expected)


class Harmful:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def refusal(source: Path, into: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What an import that fails says."""
    capsys.readouterr()
    assert main(["checkpoints", "import", str(source), "--into", str(into)]) == 78
    said = capsys.readouterr().err
    assert said.count("elastic-trainer: ") == 1
    assert not into.exists() or not list(into.glob("*.safetensors"))
    return said


def test_a_folder_that_is_damaged_or_harmful_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No code of it runs, no file outside of it is read, and nothing is left."""
    into, harm = tmp_path / "into", tmp_path / "harm"
    folder = dcp_of(tmp_path / "dcp", {"model": weights()})
    metadata = folder / ".metadata"
    whole = metadata.read_bytes()
    metadata.write_bytes(pickle.dumps(Harmful(harm)))
    assert "which may run any code" in refusal(folder, into, capsys)
    assert not harm.exists()
    metadata.write_bytes(whole.replace(b"__0_0.distcp", b"../.././data"))
    assert "names the file ../.././data, which is outside of the checkpoint" in refusal(folder, into, capsys)
    metadata.write_bytes(whole[:-20])
    assert "cannot be read" in refusal(folder, into, capsys)
    metadata.write_bytes(whole)
    (folder / "__0_0.distcp").write_bytes(b"short")
    assert "cannot be read" in refusal(folder, into, capsys)
    (folder / "__0_0.distcp").unlink()
    assert "No such file or directory" in refusal(folder, into, capsys)
    shards = tmp_path / "shards"
    shards.mkdir()
    assert "is not a folder of weights" in refusal(shards, into, capsys)
    index = shards / "model.safetensors.index.json"
    save_file(weights(), shards / "a.safetensors")
    for content, sentence in (
        ("{", "is not a valid index"),
        ('{"weight_map": {"w": "../a.safetensors"}}', "is not a valid index"),
        ('{"weight_map": {"w": "a.safetensors"}}', "does not hold 'w', as the index says"),
        ('{"weight_map": {"w": "b.safetensors"}}', "No such file or directory"),
    ):
        index.write_text(content)
        assert sentence in refusal(shards, into, capsys)
