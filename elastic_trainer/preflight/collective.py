"""One node's part in all-reduces of several nodes, in pairs and all together.

*Runs in* a separate process (``python -m``), one on each node. It prints the port of its TCP store, reads one line
about the members from standard input, measures, and prints all members' results.
*Owns* that store, and one process group at a time.
*Fails by* an error as the result of a failed pair; by a traceback if the first member's store is lost.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.ipc import gloo
from elastic_trainer.ipc.address import store_at
from elastic_trainer.preflight.child import Messages
from elastic_trainer.preflight.judge import SIZES, Pair, turns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from elastic_trainer.torch_internals import Store


GROUP_S = 10.0
"""Seconds that two nodes may take to connect, or for one all-reduce."""
TRIES = {SIZES[0]: 20, SIZES[1]: 5, SIZES[2]: 3}


@dataclass(frozen=True, slots=True)
class MeasuredPart:
    """The parent's input: this node's part in the meeting."""

    host: str
    port: int
    nonce: str
    rank: int
    names: Sequence[str]
    limit_s: float
    wait_s: float = 2 * GROUP_S
    """Seconds to wait for the first partner."""


def main(arguments: Sequence[str]) -> int:
    """``LIMIT_S ADDRESS``."""
    messages = Messages(float(arguments[0]))
    messages.doing("importing torch")
    own = store_at(arguments[1], timedelta(seconds=GROUP_S))
    messages.send(port=own.port)
    messages.doing("waiting for other nodes")
    line = sys.stdin.readline()
    if line:  # otherwise the parent has given up
        Measurement(MeasuredPart(**json.loads(line)), arguments[1], messages).run()
    return 0


def devices(counts: Sequence[tuple[str, int] | None]) -> list[str]:
    """A CUDA device for each rank if all have their own, else the CPU. ``counts``: hosts, and devices of each."""
    indices = [None if each is None else counts[:rank].count(each) for rank, each in enumerate(counts)]
    pairs = list(zip(counts, indices, strict=True))
    if all(each is None or (index is not None and index < each[1]) for each, index in pairs):
        return [f"cuda:{index or 0}" for index in indices]
    return ["cpu"] * len(counts)


class Measurement:
    """See the module."""

    def __init__(self, part: MeasuredPart, address: str, messages: Messages) -> None:
        import torch

        from elastic_trainer.torch_internals import PrefixStore, TCPStore

        self._part, self._messages = part, messages
        self._at = gloo.addresses(address, part.host, part.port)
        self._deadline = Deadline.after(part.limit_s)
        messages.doing(f"connecting to the store of {part.names[0]}")
        limit = timedelta(seconds=min(GROUP_S, part.limit_s))
        tcp = TCPStore(part.host, part.port, None, False, wait_for_workers=False, timeout=limit)
        self._store: Store = PrefixStore(part.nonce, tcp)
        self._device = self._agreed_device(torch.cuda.device_count() if torch.cuda.is_available() else 0)

    def run(self) -> None:
        part, count = self._part, len(self._part.names)
        for number, turn in enumerate(turns(count)):
            for pair in turn:
                if part.rank in pair:
                    self._meet(number, pair)
        self._messages.doing(f"all-reduce of all {count} nodes")
        gone = [name for rank, name in enumerate(part.names) if self._is_gone(rank)]
        together = {"error": f"{gone[0]} did not join"} if gone else self._timed("all", range(count))
        for low, high, measured in self._gathered():
            self._messages.send(pair=[low, high], **measured)
        self._messages.send(together=together)
        self._store.add("read", 1)
        if part.rank == 0:  # keep this store until all have read from it
            waiting = Deadline.after(min(GROUP_S, self._deadline.remaining_s()))
            there = count - sum(self._is_gone(rank) for rank in range(count))
            while self._store.add("read", 0) < there and not waiting.expired:
                pause(0.05)

    def _meet(self, number: int, pair: Pair) -> None:
        """One pair's turn. The lower rank reports the result, or the rank whose measurement failed."""
        other = pair[1] if pair[0] == self._part.rank else pair[0]
        name = self._part.names[other]
        self._messages.doing(f"all-reduce with {name}")
        self._store.set(f"turn/{number}/{self._part.rank}", "true")
        # Each turn waits longer than the one before: a rank that itself had to wait is not gone.
        limit_s = max(0.1, min(self._part.wait_s + number * GROUP_S, self._deadline.remaining_s()))
        # A rank that once did not join is not waited for again.
        if self._is_gone(other) or self._value(f"turn/{number}/{other}", limit_s, unless_gone=other) is None:
            measured: dict[str, Any] = {"error": f"{name} did not join"}
        else:
            measured = self._timed(f"pair-{number}-{pair[0]}-{pair[1]}", pair)
        if "ahead_s" in measured:
            self._messages.send(clock=[name, measured.pop("ahead_s")])
        if self._part.rank == pair[0] or "error" in measured:
            self._store.set(_key(pair), json.dumps(measured))

    def _value(self, key: str, limit_s: float, unless_gone: int | None = None) -> Any:
        """The value of ``key``, None if not written in ``limit_s`` seconds; then rank ``unless_gone`` is gone."""
        try:
            self._store.wait([key], timedelta(seconds=max(0.01, limit_s)))
            return json.loads(self._store.get(key))
        except Exception:  # noqa: BLE001 - torch has several types for a timeout
            if unless_gone is not None:
                self._store.set(f"gone/{unless_gone}", "")
            return None

    def _is_gone(self, rank: int) -> bool:
        return bool(self._store.check([f"gone/{rank}"]))

    def _timed(self, name: str, ranks: Sequence[int]) -> dict[str, Any]:
        """Seconds of the fastest all-reduce of each size, or the error."""
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
        except Exception as error:  # noqa: BLE001 - any failure is the result of the measurement
            return {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]}
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
        return min(times[1:])  # the first one includes connecting

    def _ahead_s(self, group: ProcessGroup, rank: int) -> float:
        """Seconds by which the other's clock is ahead, precise to a round trip: both read it after a barrier."""
        import torch

        times = torch.zeros(2, dtype=torch.float64, device=self._device)
        group.allreduce([times]).wait()
        times[rank] = SYSTEM.wall()
        group.allreduce([times]).wait()
        return float(times[1 - rank] - times[rank])

    def _group(self, name: str, ranks: Sequence[int]) -> ProcessGroup:
        import torch

        from elastic_trainer import torch_internals
        from elastic_trainer.torch_internals import PrefixStore

        store = PrefixStore(name, self._store)
        rank, limit = ranks.index(self._part.rank), timedelta(seconds=min(GROUP_S, self._deadline.remaining_s()))
        if self._device == "cpu":
            return cast("ProcessGroup", gloo.group(store, rank, len(ranks), limit, self._at))
        made = torch_internals.nccl(store, rank, len(ranks), torch.device(self._device), limit)
        return cast("ProcessGroup", made)

    def _agreed_device(self, mine: int) -> str:
        """The device that the first member assigns to this node, after all have reported or the wait is over."""
        part = self._part
        self._store.set(f"has/{part.rank}", json.dumps([socket.gethostname(), mine]))
        waiting = Deadline.after(min(part.wait_s, self._deadline.remaining_s()))
        if part.rank == 0:
            counts = [self._value(f"has/{rank}", waiting.remaining_s(), rank) for rank in range(len(part.names))]
            self._store.set("devices", json.dumps(devices([each and tuple(each) for each in counts])))
        else:
            self._store.wait(["devices"], timedelta(seconds=waiting.remaining_s() + GROUP_S))
        return str(json.loads(self._store.get("devices"))[part.rank])

    def _gathered(self) -> list[tuple[int, int, Mapping[str, Any]]]:
        """All results of the pairs: the first member reads them once, the others read its list."""
        waiting = Deadline.after(min(2 * GROUP_S, self._deadline.remaining_s()))
        if self._part.rank == 0:
            pairs = [pair for turn in turns(len(self._part.names)) for pair in turn]
            late = {"error": "it was not measured in time"}
            results = [[*pair, self._value(_key(pair), waiting.remaining_s()) or late] for pair in pairs]
            self._store.set("measured", json.dumps(results))
        else:
            self._store.wait(["measured"], timedelta(seconds=waiting.remaining_s() + GROUP_S))
        return [(low, high, measured) for low, high, measured in json.loads(self._store.get("measured"))]


def _key(pair: Pair) -> str:
    return f"measured/{pair[0]}-{pair[1]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
