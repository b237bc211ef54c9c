"""Makes a data worker process independent of what it inherits from the training process.

A forked child holds its parent's sockets: peers would not notice the parent's death. It holds the parent's handlers and
wakeup descriptor: a signal to the child would look like one to the parent. torchrun and Slurm send SIGTERM to all
processes of a job, and a terminal that closes sends SIGHUP; the parent needs its data workers until the ranks have
agreed to stop: so data workers ignore such signals, and end with the parent.

*Runs in* the main thread of a data worker process, before it fetches anything.
*Fails by* nothing: where the system has no such means, less is done.
*Invariant*: no data worker outlives its parent (on Linux at once, elsewhere within the seconds that torch takes).
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

_DESCRIPTORS = "/proc/self/fd"
_STANDARD = 2
PR_SET_PDEATHSIG = 1
_HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def forking() -> Iterator[None]:
    """Children that are forked in here hold back two things until :func:`settle`, which handles them.

    SIGTERM, SIGINT and SIGHUP (other threads of this process, and their C handler, still receive them); and the
    collection of garbage, which would end process groups of the parent that only cycles hold: they wait for threads
    that a child does not have.
    """
    before, collected = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def settle(parent: int, forked: bool, theirs: Callable[[int], None] | None, worker: int) -> None:
    """A ``worker_init_fn``: let go of what belongs to the process ``parent``, and end when it ends; then ``theirs``."""
    if forked:
        gc.freeze()  # nothing of the parent's is ever collected here
        gc.enable()
        let_go([number for number in open_sockets() if number > _STANDARD])
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number not in _HELD_BACK:
            signal.signal(number, signal.SIG_DFL)
    for number in _HELD_BACK:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
    end_with(parent)
    if theirs is not None:
        theirs(worker)


def end_with(parent: int) -> None:
    """Be killed when ``parent`` dies. On Linux."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:  # it died before the call above, which then never signals, or a fork server started this
        with suppress(PermissionError):
            try:
                os.kill(parent, 0)
            except ProcessLookupError:
                os._exit(1)


def open_sockets() -> dict[int, str]:
    """Descriptor number and kernel name (with the inode) of each socket of this process; empty off Linux."""
    found: dict[int, str] = {}
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found[int(name)] = target
    return found


def let_go(numbers: Collection[int]) -> None:
    """Let go of these inherited descriptors.

    Their numbers stay taken, by /dev/null: objects of the parent that name them, and may close them at any time, then
    close nothing of this process.
    """
    with suppress(OSError):
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in numbers:
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)
