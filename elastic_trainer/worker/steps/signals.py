"""Turns SIGTERM, SIGINT and SIGHUP into a request to stop, and enforces it in time; SIGUSR1 into a request to save.

Python runs signal handlers in the main thread between bytecodes, so never while it is blocked in a collective. The
interpreter's C handler however writes the signal's number into the wakeup descriptor at once, where a thread reads it.

*Runs in* a thread of its own (``session-signals``); opened and closed in the main thread.
*Owns* the process's handlers for SIGTERM and SIGINT and its wakeup descriptor while open; those for SIGHUP and SIGUSR1
if nobody else wants them: ``nohup`` has SIGHUP ignored.
*Fails by* ``os._exit``: 143 (130 after SIGINT) when the ranks do not agree to stop in time, say because a peer is dead;
at once on a second SIGINT, and when the round is known to be broken; and when the machine is about to go.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import EXIT_LEFT
from elastic_trainer.ipc.page import signal_state
from elastic_trainer.telemetry.logs import final_message, logger

EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
HANGUP = signal.SIGHUP
SAVE = signal.SIGUSR1
_POLL_S = 0.1
SAVE_PATIENCES = 12
"""Limit for a checkpoint under way, as a multiple of the patience."""


class Signals:
    """The request to stop. ``requested`` is the signal, or None.

    ``patience_s()`` limits how long the ranks may take to agree; ``broken()`` says why they never will. While
    ``saving()`` says that a checkpoint is being written they cannot agree: the patience restarts afterwards, but ends
    ``SAVE_PATIENCES`` times the patience after the signal (a pod's grace period may end earlier). ``on_request(name)``
    is called once, from the thread, with the signal's name. ``leave_within_s`` seconds after a SIGTERM the process ends
    in any case, also amid its last checkpoint: SIGKILL would come next, and count as a failure.
    """

    def __init__(
        self,
        patience_s: Callable[[], float],
        broken: Callable[[], str | None],
        saving: Callable[[], bool] = lambda: False,
        on_request: Callable[[str], None] = lambda _: None,
        clock: Clock = SYSTEM,
        leave_within_s: float | None = None,
    ) -> None:
        self._patience_s, self._broken, self._saving, self._clock = patience_s, broken, saving, clock
        self._on_request, self._leave_within_s = on_request, leave_within_s
        self._machine_ends: Deadline | None = None
        self.requested: int | None = None
        self.save_requested = False
        """Whether this process was asked to save, and no save has followed."""
        self._deadline: Deadline | None = None
        self._save_deadline: Deadline | None = None
        self._rearming = threading.Lock()
        """Once the ranks have agreed to stop, no new deadline may be set."""
        self._thread: threading.Thread | None = None
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1
        self._reader: socket.socket | None = None
        self._writer: socket.socket | None = None

    @property
    def exit_code(self) -> int:
        """Exit code once all ranks have agreed to stop."""
        return EXIT_INTERRUPTED if self.requested == signal.SIGINT else EXIT_LEFT

    def open(self) -> None:
        """Install the handlers. Python allows that only in the main thread; elsewhere nothing is done."""
        if threading.current_thread() is not threading.main_thread():
            logger().warning("signals.left_alone", reason="the session is not opened in the main thread")
            return
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*_SIGNALS, *filter(_is_free, (HANGUP, SAVE))):
            self._previous[number] = signal.signal(number, _noted)
        self._thread = threading.Thread(target=self._watch, name="session-signals", daemon=True)
        self._thread.start()

    def note_stop(self) -> None:
        """All ranks stop at this boundary: what follows (a checkpoint) has limits of its own."""
        with self._rearming:
            self._deadline = None

    def close(self) -> None:
        if self._thread is None or self._writer is None or self._reader is None:
            return
        self.note_stop()
        signal.set_wakeup_fd(self._previous_fd)
        self._give_back()
        self._writer.send(b"\0")
        self._thread.join()
        self._writer.close()
        self._reader.close()
        self._thread = None

    def disown(self) -> None:
        """In a forked child: restore the previous handlers."""
        signal.set_wakeup_fd(-1)
        self._give_back()
        self._thread = None

    def _give_back(self) -> None:
        """Restore the previous handlers, but those that the script has replaced since."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) is _noted:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def descriptors(self) -> list[int]:
        return [end.fileno() for end in (self._reader, self._writer) if end is not None]

    def _watch(self) -> None:
        while True:
            for number in self._received():
                if number == 0:
                    return
                self._note(number)
            deadline = self._deadline
            if deadline is not None:
                self._enforce(deadline)
            if self._machine_ends is not None and self._machine_ends.expired:
                lost = "; the checkpoint that was being written does not count" if self._saving() else ""
                self._leave(f"the {self._leave_within_s:g} s that this machine has after a SIGTERM are over{lost}")

    def _received(self) -> bytes:
        timed = self._deadline is not None or self._machine_ends is not None
        timeout = _POLL_S if timed else None
        if self._reader is None or not select.select([self._reader], [], [], timeout)[0]:
            return b""
        return self._reader.recv(64)

    def _note(self, number: int) -> None:
        if number == SAVE and signal.getsignal(SAVE) is _noted:  # the script may have taken it since
            self.save_requested = True
            logger().info("save.requested", signal=SAVE.name)
        if number not in _SIGNALS and not (number == HANGUP and signal.getsignal(HANGUP) is _noted):
            return
        if number == signal.SIGINT and self.requested == signal.SIGINT:
            self._leave("interrupted twice")
        if number == signal.SIGTERM and self._leave_within_s is not None and self._machine_ends is None:
            self._machine_ends = Deadline.after(self._leave_within_s, self._clock)
        if self.requested is None:
            patience_s = self._patience_s()
            self._save_deadline = Deadline.after(SAVE_PATIENCES * patience_s, self._clock)
            self._deadline = Deadline.after(patience_s, self._clock)
            self.requested = number  # last: the ranks may agree as soon as it is seen
            logger().info("stop.requested", signal=signal.Signals(number).name, patience_s=patience_s)
            self._on_request(signal.Signals(number).name)
        elif number == signal.SIGINT:
            self.requested = number

    def _enforce(self, deadline: Deadline) -> None:
        broken = self._broken()
        if broken is not None:
            self._leave(f"the round is broken: {broken}")
        if self._save_deadline is not None and not self._save_deadline.expired and self._saving():
            patience_s = self._patience_s()
            with self._rearming:
                if self._deadline is deadline:  # else the ranks have agreed meanwhile
                    self._deadline = Deadline.after(patience_s, self._clock)
        elif deadline.expired:
            self._leave("the ranks did not agree to stop in time")

    def _leave(self, reason: str) -> None:
        logger().error("session.abandoned", reason=reason, exit_code=self.exit_code)
        final_message()
        os._exit(self.exit_code)


def _noted(number: int, frame: FrameType | None) -> None:
    """The Python-level handler; without one the C handler would not write to the wakeup descriptor."""


def _is_free(number: signal.Signals) -> bool:
    """Whether the script, or C code such as faulthandler's, neither handles nor ignores that signal."""
    with suppress(OSError):
        return signal.getsignal(number) is signal.SIG_DFL and number not in signal_state(os.getpid())[0]
    return False
