"""What goes to a data worker process and comes back: requests, samples, and errors as they were raised.

*Runs in* a data worker process (:class:`Tasks`), and where its results are used.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from elastic_trainer.data.placing import leaves
from elastic_trainer.data.plan import SampleRequest
from elastic_trainer.data.reader import Cancelled, Drawn, SampleReader
from elastic_trainer.errors import DataError

_ENDING = -1
_SENDABLE = (torch.Tensor, np.ndarray, np.generic, str, bytes, int, float, complex, type(None))


@dataclass(frozen=True, slots=True)
class FetchTask:
    """A request of one numbered ``course``. Requests of earlier courses are obsolete."""

    course: int
    request: SampleRequest


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way to another process: pickled, or where that cannot be, in words."""

    pickled: bytes | None
    words: str
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """``error``, which is being handled."""
        words = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        trace = "".join(traceback.format_exception(error))
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # noqa: BLE001 - an exception may be of any class, which may pickle itself anyhow
            return cls(None, words, trace)
        return cls(pickled, words, trace)

    def exception(self) -> Exception:
        """The exception, of the kind that it was; a DataError where that cannot be."""
        error: Exception | None = None
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)
            except Exception:  # noqa: BLE001 - as above
                error = None
        if not isinstance(error, Exception):
            error = DataError(self.words)
        error.add_note(f"raised in a data worker process:\n{self.trace}")
        return error


class Tasks(Dataset[Any]):
    """The data set that torch's DataLoader gives to its processes: item ``task`` is what its request gives."""

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader
        self._course = torch.zeros(1, dtype=torch.int64)
        self._course.share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, course: int) -> None:
        """Requests of earlier courses are obsolete."""
        self._course[0] = course

    def end(self) -> None:
        """All requests are obsolete."""
        self._course[0] = _ENDING

    def __getitem__(self, task: FetchTask) -> Drawn | Failure | None:
        """What was drawn, a :class:`Failure`, or None for an obsolete request."""

        def wanted() -> bool:
            return int(self._course[0]) == task.course

        try:
            if not wanted():
                return None
            drawn = self._reader.read(task.request, wanted)
            check_sendable(drawn.data)
        except Cancelled:
            return None
        except Exception as error:  # noqa: BLE001 - the edge of a process: it is raised in the other one
            return Failure.of(error)
        return drawn


def check_sendable(data: Any) -> None:
    """DataError unless ``data`` can go to another process: its queue would drop it, and the other wait forever."""
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
            raise DataError("a data worker gives a tensor that is part of a graph", hint="detach() it")
        if not isinstance(leaf, _SENDABLE):
            try:
                pickle.dumps(leaf)
            except Exception as error:
                raise DataError(
                    f"a data worker gives a {type(leaf).__name__}, which cannot go to another process: {error}",
                    hint="give tensors, arrays, numbers or text, or use workers=0",
                ) from error


def unchanged(value: Any) -> Any:
    """The data are collated already."""
    return value
