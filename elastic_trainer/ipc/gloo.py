"""The address that each gloo group uses, and its sockets, by which a rank that is blocked in it is freed.

torch gives all groups of a process the address of this host's name, or the interfaces of ``GLOO_SOCKET_IFNAME``. Here a
group gets its own: the loopback if all its ranks are on this host, else the address by which others reach it. A round
may have one host and the next one several. A variable that the user has set wins.

torch forms groups too: the default group ignores ``pg_options``, and the script's ``new_group`` and
``init_device_mesh`` have none. So :func:`lead` replaces the constructor by one that adds the device.

*Runs in* the process that forms the group. *Owns* ``ProcessGroupGloo.__init__`` from the first :func:`lead` on.
*Fails by* nothing: without these parts of torch, or with an address that gloo refuses, torch's own choice applies, and
one log line says so.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import psutil

from elastic_trainer import settings
from elastic_trainer.ipc.address import bindable, is_loopback, own_address
from elastic_trainer.telemetry.logs import logger

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo

    from elastic_trainer.torch_internals import Store

ONE_HOST = ("127.0.0.1", "::1")
"""The addresses of a group whose ranks are all on this host; the first that there is."""
_TORCHS_TIMEOUT = timedelta(minutes=30)
_THREADS = 2
"""As torch takes for one device."""
_DESCRIPTORS = "/proc/self/fd"


def addresses(announced: str, host: str, port: int) -> tuple[str, ...]:
    """This host's addresses for a group whose ranks meet at a store at ``host``: the first that gloo accepts counts.

    ``announced``: the one that the node's agent announces; empty without an agent.
    """
    if is_loopback(host):
        return ONE_HOST
    # An announced address may be a translated one (NAT), or a name that /etc/hosts maps to the loopback.
    return ((bindable(announced) if announced else None) or own_address(host, port),)


def misleading() -> str:
    """``GLOO_SOCKET_IFNAME`` if it names loopback interfaces alone: gloo then publishes an address that leads every
    other host to itself. Else empty."""
    chosen, found = settings.gloo_interfaces(), psutil.net_if_addrs()
    published = [
        each.address
        for name in chosen.split(",")
        for each in found.get(name, ())
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return chosen if published and all(map(is_loopback, published)) else ""


def group(store: Store, rank: int, size: int, timeout: timedelta, at: Sequence[str]) -> ProcessGroupGloo:
    """A gloo group that uses the first of the addresses ``at``."""
    import torch.distributed as dist

    make: Callable[..., ProcessGroupGloo] = dist.ProcessGroupGloo
    return make(store, rank, size, _options(timeout, at))


_led: list[tuple[str, ...]] = []
"""The addresses of the newest :func:`lead`."""


def lead(at: Sequence[str]) -> None:
    """From now on, groups that torch forms in this process use the first of the addresses ``at``."""
    import torch.distributed as dist

    replaced = bool(_led)
    _led[:] = [tuple(at)]
    if replaced:
        return
    torchs = dist.ProcessGroupGloo.__init__

    def construct(made: ProcessGroupGloo, store: Store, rank: int, size: int, *more: Any, **named: Any) -> None:
        timeout = more[0] if more else named.get("timeout", _TORCHS_TIMEOUT)
        options = _options(timeout, _led[0]) if isinstance(timeout, timedelta) else timeout
        if options is not timeout and "options" not in named:
            if named.get("enable_reconfigure"):  # torch 2.14 and newer
                options.enable_reconfigure = True
            more, named = (options,), {}
        torchs(made, store, rank, size, *more, **named)

    dist.ProcessGroupGloo.__init__ = construct  # type: ignore[method-assign, assignment]


def _options(timeout: timedelta, at: Sequence[str]) -> Any:
    """The last argument of gloo's constructor: options with a device, or ``timeout`` where torch is to choose it."""
    from elastic_trainer import torch_internals

    if settings.gloo_interfaces() or not at:
        return timeout
    refused = "".join(torch_internals.lacking([torch_internals.GLOO_ADDRESSES]))
    for address in () if refused else at:
        try:
            return torch_internals.gloo_options(timeout, address, _THREADS)
        except RuntimeError as error:
            refused = str(error).partition("\n")[0]
    _tell(", ".join(at), refused)
    return timeout


@cache
def _tell(at: str, refused: str) -> None:
    """Once for each address and reason."""
    logger().warning(
        "gloo.not_placed",
        address=at,
        reason=refused,
        hint="gloo uses the address of this host's name; GLOO_SOCKET_IFNAME names an interface",
    )


