"""Value types that several packages share."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from elastic_trainer.errors import ConfigError

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_NAME = re.compile(NAME_PATTERN)


def as_text(raw: str) -> str:
    """``raw``, which the file system may have given, as Unicode: bytes of a name that are not UTF-8 as ``\\xe9``."""
    try:
        return raw.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return raw.encode("utf-8", "backslashreplace").decode()


def checked_name(value: str, what: str) -> str:
    """``value`` if it may be used as ``what`` in keys, file names and metric labels.

    Raises ConfigError otherwise: allowed are 1 to 128 letters, digits, ``.``, ``_`` and ``-``, not beginning
    with a punctuation character.
    """
    if not is_name(value):
        raise ConfigError(
            f"{what} {value!r} is not valid",
            hint="use 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit",
        )
    return value


def is_name(value: str) -> bool:
    """Whether :func:`checked_name` lets ``value`` pass."""
    return _NAME.fullmatch(value) is not None


def signal_name(number: int) -> str:
    """``SIGKILL``; real-time signals have no names: ``signal 40``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class RecoveryMode(StrEnum):
    """How a node takes part: its workers are restarted each round, or absorb the change in place."""

    RESTART = "restart"
    IN_PLACE = "in_place"


class PreflightMode(StrEnum):
    """What comes of a node that its checks find unfit."""

    OFF = "off"
    """It is not checked."""
    WARN = "warn"
    """It joins, with a warning in log and events."""
    REFUSE = "refuse"
    """It ends, and never joins."""


class RunOrder(StrEnum):
    """What an operator asks all ranks of a run to do between two steps."""

    PAUSE = "pause"
    RESTART = "restart"
    """End the workers with a checkpoint, so that torchrun starts them anew with the script as it is now."""


class Phase(StrEnum):
    """What a rank's time goes into: every second of it belongs to one of these."""

    STARTING = "starting"
    """From the start of the process (or the end of the one before) until its model is ready."""
    WAITING = "waiting"
    """Until there are enough nodes, or while an operator has paused the run."""
    RENDEZVOUS = "rendezvous"
    """Agreeing on a round and forming its process groups."""
    HEALING = "healing"
    """Getting the state from a peer or a checkpoint."""
    TRAINING = "training"
    """Steps that had not been made before: goodput is the share of this."""
    REPEATED = "repeated"
    """Steps that had been made before, and were lost."""
    DATA = "data"
    """Waiting for samples."""
    CHECKPOINT = "checkpoint"
    """Standing still for a save."""
    EVALUATION = "evaluation"
    """Measuring the model on data that it is not trained on."""
    ENDING = "ending"
    """Nothing more to train: saving what is left, waiting for the others."""


class Cause(StrEnum):
    """What ends a round."""

    WORKER_LOST = "worker_lost"
    WORKER_HUNG = "worker_hung"
    """Killed by its agent, since it answered nothing or made no progress."""
    NODE_LOST = "node_lost"
    CONTACT_LOST = "contact_lost"
    """A collective failed, and nobody was found dead."""
    STEP_GIVEN_UP = "step_given_up"
    """A rank had too little memory for a step, or an audit found a wrong result in it."""
    STALLED = "stalled"
    """No rank made progress, and none was found to be the culprit."""
    NODE_JOINED = "node_joined"
    NODE_LEFT = "node_left"
    """By a planned change, as with ``node_joined``: no step is lost."""
    FINISHED = "finished"


class Culprit(StrEnum):
    """What has failed."""

    MACHINE = "machine"
    """The hardware of a node, or what is installed there."""
    NETWORK = "network"
    STORAGE = "storage"
    SCRIPT = "script"
    DATA = "data"
    MEMORY = "memory"
    """The job needs more than there is."""
    COMPILER = "compiler"
    SCHEDULER = "scheduler"
    """Nothing: a job controller, a cloud or an operator has decided so."""
    OUTSIDE = "outside"
    """A process was killed or stopped by somebody, and nothing says by whom."""
    UNKNOWN = "unknown"


class Certainty(StrEnum):
    """How sure a verdict is."""

    CERTAIN = "certain"
    """The evidence leaves no other explanation."""
    LIKELY = "likely"
    POSSIBLE = "possible"
    """The first suspicion: the next incident will show more."""


class Advice(StrEnum):
    """What to do."""

    GO_ON = "go_on"
    RESTART = "restart"
    """Start the workers, or the nodes, again."""
    LEAVE_OUT = "leave_out"
    """Train without the node."""
    STOP = "stop"
    """Trying again cannot help."""


class Place(StrEnum):
    """What a process was doing, by the code that it was in."""

    SCRIPT = "script"
    DATA = "data"
    STORAGE = "storage"
    """Saving or loading a checkpoint."""
    COMPILER = "compiler"
    COLLECTIVE = "collective"


_PLACES = {
    Place.COMPILER: (
        *("_dynamo/convert_frame", "_dynamo/symbolic_convert", "_inductor/compile_fx", "_inductor/codecache"),
        *("_inductor/cpp_builder", "_inductor/async_compile", "_inductor/graph", "triton/compiler", "triton/backends"),
    ),
    Place.STORAGE: ("elastic_trainer/checkpoint/", "torch/serialization", "distributed/checkpoint/"),
    Place.DATA: ("torch/utils/data/", "elastic_trainer/data/", "worker/steps/feed"),
    Place.COLLECTIVE: ("distributed_c10d", "elastic_trainer/worker/comm/", "_functional_collectives"),
}


def place_of(files: Iterable[str]) -> Place:
    """What a process does, by the files of its stack, innermost first."""
    for file in files:
        for place, parts in _PLACES.items():
            if any(part in file for part in parts):
                return place
    return Place.SCRIPT


_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_NOT_OF_SCRIPTS = re.compile(
    r"/lib(?:64)?/python|site-packages|<frozen|<string>|"
    r"/torchinductor_|/elastic_trainer-\d+/compiled/"  # what Inductor generates
)


def is_script(file: str) -> bool:
    """Whether a file of a stack is the user's own."""
    return not file.startswith(_PACKAGE) and not _NOT_OF_SCRIPTS.search(file)


def line_of_script(frames: Iterable[tuple[str, int | str, str | None]]) -> str:
    """The innermost frame of the script, ``train.py:31 in batches``; "" without one.

    ``frames``: file, line and function of each, innermost first; a syntax error has no function.
    """
    for file, line, function in frames:
        if is_script(file):
            return f"{Path(file).name}:{line}" + (f" in {function}" if function else "")
    return ""


@dataclass(frozen=True, slots=True, order=True)
class Incarnation:
    """One life of one node's workers: the node key's create-revision and a count of worker starts."""

    create_revision: int
    life: int


@dataclass(frozen=True, slots=True, order=True)
class StateIdentity:
    """What a training state *is* (DESIGN section 4): the round that committed it, the step, a digest.

    ``digest`` is a hexadecimal checksum of the state, or empty where none was taken. Ordered by round, then step.
    """

    round: int
    step: int
    digest: str = ""


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """How far the job has come in the data: ``samples`` of ``epoch`` have been committed, job-wide."""

    epoch: int = 0
    samples: int = 0
