"""Sums between the ranks of one node, through shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_trainer.errors import RoundBrokenError
from elastic_trainer.worker.comm import node_sums
from elastic_trainer.worker.comm.control import WIDTH, Control, InterruptibleWaits, Purpose
from elastic_trainer.worker.comm.node_sums import AHEAD, NodeControl, NodeSums, memory_bytes, on_this_node
from tests.unit.worker.ranks import outcome, run_ranks

LIMIT = timedelta(seconds=120)
RANKS, SUMS = 3, 1000
SCRIPT = """
import os, random, signal, sys, time
from datetime import timedelta
from elastic_trainer.worker.comm.control import Purpose
from elastic_trainer.worker.comm.node_sums import NodeControl, NodeSums
from elastic_trainer.worker.comm.control import InterruptibleWaits

path, rank, ranks, sums = sys.argv[1], *map(int, sys.argv[2:])
memory = NodeSums(os.open(path, os.O_RDWR), rank, ranks)
control = NodeControl(memory, None, InterruptibleWaits(), timedelta(seconds=120))
chance, begun = random.Random(rank), []
for number in range(sums):
    if number == sums // 2 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun.append((number, control.start(Purpose.LOSS, [rank * number, 0.1 * (rank + 1)])))
    if chance.random() < 0.05:
        time.sleep(chance.random() * 0.002)
    while begun and (len(begun) > 40 or chance.random() < 0.6):
        earlier, pending = begun.pop(0)
        found = pending.wait()[:2]
        assert found == [earlier * sum(range(ranks)), 0.1 + 0.2 + 0.1 * 3], (earlier, found)
"""


def processes(tmp_path: Path) -> list[tuple[int, str, str]]:
    """What ranks in processes of their own came to; rank 1 kills itself in the middle."""
    memory = tmp_path / "memory"
    memory.write_bytes(bytes(memory_bytes(RANKS)))
    words = [sys.executable, "-c", SCRIPT, str(memory)]
    started = [
        subprocess.Popen(
            [*words, *map(str, (rank, RANKS, SUMS))], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    reaper = threading.Thread(target=started[1].wait)  # as an agent does: a zombie counts as alive
    reaper.start()
    ended = [each.communicate(timeout=300) for each in started]
    reaper.join()
    return [(each.returncode, *texts) for each, texts in zip(started, ended, strict=True)]


def test_each_rank_gets_each_sum_and_awaits_no_rank_whose_process_has_ended(tmp_path: Path) -> None:
    """However far the others are: with up to forty begun and not awaited, more than a rank may be ahead; in equal bits,
    added up by rank. Without an agent in place that says who has ended, the others find no such process."""
    assert AHEAD < 40
    first, killed, third = processes(tmp_path)
    assert killed[0] == -9
    for code, _, error in (first, third):
        assert code == 1
        assert "RoundBrokenError: a peer of rank" in error
        assert "rank 1 of this node has ended" in error


def test_ranks_of_a_node_meet_in_memory() -> None:
    """Sums go through it, and are checked as those of the group are; all else goes through the group."""

    def body(control: Control) -> tuple[object, ...]:
        here = on_this_node(control, LIMIT)
        purpose = Purpose.SAVE if control.rank == 0 else Purpose.BOUNDARY
        return (
            isinstance(here, NodeControl),
            here.sum(Purpose.BARRIER, [control.rank, 1.5])[:2],
            here.gather([control.rank]),
            outcome(lambda: here.sum(purpose)).partition("reached")[2][:40],
        )

    shared = (True, [3.0, 4.5], [[0], [1], [2]])
    mismatch = [f" '{name}' while another rank did something else"[:40] for name in ("save", "boundary", "boundary")]
    assert run_ranks(3, body) == [(*shared, each) for each in mismatch]


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_cannot_open_the_memory_all_use_the_group(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be in a container of its own, where the path names nothing, or another file."""
    opened = node_sums._opened

    def elsewhere(token: bytes, path: str, mine: int, size: int) -> NodeSums | None:
        return opened(b"another file's..", path, mine, size) if mine == rank else opened(token, path, mine, size)

    monkeypatch.setattr(node_sums, "_opened", elsewhere)
    assert run_ranks(2, lambda control: on_this_node(control, LIMIT) is control) == [True, True]
    monkeypatch.setattr(node_sums, "_opened", opened)
    monkeypatch.setattr(os, "memfd_create", lambda name: os.open("/no/such/file", os.O_RDWR))
    assert run_ranks(2, lambda control: on_this_node(control, LIMIT) is control) == [True, True]


def alone(tmp_path: Path) -> NodeSums:
    """The memory of rank 0, whose peer does not come."""
    memory = tmp_path / "memory"
    memory.write_bytes(bytes(memory_bytes(2)))
    return NodeSums(os.open(memory, os.O_RDWR), 0, 2)


def test_the_end_of_the_round_ends_the_wait(tmp_path: Path) -> None:
    """And no sum begins after it: a peer could commit a step in a round that is over."""
    works = InterruptibleWaits(interruptible=True)
    control = NodeControl(alone(tmp_path), None, works, LIMIT)
    threading.Timer(0.2, works.end, ("a node was lost",)).start()
    with pytest.raises(RoundBrokenError, match="a node was lost"):
        control.sum(Purpose.COMMIT, [1.0])
    with pytest.raises(RoundBrokenError, match="a node was lost"):
        control.start(Purpose.COMMIT, [1.0])


@pytest.mark.parametrize("in_place", [False, True])
def test_a_peer_that_does_not_come_is_awaited_for_the_groups_time(tmp_path: Path, *, in_place: bool) -> None:
    works = InterruptibleWaits(interruptible=in_place)
    control = NodeControl(alone(tmp_path), None, works, timedelta(seconds=0.2))
    with pytest.raises(RoundBrokenError, match="a rank of this node did not come in time"):
        control.sum(Purpose.COMMIT, [1.0])


def test_half_a_row_is_none(tmp_path: Path) -> None:
    sums = alone(tmp_path)
    sums.write(1, [float(each) for each in range(WIDTH)])
    assert sums.read(0, 1) == tuple(map(float, range(WIDTH)))
    at = sums._at(0, 1)
    for byte in range(at, at + node_sums._ROW_BYTES):
        sums._memory[byte] ^= 0xFF
        assert sums.read(0, 1) is None
        sums._memory[byte] ^= 0xFF
    assert sums.read(0, 1 + 2 * AHEAD) is None
