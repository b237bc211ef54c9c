"""All-reduces of several nodes, two by two and all together: one node's part.

*Runs in* a process of its own (``python -m``), of which each node starts one. It tells the port of its TCP store, reads
one line about who takes part from its standard input, measures, and tells what all have measured.
*Owns* that store, and one process group at a time.
*Fails by* telling an error for the pair that failed; by a traceback where the store of the first member is lost.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.ipc.listening import store_at
from elastic_trainer.preflight.pairs import SIZES, Pair, turns
from elastic_trainer.preflight.telling import Teller
from elastic_trainer.settings import prefer_loopback

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store


GROUP_S = 10.0
"""How long two nodes may take to connect, or to do one all-reduce."""
TRIES = {SIZES[0]: 20, SIZES[1]: 5, SIZES[2]: 3}


@dataclass(frozen=True, slots=True)
class MeasuredPart:
    """What the parent writes: this node's part in the meeting."""

    host: str
    port: int
    nonce: str
    rank: int
    names: tuple[str, ...]
    limit_s: float
    wait_s: float = 2 * GROUP_S
    """How long to wait for the first partner to come."""

    @classmethod
    def read(cls, line: str) -> MeasuredPart:
        """Of one line of JSON."""
        values = json.loads(line)
        return cls(**{**values, "names": tuple(values["names"])})


def main(arguments: Sequence[str]) -> int:
    """``LIMIT_S ADDRESS``."""
    teller = Teller(float(arguments[0]))
    teller.doing("importing torch")
    if arguments[1].startswith("127.") or arguments[1] in ("localhost", "::1"):
        prefer_loopback()  # all are on one machine, whose name may lead anywhere
    own = store_at(arguments[1], timedelta(seconds=GROUP_S))
    teller.tell(port=own.port)
    teller.doing("waiting for other nodes")
    line = sys.stdin.readline()
    if line:  # else the parent has given up
        Measurement(MeasuredPart.read(line), teller).run()
    return 0


def devices(told: Sequence[tuple[str, int] | None]) -> list[str]:
    """For each rank a CUDA device of its own, if all have one, else the CPU. ``told``: hosts and numbers of devices."""
    places = [None if each is None else sum(other == each for other in told[:rank]) for rank, each in enumerate(told)]
    pairs = list(zip(told, places, strict=True))
    if all(each is None or (place is not None and place < each[1]) for each, place in pairs):
        return [f"cuda:{place or 0}" for place in places]
    return ["cpu"] * len(told)


