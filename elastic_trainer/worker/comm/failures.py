"""Tells a collective that failed because of its peers from everything else.

gloo raises plain RuntimeError, as scripts do for whatever they like ("S3 GET: socket timeout"). So where the session
itself calls a collective it says so (:func:`collective`). What comes from elsewhere in a step (DistributedDataParallel,
a collective of the script's own) counts if it has a type of torch.distributed's, or names a place in gloo's source, as
each error of gloo's does. Even that is no proof: the agent's word that the round is broken is waited for before
anything is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb

import torch.distributed as dist

from elastic_trainer.errors import RejoinError, RoundBrokenError, TransientError

_IN_GLOO = re.compile(r"gloo/\S*\.(?:cc|h):\d+\]")


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


def trail(error: BaseException) -> list[str]:
    """``error`` and what lies behind it, each with the calls that it came through, outermost first: for the log."""
    return [f"{type(each).__name__}: {summary(each)} ({_calls(each)})" for each in chain(error)]


def _calls(error: BaseException) -> str:
    return " > ".join(
        f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in extract_tb(error.__traceback__)
    )


@contextmanager
def collective(what: str) -> Iterator[None]:
    """In the block only the peers can be the reason of an error. RoundBrokenError for it."""
    try:
        yield
    except RuntimeError as error:
        raise RoundBrokenError(f"a peer was lost ({what}: {summary(error)})") from error


def is_collective_failure(error: BaseException) -> bool:
    """Whether ``error``, or what lies behind it, is that of a collective that lost a peer."""
    return any(_is_of_a_collective(each) for each in chain(error))


def _is_of_a_collective(error: BaseException) -> bool:
    if isinstance(error, (RejoinError, TransientError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and _IN_GLOO.search(str(error)) is not None
