"""An etcd that asks who is there."""

from __future__ import annotations

from base64 import b64encode

from elastic_trainer.local.etcd import EtcdServer


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
