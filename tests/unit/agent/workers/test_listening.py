"""Who listens is found in both of the kernel's lists."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from elastic_trainer.agent.workers import local_sockets
from elastic_trainer.agent.workers.local_sockets import in_tables, listened_at

ADDRESSES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]


@pytest.mark.parametrize(("family", "address"), ADDRESSES)
@pytest.mark.parametrize("netlink", [True, False], ids=["netlink", "tables"])
def test_a_port_is_listened_at_from_listen_to_close(
    netlink: bool, family: socket.AddressFamily, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound socket does not listen yet; nor does the one that connects to it."""
    if not netlink:
        monkeypatch.setattr(local_sockets, "NETLINK_SOCK_DIAG", 31)  # there is no such protocol
    with socket.socket(family) as server, socket.socket(family) as client:
        server.bind((address, 0))
        port = server.getsockname()[1]
        assert not listened_at(port)
        server.listen()
        assert listened_at(port)
        client.connect((address, port))
        own = client.getsockname()[1]
        assert not listened_at(own)
    assert not listened_at(port)


def test_the_tables_are_no_answer_where_they_are_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        in_tables(1, tmp_path)
