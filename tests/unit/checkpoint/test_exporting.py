"""Exports and imports: others read what is written, a whole state comes back bit by bit, and no file is run."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from elastic_trainer.checkpoint import CheckpointManager, SaveInfo, exchange
from elastic_trainer.cli.main import main
from tests.unit.checkpoint.states import Harmful, newest_of, same, training_state


class Tied(nn.Module):
    """Two names of one parameter, as language models have; a buffer, half numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(7, 4)
        self.decoder = nn.Linear(4, 7, bias=False)
        self.decoder.weight = self.encoder.weight
        self.narrow = nn.Linear(4, 4).to(torch.bfloat16)
        self.register_buffer("count", torch.tensor(3))


def tied_model() -> dict[str, Any]:
    torch.manual_seed(5)
    return {**training_state(), "model": Tied().state_dict(), "user": {"note": "ü", "raw": bytes(5000)}}


INFO = SaveInfo(12, 3, 1, 640, 4, {"loss": float("nan")}, True, {"seed": 7, "config": {"model_type": "tied"}})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    CheckpointManager(tmp_path / "run").save(tied_model(), INFO)
    return tmp_path / "run"


def command(*words: object, code: int = 0) -> None:
    assert main(["checkpoints", *map(str, words)]) == code


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.state_dict())


def test_weights_load_into_a_model(run: Path, tmp_path: Path) -> None:
    """By safetensors' own function, tied parameters included; by torch.load with weights_only."""
    command("export", run, tmp_path / "m.safetensors", "--to", "safetensors")
    command("export", run, tmp_path / "m.pt", "--to", "torch")
    expected = tied_model()["model"]
    one, other = Tied(), Tied()
    safetensors.torch.load_model(one, tmp_path / "m.safetensors")
    other.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    for found in (one, other):
        assert found.decoder.weight is found.encoder.weight
        assert all(torch.equal(weights(found)[name], each) for name, each in expected.items())
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata()["step"] == "12"
        assert file.metadata()["decoder.weight"] == "encoder.weight"


def test_a_moving_average_is_a_part_of_its_own(tmp_path: Path) -> None:
    """Exported under the names of the model."""
    model = Tied()
    average = torch.optim.swa_utils.AveragedModel(model)
    CheckpointManager(tmp_path / "run").save(
        {"model": model.state_dict(), "average": average.state_dict()}, SaveInfo(1)
    )
    for target, load in (("safetensors", safetensors.torch.load_model), ("torch", None)):
        goal = tmp_path / f"average.{target}"
        command("export", tmp_path / "run", goal, "--to", target, "--part", "average")
        found = Tied()
        if load is not None:
            load(found, goal)
        else:
            found.load_state_dict(torch.load(goal, weights_only=True))
        assert all(torch.equal(weights(found)[name], each) for name, each in weights(model).items())


