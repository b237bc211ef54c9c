"""Runs a check in a process of its own, which can be killed: devices and file systems that are ill never answer.

*Runs in* the thread that asks. *Owns* the process, and a file with what it writes to standard error.
*Fails by* ChildError, in which it says what the process was doing; :func:`findings_of` makes a finding of it.
*Invariant*: nothing waits longer than the deadline, not even for a process that cannot be killed (it is in the kernel).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import PermanentError
from elastic_trainer.preflight.finding import Finding, Status

BURIAL_S = 2.0
"""How long a killed process may take to be gone."""
_LONGEST_COMPLAINT = 200

Doing = Callable[[str], None]


class ChildError(PermanentError):
    """The process ended badly, or not in time."""


class Child:
    """``python -m module arguments``; a context manager that leaves no process."""

    def __init__(self, module: str, arguments: Sequence[str] = ()) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._begun = b""
        self._doing = "starting"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def messages(self, deadline: Deadline) -> Iterator[Mapping[str, Any]]:
        """What it tells until it ends; may be asked for again to go on reading."""
        limit_s = deadline.remaining_s()
        while (line := self._line(deadline, limit_s)) is not None:
            message = _understood(line)
            self._doing = str(message.get("doing", self._doing))
            if message:
                yield message
        self._bury(deadline, limit_s)

    def tell(self, message: Mapping[str, Any]) -> None:
        """One line to its standard input."""
        pipe = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended, and reading will say how
            if pipe is not None:
                pipe.write(json.dumps(message).encode() + b"\n")
                pipe.flush()

    def end(self) -> None:
        """Kill it and all that it started, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(BURIAL_S)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _line(self, deadline: Deadline, limit_s: float) -> bytes | None:
        """The next line; None at the end of its output."""
        if self._process.stdout is None:
            raise RuntimeError("it was started without a pipe")
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._begun:
            ready, _, _ = select.select([descriptor], [], [], deadline.remaining_s())
            if not ready:
                raise ChildError(f"no answer in {limit_s:.3g} s while {self._doing}", hint=_HUNG)
            part = os.read(descriptor, 1 << 16)
            if not part:
                return None
            self._begun += part
        line, _, self._begun = self._begun.partition(b"\n")
        return line

    def _bury(self, deadline: Deadline, limit_s: float) -> None:
        try:
            code = self._process.wait(deadline.remaining_s())
        except subprocess.TimeoutExpired:
            raise ChildError(f"no end in {limit_s:.3g} s after {self._doing}", hint=_HUNG) from None
        if code:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise ChildError(f"ended by itself ({how}) while {self._doing}{self._complaint()}", hint=_CRASHED)

    def _complaint(self) -> str:
        """The last line that it wrote to standard error."""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return f": {lines[-1][:_LONGEST_COMPLAINT]}" if lines else ""


_HUNG = "a device or a file system hangs, or the limit is too short for this machine"
_CRASHED = "run the same by hand to see all that it says"


def _understood(line: bytes) -> Mapping[str, Any]:
    """The message in ``line``; empty for a line that is none."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def findings_of(
    name: str, module: str, arguments: Sequence[str], deadline: Deadline, doing: Doing, versions: dict[str, str]
) -> list[Finding]:
    """All that the check ``module`` finds; what it was doing when it failed is a bad finding called ``name``."""
    found: list[Finding] = []
    with Child(module, arguments) as child:
        try:
            for message in child.messages(deadline):
                if "doing" in message:
                    doing(str(message["doing"]))
                elif "finding" in message:
                    found.append(Finding.from_json(message["finding"]))
                elif "version" in message:
                    what, text = message["version"]
                    versions[what] = text
        except ChildError as error:
            found.append(Finding(name, Status.BAD, error.message, hint=error.hint or ""))
    return found
