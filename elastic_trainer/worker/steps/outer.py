"""Outer steps: the steps that ranks make apart between two synchronisations, as one unit that all agree on or none.

What the ranks share is the state at a synchronisation: parameters, schedule, position in the data, and the outer
optimizer. Only there are checkpoints saved, calls of all ranks made and rounds changed by plan. A round that ends
between two of them undoes the steps since the last one, from a copy in memory, and their samples come again; so the
ledger gets its lines about them at the synchronisation.

Each rank keeps the state of its own (inner) optimizer; that of the rank that saves or heals is what others begin with.

*Runs in* the worker's main thread. *Owns* the copy.
*Fails by* ConfigError for ranks that have made different numbers of steps, RoundBrokenError when a peer is lost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.control import Purpose
from elastic_trainer.worker.model.local import LocalReplica
from elastic_trainer.worker.steps.engine import RoundEnd, Step, Workplace


class OuterSteps:
    """See the module. ``collect()`` gives the state of this rank, ``take_over(state)`` makes it the present one.

    A synchronisation follows each multiple of ``every`` steps, and the last step of an epoch and of the run, so that
    none reaches over it.
    """

    def __init__(
        self,
        place: Workplace,
        replica: LocalReplica,
        every: int,
        round_end: RoundEnd,
        collect: Callable[[], dict[str, Any]],
        take_over: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._place, self._replica, self._every, self._round_end = place, replica, every, round_end
        self._collect, self._take_over = collect, take_over
        self._kept: dict[str, Any] | None = None
        """The state at the last synchronisation; None until a step is begun from there."""
        self._lines: list[dict[str, Any]] = []
        """What the ledger will say of the steps since then."""
        self._made = 0
        """Steps made since then."""
        self._undone = 0
        """Those that a fault undid, until the next step begins."""
        self._attempted: tuple[int, int] | None = None
        """The step and the generation of the last synchronisation that was begun, and who this rank was then."""
        self._identity: dict[str, int] = {}

    @property
    def open(self) -> bool:
        """Whether a step was begun since the last synchronisation."""
        return self._kept is not None

    def begin(self) -> None:
        """A step begins, behind the script's code after the one before: keep the state if it is the first one."""
        if self._kept is not None:
            return
        self._lines, self._attempted, self._made, self._undone = [], None, 0, 0
        if self._replica.lasting:
            self._kept = copy.deepcopy(self._collect())
        else:  # the end of the round ends the process
            self._kept = {"model": self._replica.anchor()}

    def made(self, step: Step) -> bool:
        """After ``step``: synchronise if it is time; whether all ranks hold one state now."""
        if self._place.ledger.enabled:
            self._lines.append(self._place.entry(step))
        step.recorded = True
        self._made += 1
        if step.number % self._every and not self._place.feed.at_end:
            return False
        self.synchronise()
        return True

    def synchronise(self) -> None:
        """All ranks come to one state, unless they hold it."""
        if self._kept is None or not self._made:
            return
        control, position = self._place.present.control, self._place.position
        self._attempted = position.step, position.generation
        self._identity = {"rank": control.rank, "world": control.world_size, "round": position.generation}
        if control.sum(Purpose.AVERAGE, [position.step])[0] != position.step * control.world_size:
            raise ConfigError(
                f"at step {position.step} ranks average, but other ranks have made a different number of steps",
                hint="say the same sync_every on all ranks, and let all make the same steps",
            )
        self._replica.synchronise(self._kept["model"], self._round_end.check_gradients)
        self._kept = None
        self._record()

    def undo(self) -> None:
        """The round has ended: go back to the last synchronisation."""
        if self._kept is not None:
            kept, self._kept, self._undone = self._kept, None, self._made
            self._take_over(kept)

    def finish(self) -> None:
        """The script has left its loop: all ranks come to one state. ConfigError if a fault has undone the last steps:
        the script would not make them again.
        """
        if self._undone:
            raise ConfigError(
                f"a rank was lost after the script had left its loop, and {self._undone} steps since the last"
                " synchronisation were undone",
                hint="start the job again; a loop that ends where session.step_number is a multiple of sync_every"
                f" ({self._every}), or with an epoch, loses none",
            )
        self.synchronise()

    def healed(self) -> None:
        """This rank has received the state of a peer. If that comes from the synchronisation that failed here, the
        steps of this rank are in it."""
        position = self._place.position
        if self._attempted == (position.step, position.lineage):
            self._undone = 0
            self._record()

    def require_closed(self) -> None:
        """ConfigError between two synchronisations."""
        if self._kept is not None and self._made:
            raise ConfigError(
                f"a call of all ranks after step {self._place.position.step}, where each holds parameters of its own",
                hint="make it at the end of an epoch, or where session.step_number is a multiple of sync_every"
                f" ({self._every})",
            )

    def _record(self) -> None:
        lines, self._lines = self._lines, []
        for line in lines:
            self._place.ledger.write("step", **self._identity, **line)
