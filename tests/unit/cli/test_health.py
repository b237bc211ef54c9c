"""What ``elastic-trainer health`` makes of the answers, and that it asks servers as they are."""

from __future__ import annotations

import socket
import ssl
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_trainer.cli.health import ask, judge
from elastic_trainer.cli.main import main
from elastic_trainer.web.server import Answer, Request, Server, text, tls_context
from tests.support.certificates import Authority

WELL, SICK = (200, "ok"), (503, "the monitor has stopped reading the store")
STUCK = (None, "no answer: timed out")


@pytest.mark.parametrize(
    ("heard", "required", "well"),
    [
        ([None, WELL], False, True), ([None, SICK], False, False), ([None, STUCK], False, False),
        ([None], False, True), ([None], True, False), ([None, WELL], True, False), ([WELL], True, True),
    ],
)  # fmt: skip
def test_who_listens_must_be_well_and_who_was_named_must_listen(
    heard: list[tuple[int | None, str] | None], required: bool, well: bool
) -> None:
    """A container whose job has no endpoint is not sick; one whose endpoint does not answer is."""
    assert judge(dict(enumerate(heard, 9470)), required=required)[0] is well


def test_a_server_is_asked_and_one_that_was_named_must_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 0 for one that is well and 1 for one that is not, and its own words are passed on. With TLS its
    CA is not needed: the check runs beside it, and looks at nothing but the answer. A monitor that listens no more is
    sick, in one line."""

    def served(status: int, tls: ssl.SSLContext | None = None) -> Server:
        def answer(request: Request) -> Answer:
            return text(status if request.path == "/healthz" else 404, "spoken")

        server = Server("127.0.0.1", 0, answer, tls)
        server.start()
        ending.callback(server.close)
        return server

    with ExitStack() as ending:
        assert main(["health", "--port", str(served(200).port)]) == 0
        assert main(["health", "--port", str(served(503).port)]) == 1
        assert capsys.readouterr().out.count(": spoken\n") == 2
        assert ask("127.0.0.1", served(200, tls_context(*Authority(tmp_path).issue("node"))).port) == (200, "spoken")
        taken = ending.enter_context(socket.socket())  # bound and not listening, so that nobody else gets it
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert main(["health", "--port", str(port)]) == 1
        assert capsys.readouterr().out == f"port {port}: nobody listens\n"
