"""Finds free TCP ports on this machine for servers that will be restarted on them.

*Runs in* tests, drills and ``elastic-trainer local``. *Owns* nothing: another process may take a port at once, so users
try another when binding fails. *Fails by* StoreUnavailableError when no port is free.
"""

from __future__ import annotations

import random
import socket

from elastic_trainer.errors import StoreUnavailableError

HOST = "127.0.0.1"


def free_ports(count: int) -> tuple[int, ...]:
    """Ports that were free a moment ago, outside the kernel's range of ephemeral ports.

    In that range a client that connects to a stopped etcd could be assigned etcd's own port, and keep it.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        first_ephemeral = int(file.read().split()[0])
    candidates = range(10_000, first_ephemeral) if first_ephemeral > 11_000 else range(61_000, 65_536)
    chosen: list[int] = []
    for port in random.sample(candidates, len(candidates)):
        if is_free(port):
            chosen.append(port)
        if len(chosen) == count:
            return tuple(chosen)
    raise StoreUnavailableError("this machine has no free ports")


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
