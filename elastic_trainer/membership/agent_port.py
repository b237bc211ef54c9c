"""Connects to the ports of agents: a kernel that refuses the connection proves its agent dead.

Unless the agent announces a loopback address, which leads each machine to itself.

*Runs in* the caller's thread (``refuses``) and short-lived ones, which ``start_probes`` starts.
*Fails by* nothing: a node that cannot be probed is not proven dead.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable

from elastic_trainer.ipc.own_address import refusal_proves
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.effects import Probed
from elastic_trainer.membership.probe import PROBE_TIMEOUT_S
from elastic_trainer.telemetry.logs import logger

ENDING_S = 0.1
"""How long a connection that was accepted is kept: until the next probe."""


def refuses(host: str, port: int, timeout_s: float) -> bool:
    """Whether ``host`` refuses connections to ``port``; a timeout proves nothing.

    The kernel accepts for a killed process until its sockets close, and a container's network is gone soon after: then
    nobody refuses the next probe. So a connection is kept for a moment, and made again if the other side closes it.
    """
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as accepted:
            accepted.settimeout(min(ENDING_S, timeout_s))
            with contextlib.suppress(ConnectionResetError):
                accepted.recv(1)
        socket.create_connection((host, port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def start_probes(nodes: Iterable[NodeView], own: str, answered: Callable[[Probed], None]) -> None:
    """Probe each of ``nodes`` in its own thread, which calls ``answered``. ``own``: the address of this node."""
    for node in nodes:
        try:
            threading.Thread(target=_probe, args=(node, own, answered), name=f"probe-{node.id}", daemon=True).start()
        except RuntimeError:  # the limit of processes is reached
            answered(Probed(node.id, node.mod_revision, dead=False))


def _probe(node: NodeView, own: str, answered: Callable[[Probed], None]) -> None:
    dead = False
    try:
        address = node.record.address
        dead = refusal_proves(own, address) and refuses(address, node.record.probe_port, PROBE_TIMEOUT_S)
        if dead:
            logger().warning("node.found_dead", node=node.id, address=address)
    finally:
        answered(Probed(node.id, node.mod_revision, dead))
