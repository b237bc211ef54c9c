"""Whether all ranks cut the data alike: the same length, batches, seed and order, else samples are missed or repeated.

They compare at the first step of each round, and of each epoch for which no rank has promised the same plan
(``batches(epochs=5)`` promises five, and a script may make another plan after them): by one sum, before anything is
computed, as ranks that differ in micro-batches would wait for each other in SyncBatchNorm. And they compare behind
steps by a number that travels with what they agree on anyway. So nothing depends on how often a rank calls
``batches()``, and all other steps cost nothing.

*Runs in* the worker's main thread of all ranks at once.
*Fails by* ConfigError that names the field, both values and both ranks: on the ranks that differ from those that have
trained already, which go on without them; where nobody has trained yet, on all. RoundBrokenError when a peer is gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_trainer.errors import ConfigError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control, Purpose
from elastic_trainer.worker.comm.whereabouts import UNNAMED

Fields = Mapping[str, Any]
Plan = tuple[Fields, int]
"""The fields, and the epoch before which they stay as they are; 0: nothing is promised beyond the present epoch."""
_ADVICE = "start all nodes with the same script, arguments and data"
_MARK_BYTES = 5
"""A float64 sums marks of 40 bits exactly over 8,192 ranks."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How one rank cuts the data (``fields`` of its plan, empty if it has none), and whether it has trained so."""

    rank: int
    node: str
    fields: Fields
    trained: bool

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" (node {self.node})" if self.node != UNNAMED else "")


def refusals(cuts: Sequence[Cut]) -> dict[int, str]:
    """What is wrong with each rank that cannot go on. Pure; ``cuts`` are in rank order.

    Ranks that have trained are right. Where there are none, nobody knows who is right, and all are refused.
    """
    right = next((cut for cut in cuts if cut.trained), cuts[0])
    found = {cut.rank: sentence for cut in cuts if (sentence := _difference(cut, right))}
    if found and not right.trained:
        first = next(iter(found.values()))
        return {cut.rank: found.get(cut.rank, first) for cut in cuts}
    return found


def _difference(cut: Cut, right: Cut) -> str:
    for name in sorted({*cut.fields, *right.fields}):
        mine, other = (each.fields.get(name, "not set") for each in (cut, right))
        if mine != other:
            return f"ranks cut the data differently: '{name}' is {mine} on {cut} and {other} on {right}"
    return ""


def mark(fields: Fields) -> int:
    """A hash of ``fields``: other fields almost certainly give another number."""
    text = json.dumps(dict(fields), sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=_MARK_BYTES).digest())


class Accord:
    """See the module. ``plan()`` is the one that the batch at hand was drawn by."""

    def __init__(self, node: str, plan: Callable[[], Plan]) -> None:
        self._node, self._plan = node, plan
        self._control = Control()
        self._given: Fields = {}
        self._compared_until = 0
        """The epoch before which no rank of this round will make another plan, by what they said when they compared."""
        self._trained = False

    def bind(self, control: Control, given: Fields) -> None:
        """A round begins. ``given``: the plan of the rank whose state was just taken over, if it had one."""
        self._control, self._given, self._compared_until = control, given, 0

    def check(self, fields: Fields) -> None:
        """Before the first batch: ConfigError unless the plan is that of the ranks that this one has joined."""
        for name, value in fields.items():
            if not self._trained and self._given.get(name, value) != value:
                here = Cut(self._control.rank, self._node, fields, trained=False)
                raise ConfigError(
                    f"ranks cut the data differently: '{name}' is {value} on {here} and {self._given[name]} on the"
                    " ranks that train already",
                    hint=_ADVICE,
                )

    def at_step(self, epoch: int) -> None:
        """A step begins: compare if it is the first of the round, or of an epoch that may have another plan."""
        if epoch >= self._compared_until:
            self._compared_until = max(self.compare(), epoch + 1)
            self._trained = True

    def mark(self) -> int:
        """What all ranks must have in common, as one number."""
        return mark(self._plan()[0])

    def compare(self) -> int:
        """Look at the plans of all ranks; all call it alike. The epoch before which none of them changes."""
        fields, until = self._plan()
        if self._control.alone:
            return until
        mine = mark({**fields, "until": until})
        if self._control.sum(Purpose.PLAN, [mine])[0] == mine * self._control.world_size:
            return until
        text = json.dumps({"node": self._node, "fields": dict(fields), "trained": self._trained, "until": until})
        rows = [json.loads(each) for each in self._control.gather_bytes(text.encode())]
        common = min(int(row.pop("until")) for row in rows)
        refused = refusals([Cut(rank, **row) for rank, row in enumerate(rows)])
        if self._control.rank in refused:
            raise ConfigError(refused[self._control.rank], hint=_ADVICE)
        for sentence in refused.values():
            logger().warning("rank.refused", reason=sentence)
        return common
