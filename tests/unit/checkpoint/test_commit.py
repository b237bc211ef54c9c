"""Who may write: one job at a time; leftovers of the dead go; co-writers wait for their turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import structlog
import torch

from elastic_trainer.checkpoint import CheckpointManager, Owner, SaveInfo, manager
from elastic_trainer.checkpoint.commit import FIND_S, write_file, write_share
from elastic_trainer.checkpoint.manager import ELSEWHERE_S, REBOOTED_S, Transition, reason_to_remove, sweep
from elastic_trainer.checkpoint.manifest import (
    OFFER_FILE,
    OWNER_FILE,
    Image,
    Kind,
    Manifest,
    WriterIdentity,
    from_bytes,
    kind_of,
    seal,
    temporary_name,
    this_process,
    trash_name,
)
from elastic_trainer.checkpoint.storage import PosixStorage
from elastic_trainer.errors import StorageError
from tests.support.memory_store import ManualClock
from tests.unit.checkpoint.states import GroupRank

ME = WriterIdentity(100, 5000, "a" * 32, 1, "here")
NAME = "step-000000120-r7-0123456789ab"


@pytest.mark.parametrize(
    ("writer", "alive", "idle_s", "removed"),
    [
        (ME, None, None, False),
        (WriterIdentity(101, 5000, "a" * 32, 1, "here"), True, None, False),
        (WriterIdentity(101, 5000, "a" * 32, 1, "here"), False, None, True),
        (WriterIdentity(101, 5000, "b" * 32, 1, "here"), None, REBOOTED_S - 1, False),
        (WriterIdentity(101, 5000, "b" * 32, 1, "here"), None, REBOOTED_S + 1, True),
        (WriterIdentity(101, 5000, "a" * 32, 2, "here"), None, REBOOTED_S + 1, False),
        (WriterIdentity(101, 5000, "a" * 32, 2, "here"), None, ELSEWHERE_S + 1, True),
        (WriterIdentity(101, 5000, "b" * 32, 1, "there"), None, REBOOTED_S + 1, False),
        (WriterIdentity(101, 5000, "b" * 32, 1, "there"), None, ELSEWHERE_S + 1, True),
        (WriterIdentity(101, 5000, "b" * 32, 1, "there"), None, None, False),
    ],
)
def test_only_what_is_known_to_be_dead_may_be_removed(
    writer: WriterIdentity, alive: bool | None, idle_s: float | None, removed: bool
) -> None:
    """The kernel's word counts where it has one; elsewhere only long silence does."""
    assert (reason_to_remove(writer, ME, alive, idle_s) is not None) is removed


def make(directory: Path, name: str, age_s: float = 0.0) -> Path:
    path = directory / name
    path.mkdir()
    (path / "tensors.safetensors").write_bytes(b"x" * 100)
    for each in (path / "tensors.safetensors", path):
        stamp = each.stat().st_mtime - age_s
        os.utime(each, (stamp, stamp))
    return path


def dead_process() -> WriterIdentity:
    """The identity of a process that has lived on this machine and is gone."""
    code = "import dataclasses, json\nfrom elastic_trainer.checkpoint.manifest import this_process\n"
    command = [sys.executable, "-c", f"{code}print(json.dumps(dataclasses.astuple(this_process())))"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    return WriterIdentity(*json.loads(said))


def test_only_what_is_dead_is_swept(tmp_path: Path) -> None:
    """A dead process's temporary and interrupted removals go; live, foreign and committed entries stay."""
    me = this_process()
    assert me.pid == os.getpid()
    assert me.start > 0 < me.namespace
    assert me.boot != "0" * 32
    dead = dead_process()
    reused = WriterIdentity(me.pid, me.start + 1, me.boot, me.namespace, me.host)
    elsewhere = WriterIdentity(1, 1, "b" * 32, 1, "elsewhere")
    gone = [
        make(tmp_path, temporary_name(dead)),
        make(tmp_path, temporary_name(reused)),
        make(tmp_path, temporary_name(elsewhere), age_s=ELSEWHERE_S + 60),
        make(tmp_path, trash_name(NAME)),
    ]
    stays = [
        make(tmp_path, temporary_name(me)),
        make(tmp_path, temporary_name(elsewhere), age_s=ELSEWHERE_S - 600),
        make(tmp_path, "tmp-of-somebody", age_s=10 * ELSEWHERE_S),
        make(tmp_path, NAME, age_s=10 * ELSEWHERE_S),
        make(tmp_path, f"corrupt-{NAME}-1", age_s=10 * ELSEWHERE_S),
    ]
    events = list(sweep(PosixStorage(tmp_path)))
    assert sorted(event.name for event in events) == sorted(path.name for path in gone)
    assert all(event.kind is Transition.SWEPT for event in events)
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in stays)
    assert list(sweep(PosixStorage(tmp_path / "missing"))) == []