# ---- the sockets of a group


End = tuple[str, int]
"""Address and port of one end of a connection."""


def open_sockets() -> dict[int, str]:
    """Descriptor number and kernel name (with the inode) of each socket of this process; empty off Linux."""
    found: dict[int, str] = {}
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[int(name)] = target
    return found


class Sockets:
    """The sockets of one process group at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: dict[int, str] | None = None
        self._mine: dict[int, str] | None = None
        self._ends: frozenset[End] = frozenset()
        self._round = 0

    def forming(self, store: Collection[End], round_: int = 0) -> None:
        """Sockets opened from now on may belong to the group of ``round_``; those connected to its ``store`` do."""
        with self._lock:
            self._before, self._mine, self._ends = open_sockets(), None, frozenset(store)
            self._round = round_

    def formed(self, listening: Collection[End]) -> int:
        """The group is complete and its ranks listen at ``listening``; returns the number of its sockets."""
        with self._lock:
            self._ends |= frozenset(listening)
            self._mine = self._appeared()
            for number in self._mine:
                with contextlib.suppress(OSError):
                    os.set_inheritable(number, False)  # gloo would leave them open in programs started by the script
            return len(self._mine)

    def forget(self) -> None:
        """The group has ended: the kernel may reuse its descriptors."""
        with self._lock:
            self._before = self._mine = None

    def descriptors(self) -> list[int]:
        """The unchanged descriptors of a complete group. Takes no lock, which a forked child might never get."""
        mine, now = self._mine or {}, open_sockets()
        return [number for number, name in mine.items() if now.get(number) == name]

    def sever(self, round_: int | None = None) -> int:
        """Shut the group's connected sockets down for reading; returns how many. ``round_``: only if they are its own.

        Another thread cannot know whether the group is still the one that it means, however late it looked.
        """
        with self._lock:
            if self._before is None or round_ not in (None, self._round):
                return 0
            mine = self._appeared() if self._mine is None else self._mine
            now = open_sockets()
            return sum(_shut(number) for number, name in mine.items() if now.get(number) == name)

    def _appeared(self) -> dict[int, str]:
        before = self._before or {}
        found = {number: name for number, name in open_sockets().items() if before.get(number) != name}
        return {
            number: name
            for number, name in found.items()
            if not self._ends.isdisjoint(_ends(number) or _ends(number, listens=True))
        }


def listening(published: bytes | None) -> list[End]:
    """Addresses at which sockets of this process listen and that are contained in ``published`` (None: all of them).

    gloo publishes its address as the kernel's own structure, among other things.
    """
    found = [end for number in open_sockets() for end in _ends(number, listens=True)]
    return [end for end in found if published is None or _packed(end) in published]


def resolved(host: str, port: int) -> list[End]:
    """All remote addresses that connections to ``host`` may have."""
    try:
        return [_plain(found[4]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _packed(end: End) -> bytes:
    """As in ``sockaddr_in`` or ``sockaddr_in6``."""
    address = ipaddress.ip_address(end[0])
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    flow = b"" if address.version == 4 else bytes(4)
    return struct.pack("=H", family) + struct.pack("!H", end[1]) + flow + address.packed


def _ends(number: int, *, listens: bool = False) -> list[End]:
    """Both ends of a TCP connection, or the address at which a socket ``listens``; empty for any other descriptor."""
    with contextlib.suppress(OSError), _tcp(number) as duplicate:  # OSError: not connected
        if not listens:
            return [_plain(duplicate.getsockname()), _plain(duplicate.getpeername())]
        if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return [_plain(duplicate.getsockname())]
    return []


def _plain(address: Any) -> End:
    """One spelling for each address: no scope, and IPv4 not inside IPv6."""
    found = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found), address[1]


def _shut(number: int) -> bool:
    """Shut ``number`` down for reading if it is a connected TCP socket; whether it was."""
    with contextlib.suppress(OSError), _tcp(number) as duplicate:
        if not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            duplicate.shutdown(socket.SHUT_RD)
            return True
    return False


@contextlib.contextmanager
def _tcp(number: int) -> Iterator[socket.socket]:
    """A duplicate of descriptor ``number``; OSError unless it is a TCP socket."""
    with socket.socket(fileno=os.dup(number)) as duplicate:
        if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or duplicate.type != socket.SOCK_STREAM:
            raise OSError(errno.EPROTOTYPE, os.strerror(errno.EPROTOTYPE))
        yield duplicate
