"""Runs a check in a child process that can be killed: broken devices and file systems may never answer.

The child sends :class:`Messages`, one JSON object per line: activities and findings. Output of libraries goes to
standard error.

*Runs in* the caller's thread. *Owns* the process and a file with its standard error.
*Fails by* ChildError, which names the process's last activity; :func:`findings_of` turns it into a finding.
*Invariant*: nothing waits beyond the deadline, not even for a process that the kernel cannot kill; the child ends by
itself, even if a device never answers and its parent is dead.
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
from typing import Any, Self, TextIO

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import PermanentError
from elastic_trainer.model import signal_name
from elastic_trainer.preflight.judge import Finding

BURIAL_S = 2.0
"""Seconds that a killed process may take to end."""
_LONGEST_COMPLAINT = 200

Doing = Callable[[str], None]


class ChildError(PermanentError):
    """The process failed, or did not end in time."""


class Child:
    """``python -m module arguments``; a context manager that leaves no process behind."""

    def __init__(self, module: str, arguments: Sequence[str] = ()) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("it was started without pipes")
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._begun = b""
        self._doing = "starting"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def messages(self, deadline: Deadline) -> Iterator[Mapping[str, Any]]:
        """Yields its messages until it ends; a second call continues."""
        limit_s = deadline.remaining_s()
        while (line := self._line(deadline, limit_s)) is not None:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                self._doing = str(message.get("doing", self._doing))
                yield message
        try:
            code = self._process.wait(deadline.remaining_s())
        except subprocess.TimeoutExpired:
            raise ChildError(f"no exit in {limit_s:.3g} s after {self._doing}", hint=_HUNG) from None
        if code:
            how = f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"
            self._errors.seek(0)
            said = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
            complaint = f": {said[-1][:_LONGEST_COMPLAINT]}" if said else ""
            raise ChildError(f"exited ({how}) while {self._doing}{complaint}", hint=_CRASHED)

    def send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended; reading will report how
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()

    def end(self) -> None:
        """Kill it and its descendants, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(BURIAL_S)
        for stream in (self._stdin, self._stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _line(self, deadline: Deadline, limit_s: float) -> bytes | None:
        """The next line of output; None at its end."""
        descriptor = self._stdout.fileno()
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


_HUNG = "a device or a file system hangs, or the limit is too short for this machine"
_CRASHED = "run the same command by hand to see its whole output"


def findings_of(
    name: str, module: str, arguments: Sequence[str], deadline: Deadline, doing: Doing, versions: dict[str, str]
) -> list[Finding]:
    """The findings of the check ``module``; if it fails, a bad finding ``name`` states its last activity."""
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
            found.append(Finding.of_error(name, error))
    return found


# ---- in the child

_REPRIEVE_S = 10.0
"""Extra seconds, so that the parent acts first and can report what happened."""


class Messages:
    """See the module; created once, at the start of the process, which lives at most ``limit_s`` seconds."""

    def __init__(self, limit_s: float) -> None:
        # The default action kills the process anywhere; a Python handler would wait for C code to return.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s + _REPRIEVE_S)
        self._out: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def doing(self, what: str) -> None:
        """Report the next activity; if the process ends in it, this names the cause."""
        self.send(doing=what)

    def found(self, finding: Finding) -> None:
        self.send(finding=finding.as_json())

    def version(self, name: str, text: str) -> None:
        """Report a version that nodes should agree on."""
        self.send(version=[name, text])

    def send(self, **message: Any) -> None:
        print(json.dumps(message), file=self._out, flush=True)
