"""Compares the parameters of all ranks every few steps, so that differences are found, whatever causes them.

Each parameter's number is taken after a step; a sum over all of them starts after the next step and is read after the
one following. So nobody waits, and all ranks learn of a difference at the same point. Only then are the numbers
gathered, to name the parameter and the ranks.

Before a step that is audited they are compared at once, so that no wrong state is trained on there.

Buffers are left out, since each rank moves its own, and so is what DistributedDataParallel ignores. The end of a round
discards its comparison: the next round makes states equal anyway.

*Runs in* the worker's main thread.
*Fails by* DifferError on all ranks, RoundBrokenError when a peer is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import xxhash

from elastic_trainer.errors import DifferError
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.worker.comm.control import Control, EqualityCheck, Purpose
from elastic_trainer.worker.model import digests
from elastic_trainer.worker.model.trainable import Trainable
from elastic_trainer.worker.report.heartbeat import HeartbeatReporter

EVERY_STEPS = 100


class OnDifference(StrEnum):
    """What happens to ranks that differ."""

    STOP = "stop"
    HEAL = "heal"
    """They adopt the state that most ranks hold."""


Row = Sequence[int]
"""A number for each parameter."""


@dataclass(frozen=True, slots=True)
class Difference:
    """``others`` hold another ``parameter`` than ``source`` (the first of ``count`` that differ)."""

    source: int
    others: tuple[int, ...]
    parameter: str
    count: int


def difference(names: Sequence[str], rows: Sequence[Row]) -> Difference | None:
    """How the ``rows`` of all ranks differ from the most common one (a tie: the lowest rank's). Pure."""
    whole = [tuple(row) for row in rows]
    most = Counter(whole)  # in rank order
    wanted = max(most, key=lambda row: most[row])
    others = tuple(rank for rank, row in enumerate(whole) if row != wanted)
    places = [
        place for place in range(len(names)) if any(len(row) <= place or row[place] != wanted[place] for row in whole)
    ]
    if not others:
        return None
    first = names[places[0]] if places else "(their number)"
    return Difference(whole.index(wanted), others, first, len(places))


class Comparison:
    """See the module. ``heal`` sends the source's state to the others; None: the training stops."""

    def __init__(
        self,
        control: Control,
        compared: Trainable,
        every_steps: int | None,
        tracker: HeartbeatReporter,
        heal: Callable[[Difference], None] | None,
        audit_every: int | None,
        node: str,
    ) -> None:
        self._node = node
        self._control, self._compared, self._tracker, self._heal = control, compared, tracker, heal
        self._every = 0 if every_steps is None or control.alone else every_steps
        self._audit_every = 0 if audit_every is None or control.alone else audit_every
        self._taken: _Taken | None = None
        self._asked: tuple[_Taken, EqualityCheck] | None = None

    def after_step(self, step: int) -> None:
        if self._audit_every and (step + 1) % self._audit_every == 0:
            self._at_once(step)
            return
        if not self._every:
            return
        if self._asked is not None:
            self._answer()
        if self._taken is not None:
            self._ask()
        if step % self._every == 0:
            self._take(step)

    def end(self, step: int) -> None:
        """After the last step: compare the present parameters and wait for the result."""
        if self._every or self._audit_every:
            self._at_once(step)

    def _at_once(self, step: int) -> None:
        if self._asked is not None:
            self._answer()
        self._take(step)
        self._ask()
        self._answer()

    def _take(self, step: int) -> None:
        named = self._compared.named()
        parameters = [each for _, each in named]
        names = [name for name, _ in named]
        self._taken = _Taken(step, names, digests.on_device(parameters), digests.begun(parameters))

    def _ask(self) -> None:
        taken, self._taken = self._taken, None
        if taken is not None:
            number = xxhash.xxh3_64_intdigest(taken.bytes())
            self._asked = taken, EqualityCheck(self._control, Purpose.COMPARE, number)

    def _answer(self) -> None:
        asked, self._asked = self._asked, None
        if asked is None or asked[1].wait():
            return
        taken = asked[0]
        rows = [np.frombuffer(row, np.uint64).tolist() for row in self._control.gather_bytes(taken.bytes())]
        if len({row[0] for row in rows}) > 1:
            logger().warning("ranks.not_compared", reason="some train on a CUDA device, and others do not")
            self._every, self._audit_every, self._taken = 0, 0, None
            return
        found = difference(taken.names, [row[1:] for row in rows])
        if found is not None:
            self._taken = None
            nodes = [each.decode() for each in self._control.gather_bytes(self._node.encode())]
            self._meet(taken.step, found, sorted({nodes[rank] for rank in found.others}))

    def _meet(self, step: int, found: Difference, nodes: Sequence[str]) -> None:
        if self._control.rank == 0:
            self._tracker.differed()
        logger().error(
            "ranks.differed",
            step=step,
            parameter=found.parameter,
            parameters=found.count,
            ranks=list(found.others),
            nodes=nodes,
            source=found.source,
        )
        if self._heal is None:
            raise DifferError(
                f"after step {step} {_ranks(found.others)} another {found.parameter!r} than rank {found.source}"
                f" (the first of {found.count} such parameters)",
                hint="look for what changes parameters outside of optimizer.step(), or on some ranks only;"
                " on_difference='heal' goes on with the state that most ranks hold",
            )
        self._heal(found)


@dataclass(frozen=True, slots=True)
class _Taken:
    step: int
    names: Sequence[str]
    on_device: bool
    numbers: digests.Numbers

    def bytes(self) -> bytes:
        return np.array([self.on_device, *self.numbers()], np.uint64).tobytes()


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} holds"
    return f"ranks {', '.join(map(str, ranks))} hold"
