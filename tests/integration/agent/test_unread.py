"""A process whose output nobody reads any more."""

from __future__ import annotations

import os
import subprocess
import sys

UNREAD = """
import sys, threading
from elastic_trainer.telemetry import logs
from elastic_trainer.worker.recovery import ChannelLink
logs.configure()
sys.stdin.read()
def end():
    logs.logger().info("round.entered")
    ChannelLink.__new__(ChannelLink)._end(7, "its agent is gone")
threading.Thread(target=end).start()
threading.Event().wait(60.0)
"""


def test_a_process_that_nobody_listens_to_can_still_end() -> None:
    """Slurm's step, a container's runtime or a shell that was killed leaves pipes that nobody reads: the thread that
    has to end its process does so with its code, where a failed write would have ended the thread alone."""
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", UNREAD], stdin=subprocess.PIPE, stdout=writer, stderr=writer)
    os.close(writer)
    os.close(reader)
    process.communicate(timeout=60)
    assert process.returncode == 7
