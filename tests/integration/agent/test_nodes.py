"""Whole nodes die, freeze, leave, join and wait while a plain script trains under torchrun."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

import pytest

from elastic_trainer.local import processes
from elastic_trainer.membership.documents import RoundState
from tests.support.plainjob import PlainJob

ENDING = {"ttl": "20"}
"""The lease of a frozen node ends, and that of none whose agent is only slow."""


@pytest.mark.timeout(600)
def test_nodes_are_lost_replaced_and_added(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """The node of rank 0 is killed: the two others go on, in order, and no step is made with the lost one any more.
    It is found to be dead by asking: no lease ends while the test lasts, also not that of an agent on a loaded machine.
    A new node joins behind them by a planned change. One more node, above max, waits and disturbs nobody; when a
    member is killed it is in the very next round."""
    with PlainJob(tmp_path, etcd_endpoint, run_id, options={"last_call": "0.5"}) as job:
        job.start(2)
        first = job.await_world(*(order := job.await_order()))
        job.add()
        order.append("n2")
        second = job.await_world(*order, after=first)
        assert second == first + 1

        head, *others = order
        assert job.node(head).kill() is not None
        third = job.await_world(*others, after=second)
        assert third == second + 1
        assert job.document().member(head) is None

        job.add()
        fourth = job.await_world(*others, "n3", after=third)
        assert fourth == third + 1
        assert _reason(job, third, RoundState.DRAINING) == "node n3 joins"

        spare = job.add()
        job.wait_for(lambda: job.present(spare.name), "the spare does not come")
        job.await_steps(others[0], 100)
        assert job.document().number == fourth
        assert job.last(spare.name) is None

        assert job.node(others[1]).kill() is not None
        assert job.await_world(others[0], "n3", spare.name, after=fourth) == fourth + 1
        job.tell("stop")
        for name in (others[0], "n3", spare.name):
            assert job.exit_code(job.node(name)) == 0


def _reason(job: PlainJob, number: int, state: RoundState) -> str:
    return "; ".join(entry.reason for entry in job.journal() if (entry.round, entry.state) == (number, state))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("thawed", ["all", "all but its worker"])
def test_a_frozen_node_is_left_behind_and_comes_back(
    tmp_path: Path, etcd_endpoint: str, run_id: str, thawed: str
) -> None:
    """All of one node stands still, so that its peers hang in a collective; their Python SIGTERM handlers cannot run
    there. Soon after its lease has ended they train without it, long before torchrun's own 30 seconds. Thawed, it
    joins again by a planned change: no round is broken for it. It joins when its old worker has ended, which is killed
    where it does not by itself."""
    with PlainJob(tmp_path, etcd_endpoint, run_id, flags=["--handler"], options=ENDING) as job:
        job.start(3)
        order = job.await_order()
        first = job.await_world(*order)
        victim, others = job.node(order[1]), [order[0], order[2]]
        assert len(victim.freeze()) >= 2
        job.await_world(*others, after=first)
        assert any("worker.killed" in job.log(name) for name in others), "torchrun's own 30 s were waited for"

        stuck = victim.worker() if thawed == "all but its worker" else None
        processes.send([each for each in victim.family() if each != stuck], signal.SIGCONT)
        job.await_world(*others, victim.name, after=first + 1)
        states = [entry.state for entry in job.journal()]
        assert states.count(RoundState.BROKEN) == 1, [entry.reason for entry in job.journal()]
        _no_step_of_two_rounds_at_once(job, others)
        # A collective that all had entered when it froze may end once it is thawed; it can enter none without them.
        assert _last_in(job, victim.name, first) <= max(_last_in(job, name, first) for name in others) + 1
        assert set(job.finish().values()) == {0}


def _last_in(job: PlainJob, node: str, number: int) -> int:
    """The last step that ``node`` has made in this round; -1 if none."""
    return max((step.step for step in job.steps(node) if step.round == number), default=-1)


def _no_step_of_two_rounds_at_once(job: PlainJob, nodes: list[str]) -> None:
    """No worker steps in a round after another has stepped in a later one."""
    steps = sorted((step for node in nodes for step in job.steps(node)), key=lambda step: step.t)
    for earlier, later in pairwise(steps):
        assert later.round >= earlier.round, (earlier, later)
