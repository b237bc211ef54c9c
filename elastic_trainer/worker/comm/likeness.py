"""Whether a number is the same on all ranks, found beside the training by one sum.

Values are equal exactly if they have no variance: a rank whose own value m and its square come W times in the sums over
W ranks knows that all have m.

*Runs in* the worker's main thread. *Fails by* RoundBrokenError when a peer is gone.
"""

from __future__ import annotations

from elastic_trainer.worker.comm.control import Control, Purpose

_BITS, _PARTS = 20, 3
"""The sum of the squares of 8192 ranks is exact then: a double has 53 bits."""
_MASK = (1 << _BITS) - 1


class Likeness:
    """The question about the low 60 bits of ``number``; all ranks ask it at the same point."""

    def __init__(self, control: Control, purpose: Purpose, number: int) -> None:
        parts = [float((number >> _BITS * place) & _MASK) for place in range(_PARTS)]
        mine = [*parts, *(part * part for part in parts)]
        self._wanted = [control.world_size * each for each in mine]
        self._pending = control.start(purpose, mine)

    def wait(self) -> bool:
        return self._pending.wait() == self._wanted
