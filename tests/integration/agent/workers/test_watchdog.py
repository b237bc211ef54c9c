"""What the kernel says of a worker that answers nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, cast

from elastic_trainer.agent.workers.conductor import Worker
from elastic_trainer.agent.workers.hang_rules import starved_s
from elastic_trainer.agent.workers.watchdog import ping, queued_s
from tests.support.waiting import eventually

BUSY = "import os; os.sched_setaffinity(0, [int({cpu})]); print(flush=True)\nwhile True: pass"


class Mute:
    """A connection at whose other end nobody answers."""

    def send(self, message: object) -> None: ...


def test_a_process_that_shares_its_cpu_is_seen_to_wait_for_it() -> None:
    call = [sys.executable, "-S", "-c", BUSY.format(cpu=min(os.sched_getaffinity(0)))]
    with subprocess.Popen(call, stdout=subprocess.PIPE) as one, subprocess.Popen(call, stdout=subprocess.PIPE) as other:
        try:
            for each in (one, other):
                assert each.stdout is not None
                each.stdout.readline()
            worker = Worker(cast("Any", Mute()), one.pid, 0, life=1)
            ping(worker, now=1.0)
            eventually(lambda: starved_s(queued_s(worker.pid), worker.queued) >= 0.1, "it does not wait for the CPU")
        finally:
            one.kill()
            other.kill()
