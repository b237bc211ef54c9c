"""What only tests do with an etcd server: freeze it, and let it ask who is there."""

from __future__ import annotations

import http.client
import os
import signal
import ssl
from base64 import b64encode
from pathlib import Path

from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.local.hosts import HOST


def freeze(server: EtcdServer) -> None:
    """From the return on its connections stay open but nothing answers."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # all threads are stopped


def thaw(server: EtcdServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGCONT)


class TlsEtcdServer(EtcdServer):
    """One that uses TLS with its clients and requires certificates of ``ca_cert`` from them."""

    scheme = "https"

    def __init__(self, directory: Path, ca_cert: Path, cert: Path, key: Path, *, binary: str) -> None:
        files = [f"--cert-file={cert}", f"--key-file={key}", f"--trusted-ca-file={ca_cert}", "--client-cert-auth"]
        super().__init__(directory, binary=binary, arguments=files)
        self._context = ssl.create_default_context(cafile=str(ca_cert))
        self._context.load_cert_chain(cert, key)

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        where = HOST, self.client_port
        return http.client.HTTPSConnection(*where, timeout=timeout_s, context=self._context)


def guard(server: EtcdServer, password: str) -> EtcdServer:
    """Switch authentication on: ``root`` with the password ``r00t``, and ``trainer``, who may use this package's prefix
    only, with ``password``."""
    key, end = (b64encode(text).decode() for text in (b"/elastic_trainer/", b"/elastic_trainer0"))
    for name, secret in (("root", "r00t"), ("trainer", password)):
        server.call("auth/user/add", name=name, password=secret)
        server.call("auth/role/add", name=name)
        server.call("auth/user/grant", user=name, role=name)
    permission = {"permType": "READWRITE", "key": key, "range_end": end}
    server.call("auth/role/grant", name="trainer", perm=permission)
    server.call("auth/enable")
    return server
