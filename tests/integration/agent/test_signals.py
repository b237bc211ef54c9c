"""SIGTERM and SIGHUP to torchrun: before any worker was started, twice, at its end, and where SIGHUP is ignored."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from elastic_trainer.errors import EXIT_LEFT
from tests.support.forked import Forked
from tests.support.plainjob import LIMIT_S, PlainJob

SENTENCE = "elastic-trainer: SIGTERM came before the workers were started: this node leaves"
SWALLOWS = """
import os, signal, threading, time
from elastic_trainer.agent.rendezvous import launcher

class Swallowing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)

launcher.listen_for_sigterm()
threading.Timer(4.0, print, ["all threads have ended"]).start()
Swallowing()
time.sleep(60)
"""
HANGS = """
import atexit, os, signal, threading
from elastic_trainer.agent.rendezvous import launcher

launcher._LIMIT_S = 1.5
if %s:
    atexit.register(threading.Event().wait)
launcher.listen_for_sigterm()
try:
    os.kill(os.getpid(), signal.SIGTERM)
finally:
    %s
"""
HANGUP = """
import os, signal, sys
from torch.distributed.elastic.multiprocessing import SignalException, api
from elastic_trainer.agent.rendezvous import launcher

signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
launcher.listen_for_sigterm()

class Started(api.PContext):
    def __init__(self): self._tail_logs = []
    def _start(self): pass
    _poll = pids = _close = None

if sys.argv[2] == "workers":
    Started.__abstractmethods__ = frozenset()
    Started().start()
try:
    os.kill(os.getpid(), signal.SIGHUP)
except SignalException as error:
    print(error.sigval.name)
else:
    print(signal.getsignal(signal.SIGHUP).name)
"""


def run(tmp_path: Path, script: str, *words: str) -> tuple[int, str, str]:
    """The exit code of ``script``, and what it said on its two outputs."""
    file, out, err = (tmp_path / name for name in ("script.py", "out", "err"))
    file.write_text(script)
    code = Forked([str(file), *words], os.environ, out, err).wait(LIMIT_S)
    return code, out.read_text(), err.read_text()


@pytest.mark.timeout(200)
def test_a_node_that_waits_for_others_leaves_when_it_is_told_to(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """In restart mode it waits in the rendezvous: it exits with 143, and its key goes with it, although its lease
    would last for ten minutes. The run is there for the next nodes."""
    with PlainJob(tmp_path, etcd_endpoint, run_id, flags=["--alone"], options={"ttl": "600", "last_call": "1"}) as job:
        early = job.add()
        job.wait_for(lambda: job.present(early.name), "its key does not come")
        early.terminate()
        assert job.exit_code(early) == EXIT_LEFT, job.describe()
        assert not job.present(early.name)
        assert SENTENCE in job.log(early.name)
        assert "Traceback" not in job.log(early.name)
        others = [job.add().name for _ in range(2)]
        assert sorted(job.await_order()) == sorted(others)
        job.finish()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("recovery", ["restart", "in_place"])
def test_a_node_that_waits_for_etcd_leaves_when_it_is_told_to(tmp_path: Path, recovery: str) -> None:
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(LIMIT_S)
        command = ["-m", "torch.distributed.run", "--nnodes=1:2", "--max-restarts=3", "--rdzv-id=run"]
        command += ["--rdzv-backend=etcd3", f"--rdzv-endpoint=127.0.0.1:{silent.getsockname()[1]}"]
        command += [f"--rdzv-conf=recovery={recovery},connect_timeout=600", "no_script_is_ever_started.py"]
        process = Forked(command, os.environ, log, log)
        try:
            silent.accept()[0].close()
            process.terminate()
            assert process.wait(LIMIT_S) == EXIT_LEFT, log.read_text()
        finally:
            process.kill()
    assert SENTENCE in log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_signal_whose_exception_was_swallowed_ends_the_process_all_the_same(tmp_path: Path) -> None:
    """A destructor swallows it; the end of Python, which takes its time, is not disturbed by the ones that follow."""
    code, out, err = run(tmp_path, SWALLOWS)
    assert "Exception ignored in" in err
    assert code == EXIT_LEFT
    assert err.count("Traceback") == 1
    assert out == "all threads have ended\n"


@pytest.mark.parametrize(
    ("start", "when", "said", "code"),
    [
        ("nohup", "early", "SIG_IGN\n", 0),
        ("nohup", "workers", "SIG_IGN\n", 0),
        ("terminal", "early", "", EXIT_LEFT),
        ("terminal", "workers", "SIGHUP\n", 0),
    ],
)
def test_a_hangup_asks_to_leave_unless_it_was_ignored_at_the_start(
    tmp_path: Path, start: str, when: str, said: str, code: int
) -> None:
    """torchrun installs its handlers as it starts the first workers, which inherit what is ignored."""
    found, out, err = run(tmp_path, HANGUP, start, when)
    assert (out, found) == (said, code), err
    assert ("SIGHUP came before the workers were started" in err) == (code == EXIT_LEFT)


@pytest.mark.parametrize("at_exit", [True, False])
def test_a_process_whose_end_hangs_ends_all_the_same(tmp_path: Path, at_exit: bool) -> None:
    """In what cleans up while the exception goes through it, or in what Python calls at its exit."""
    code, _, err = run(tmp_path, HANGS % (at_exit, "pass" if at_exit else "threading.Event().wait()"))
    assert code == EXIT_LEFT, err
