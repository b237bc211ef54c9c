"""One rank of the job of ``reconfigure.py``: goes from round to round as that says, and sums gradients in each.

``groups`` changes groups as a session does, ``reconfigure`` and ``reconfigure+sever`` with torch's ``_reconfigure``.
Times are of the machine's one monotonic clock.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import RoundBrokenError
from elastic_trainer.worker.comm import groups, sever
from elastic_trainer.worker.comm.placement import GLOO, Placement
from elastic_trainer.worker.comm.round_place import RoundPlace, StoreAddress
from elastic_trainer.worker.comm.waits import InterruptibleWaits
from elastic_trainer.worker.inplace.escape import Escape
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter

HOST = "127.0.0.1"
FORMING_S, WORKING_S = 10.0, 15.0
_TORCHS: Any = c10d  # 2.14 and newer know ReconfigureOptions
Order = Mapping[str, Any]


class Groups:
    """As a session does: a thread makes new groups in each round, the old ones are severed and abandoned."""

    def __init__(self, port: int) -> None:
        self._port, self.escape = port, Escape(HeartbeatReporter())
        self._group: groups.Group | None = None

    def handles(self) -> list[str]:
        """What the others need to know of this process."""
        return []

    def enter(self, order: Order) -> InterruptibleWaits:
        """Form the groups of a round."""
        number, rank, size = order["number"], order["rank"], order["size"]
        place = RoundPlace(number, rank, size, rank, size, StoreAddress(HOST, self._port, False, str(number)))
        works = self.escape.enter(number, groups.store_ends(place))
        patience = groups.FormTimeouts(FORMING_S, WORKING_S)
        placement = Placement(torch.device("cpu"), GLOO)
        group = groups.form_in_place(place, placement, patience, lambda: None, lambda: None, works)
        self.escape.sockets.formed(group.listening)
        self._group = group
        return works

    def leave(self, *, planned: bool) -> None:
        """Be in no round."""
        self.escape.leave(planned=planned)
        group, self._group = self._group, None
        groups.abandon(group)


class Reconfigure:
    """Two groups for the life of the process; waits end as in a session, and sockets too where it ``severs``."""

    def __init__(self, port: int, index: int, *, severs: bool) -> None:
        self._severs, self.escape = severs, Escape(HeartbeatReporter())
        store, limit = c10d.TCPStore(HOST, port, None, False), timedelta(seconds=WORKING_S)
        # A handle consists of rank and round, and must be unique: newcomers start with ranks that nobody has.
        named: dict[str, Any] = {"timeout": limit, "enable_reconfigure": True}
        control, data = c10d.PrefixStore("control", store), c10d.PrefixStore("data", store)
        self._control = dist.ProcessGroupGloo(control, index, index + 1, **named)
        dist.init_process_group(GLOO, store=data, rank=index, world_size=index + 1, **named)

    def handles(self) -> list[str]:
        """What the others need to know of this process."""
        return [each.get_reconfigure_handle() for each in self._both()]

    def _both(self) -> tuple[Any, Any]:
        return self._control, dist.group.WORLD

    def enter(self, order: Order) -> InterruptibleWaits:
        """Form the groups of a round."""
        works = self.escape.enter(order["number"], [])
        for group, handles in zip(self._both(), zip(*order["handles"], strict=True), strict=True):
            options = _TORCHS.ReconfigureOptions()
            options.uuid, options.handles = order["number"], list(handles)
            options.timeout = timedelta(seconds=FORMING_S)
            group.reconfigure(options).wait()
        if self._severs:
            found: list[Any] = [None] * order["size"]
            dist.all_gather_object(found, sever.listening(None))
            self.escape.sockets.formed([tuple(end) for ends in found for end in ends])
        return works

    def leave(self, *, planned: bool) -> None:
        """Be in no round."""
        self.escape.leave(planned=planned)


class Agent:
    """The connection to the benchmark. A thread reads its orders, as a session reads its agent's messages."""

    def __init__(self, connection: Connection, escape: Escape) -> None:
        self._connection, self._escape = connection, escape
        self.rounds: queue.Queue[Order] = queue.Queue()
        self.drain = threading.Event()
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def _read(self) -> None:
        while True:
            order = self._connection.recv()
            if order["what"] == "round":
                self.rounds.put(order)
            elif order["what"] == "drain":
                self.drain.set()
            else:
                self._escape.over(order["number"])

    def say(self, what: str, number: int, **more: Any) -> None:
        self._connection.send({"what": what, "number": number, "at": SYSTEM.monotonic(), **more})

    def free(self, number: int, handles: list[str]) -> None:
        """Say that this rank has left round ``number``, and what the process holds."""
        mine = psutil.Process()
        held = {"descriptors": mine.num_fds(), "threads": mine.num_threads(), "megabytes": mine.memory_info().rss / 1e6}
        self.say("free", number, handles=handles, held=held)


def train(way: Groups | Reconfigure, agent: Agent, gradients: torch.Tensor, order: Order) -> None:
    """One round: to the step in which a rank has heard that it is to drain, or to a fault."""
    number, drained = order["number"], False
    agent.drain.clear()
    try:
        works = way.enter(order)
        for step in range(sys.maxsize):
            gradients.fill_(1.0)
            gradients[0] = float(agent.drain.is_set())
            works.wait(works.begun(dist.all_reduce(gradients, async_op=True)))
            if float(gradients[-1]) != order["size"]:
                raise SystemExit(f"a sum over {order['size']} ranks is {float(gradients[-1])}")
            if step == 0:
                agent.say("step", number)
            if gradients[0] > 0:
                drained = True
                break
    except (RuntimeError, RoundBrokenError) as error:
        agent.say("broken", number, why=str(error))
    way.leave(planned=drained)
    agent.free(number, way.handles())


def serve(name: str, port: int, index: int, megabytes: float, connection: Connection) -> None:
    """Until somebody ends this process."""
    torch.set_num_threads(1)
    way = Groups(port) if name == "groups" else Reconfigure(port, index, severs=name.endswith("sever"))
    agent, gradients = Agent(connection, way.escape), torch.ones(int(megabytes * 1e6 / 4))
    agent.free(0, way.handles())
    while True:
        train(way, agent, gradients, agent.rounds.get())
