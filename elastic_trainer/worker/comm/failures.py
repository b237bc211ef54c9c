"""Distinguishes a collective that failed because of its peers from all other errors.

gloo raises plain RuntimeErrors, and scripts may raise them with any text ("S3 GET: socket timeout"). So a session marks
its own collectives (:func:`collective`). Errors from elsewhere in a step (DistributedDataParallel, the script's own
collectives) count if they have a type of torch.distributed or name a line of gloo's source. Even then nothing is
repeated until the agent has confirmed that the round is over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb

import torch.distributed as dist

from elastic_trainer.errors import RejoinError, RoundBrokenError, TransientError

_REMOTE = re.compile(r"remote=\[([^\]\s]+)\]")
_PORT = re.compile(r"(remote=\[[^\]\s]+\]):\d+(?:\$\d+)?")
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
    """``error`` in a few words, without gloo's file names, advice, and the number of a pair that is gone."""
    text = str(error).partition("\n")[0]
    text = _PORT.sub(r"\1", re.sub(r"\[/[^\]]*\]\s*", "", text))
    return text.partition(". This is")[0][:160]


def tried(error: BaseException) -> str:
    """The address that gloo could not connect to, as far as its message says; a hint, since that is no interface."""
    found = (_REMOTE.search(str(each)) for each in chain(error))
    return next((match[1] for match in found if match is not None), "")


def trail(error: BaseException) -> list[str]:
    """``error`` and its causes, each with the calls that it came through, outermost first: for the log."""
    return [f"{type(each).__name__}: {summary(each)} ({_calls(each)})" for each in chain(error)]


def _calls(error: BaseException) -> str:
    return " > ".join(
        f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in extract_tb(error.__traceback__)
    )


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Turns any error of the body, which only peers can cause, into a RoundBrokenError."""
    try:
        yield
    except RuntimeError as error:
        raise RoundBrokenError(f"a peer was lost ({what}: {summary(error)})") from error


def is_collective_failure(error: BaseException) -> bool:
    """Whether ``error`` or one of its causes is a collective that lost a peer."""
    return any(_is_of_a_collective(each) for each in chain(error))


def _is_of_a_collective(error: BaseException) -> bool:
    if isinstance(error, (RejoinError, TransientError, dist.DistError)):
        return True
    return isinstance(error, RuntimeError) and _IN_GLOO.search(str(error)) is not None
