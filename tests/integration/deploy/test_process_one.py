"""The image's process 1, in a namespace of its own: signals go through, orphans are waited for, codes are kept."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.worker.launch import LIMIT_S, finished, plain, run, started, tail
from tests.support.dockerfile import values, words
from tests.support.requirements import needs, needs_root
from tests.support.waiting import eventually

ORPHAN = """
import os, sys, time
reading, writing = os.pipe()
if os.fork() == 0:
    orphan = os.fork()
    if orphan:
        os.write(writing, str(orphan).encode())
        os._exit(0)
    time.sleep(0.2)  # outlive the parent
    os._exit(0)
os.wait()
orphan = os.read(reading, 20).decode()
until = time.monotonic() + 60
while os.path.exists("/proc/" + orphan):
    if time.monotonic() > until:
        sys.exit("the orphan " + orphan + " was not waited for: " + open(f"/proc/{orphan}/stat").read())
    time.sleep(0.02)
print("the orphan is gone")
"""


def contained(*command: str) -> list[str]:
    """``command`` as the image runs it."""
    needs_root("makes a namespace of processes")
    unshare = needs("unshare", "makes a namespace of processes (Debian: util-linux)")
    program, *options = words(values("ENTRYPOINT")[0])
    init = needs(program, "is process 1 of the image")
    return [unshare, "--pid", "--fork", "--mount-proc", "--kill-child", init, *options, *command]


@pytest.mark.parametrize("code", [0, 1, 69, 71, 73, 78, 143])
def test_the_exit_code_is_the_commands(code: int, tmp_path: Path) -> None:
    """Kubernetes decides by it whether a pod has failed, left, or must not be tried again."""
    run(contained("sh", "-c", f"exit {code}"), tmp_path / "log", expected=code)


def test_a_command_that_a_signal_ended_has_the_code_of_that() -> None:
    """128 and the signal's number, as a shell says it: 137 for a process that ran out of memory."""
    with started(contained("sh", "-c", "kill -9 $$"), Path("/dev/null")) as process:
        assert process.wait(LIMIT_S) == 128 + signal.SIGKILL


def test_sigterm_to_process_1_lets_a_training_save_and_leave_with_143(tmp_path: Path) -> None:
    """It reaches the command, and process 1 waits for it."""
    log = tmp_path / "log"
    with started(
        contained(*plain("train.py", tmp_path, "1000", "--step-s", "0.02", "--save-every", "3")), log
    ) as process:
        eventually(lambda: list(tmp_path.glob("checkpoints/*")), lambda: tail(log), LIMIT_S)
        (init,) = psutil.Process(process.pid).children()
        init.send_signal(signal.SIGTERM)
        assert finished(process, log) == 143, tail(log)


def test_orphans_of_a_worker_are_waited_for(tmp_path: Path) -> None:
    """Data workers of a worker that was killed become children of process 1; torchrun there would leave them dead."""
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    log = tmp_path / "log"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    run(contained(*torchrun), log)
    assert "the orphan is gone" in log.read_text()
