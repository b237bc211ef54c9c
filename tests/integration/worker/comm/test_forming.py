"""A round that ends while its groups form, between two processes."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

SCRIPT = """
import sys, threading, time
import torch
from elastic_trainer.errors import RoundBrokenError
from elastic_trainer.worker.comm import groups
from elastic_trainer.worker.comm.placement import Placement
from elastic_trainer.worker.comm.groups import RankAssignment, StoreAddress
from elastic_trainer.worker.comm.control import InterruptibleWaits

rank, port = int(sys.argv[1]), int(sys.argv[2])
works = InterruptibleWaits(interruptible=True)

def form():
    place = RankAssignment(1, rank, 2, 0, 1, StoreAddress("127.0.0.1", port, False, "1"))
    placement = Placement(torch.device("cpu"), "gloo")
    groups.form_in_place(place, placement, groups.FormTimeouts(60.0, 600.0), lambda: None, lambda: None, works)

if rank == 1:
    groups._listening = lambda *arguments: time.sleep(600)  # it is in both groups, and does not answer
    form()
listening = groups._listening

def until_over(*arguments):
    threading.Timer(0.5, works.end, ("a node was lost",)).start()
    return listening(*arguments)

groups._listening = until_over
try:
    form()
except RoundBrokenError as error:
    print(error, flush=True)
print("left", flush=True)
"""


def test_a_round_that_ends_in_the_last_collective_of_forming_is_left_at_once() -> None:
    """The collective stays pending for as long as the group's timeout; the main thread does not wait for it."""
    server = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=60), wait_for_workers=False)
    words = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen([*words, "1", str(server.port)]) as other:
        try:
            ended = subprocess.run(
                [*words, "0", str(server.port)], capture_output=True, text=True, check=False, timeout=240
            )
        finally:
            other.kill()
    assert ended.stdout.splitlines() == ["a node was lost", "left"], ended.stderr
    assert ended.returncode == 0, ended.stderr
