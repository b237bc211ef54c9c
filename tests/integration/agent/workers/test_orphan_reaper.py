"""The workers of an agent that is killed end: real torchrun, real processes, and the reaper alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_trainer.agent.workers.orphan_reaper import OrphanReaper, watched
from elastic_trainer.ipc.page import start_of
from elastic_trainer.local import processes
from tests.support.plainjob import PlainJob

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
OBEDIENT = "import time; print(flush=True); time.sleep(600)"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("preload", ["auto", "off"])
def test_workers_of_a_killed_agent_get_sigterm_and_end(
    tmp_path: Path, etcd_endpoint: str, run_id: str, preload: str
) -> None:
    """A script that knows nothing of an agent, with a handler: it says so by its exit, which only SIGTERM asks for.

    It has a child, which ends with it: both are of one process group.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, signal, subprocess, sys\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "signal.signal(signal.SIGTERM, lambda *_: (here / 'asked').touch() or os._exit(143))\n"
        "(here / 'started').touch()\n"
        "signal.pause()\n"
    )
    options = {"preload": preload}
    with PlainJob(tmp_path, etcd_endpoint, run_id, least=1, most=1, entry=[str(script)]) as job:
        agent = job.add_with(options={**job.spec.options, **options})
        job.wait_for((tmp_path / "started").exists, "no worker")
        worker = agent.worker()
        assert worker is not None
        pids = [each.pid for each in processes.tree(worker.pid)]
        assert len(pids) > 1
        assert all(start_of(each) for each in pids)
        os.kill(agent.pid, signal.SIGKILL)
        job.wait_for(lambda: not any(start_of(each) for each in pids), "workers live on")
        assert (tmp_path / "asked").exists()


@pytest.fixture
def reaper() -> Iterator[OrphanReaper]:
    made = OrphanReaper(grace_s=0.2, notice_s=0.0)
    yield made
    made.close()


def _started(command: str, reaper: OrphanReaper) -> subprocess.Popen[bytes]:
    def start() -> subprocess.Popen[bytes]:
        words = [sys.executable, "-S", "-c", command]
        return subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)

    worker = watched(reaper, start)()
    return _ready(worker)


def _ready(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
    return process


def test_who_ignores_sigterm_is_killed(reaper: OrphanReaper) -> None:
    workers = [_started(STUBBORN, reaper), _started(OBEDIENT, reaper)]
    reaper.close()
    assert [each.wait() for each in workers] == [-signal.SIGKILL, -signal.SIGTERM]


def test_a_process_that_has_got_the_number_of_a_worker_is_left_alone(reaper: OrphanReaper) -> None:
    words = [sys.executable, "-S", "-c", OBEDIENT]
    stranger = _ready(subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True))
    process = cast("Any", reaper)._process
    process.stdin.write(f"{stranger.pid} 1\n".encode())
    worker = _started(OBEDIENT, reaper)
    reaper.close()
    assert worker.wait() == -signal.SIGTERM
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_signals_for_the_agent_do_not_end_the_reaper(reaper: OrphanReaper) -> None:
    worker = _started(OBEDIENT, reaper)
    process = cast("Any", reaper)._process
    while not _ignores_sigterm(process.pid):
        assert process.poll() is None
    process.terminate()
    reaper.close()
    assert process.returncode == 0
    assert worker.wait() == -signal.SIGTERM


def _ignores_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return bool(ignored >> (signal.SIGTERM - 1) & 1)


def test_a_reaper_that_is_gone_stops_nothing(reaper: OrphanReaper) -> None:
    process = cast("Any", reaper)._process
    process.kill()
    process.wait()
    worker = cast("Any", SimpleNamespace(pid=os.getpid()))
    assert watched(reaper, lambda: worker)() is worker