@pytest.mark.parametrize("size", [1 << 30, 100])
def test_a_folder_for_hugging_face_holds_all_weights(size: int, run: Path, tmp_path: Path) -> None:
    """One file, or several of at most the given size with the index that their tools read; config.json beside them."""
    goal = tmp_path / "hf"
    command("export", run, goal, "--to", "huggingface", "--shard-size", size)
    files = sorted(each.name for each in goal.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (size > 100)
    assert json.loads((goal / "config.json").read_text()) == {"model_type": "tied"}
    found: dict[str, torch.Tensor] = {}
    for name in files:
        content = safetensors.torch.load_file(goal / name)
        assert len(content) == 1 or sum(each.nbytes for each in content.values()) <= size
        found |= content
        with safetensors.safe_open(goal / name, "pt") as file:
            assert file.metadata()["format"] == "pt", "transformers refuses a file without it"
    model = Tied()
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert (missing, unexpected) == (["decoder.weight"], [])
    if len(files) > 1:
        index = json.loads((goal / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
        assert set(index["weight_map"]) == set(found)
        assert set(index["weight_map"].values()) == set(files)


@pytest.mark.parametrize("target", ["safetensors", "torch"])
def test_a_whole_state_comes_back_bit_by_bit(
    target: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all that is known of it; what is in the directory already stays, and is named if it counts as newer."""
    goal = tmp_path / ("all.pt" if target == "torch" else "all.safetensors")
    command("export", run, goal, "--to", target, "--all")
    for step in (1, 2, 3, 4, 5):
        CheckpointManager(tmp_path / "new").save({"step": step}, SaveInfo(step))
    before = os.listdir(tmp_path / "new")
    command("import", goal, "--into", tmp_path / "new")
    assert set(before) < set(os.listdir(tmp_path / "new"))
    loaded = newest_of(CheckpointManager(tmp_path / "new"))
    assert same(loaded.state, tied_model())
    before_it = CheckpointManager(run).newest()
    assert before_it is not None
    for name in exchange.FIELDS:
        assert repr(getattr(loaded.manifest, name)) == repr(getattr(before_it.manifest, name))
    newer = CheckpointManager(tmp_path / "new").save({}, SaveInfo(5, round=9)).name
    command("import", goal, "--into", tmp_path / "new")
    assert f"{newer} counts as newer" in capsys.readouterr().out


@pytest.mark.parametrize("shape", ["flat", "model", "state_dict", "ddp", "compiled", "layers", "legacy", "part"])
def test_weights_of_others_become_a_file_of_weights(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever programs put them, and whatever wraps put before their names; what else there is, is named."""
    model = Tied()
    state: Any = model.state_dict()
    if shape in ("ddp", "compiled"):
        prefix = {"ddp": "module.", "compiled": "module._orig_mod."}[shape]
        state = OrderedDict((f"{prefix}{name}", each) for name, each in state.items())
    if shape == "layers":
        wrapped = "._checkpoint_wrapped_module._orig_mod."
        state = OrderedDict((wrapped.join(name.rsplit(".", 1)), each) for name, each in state.items())
    content = {"model": {"model": state, "epoch": 3}, "state_dict": {"state_dict": state, "opt": {}}}.get(shape, state)
    content = {"ema": {"net": state}, "model": {}} if shape == "part" else content
    source = tmp_path / "theirs.pth"
    torch.save(content, source, _use_new_zipfile_serialization=shape != "legacy")
    command("import", source, "--into", tmp_path / "new", *(("--part", "ema/net") if shape == "part" else ()))
    found = Tied()
    safetensors.torch.load_model(found, tmp_path / "new/theirs.safetensors")
    assert all(torch.equal(weights(found)[name], each) for name, each in weights(model).items())
    output = capsys.readouterr().out
    assert f"safetensors.torch.load_model(model, '{tmp_path}/new/theirs.safetensors')" in output
    assert ("left out: epoch" in output) == (shape == "model")
    command("import", source, "--into", tmp_path / "new", code=78)


def test_weights_in_safetensors_are_taken_as_they_are(run: Path, tmp_path: Path) -> None:
    command("export", run, tmp_path / "m.safetensors", "--to", "safetensors")
    command("import", tmp_path / "m.safetensors", "--into", tmp_path / "new")
    one, two = (safetensors.torch.load_file(path / "m.safetensors") for path in (tmp_path, tmp_path / "new"))
    assert same(dict(sorted(one.items())), dict(sorted(two.items())))
    command("export", run, tmp_path / "all.safetensors", "--to", "safetensors", "--all")
    command("import", tmp_path / "all.safetensors", "--part", "model", "--into", tmp_path / "new")
    three = safetensors.torch.load_file(tmp_path / "new/all.safetensors")
    assert same(dict(sorted(one.items())), dict(sorted(three.items())))


def test_nothing_in_a_file_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that needs pickle is refused in a sentence, and its code was not executed."""
    for legacy in (False, True):
        torch.save(
            {"model": Harmful(tmp_path / "ran")}, tmp_path / "trap.pt", _use_new_zipfile_serialization=not legacy
        )
        command("import", tmp_path / "trap.pt", "--into", tmp_path / "new", code=78)
        assert "holds a posix.mkdir, which only pickle can read" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.safetensors", b"", "cannot be read"),
        ("a.safetensors", b"x" * 100, "is not a safetensors file"),
        ("a.safetensors", (2).to_bytes(8, "little") + b"{}xx", "describes 0 bytes of data"),
        ("a.pt", b"", "cannot be read"),
        ("a.pt", b"PK\x03\x04" + bytes(50), "cannot be read"),
        ("a.txt", b"hello", "is not a .pt, .pth or .safetensors file"),
    ],
)
def test_a_file_of_nothing_known_is_one_sentence(
    name: str, content: bytes, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    command("import", tmp_path / name, "--into", tmp_path / "new", code=78)
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_whole_state_that_was_changed_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A note that does not fit its tensors makes no checkpoint."""
    command("export", run, tmp_path / "all.safetensors", "--to", "safetensors", "--all")
    content = (tmp_path / "all.safetensors").read_bytes()
    for old, new in ((b"user/raw", b"user/war"), (b'\\"step\\": 12', b'\\"step\\": -2')):
        assert old in content
        (tmp_path / "changed.safetensors").write_bytes(content.replace(old, new, 1))
        command("import", tmp_path / "changed.safetensors", "--into", tmp_path / "new", code=78)
        assert "state" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_goal_that_exists_stays_unless_forced(run: Path, tmp_path: Path) -> None:
    """Files and folders; after a failure nothing is left beside them."""
    (tmp_path / "m.pt").write_text("mine")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/mine").write_text("mine")
    for target, goal in (("torch", "m.pt"), ("safetensors", "m.pt"), ("huggingface", "hf")):
        command("export", run, tmp_path / goal, "--to", target, code=78)
    assert (tmp_path / "m.pt").read_text() == "mine"
    command("export", run, tmp_path / "hf", "--to", "torch", "--force", code=78)
    command("export", run, tmp_path / "m.pt", "--to", "torch", "--force")
    command("export", run, tmp_path / "hf", "--to", "huggingface", "--force")
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "model.safetensors"]
    (run / os.listdir(run)[0] / "tensors.safetensors").write_bytes(b"")
    command("export", run, tmp_path / "new.pt", "--to", "torch", code=1)
    command("export", run, tmp_path / "m.pt", "--to", "torch", "--force", code=1)
    assert sorted(os.listdir(tmp_path)) == ["hf", "m.pt", "run"]
    assert set(torch.load(tmp_path / "m.pt", weights_only=True)) == set(tied_model()["model"])


def test_what_a_target_cannot_hold_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Complex numbers in safetensors; a state without the part."""
    CheckpointManager(tmp_path / "run").save({"model": {"c": torch.zeros(2) * 1j}, "n": 1}, SaveInfo(1))
    command("export", tmp_path / "run", tmp_path / "c.safetensors", "--to", "safetensors", code=1)
    assert "tensor 'c' of checkpoint" in capsys.readouterr().err
    command("export", tmp_path / "run", tmp_path / "c.pt", "--to", "torch")
    assert torch.equal(torch.load(tmp_path / "c.pt", weights_only=True)["c"], torch.zeros(2) * 1j)
    command("export", tmp_path / "run", tmp_path / "d.pt", "--to", "torch", "--part", "net", code=1)
    assert "has no tensors under 'net' (its parts are: model, n)" in capsys.readouterr().err


# ---- folders


def prefixed() -> dict[str, torch.Tensor]:
    return {"module.up.weight": torch.randn(40, 30), "module.up.bias": torch.randn(40).bfloat16()}


def imported(source: Path, into: Path, *options: str) -> dict[str, torch.Tensor]:
    command("import", source, "--into", into, *options)
    return dict(sorted(load_file(into / f"{source.name}.safetensors").items()))


def test_a_hugging_face_folder_of_several_files_is_imported(tmp_path: Path) -> None:
    """As it is exported here, and as others have it: prefixes go, a tensor comes from the file that the index says."""
    state = {"model": {f"w{number}": torch.randn(1000) for number in range(5)}}
    CheckpointManager(tmp_path / "run").save(state, SaveInfo(1))
    words = ["--to", "huggingface", "--shard-size", "9000"]
    command("export", tmp_path / "run", tmp_path / "ours", *words)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) == 3
    assert same(imported(tmp_path / "ours", tmp_path / "into"), state["model"])
    theirs = tmp_path / "theirs-1.5"
    theirs.mkdir()
    (theirs / "config.json").write_text("{}")
    tensors, index = prefixed(), dict[str, str]()
    for number, name in enumerate(tensors):
        save_file({name: tensors[name], "module.stale": torch.zeros(number + 1)}, theirs / f"{number}.safetensors")
        index |= {name: f"{number}.safetensors", "module.stale": "0.safetensors"}
    (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found = imported(theirs, tmp_path / "into")
    assert found.keys() == {"up.weight", "up.bias", "stale"}
    assert found["stale"].shape == (1,)
    assert all(torch.equal(each, found[name.removeprefix("module.")]) for name, each in tensors.items())


def dcp_of(directory: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_dcp(state, checkpoint_id=directory, no_dist=True)
    return directory


def test_a_directory_of_torchs_distributed_checkpoint_is_imported(tmp_path: Path) -> None:
    """The model that is found there, or the part that is named; no other tensor is read."""
    state: dict[str, Any] = {"model": prefixed(), "ema": {"w": torch.ones(3)}, "optimizer": {"lr": 0.1}, "step": 7}
    folder = dcp_of(tmp_path / "dcp", state)
    expected = {name.removeprefix("module."): state["model"][name] for name in sorted(state["model"])}
    assert same(imported(folder, tmp_path / "one"), expected)
    assert same(imported(folder, tmp_path / "two", "--part", "ema"), {"w": torch.ones(3)})
    assert set(imported(dcp_of(tmp_path / "flat", prefixed()), tmp_path / "three")) == set(expected)


def refusal(source: Path, into: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    command("import", source, "--into", into, code=78)
    said = capsys.readouterr().err
    assert said.count("elastic-trainer: ") == 1
    assert not into.exists() or not list(into.glob("*.safetensors"))
    return said


def test_a_folder_that_is_damaged_or_harmful_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No code of it runs, no file outside of it is read, and nothing is left."""
    into, harm = tmp_path / "into", tmp_path / "harm"
    folder = dcp_of(tmp_path / "dcp", {"model": prefixed()})
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
    save_file(prefixed(), shards / "a.safetensors")
    for content, sentence in (
        ("{", "is not a valid index"),
        ('{"weight_map": {"w": "../a.safetensors"}}', "is not a valid index"),
        ('{"weight_map": {"w": "a.safetensors"}}', "does not hold 'w', as the index says"),
        ('{"weight_map": {"w": "b.safetensors"}}', "No such file or directory"),
    ):
        index.write_text(content)
        assert sentence in refusal(shards, into, capsys)
