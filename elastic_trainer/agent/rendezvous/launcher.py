"""What torchrun starts on this node, for whom and why: read from the frames of torchrun's agent, which passes none on.

The handler needs the number of workers before it can assign ranks. torchrun's own backends get it from a second
exchange after the rendezvous, in which any node can block on a dying one.

*Runs in* torchrun's main thread, inside ``next_rendezvous``.
*Fails by* ConfigError when no torchrun agent is calling.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import ElasticAgent, RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic_trainer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LocalWorkers:
    """The number of workers of this node, and torchrun's ``--role`` and ``--max-restarts``."""

    count: int
    role: str
    max_restarts: int


def local_workers() -> LocalWorkers:
    """Read them from the calling torchrun agent (the nearest one up the stack)."""
    spec = _worker_spec()
    if spec is None:
        raise ConfigError(
            "this rendezvous backend was not called by torchrun's agent", hint="start the job with torchrun"
        )
    return LocalWorkers(spec.local_world_size, spec.role, spec.max_restarts)


def job() -> dict[str, str]:
    """The fields by which a run's spec knows its job: those of the calling torchrun agent, in this process's name."""
    spec = _worker_spec()
    return {} if spec is None else {"user": _user(), **job_of(spec.entrypoint, spec.args)}


def _worker_spec() -> WorkerSpec | None:
    """What the nearest torchrun agent up the stack starts."""
    agents = (names.get("self") for names in _callers())
    found = next((each for each in agents if isinstance(each, ElasticAgent)), None)
    return None if found is None else found.get_worker_group().spec


def job_of(entrypoint: Callable[..., Any] | str | None, arguments: Sequence[Any]) -> dict[str, str]:
    """Script, arguments and checkpoint directory as the user named them; nodes may have different Pythons.

    What names the node itself (``--node-rank 1``) is no part of them.
    """
    words = [str(word) for word in arguments]
    if words[:2] == ["-u", "-m"]:
        script, words = f"-m {words[2]}", words[3:]
    elif words[:1] == ["-u"]:
        script, words = words[1], words[2:]
    else:
        script = entrypoint if isinstance(entrypoint, str) else getattr(entrypoint, "__qualname__", "")
    options = [word for word in _split(words) if not _OF_NODE.match(word)]
    found = [match for word in options if (match := _DIRECTORY.match(word))]
    rest = "\0".join(word for word in options if not _DIRECTORY.match(word))
    digest = hashlib.sha256(rest.encode(errors="surrogateescape")).hexdigest()[:16]
    return {"script": script, "command": digest, "checkpoint_dir": found[-1].group(1) if found else ""}


_OF_NODE = re.compile(r"--?(node|machine|host)[-_]?(rank|id|name)?=", re.IGNORECASE)
_DIRECTORY = re.compile(r"(?:--?checkpoint[-_]dir(?:ectory)?|checkpoint\.directory)=(.+)", re.IGNORECASE | re.DOTALL)


def _split(words: Sequence[str]) -> Iterator[str]:
    """``--name value`` as ``--name=value``; other words as they are."""
    left = list(words)
    while left:
        word = left.pop(0)
        if word.startswith("--") and "=" not in word and left and not left[0].startswith("-"):
            word += f"={left.pop(0)}"
        yield word


def _user() -> str:
    """The name of the user that this process runs as, or its number: containers may know no names."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def failures() -> dict[int, ProcessFailure]:
    """The failed workers, by rank, if torchrun calls because of their failure."""
    for names in _callers():
        result = names.get("run_result")
        if isinstance(result, RunResult):
            return dict(result.failures)
    return {}


def _callers() -> Iterator[dict[str, Any]]:
    """The local variables of all callers, nearest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back
