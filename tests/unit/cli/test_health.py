"""What ``elastic-trainer health`` makes of the answers, and that it asks servers as they are."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_trainer.cli.health import Word, ask, judge
from elastic_trainer.cli.main import main
from elastic_trainer.web.server import Answer, Request, Server, text, tls_context
from tests.support.certificates import Authority

SILENT = Word(9470, False, None, "nobody listens")
WELL = Word(9471, True, 200, "ok")
SICK = Word(9471, True, 503, "the monitor has stopped reading the store")
STUCK = Word(9471, True, None, "no answer: timed out")


@pytest.mark.parametrize(
    ("words", "required", "well"),
    [
        ([SILENT, WELL], False, True), ([SILENT, SICK], False, False), ([SILENT, STUCK], False, False),
        ([SILENT], False, True), ([SILENT], True, False), ([SILENT, WELL], True, False), ([WELL], True, True),
    ],
)  # fmt: skip
def test_who_listens_must_be_well_and_who_was_named_must_listen(words: list[Word], required: bool, well: bool) -> None:
    """A container whose job has no endpoint is not sick; one whose endpoint does not answer is."""
    assert judge(words, required=required)[0] is well


Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def start(status: int, directory: Path | None = None) -> int:
        context = None if directory is None else tls_context(*Authority(directory).issue("node"))

        def answer(request: Request) -> Answer:
            return text(status if request.path == "/healthz" else 404, "spoken")

        servers.append(Server("127.0.0.1", 0, answer, context))
        servers[-1].start()
        return servers[-1].port

    yield start
    for server in servers:
        server.stop()


def test_a_server_is_asked(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 0 for one that is well and 1 for one that is not, and its own words are passed on. With TLS its
    CA is not needed: the check runs beside it, and looks at nothing but the answer."""
    assert main(["health", "--port", str(serve(200))]) == 0
    assert main(["health", "--port", str(serve(503))]) == 1
    assert capsys.readouterr().out.count(": spoken\n") == 2
    assert ask("127.0.0.1", serve(200, tmp_path)).status == 200


def test_a_port_that_was_named_must_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """A monitor that listens no more is sick, in one line."""
    with socket.socket() as taken:  # bound and not listening, so that nobody else gets it
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert main(["health", "--port", str(port)]) == 1
    assert capsys.readouterr().out == f"port {port}: nobody listens\n"
