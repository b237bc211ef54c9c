"""moto's S3 in a process of its own on loopback, with a door for faults and for counting requests.

``python -m tests.support.s3server`` serves, and says its address; :func:`serving` starts it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from elastic_trainer.local.hosts import reachable

BUCKET = "runs"
_CONTROL = "/_control"
_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>"
_CODES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}


@dataclass(frozen=True, slots=True)
class Fault:
    """What befalls requests whose ``METHOD path?query`` has ``pattern``: an answer, or silence for ``stall_s``.

    ``late``: the answer comes when the request was carried out. ``cut``: the connection ends in the body.
    """

    pattern: str
    status: int = 0
    stall_s: float = 0.0
    late: bool = False
    cut: bool = False
    count: int = 1_000_000


class S3Server:
    """A running server. ``environment`` is what clients of it need."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address
        self.environment = {
            "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    def inject(self, *faults: Fault) -> None:
        """Replace the faults that are in force; none ends them."""
        self._control("faults", [asdict(each) for each in faults])

    def hits(self) -> int:
        return int(self._control("hits"))

    def log(self) -> list[str]:
        """``METHOD path?query`` of the requests since this was asked last."""
        return list(self._control("log"))

    def _control(self, what: str, body: Any = None) -> Any:
        request = urllib.request.Request(f"{self.address}{_CONTROL}/{what}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


@contextmanager
def serving() -> Iterator[S3Server]:
    """A server with an empty bucket, until the block ends."""
    command = [sys.executable, "-m", "tests.support.s3server", reachable()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        server = S3Server(process, process.stdout.readline().strip())
        request = urllib.request.Request(f"{server.address}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        yield server
    finally:
        process.kill()
        process.communicate()


def use(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process, and those that it starts, be clients of ``server``."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)


class _Door:
    """WSGI middleware: faults and the log."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._lock, self._conditional = threading.Lock(), threading.Lock()
        self._faults: list[dict[str, Any]] = []
        self._hits, self._log = 0, []  # type: int, list[str]
        self._released = threading.Event()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith(_CONTROL):
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(self._controlled(path, environ)).encode()]
        name = f"{environ['REQUEST_METHOD']} {path}?{environ.get('QUERY_STRING', '')}"
        fault = self._fault(name)
        if fault is not None:
            if fault["stall_s"]:
                self._released.wait(fault["stall_s"])
            if fault["late"]:
                list(self._application(environ, lambda *_: lambda _: None))
            if fault["cut"]:
                whole = b"".join(self._application(environ, start))
                return [whole[: len(whole) // 2]]
            if fault["status"]:
                if not fault["late"]:
                    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start(f"{fault['status']} injected", [("Content-Type", "application/xml")])
                return [_ERROR.format(code=_CODES[fault["status"]]).encode()]
        if "HTTP_IF_NONE_MATCH" in environ:
            with self._conditional:  # S3 decides at once; moto looks first and writes then
                return list(self._application(environ, start))
        return self._application(environ, start)

    def _fault(self, name: str) -> dict[str, Any] | None:
        with self._lock:
            self._log.append(name)
            for fault in self._faults:
                if fault["count"] > 0 and re.search(fault["pattern"], name):
                    fault["count"] -= 1
                    self._hits += 1
                    return fault
        return None

    def _controlled(self, path: str, environ: dict[str, Any]) -> Any:
        body = json.loads(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)) or b"null")
        with self._lock:
            if path.endswith("/faults"):
                self._faults, self._hits = body, 0
                self._released.set()
                self._released = threading.Event()
            log = self._log
            if path.endswith("/log"):
                self._log = []
            return log if path.endswith("/log") else self._hits


def main() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = _Door(DomainDispatcherApplication(create_backend_app))
    host = sys.argv[1]
    server = make_server(host, 0, application, threaded=True)
    print(f"http://{host}:{server.server_port}", flush=True)
    parent = os.getppid()

    def leave_with_parent() -> None:
        while os.getppid() == parent:
            threading.Event().wait(1.0)
        os._exit(0)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
