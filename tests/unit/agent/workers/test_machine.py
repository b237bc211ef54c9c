"""How busy the machine is, and the last lines of what workers wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from elastic_trainer.agent.workers.machine import LINE, LogTails, Machine, last_lines
from elastic_trainer.membership.documents import GpuLoad
from tests.support.waiting import eventually
from tests.unit.agent.readings import reading


def test_a_busy_process_is_seen_in_the_load(tmp_path: Path) -> None:
    """Of the whole machine, so that what others do counts too; without a limit the memory is the machine's."""
    subject = Machine({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        spent = psutil.Process(busy.pid)
        eventually(lambda: spent.cpu_times().user >= 0.5, "it has worked for a while")
        found = subject.usage()
    finally:
        busy.kill()
        busy.wait()
    assert found.cpus == psutil.cpu_count()
    assert 0.5 / found.cpus < found.cpu <= 1.0
    assert found.total_bytes == psutil.virtual_memory().total
    assert 0 < found.used_bytes < found.total_bytes
    assert found.gpus == ()


def test_a_container_s_limit_counts_as_its_memory(tmp_path: Path) -> None:
    """What the kernel would drop before it kills is not used: pages of files that nobody has read lately."""
    for name, text in (("max", "1000\n"), ("current", "700\n"), ("stat", "anon 400\ninactive_file 250\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    found = Machine({"CUDA_VISIBLE_DEVICES": ""}, tmp_path).usage()
    assert (found.used_bytes, found.total_bytes) == (450, 1000)
    (tmp_path / "memory.max").write_text("max\n")
    assert Machine({"CUDA_VISIBLE_DEVICES": ""}, tmp_path).usage().total_bytes == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("devices", "indices"), [(None, [0, 1]), ("1", [1]), ("GPU-b,0", [1, 0]), ("", []), ("-1", []), ("7", [])]
)
def test_gpus_are_those_that_the_job_may_use(
    monkeypatch: pytest.MonkeyPatch, devices: str | None, indices: list[int]
) -> None:
    """One whose driver tells no utilization has its memory; one that the driver does not know is left out."""

    def unknown(_: object) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def by_index(index: int) -> int:
        return index if index in (0, 1) else unknown(index)

    memory = SimpleNamespace(used=3, total=8)
    told: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": {"GPU-a": 0, "GPU-b": 1}.__getitem__,
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlDeviceGetMemoryInfo": lambda handle: memory,
        "nvmlDeviceGetUtilizationRates": lambda handle: unknown(handle) if handle else SimpleNamespace(gpu=75),
    }
    for name, value in told.items():
        monkeypatch.setattr(pynvml, name, value)
    found = Machine({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}).usage().gpus
    of = {index: GpuLoad(index=index, busy=(0.75, None)[index], used_bytes=3, total_bytes=8) for index in (0, 1)}
    assert found == tuple(of[index] for index in indices)


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("one\ntwo\nthree\n\n", ("two", "three")),
        ("ends without a line's end\nas here", ("ends without a line's end", "as here")),
        ("\x1b[31mred\x1b[0m\n", ("red",)),
        ("10 %\r20 %\r30 %\r\n", ("30 %",)),
        ("a\tb\x00\x07c\n", ("a   b  c",)),
        ("", ()),
        ("x" * 500 + "\n", ("x" * (LINE - 1) + "…",)),
    ],
)
def test_lines_are_shown_as_a_terminal_leaves_them(tmp_path: Path, written: str, lines: tuple[str, ...]) -> None:
    file = tmp_path / "log"
    file.write_text(written)
    assert last_lines(file, 2) == lines
    assert last_lines(tmp_path / "missing", 2) == ()


def test_of_a_long_file_only_the_end_is_read(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("".join(f"line {number}\n" for number in range(100_000)) + "\xff the last\n", encoding="latin-1")
    assert last_lines(file, 2) == ("line 99999", "� the last")


def test_the_lines_of_a_dead_worker_stay_until_another_has_its_place(tmp_path: Path) -> None:
    """Workers that share a file have one tail; all together have the lines that were asked for."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    tails = LogTails(4)
    script = "import os, time; os.write(1, b'0\\n1\\n2\\n3\\n4\\n'); time.sleep(600)"  # one write: no torn lines
    workers = []
    for file in (shared, shared, own):
        with file.open("a") as output:
            workers.append(subprocess.Popen([sys.executable, "-c", script], stdout=output, stderr=subprocess.STDOUT))
    try:
        eventually(lambda: (shared.stat().st_size, own.stat().st_size) == (20, 10), "they have written")
        living = [reading(pid=each.pid, slot=slot, rank=slot + 4) for slot, each in enumerate(workers)]
        found = tails.read(living)
        assert [(each.ranks, each.file, each.lines) for each in found] == [
            ((4, 5), str(shared), ("3", "4")),
            ((6,), str(own), ("3", "4")),
        ]
    finally:
        for each in workers:
            each.kill()
            each.wait()
    with own.open("a") as output:
        output.write("ValueError: shapes do not match\n")
    assert tails.read([])[1].lines == ("4", "ValueError: shapes do not match")
    with (tmp_path / "fresh").open("w") as output:
        fresh = subprocess.Popen(["sh", "-c", "echo again; exec sleep 600"], stdout=output)
    try:
        eventually((tmp_path / "fresh").read_text, "it has written")
        found = tails.read([reading(pid=fresh.pid, slot=2, rank=6)])
        assert [each.lines for each in found if each.ranks == (6,)] == [("again",)]
    finally:
        fresh.kill()
        fresh.wait()


def test_output_that_is_no_file_has_no_lines(tmp_path: Path) -> None:
    """Without any worker's file it is that of the agent, if that is one."""
    command = ["sh", "-c", "echo hello; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as worker:
        (tmp_path / "self").symlink_to(f"/proc/{worker.pid}")
        (tmp_path / str(worker.pid)).symlink_to(f"/proc/{worker.pid}")
        assert LogTails(4, tmp_path).read([reading(pid=worker.pid)]) == ()
        worker.kill()
    (tmp_path / "self").unlink()
    (tmp_path / "self" / "fd").mkdir(parents=True)
    (tmp_path / "log").write_text("no such module\n")
    (tmp_path / "self" / "fd" / "2").symlink_to(tmp_path / "log")
    (found,) = LogTails(4, tmp_path).read([])
    assert (found.ranks, found.lines) == ((), ("no such module",))
    assert LogTails(0, tmp_path).read([]) == ()
