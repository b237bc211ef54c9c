"""Tells a collective that failed because of its peers from everything else. Pure.

gloo raises plain RuntimeError, so its text is looked at; that alone is no proof, which is why the agent's word that the
round is broken is waited for before anything is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch.distributed as dist

from elastic_trainer.errors import RejoinError, TransientError

_MARKS = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "socket timeout",
    "timed out waiting",
    "wait timeout",
    "application timeout",
)


def chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was raised from or during."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def summary(error: BaseException) -> str:
    """``error`` in a few words for people: without the file names and the advice that gloo wraps around its own."""
    text = str(error).partition("\n")[0]
    text = re.sub(r"\[/[^\]]*\]\s*", "", text)
    return text.partition(". This is")[0][:160]


def is_collective_failure(error: BaseException) -> bool:
    """Whether ``error``, or what lies behind it, looks like a collective that lost a peer."""
    return any(_looks_lost(each) for each in chain(error))


def _looks_lost(error: BaseException) -> bool:
    if isinstance(error, (RejoinError, TransientError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error).lower() for mark in _MARKS)