class Measurement:
    """See the module."""

    def __init__(self, part: MeasuredPart, teller: Teller) -> None:
        import torch
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        self._part, self._teller = part, teller
        self._deadline = Deadline.after(part.limit_s)
        teller.doing(f"connecting to the store of {part.names[0]}")
        limit = timedelta(seconds=min(GROUP_S, part.limit_s))
        tcp = TCPStore(part.host, part.port, None, False, wait_for_workers=False, timeout=limit)
        self._store: Store = PrefixStore(part.nonce, tcp)
        self._device = self._agreed_device(torch.cuda.device_count() if torch.cuda.is_available() else 0)

    def run(self) -> None:
        """Measure all, then tell what everybody has measured."""
        part, count = self._part, len(self._part.names)
        for number, turn in enumerate(turns(count)):
            for pair in turn:
                if part.rank in pair:
                    self._meet(number, pair)
        self._teller.doing(f"all-reduce of all {count} nodes")
        gone = [name for rank, name in enumerate(part.names) if self._is_gone(rank)]
        together = {"error": f"{gone[0]} did not come"} if gone else self._timed("all", range(count))
        for low, high, measured in self._gathered():
            self._teller.tell(pair=[low, high], **measured)
        self._teller.tell(together=together)
        self._part_company()

    def _meet(self, number: int, pair: Pair) -> None:
        """One pair's turn. The lower rank reports what was measured, or the one that failed."""
        other = pair[1] if pair[0] == self._part.rank else pair[0]
        name = self._part.names[other]
        self._teller.doing(f"all-reduce with {name}")
        if not self._comes(number, other):
            measured: dict[str, Any] = {"error": f"{name} did not come"}
        else:
            measured = self._timed(f"pair-{number}-{pair[0]}-{pair[1]}", pair)
        if "ahead_s" in measured:
            self._teller.tell(clock=[name, measured.pop("ahead_s")])
        if self._part.rank == pair[0] or "error" in measured:
            self._store.set(_key(pair), json.dumps(measured))

    def _comes(self, turn: int, other: int) -> bool:
        """Whether the other is there for this turn; who is waited for in vain is not waited for again.

        Each turn waits longer than the one before, so that who was kept waiting is not taken for gone too.
        """
        self._store.set(f"turn/{turn}/{self._part.rank}", "here")
        if self._is_gone(other):
            return False
        limit_s = min(self._part.wait_s + turn * GROUP_S, self._deadline.remaining_s())
        try:
            self._store.wait([f"turn/{turn}/{other}"], timedelta(seconds=max(0.1, limit_s)))
        except Exception:  # noqa: BLE001 - torch has several types for a time that is over
            self._store.set(f"gone/{other}", "")
            return False
        return True

    def _is_gone(self, rank: int) -> bool:
        return bool(self._store.check([f"gone/{rank}"]))

    def _timed(self, name: str, ranks: Sequence[int]) -> dict[str, Any]:
        """Seconds of the best all-reduce of each size, or the error."""
        import torch

        try:
            group = self._group(name, ranks)
            measured: dict[str, Any] = {}
            if len(ranks) == 2:
                measured["ahead_s"] = self._ahead_s(group, ranks.index(self._part.rank))
            measured["seconds"] = {}
            for size, tries in TRIES.items():
                data = torch.ones(size // 4, dtype=torch.float32, device=self._device)
                measured["seconds"][str(size)] = self._best_s(group, data, tries)
        except Exception as error:  # noqa: BLE001 - whatever fails is the result of the measurement
            return {"error": _first_line(error)}
        return measured

    def _best_s(self, group: ProcessGroup, data: Any, tries: int) -> float:
        times = []
        for _ in range(1 + tries):
            begun = SYSTEM.monotonic()
            group.allreduce([data]).wait()
            if self._device != "cpu":
                import torch

                torch.cuda.synchronize(self._device)
            times.append(SYSTEM.monotonic() - begun)
            data.fill_(1.0)
        return min(times[1:])  # the first connects

    def _ahead_s(self, group: ProcessGroup, place: int) -> float:
        """By how much the other's clock is ahead, with an error of one round trip: both tell it after a barrier."""
        import torch

        times = torch.zeros(2, dtype=torch.float64, device=self._device)
        group.allreduce([times]).wait()
        times[place] = SYSTEM.wall()
        group.allreduce([times]).wait()
        return float(times[1 - place] - times[place])

    def _group(self, name: str, ranks: Sequence[int]) -> ProcessGroup:
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        store = PrefixStore(name, self._store)
        rank, limit = ranks.index(self._part.rank), timedelta(seconds=min(GROUP_S, self._deadline.remaining_s()))
        if self._device == "cpu":
            return cast("ProcessGroup", dist.ProcessGroupGloo(store, rank, len(ranks), limit))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return cast("ProcessGroup", dist.ProcessGroupNCCL(store, rank, len(ranks), options))

    def _agreed_device(self, mine: int) -> str:
        """What the first member decides for this node, once it has heard from all or waited long enough."""
        part = self._part
        self._store.set(f"has/{part.rank}", json.dumps([socket.gethostname(), mine]))
        waiting = Deadline.after(min(part.wait_s, self._deadline.remaining_s()))
        if part.rank == 0:
            told = [self._has(rank, waiting) for rank in range(len(part.names))]
            self._store.set("devices", json.dumps(devices(told)))
        else:
            self._store.wait(["devices"], timedelta(seconds=waiting.remaining_s() + GROUP_S))
        return str(json.loads(self._store.get("devices"))[part.rank])

    def _has(self, rank: int, waiting: Deadline) -> tuple[str, int] | None:
        """The host of ``rank`` and how many CUDA devices it has; None where it has not come."""
        try:
            self._store.wait([f"has/{rank}"], timedelta(seconds=max(0.01, waiting.remaining_s())))
        except Exception:  # noqa: BLE001 - torch has several types for a time that is over
            self._store.set(f"gone/{rank}", "")
            return None
        host, count = json.loads(self._store.get(f"has/{rank}"))
        return host, count

    def _gathered(self) -> list[tuple[int, int, Mapping[str, Any]]]:
        """All results of the pairs: the first member reads all of it once, the others read its list."""
        waiting = Deadline.after(min(2 * GROUP_S, self._deadline.remaining_s()))
        if self._part.rank == 0:
            pairs = [pair for turn in turns(len(self._part.names)) for pair in turn]
            self._store.set("measured", json.dumps([[*pair, self._told(pair, waiting)] for pair in pairs]))
        else:
            self._store.wait(["measured"], timedelta(seconds=waiting.remaining_s() + GROUP_S))
        return [(low, high, measured) for low, high, measured in json.loads(self._store.get("measured"))]

    def _told(self, pair: Pair, waiting: Deadline) -> Mapping[str, Any]:
        """The results of the pair's members."""
        try:
            self._store.wait([_key(pair)], timedelta(seconds=max(0.01, waiting.remaining_s())))
            measured: Mapping[str, Any] = json.loads(self._store.get(_key(pair)))
        except Exception:  # noqa: BLE001 - as above
            return {"error": "it was not measured in time"}
        return measured

    def _part_company(self) -> None:
        """The first member's store must last until everybody has read from it."""
        self._store.add("read", 1)
        if self._part.rank == 0:
            gone = sum(self._is_gone(rank) for rank in range(len(self._part.names)))
            waiting = Deadline.after(min(GROUP_S, self._deadline.remaining_s()))
            _until(lambda: self._store.add("read", 0) >= len(self._part.names) - gone, waiting)


def _until(done: Callable[[], bool], deadline: Deadline) -> None:
    while not done() and not deadline.expired:
        pause(0.05)


def _key(pair: Pair) -> str:
    return f"measured/{pair[0]}-{pair[1]}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
