"""The drill in which nothing fails, but other programs take the machine: a false suspicion may harm nobody.

*Runs in* the main thread of the command or test. *Owns* the busy processes; all are gone at the return.
*Fails by* DrillError.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.drills.measure import Effect
from elastic_trainer.drills.node_faults import broken_rounds
from elastic_trainer.drills.stage import Stage, now
from elastic_trainer.drills.strikes import restarted

LOOPS = 8
_LOOP = "while True: pass"


def busy_machine(stage: Stage, repeat: int, seconds: float) -> Effect:
    """Loops keep the machine busy for ``seconds``: a suspicion that is wrong costs the step at hand, and no more.

    Recovery is how long all ranks needed for their next step once the loops had ended.
    """
    before = stage.settled()
    broken, begun = len(broken_rounds(stage)), now()
    with busy_loops():
        deadline = Deadline.after(seconds)
        while not deadline.expired:
            stage.until(lambda: True, "")
            pause(min(0.2, deadline.remaining_s()))
    ended = now()
    standing = stage.settled()
    pids = list(before.pids.values())
    return Effect(
        what=f"{LOOPS} busy loops for {seconds:g} s",
        recovery_s=stage.resumed(pids, ended, 0, "a step of all") - ended,
        gap_s=stage.book.gap(pids, begun, ended),
        steps_lost=stage.book.committed_again(pids),
        details={
            "rounds_broken": float(len(broken_rounds(stage)) - broken),
            "steps": float(min(len(stage.book.steps_after(pid, begun)) for pid in standing.pids.values())),
        },
        problems=tuple(restarted(stage, before.pids)),
    )


@contextmanager
def busy_loops() -> Iterator[None]:
    """``LOOPS`` processes compute as fast as they can; they die with this one."""
    tied = [sys.executable, "-m", "elastic_trainer.local.parent_death", str(os.getpid()), "0"]
    with ExitStack() as stack:
        for _ in range(LOOPS):
            loop = subprocess.Popen([*tied, sys.executable, "-c", _LOOP], stdin=subprocess.DEVNULL)
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        yield
