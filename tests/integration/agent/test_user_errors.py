"""What a user may get wrong on torchrun's command line: one sentence and a status, never a traceback."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from elastic_trainer.errors import EXIT_CONFIG, EXIT_UNAVAILABLE
from elastic_trainer.local.hosts import free_ports
from tests.support.forked import Forked

LIMIT_S = 100.0


@dataclass(frozen=True, slots=True)
class Mistake:
    """A wrong command line, and what must come of it. ``{...}`` stands for a port."""

    name: str
    sentence: str
    code: int = EXIT_CONFIG
    endpoint: str = "127.0.0.1:{nobody}"
    run: str = "run"
    options: str = "connect_timeout=2"


MISTAKES = [
    Mistake("unknown option", "--rdzv-conf: unknown key 'tll' (remove it or correct its spelling)", options="tll=3"),
    Mistake("wrong value", "--rdzv-conf: 'ttl' is 'soon'", options="ttl=soon"),
    Mistake("too small a value", "--rdzv-conf: 'ttl' is '1'", options="ttl=1"),
    Mistake("run id", "run id (--rdzv-id) 'my/run' is not valid (use 1 to 128 letters", run="my/run"),
    Mistake("no run id", "the run has no name: without --rdzv-id torchrun calls every run 'none'", run="none"),
    Mistake("no endpoint", "no store address was given (add --rdzv-endpoint host:2379)", endpoint=""),
    Mistake("no etcd there", "cannot use the store: nothing listens at 127.0.0.1:{nobody}", EXIT_UNAVAILABLE),
    Mistake("not etcd", "127.0.0.1:{web} is a web server", endpoint="127.0.0.1:{web}"),
    Mistake(
        "no such host",
        "the host name 'no-such-host.invalid' does not resolve",
        EXIT_UNAVAILABLE,
        "no-such-host.invalid",
    ),
]


@pytest.fixture(scope="module")
def web_server() -> Iterator[int]:
    """The port of something that is not etcd."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory="/nonexistent")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join(LIMIT_S)


def _start(mistake: Mistake, ports: dict[str, int], directory: Path) -> Forked:
    command = ["-m", "torch.distributed.run", "--nnodes=1:2", f"--rdzv-id={mistake.run}"]
    command += ["--rdzv-backend=etcd3", f"--rdzv-endpoint={mistake.endpoint.format(**ports)}"]
    command += [f"--rdzv-conf={mistake.options}", "no_script_is_ever_started.py"]
    log = directory / mistake.name
    return Forked(command, os.environ, log, log)


@pytest.mark.timeout(240)
def test_mistakes_end_in_one_sentence_and_the_right_status(tmp_path: Path, web_server: int) -> None:
    """Two at a time. Each ends by itself, with the sentence, once, and nothing that looks like a crash."""
    ports = {"web": web_server, "nobody": free_ports(1)[0]}
    for first in range(0, len(MISTAKES), 2):
        pair = MISTAKES[first : first + 2]
        started = [(mistake, _start(mistake, ports, tmp_path)) for mistake in pair]
        for mistake, process in started:
            code = process.wait(LIMIT_S)
            said = (tmp_path / mistake.name).read_text()
            assert code == mistake.code, f"{mistake.name}: {code}\n{said}"
            own = [line for line in said.splitlines() if line.startswith("elastic-trainer: ")]
            assert len(own) == 1, said
            assert mistake.sentence.format(**ports) in own[0]
            assert "Traceback" not in said
            assert "decision" not in said
