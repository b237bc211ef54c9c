"""Events of checkpoints, as values: each is logged once and passed to the listener."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elastic_trainer.telemetry.logs import logger


class Transition(StrEnum):
    """The transitions; the values are the names of the log lines."""

    COMMITTED = "checkpoint.committed"
    FAILED = "checkpoint.failed"
    LOADED = "checkpoint.loaded"
    QUARANTINED = "checkpoint.quarantined"
    SKIPPED = "checkpoint.skipped"
    OUTRANKED = "checkpoint.outranked"
    REMOVED = "checkpoint.removed"
    REMOVAL_FAILED = "checkpoint.removal_failed"
    SWEPT = "checkpoint.swept"


_WARNINGS = frozenset(
    {
        Transition.QUARANTINED,
        Transition.SKIPPED,
        Transition.OUTRANKED,
        Transition.REMOVAL_FAILED,
    }
)


@dataclass(frozen=True, slots=True)
class Event:
    """One transition of the directory entry ``name``; ``values`` are the other keys of the log line."""

    kind: Transition
    name: str
    reason: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


EventSink = Callable[[Event], None]


def announce(event: Event, listener: EventSink | None) -> None:
    """Log ``event`` and pass it to ``listener``."""
    log = logger()
    write = log.error if event.kind is Transition.FAILED else log.warning if event.kind in _WARNINGS else log.info
    details = {"reason": event.reason, **event.values} if event.reason else dict(event.values)
    write(str(event.kind), checkpoint=event.name, **details)
    if listener is not None:
        listener(event)
