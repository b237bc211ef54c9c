"""Lives that failed at startup: before this node's workers could have met those of other nodes.

A script that cannot start (a failing import, a wrong argument) fails in the same way on every node, every time. A
failure of one node alone is something else, so all members of the round have to report the same failure twice (see
``membership.rules``); and once the ranks have met, any of them may have caused the failure of another.

*Runs in* torchrun's main thread, and for a minute of each life in a thread named ``startup``. *Owns* that thread.
*Fails by* nothing: if the kernel does not show listening sockets, a life counts as one whose workers have met others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic_trainer.agent.workers.listening import listened_at
from elastic_trainer.agent.workers.periodic import IDLE_S, PeriodicThread
from elastic_trainer.clock import SYSTEM, Clock

AT_START_S: Final = 60.0
"""A life that lasts longer has completed its startup."""
_LOOK_EVERY_S: Final = 0.05
_LONGEST: Final = 200


@dataclass(frozen=True, slots=True)
class FalseStart:
    """How the last life failed, and how many consecutive lives failed in that way."""

    what: str
    count: int

    @property
    def fields(self) -> dict[str, Any]:
        """Those of the node's record."""
        return {"false_start": self.what, "false_starts": self.count}


class StartupWatch:
    """See the module."""

    def __init__(self, clock: Clock = SYSTEM, listened: Callable[[int], bool] = listened_at) -> None:
        self._clock, self._listened = clock, listened
        self._began = clock.monotonic()
        self._got_past = False
        """Whether a life of this node did; then the script can start, whatever prevents that now."""
        self._last: FalseStart | None = None
        self._thread: PeriodicThread | None = None

    def begin(self, port: int | None) -> None:
        """The workers start; ``port``: where all ranks meet, if that is on this node."""
        self.close()
        self._began = self._clock.monotonic()
        if port is not None and not self._got_past:
            self._thread = PeriodicThread("startup", partial(self.look, port), self._clock)
            self._thread.start()

    def end(self, failures: Mapping[int, ProcessFailure], *, stepped: bool) -> FalseStart | None:
        """The workers have ended, ``failures`` of them by themselves; ``stepped``: some have made a step."""
        self.close()
        self._got_past |= stepped or self.lasted_s >= AT_START_S
        what = described(failures)
        if self._got_past or not what:
            return None
        before = self._last.count if self._last is not None and self._last.what == what else 0
        self._last = FalseStart(what, before + 1)
        return self._last

    @property
    def lasted_s(self) -> float:
        return self._clock.monotonic() - self._began

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def look(self, port: int) -> float:
        """Note whether a socket listens at ``port`` now; returns the seconds until the next look."""
        if self._got_past or self.lasted_s >= AT_START_S:
            return IDLE_S
        try:
            self._got_past = self._listened(port)
        except OSError:
            self._got_past = True
        return _LOOK_EVERY_S


def described(failures: Mapping[int, ProcessFailure]) -> str:
    """How the workers failed, in words that are equal for equal failures; "" if they did not fail by themselves."""
    if not failures or any(each.exitcode <= 0 for each in failures.values()):
        return ""
    first = failures[min(failures)]
    said: Any = first.error_file_data.get("message")  # of scripts whose main() has torch's @record
    said = said.get("message") if isinstance(said, dict) else None
    text = f"exit code {first.exitcode}" + (f": {said}" if isinstance(said, str) else "")
    return text.partition("\n")[0][:_LONGEST]
