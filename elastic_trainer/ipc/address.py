"""The address of this host at which other hosts reach it, ports that listen only there, and a name for this process.

The route to etcd, or to rank 0, shows it. Where that runs on this machine the route is the loopback, and on another
machine a loopback address leads to that machine itself: then the default route or an interface has to show it.

*Runs in* any thread. *Fails by* OSError if no port is free; a machine without a network has its loopback address alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from elastic_trainer.telemetry.logs import logger

if TYPE_CHECKING:
    from elastic_trainer.torch_internals import TCPStore


LOOPBACK = "127.0.0.1"
_ELSEWHERE = (("203.0.113.1", 9), ("2001:db8::1", 9))
"""Of networks for documentation: their route is the default route. Nothing is sent there."""


def own_address(host: str, port: int, *, alone: bool = False) -> str:
    """The address by which others reach this host, if they reach ``host`` too. ``alone``: there are no others."""
    route = _source(host, port)
    if route is not None and not is_loopback(route):
        return route
    if alone:
        return route or LOOPBACK
    names = list(_interfaces())
    default = next((found for remote in _ELSEWHERE if (found := _source(*remote)) and not is_loopback(found)), None)
    address = default or (names[0] if names else None)
    if address is None:
        return route or LOOPBACK
    if default is None and len(names) > 1:
        logger().warning(
            "address.guessed",
            address=address,
            others=names[1:],
            reason=f"{host} is on this machine, which has several addresses and no default route",
            hint="choose one with --local-addr or --rdzv-conf interface=ADDRESS",
        )
    elif route is not None:
        logger().info("address.chosen", address=address, reason=f"other machines cannot use {route}, as {host} is here")
    return address


def is_loopback(address: str) -> bool:
    """Whether ``address`` leads every machine to itself. A name other than ``localhost`` is not looked up."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address == "localhost"
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def leads_here(address: str) -> bool:
    """Whether ``address``, of another node, is looked up as a loopback address here."""
    return is_loopback(address) or any(is_loopback(found[0]) for _, found in _addresses(address))


def refusal_proves(own: str, other: str) -> bool:
    """Whether a refused connection to ``other`` says anything about the node that announces it.

    This node announces ``own``. From another machine a loopback address leads to no other one.
    """
    return not leads_here(other) or leads_here(own)


def bindable(address: str) -> str | None:
    """``address``, or what its name stands for, in numbers; None if it is none of this host's, or a loopback one."""
    for family, found in _addresses(address):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((found[0], 0, *found[2:]))
            if not is_loopback(found[0]):
                return str(found[0])
    return None


def _source(host: str, port: int) -> str | None:
    """The address that this host uses to reach ``host``; None if no route is known. Sends nothing."""
    for family, found in _addresses(host):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((found[0], port, *found[2:]))
            return str(probe.getsockname()[0])
    return None


def _addresses(host: str) -> Iterator[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """The addresses of ``host``; none for a name without."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, _, _, _, found in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            if family in (socket.AF_INET, socket.AF_INET6):
                yield family, found


def _interfaces() -> Iterator[str]:
    """An address of each interface that is up, IPv4 where it has one; without loopbacks and those of one link alone."""
    states = psutil.net_if_stats()
    for name, found in psutil.net_if_addrs().items():
        usable = [
            each.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for each in found
            if each.family == family
            and not is_loopback(each.address)
            and not ipaddress.ip_address(each.address.partition("%")[0]).is_link_local
        ]
        if usable and name in states and states[name].isup:
            yield usable[0]


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
        family, kind, number, _, found = socket.getaddrinfo(
            numeric, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        listener = socket.socket(family, kind, number)
    except socket.gaierror:
        return None
    try:
        listener.bind(found)
    except OSError as error:
        logger().info("address.not_bound", address=address, error=str(error))
        listener.close()
        return None
    return listener


def default_node_id() -> str:
    """A name that is unique among all processes: host name, process id, a few random digits."""
    host = "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "-" for c in socket.gethostname())
    return f"{host.lstrip('-.')[:80] or 'node'}-{os.getpid()}-{secrets.token_hex(2)}"
