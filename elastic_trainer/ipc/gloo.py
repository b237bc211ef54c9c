"""The address that each gloo group uses.

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

import socket
from collections.abc import Callable, Sequence
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


def lead(at: Sequence[str]) -> None:
    """From now on, groups that torch forms in this process use the first of the addresses ``at``."""
    _led.addresses = tuple(at)
    _led.begin()


class _Led:
    """The groups that torch forms."""

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()
        self._torchs: Callable[..., None] | None = None

    def begin(self) -> None:
        import torch.distributed as dist

        if self._torchs is not None:
            return
        torchs = self._torchs = dist.ProcessGroupGloo.__init__

        def construct(made: ProcessGroupGloo, store: Store, rank: int, size: int, *more: Any, **named: Any) -> None:
            timeout = more[0] if more else named.get("timeout", _TORCHS_TIMEOUT)
            options = _options(timeout, self.addresses) if isinstance(timeout, timedelta) else timeout
            if options is not timeout and "options" not in named:
                if named.get("enable_reconfigure"):  # torch 2.14 and newer
                    options.enable_reconfigure = True
                more, named = (options,), {}
            torchs(made, store, rank, size, *more, **named)

        dist.ProcessGroupGloo.__init__ = construct  # type: ignore[method-assign, assignment]


_led = _Led()


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
