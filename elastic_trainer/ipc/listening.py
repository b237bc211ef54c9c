"""Ports that a node opens for others: only on its announced address, not on others of the machine.

*Runs in* any thread. *Fails by* OSError if no port is free.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from elastic_trainer.telemetry.logs import logger

if TYPE_CHECKING:
    from elastic_trainer.torch_internals import TCPStore

_BACKLOG = 512


def listen(address: str) -> socket.socket:
    """A socket that listens at ``address``, on any free port.

    Listens on all addresses if ``address`` is a name, which may resolve differently elsewhere, or no address of this
    machine (NAT).
    """
    listener = _at(address)
    if listener is None:
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("", 0))
    listener.listen(_BACKLOG)
    return listener


def store_at(address: str, timeout: timedelta) -> TCPStore:
    """A torch store that listens in the same way; by default it would listen on all addresses."""
    from elastic_trainer.torch_internals import TCPStore

    listener = _at(address)
    if listener is None:
        return TCPStore("localhost", 0, None, True, wait_for_workers=False, timeout=timeout)
    listener.listen(_BACKLOG)
    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, None, True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach())


def _at(address: str) -> socket.socket | None:
    """A socket on a free port of ``address``; None if that is known to be no address of this machine."""
    numeric = "127.0.0.1" if address == "localhost" else address
    try:
        family, kind, number, _, place = socket.getaddrinfo(
            numeric, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        listener = socket.socket(family, kind, number)
    except socket.gaierror:
        return None
    try:
        listener.bind(place)
    except OSError as error:
        logger().info("address.not_bound", address=address, error=str(error))
        listener.close()
        return None
    return listener
