"""Value types that several packages share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from elastic_trainer.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def checked_name(value: str, what: str) -> str:
    """``value`` if it may be used as ``what`` in keys, file names and metric labels.

    Raises ConfigError otherwise: allowed are 1 to 128 letters, digits, ``.``, ``_`` and ``-``, not beginning
    with a punctuation character.
    """
    if not _NAME.fullmatch(value):
        raise ConfigError(
            f"{what} {value!r} is not valid",
            hint="use 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit",
        )
    return value


class RecoveryMode(StrEnum):
    """How a node takes part: its workers are restarted each round, or absorb the change in place."""

    RESTART = "restart"
    IN_PLACE = "in_place"


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
