"""Checks of the network: whether others can connect to this node, its name resolves, and other nodes answer.

*Runs in* the caller's thread, and in short-lived threads for connections to many nodes.
*Owns* sockets during one call. *Fails by* findings.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from elastic_trainer.clock import Deadline
from elastic_trainer.ipc.listening import listen
from elastic_trainer.ipc.own_address import is_loopback, leads_here
from elastic_trainer.preflight.finding import Finding, Status
from elastic_trainer.settings import gloo_interfaces
from elastic_trainer.wording import counted

CONNECT_S = 2.0
AT_ONCE = 32
"""Simultaneous connections."""
MOST_ASKED = 64
"""Nodes to connect to: enough to detect that this node is cut off, and little load for the others."""
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Neighbor:
    """Another node's address."""

    node: str
    address: str
    port: int


def listening(address: str) -> Finding:
    """Whether a port of this node is reachable at its published address."""
    hint = "set --rdzv-conf interface to an address of this machine, and check its firewall"
    try:
        socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
        with listen(address) as server:
            port = server.getsockname()[1]
            with socket.create_connection((address, port), CONNECT_S):
                return Finding("ports", Status.OK, f"listens on {address}")
    except socket.gaierror:
        return Finding("ports", Status.BAD, f"the address {address!r} of this node does not resolve", hint=hint)
    except OSError as error:
        said = error.strerror or str(error)
        return Finding("ports", Status.BAD, f"this node cannot be reached at {address}: {said.lower()}", hint=hint)


def host_name(host: str, address: str) -> Finding:
    """Whether others can use the ``address`` that this node announces, and the address of its own name.

    torch's gloo publishes the latter for groups that a script forms without a session.
    """
    hint = "correct /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME"
    if leads_here(address):
        text = f"this node would announce {address}, which leads every other machine to itself"
        return Finding(
            "name", Status.WARN, text, hint="give --local-addr or --rdzv-conf interface, unless all nodes are here"
        )
    if chosen := gloo_interfaces():
        return Finding("name", Status.OK, f"gloo uses {chosen}")
    found = _resolved(host)
    if found is None:
        return Finding("name", Status.WARN, f"the name {host!r} of this host has no address", hint=hint)
    if is_loopback(found):
        text = f"{host!r} resolves to {found}: gloo groups that a script forms without a Session fail across machines"
        return Finding("name", Status.WARN, text, hint=hint)
    return Finding("name", Status.OK, f"{host} is {found}")


def _resolved(host: str) -> str | None:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def reaching(name: str, neighbors: Sequence[Neighbor], deadline: Deadline) -> Finding:
    """Whether the other nodes' hosts answer. A refused connection is an answer: only the process has ended."""
    if not neighbors:
        return Finding(name, Status.SKIPPED, "no other node is present")
    asked = neighbors[:MOST_ASKED]
    limit_s = deadline.at_most(CONNECT_S).remaining_s()
    with ThreadPoolExecutor(min(AT_ONCE, len(asked)), thread_name_prefix="preflight-connect") as pool:
        answers = list(pool.map(lambda each: _answers(each, limit_s), asked))
    silent = [each for each, answer in zip(asked, answers, strict=True) if not answer]
    answered = len(asked) - len(silent)
    text = f"{answered} of {counted(len(asked), 'node answers', 'nodes answer')}"
    found = Finding(name, Status.OK, text, float(answered), "nodes", float(len(asked)))
    if not silent:
        return found
    who = ", ".join(f"{each.node} ({each.address}:{each.port})" for each in silent[:_NAMED])
    more = ", ..." if len(silent) > _NAMED else ""
    text = f"{len(silent)} of {counted(len(asked), 'node does', 'nodes do')} not answer: {who}{more}"
    # One silent node may be faulty itself; if none of several answers, this one is cut off.
    status = Status.BAD if len(silent) == len(asked) > 1 else Status.WARN
    return found.but(status, "check network, firewall and network policies", text)


def _answers(neighbor: Neighbor, limit_s: float) -> bool:
    try:
        with socket.create_connection((neighbor.address, neighbor.port), max(0.1, limit_s)):
            return True
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