HOLDER = """
import sys
from elastic_trainer.checkpoint import CheckpointManager, Owner
checkpoints = CheckpointManager(sys.argv[1], owner=Owner(*(each or None for each in sys.argv[2:])))
checkpoints.check_writable()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another(directory: Path, run: str = "", job: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process of a job that holds ``directory``."""
    command = [sys.executable, "-c", HOLDER, str(directory), run, job]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "CLAIM_S", 0.2)


@pytest.mark.parametrize("mine", [Owner(), Owner("b"), Owner("b", "b"), Owner("a")])
def test_a_directory_that_a_living_process_of_another_job_saves_in_is_refused(tmp_path: Path, mine: Owner) -> None:
    """At the start and at each save, with the holder's name; an equal name proves nothing where no agent vouches for
    it. Nothing is written. Who reads is kept out by nobody."""
    with another(tmp_path, "a") as holder:
        checkpoints = CheckpointManager(tmp_path, owner=mine)
        for attempt in (checkpoints.check_writable, lambda: checkpoints.save({"x": 1}, SaveInfo(1))):
            with pytest.raises(StorageError, match=rf"in use by run 'a' \(process {holder.pid} on "):
                attempt()
        assert checkpoints.newest() is None
        assert kind_of(OWNER_FILE) is Kind.FOREIGN
        assert CheckpointManager(tmp_path).sweep() == 0
    assert CheckpointManager(tmp_path).entries() == ()


def test_a_job_that_is_gone_leaves_the_directory_to_others(tmp_path: Path) -> None:
    """However it ended: the kernel takes the lock back. One whose process lives on gives it back itself."""
    with another(tmp_path):
        pass
    first = CheckpointManager(tmp_path, owner=Owner("b"))
    first.check_writable()
    assert json.loads((tmp_path / OWNER_FILE).read_text())["run"] == "b"
    first.close()
    with another(tmp_path, "c"):
        pass


def test_a_process_of_the_same_job_does_not_wait_for_its_predecessor(tmp_path: Path) -> None:
    """In place another rank saves at once where the one before is frozen; it gets the lock when that one is gone."""
    checkpoints = CheckpointManager(tmp_path, owner=Owner("a", "a"))
    with another(tmp_path, "a", "a"):
        assert checkpoints.save({"x": 1}, SaveInfo(1)).entry.manifest.run == "a"
    checkpoints.save({"x": 2}, SaveInfo(2))
    with pytest.raises(AssertionError), another(tmp_path, "b"):
        pass


class Helper(ManualClock):
    """Shard rank 1, which is to help to save step 2; a wait lets its time pass."""

    def __init__(self, directory: Path) -> None:
        super().__init__(0.0)
        self._manager, self.storage, self.stop = CheckpointManager(directory), PosixStorage(directory), Event()
        self.stops_s = self.offered_s = float("inf")
        self.earlier = ""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.advance(timeout_s)
        if self.monotonic() >= self.stops_s:
            self.stop.set()
        if self.monotonic() >= self.offered_s:
            self.offered_s = float("inf")
            self.storage.remove(self.earlier)
            self.offer(2)
        return event.is_set()

    def _prepared(self, step: int) -> tuple[Image, Manifest]:
        info = SaveInfo(step, round=1)
        return self._manager.encode({"w": torch.ones(3)}, info, shard_group=GroupRank(1)), self._manager.draft(info)

    def offer(self, step: int, *, alive: bool = True) -> str:
        """Shard rank 0 begins to save ``step``."""
        writer = this_process() if alive else replace(this_process(), start=1)
        name, manifest = temporary_name(writer), self._prepared(step)[1]
        self.storage.create(name, manifest.name)
        write_file(self.storage, name, from_bytes(OFFER_FILE, seal(manifest)))
        return name

    def helps(self) -> tuple[tuple[str, ...], list[str]]:
        """The files that it writes, and what it warns of."""
        with structlog.testing.capture_logs() as logs:
            wrote = write_share(self.storage, *self._prepared(2), 0, self.stop, self)
        return wrote, [each["event"] for each in logs if each["log_level"] == "warning"]


@pytest.fixture
def helper(tmp_path: Path) -> Helper:
    return Helper(tmp_path)


def test_a_place_waits_for_its_turn_while_place_0_saves_an_earlier_state(helper: Helper) -> None:
    """However long that takes: else place 0 waits for it in vain later, and all the saves behind that fail too."""
    helper.earlier, helper.offered_s = helper.offer(1), 1000.0
    wrote, warned = helper.helps()
    assert (len(wrote), warned) == (1, [])


def test_the_wait_for_a_turn_ends_when_it_is_known_not_to_come(helper: Helper) -> None:
    helper.offer(1)
    helper.stops_s = 500.0
    assert helper.helps() == ((), [])
    assert 500.0 <= helper.monotonic() < 510.0


@pytest.mark.parametrize("left", [False, True])
def test_a_place_that_sees_place_0_save_nothing_gives_up(helper: Helper, *, left: bool) -> None:
    """Nothing at all, or only what a process that has died ``left``; and says so."""
    if left:
        helper.offer(1, alive=False)
    assert helper.helps() == ((), ["checkpoint.place_given_up"])
    assert FIND_S <= helper.monotonic() < FIND_S + 10.0
