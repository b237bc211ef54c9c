"""Sweeping: leftovers of the dead go, those of the living stay."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from elastic_trainer.checkpoint.layout import WriterIdentity, temporary_name, this_process, trash_name
from elastic_trainer.checkpoint.manager import ELSEWHERE_S, REBOOTED_S, Transition, fate, sweep
from elastic_trainer.checkpoint.storage import PosixStorage

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
def test_fate(writer: WriterIdentity, alive: bool | None, idle_s: float | None, removed: bool) -> None:
    """The kernel's word counts where it has one; elsewhere only long silence does."""
    verdict = fate(writer, ME, alive, idle_s)
    assert verdict.remove is removed
    assert verdict.reason


def make(directory: Path, name: str, age_s: float = 0.0) -> Path:
    """An entry with a file in it, last written ``age_s`` ago."""
    path = directory / name
    path.mkdir()
    (path / "tensors.safetensors").write_bytes(b"x" * 100)
    for each in (path / "tensors.safetensors", path):
        stamp = each.stat().st_mtime - age_s
        os.utime(each, (stamp, stamp))
    return path


def dead_process() -> WriterIdentity:
    """The identity of a process that has lived on this machine and is gone."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_tell, args=(send,))
    child.start()
    writer = receive.recv()
    child.join(60)
    assert isinstance(writer, WriterIdentity)
    return writer


def _tell(send: multiprocessing.connection.Connection) -> None:
    send.send(this_process())


def test_only_what_is_dead_is_swept(tmp_path: Path) -> None:
    """A dead process's temporary and interrupted removals go; live, foreign and committed entries stay."""
    me = this_process()
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


def test_this_process_is_known_to_the_kernel() -> None:
    """On Linux every part of the identity is filled in."""
    me = this_process()
    assert me.pid == os.getpid()
    assert me.start > 0
    assert me.namespace > 0
    assert me.boot != "0" * 32
