"""Checkpoints of sharded state: real gloo ranks with FSDP2 and tensor parallel write them together, and load them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.cli.main import main
from tests.integration.worker.launch import environment
from tests.support.forked import Forked
from tests.unit.checkpoint.reader import read
from tests.unit.checkpoint.states import newest_of, same

LIMIT_S = 90.0
Start = Callable[..., list[Forked]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as ends:

        def begin(action: str, shape: str) -> list[Forked]:
            size = ranks(shape)
            store = tmp_path / f"store-{len(list(tmp_path.glob('store-*')))}"
            store.touch()
            (tmp_path / "checkpoints").mkdir(exist_ok=True)
            directory = str(tmp_path / "checkpoints")
            words = ["-m", "tests.integration.checkpoint.places", action, directory, shape]
            found = []
            for rank in range(size):
                env = environment(RANK=str(rank), WORLD_SIZE=str(size), STORE=str(store))
                log = tmp_path / f"log-{rank}"
                log.unlink(missing_ok=True)
                found.append(Forked(words, env, log, log, Path.cwd(), dies_with_parent=True))
                ends.callback(found[-1].kill)
            return found

        yield begin


def ranks(shape: str) -> int:
    return sum(map(int, shape.split("+"))) if "+" in shape else torch.Size(map(int, shape.split("x"))).numel()


def ended(processes: list[Forked], tmp_path: Path) -> list[str]:
    """What each rank said, once all have ended well."""
    for rank, each in enumerate(processes):
        assert each.wait(LIMIT_S) == 0, (tmp_path / f"log-{rank}").read_text()
    return [(tmp_path / f"log-{rank}").read_text() for rank in range(len(processes))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shape", ["4", "2x1", "2x2"])
def test_what_some_places_write_others_load(start: Start, tmp_path: Path, shape: str) -> None:
    """Bit by bit, at more ranks and fewer, and whole; each rank has written its shards alone."""
    directory = tmp_path / "checkpoints"
    said = ended(start("save", shape), tmp_path)
    assert "committed" in said[0]
    assert all("wrote tensors-" in each for each in said[1:])
    (entry,) = CheckpointManager(directory).entries()
    parts = [each for each in entry.manifest.files if each.name.startswith("tensors")]
    assert len(parts) == ranks(shape)
    assert max(each.size for each in parts) < 0.8 * entry.manifest.size
    reference = torch.load(directory / "reference.pt", weights_only=False)
    whole = CheckpointManager(directory).load(entry).state
    assert same(whole, reference)
    assert whole["model"]["again.weight"] is whole["model"]["first.weight"]
    plain = read(entry.path)
    assert plain["model"]["head.weight"].data == reference["model"]["head.weight"].numpy().tobytes()
    for other in ("1", "2", "3", "3x2"):
        assert "equal" in ended(start("load", other), tmp_path)[0], other


@pytest.mark.timeout(180)
def test_of_two_replicas_the_faster_rank_writes_a_place(start: Start, tmp_path: Path) -> None:
    said = ended(start("save", "2+2"), tmp_path)
    assert "committed" in said[0]
    assert sum("wrote tensors-00002-of-00002.safetensors" in each for each in said) == 1
    assert same(
        newest_of(CheckpointManager(tmp_path / "checkpoints")).state,
        torch.load(tmp_path / "checkpoints" / "reference.pt", weights_only=False),
    )


@pytest.mark.timeout(180)
def test_what_torch_has_saved_of_a_sharded_model_is_imported(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights, as one file of whole tensors; the rest is named."""
    directory = tmp_path / "checkpoints"
    ended(start("dcp", "2x2"), tmp_path)
    assert main(["checkpoints", "import", str(directory / "dcp"), "--into", str(tmp_path / "weights")]) == 0
    assert "left out: optimizer, note" in capsys.readouterr().out
    reference = torch.load(directory / "reference.pt", weights_only=False)["model"]
    found = load_file(tmp_path / "weights" / "dcp.safetensors")
    assert same(dict(sorted(found.items())), dict(sorted(reference.items())))
