"""Several processes write one checkpoint: exactly the state of the one that saves, whatever the others do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint import CheckpointManager, SaveInfo, codec, commit
from elastic_trainer.checkpoint.manifest import MANIFEST_FILE, STATE_FILE, Image, Manifest, tensors_file
from elastic_trainer.checkpoint.storage import PosixStorage, Sink
from tests.support.waiting import eventually
from tests.unit.checkpoint.states import newest_of, records, same

PARTS = 4


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "model": {f"layer{number}": torch.randn(300_000) for number in range(8)},
        "random": torch.full((9,), float(os.getpid())),
    }


def prepared(directory: Path, held: dict[str, Any], step: int = 1) -> tuple[Image, Manifest]:
    manager = CheckpointManager(directory)
    image = codec.encode(held, parts=PARTS, own=lambda name: name == "random")
    return image, manager.draft(SaveInfo(step, 1)).with_files(records(image))


class Slow(PosixStorage):
    """A disk that takes its time for each write, as long as ``gate`` is closed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()

    def sink(self, name: str, file: str) -> Sink:
        if file.startswith("tensors"):
            assert self.gate.wait(30.0)
        return super().sink(name, file)


def loaded(directory: Path) -> dict[str, Any]:
    found = newest_of(CheckpointManager(directory))
    tensors = {tensors_file(part, PARTS) for part in range(PARTS)}
    assert {path.name for path in (directory / found.name).iterdir()} == {MANIFEST_FILE, STATE_FILE, *tensors}
    return found.state


def test_a_helper_with_another_state_writes_what_is_equal(tmp_path: Path) -> None:
    """Buffers and random numbers differ between ranks; of another step it writes nothing."""
    other = state()
    other["random"] = torch.zeros(9)
    other["model"]["layer7"] += 1
    saver, helper, stop = Slow(tmp_path), PosixStorage(tmp_path), threading.Event()
    threading.Timer(1.0, stop.set).start()
    with ThreadPoolExecutor(2) as pool:
        helped = pool.submit(commit.write_share, helper, *prepared(tmp_path, other), 0, threading.Event())
        saving = pool.submit(commit.commit, saver, *prepared(tmp_path, state()))
        assert commit.write_share(helper, *prepared(tmp_path, state(), step=2), 0, stop) == ()
        wrote = set(helped.result(30.0))
        saver.gate.set()
        saving.result(30.0)
    assert wrote >= {tensors_file(1, PARTS), tensors_file(2, PARTS)}
    assert wrote.isdisjoint({tensors_file(0, PARTS), tensors_file(3, PARTS)})
    assert same(loaded(tmp_path), state())


def test_a_file_that_a_helper_cannot_write_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes have changed since it took their checksums: nobody waits for it."""
    monkeypatch.setattr(commit, "LEAST_PATIENCE_S", 600.0)
    saver = Slow(tmp_path)
    (image, manifest), (changed, _) = prepared(tmp_path, state()), prepared(tmp_path, state(seed=1))
    saving = threading.Thread(target=commit.commit, args=(saver, image, manifest))
    saving.start()
    assert commit.write_share(PosixStorage(tmp_path), changed, manifest, 1, threading.Event()) == ()
    saver.gate.set()
    saving.join(60.0)
    assert same(loaded(tmp_path), state())


HELPER = """
import sys, threading
from pathlib import Path
from elastic_trainer.checkpoint import commit
from tests.integration.checkpoint.test_sharing import Slow, prepared, state
directory = Path(sys.argv[1])
commit.write_share(Slow(directory), *prepared(directory, state()), 1, threading.Event())
"""


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_helper_that_dies_or_stands_still_is_done_without(
    tmp_path: Path, fault: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a file; one that thaws afterwards changes nothing any more."""
    monkeypatch.setattr(commit, "LEAST_PATIENCE_S", 1.0)
    helper = subprocess.Popen([sys.executable, "-c", HELPER, str(tmp_path)])
    try:
        image, manifest = prepared(tmp_path, state())
        storage = Slow(tmp_path)
        saving = threading.Thread(target=commit.commit, args=(storage, image, manifest))
        saving.start()
        eventually(lambda: any(tmp_path.glob("tmp-*/taken-tensors-00002*")), "nobody helps")
        os.kill(helper.pid, fault)
        storage.gate.set()
        saving.join(60.0)
        before = {path: path.read_bytes() for path in tmp_path.glob("step-*/*")}
        assert same(loaded(tmp_path), state())
        os.kill(helper.pid, signal.SIGCONT)
        assert {path: path.read_bytes() for path in tmp_path.glob("step-*/*")} == before
    finally:
        helper.kill()
        helper.wait(30)
