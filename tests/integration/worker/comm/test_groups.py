"""Process groups: how they form, what they say, and that they leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from elastic_trainer.errors import RoundBrokenError, TransientError
from elastic_trainer.worker import alone
from elastic_trainer.worker.comm import groups as groups
from elastic_trainer.worker.comm import placement
from elastic_trainer.worker.comm.control import InterruptibleWaits, Purpose
from elastic_trainer.worker.comm.groups import RankAssignment, StoreAddress
from elastic_trainer.worker.session import Session
from elastic_trainer.worker.steps.options import GroupOptions
from tests.integration.worker.launch import free_port
from tests.support.waiting import eventually


def test_a_group_that_was_left_has_no_threads_and_one_that_failed_to_form_no_number() -> None:
    """torch counts groups, also those that never came about; ranks that count differently never meet again.

    Seen where a member died while the others formed: some had begun to, some not. And a thread of gloo's that let go of
    a tensor while the interpreter ended aborted the process (1 job of 90).
    """
    with pytest.raises(RuntimeError):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=0.2))
    before = set(os.listdir("/proc/self/task"))
    store = StoreAddress("127.0.0.1", free_port(), serve=True)
    formation = RankAssignment(round=0, rank=0, world_size=1, local_rank=0, local_world_size=1, store=store)
    group = groups.form(formation, placement.take("cpu", 0, 1), groups.FormTimeouts(30.0, 30.0), InterruptibleWaits())
    assert dist.group.WORLD is not None
    assert dist.group.WORLD.group_name == "0"
    assert len(set(os.listdir("/proc/self/task")) - before) >= 4, "gloo's threads are not there"
    group.control.sum(Purpose.FINISH)
    dist.all_reduce(torch.ones(3))
    groups.leave(group)
    # Who has joined a thread may be earlier than the kernel, which still lists it.
    eventually(lambda: not [name for name in _threads(before) if "gloo" in name], lambda: str(_threads(before)))
    del group
    eventually(lambda: len(_threads(before)) <= 1, lambda: str(_threads(before)))  # the store's client may stay


@pytest.mark.parametrize(
    ("rank", "listens", "says"),
    [
        (0, True, "another program listens there"),
        (1, True, "what listens there does not answer as a store"),
        (0, False, "rank 0 waits for ranks 1"),
        (1, False, "timed out after 0.5 s: it accepts no connection .*check that all nodes reach this address"),
    ],
)
def test_processes_without_a_launcher_that_cannot_meet_fail_in_time_and_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, rank: int, listens: bool, says: str
) -> None:
    """Torch's own attempt to connect takes a second and more, whatever its limit: rank 1 does not wait for it."""
    if rank:
        monkeypatch.setattr(groups, "ANSWER_S", 0.3)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        port = other.getsockname()[1] if listens or rank else free_port()  # bound: nobody takes it meanwhile
        asked = Session(
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=2,
            device="cpu",
            group=GroupOptions(timeout_s=0.5),
        )
        with pytest.raises(TransientError, match=says), asked:
            pass


def test_frameworks_see_the_ranks_of_a_group_without_a_launcher_until_they_are_hidden() -> None:
    """No variable says so: torch's group does."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with Session(init_method=address, rank=0, world_size=1, device="cpu") as session:
        seen = [alone.hidden()]
        session.hide_ranks()
        seen.append(alone.hidden())
    assert (seen, dist.is_initialized()) == ([False, True], False)


def _threads(before: set[str]) -> list[str]:
    """The names of this process's threads but those ``before``."""
    names = []
    for task in set(os.listdir("/proc/self/task")) - before:
        with contextlib.suppress(OSError):
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
    return names


def leave_a_group_behind() -> None:
    """What a rank does whose peer never comes: stop waiting, while torch goes on to wait for two seconds."""
    served = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = PrefixStore("round/r1", served)
    formation = RankAssignment(round=1, rank=0, world_size=2, local_rank=0, local_world_size=1)
    works = InterruptibleWaits(interruptible=True)
    works.end("the round is over")  # a moment later it is no longer waited for
    patience = groups.FormTimeouts(forming_s=2.0, working_s=60.0)
    with pytest.raises(RoundBrokenError):
        groups._formed(formation, placement.take("cpu", 0, 2), served, store, patience, works)


def test_a_process_that_left_a_group_behind_ends_well() -> None:
    """The thread that makes it comes back to an interpreter that is still there: else C++ aborts (exit code 134)."""
    script = "from tests.integration.worker.comm.test_groups import leave_a_group_behind; leave_a_group_behind()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60.0, check=False)
    assert (done.returncode, "terminate" in done.stderr) == (0, False), done.stderr


FORMING = """
import sys, threading, time
import torch
from elastic_trainer.errors import RoundBrokenError
from elastic_trainer.worker.comm import groups
from elastic_trainer.worker.comm.placement import Placement
from elastic_trainer.worker.comm.groups import CollectiveAborter, ElasticGroups, RankAssignment, StoreAddress
from elastic_trainer.worker.report import HeartbeatReporter

rank, port = int(sys.argv[1]), int(sys.argv[2])
aborter = CollectiveAborter(HeartbeatReporter())

def form():
    place = RankAssignment(1, rank, 2, 0, 1, StoreAddress("127.0.0.1", port, False, "1"))
    placement = Placement(torch.device("cpu"), "gloo")
    ElasticGroups(aborter, placement, groups.FormTimeouts(60.0, 600.0), None).form(place, lambda number: None)

if rank == 1:
    groups._listening = lambda *arguments: time.sleep(600)  # it is in both groups, and does not answer
    form()
listening = groups._listening

def until_over(*arguments):
    threading.Timer(0.5, aborter._works.end, ("a node was lost",)).start()
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
    words = [sys.executable, "-c", FORMING]
    with subprocess.Popen([*words, "1", str(server.port)]) as other:
        try:
            ended = subprocess.run(
                [*words, "0", str(server.port)], capture_output=True, text=True, check=False, timeout=240
            )
        finally:
            other.kill()
    assert ended.stdout.splitlines() == ["a node was lost", "left"], ended.stderr
    assert ended.returncode == 0, ended.stderr


HOOK = """
import sys
import torch.distributed as dist
from elastic_trainer.worker.comm.groups import ExceptionHook

hook = ExceptionHook()

def rounds():
    for _ in range(3):
        with hook.replaced():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()

def said_by_the_script(*error):
    print("the script's", file=sys.stderr)
    torchs(*error)

rounds()
torchs, sys.excepthook = sys.excepthook, said_by_the_script
rounds()
raise ValueError("at last")
"""


def test_a_traceback_has_its_rank_once_whatever_rounds_came_before_and_a_hook_of_the_scripts_stays() -> None:
    """torch's hook would otherwise call that of each earlier round, and after 1,000 rounds print nothing at all."""
    ended = subprocess.run([sys.executable, "-c", HOOK], capture_output=True, text=True, check=False, timeout=300)
    lines = ended.stderr.splitlines()
    assert lines[0] == "[rank0]: the script's", ended.stderr
    assert lines[-1] == "[rank0]: [rank0]: ValueError: at last", ended.stderr
