"""Shard groups of two nodes: nodes die in one group, in two at once, and fresh ones take their shard ranks.

A model that is sharded over all nodes of the job is sharded anew at each number of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.checkpoint.memory import SLOTS
from elastic_trainer.drills.measure import Book
from elastic_trainer.local.cluster import Node, kill
from elastic_trainer.local.ledger import Line, LineKind
from elastic_trainer.membership.documents import NodeState
from tests.drills.sharded.test_saves import Saved
from tests.drills.sharded.test_sharded import CLOSE, MIXTURE

pytestmark = pytest.mark.usefixtures("sharded_torch")

GROUP, NODES = 2, 3
RARELY = 40
"""Steps between its saves: it resumes copies."""


class Groups(Saved):
    """Four nodes of one rank each."""

    def members(self) -> list[Node]:
        """The nodes of the newest round, group by group."""
        nodes = {node.name: node for node in self.job.nodes}
        return [nodes[member.node] for member in self.job.document().members]

    def train(self, *nodes: Node) -> list[Node]:
        """Wait until exactly these make steps together; they, group by group."""
        self.job.await_world(*(node.name for node in nodes), after=self._before)
        self._before = self.job.document().number
        return self.members()

    _before = 0

    def begins(self) -> None:
        """A fault comes: what follows is a later round."""
        self._before = self.job.document().number

    def kill_nodes(self, *victims: Node) -> None:
        """At once: after a death in one group only the other holds the newest shards."""
        self.begins()
        assert all(node.running for node in victims)
        kill([process for node in victims for process in node.family()])

    def ready(self, node: Node) -> Node:
        """Wait until it could take part in a round: of five nodes the last is a spare in the first slot."""

        self.job.wait_for(lambda: self.job.shows(node.name, NodeState.READY), f"{node.name} is not ready")
        record = self.job.record(node.name)
        assert record is not None
        assert record.shard_slot == 0
        return node

    def taken_up(self, world: int) -> int:
        """Wait until ``world`` ranks make steps after those of other sizes; the first step that they made."""
        before = self._before
        self.train(*self.job.running)

        def first() -> Line | None:
            made = (each for each in self.job.lines() if each.event is LineKind.STEP and each.round > before)
            return next((each for each in made if each.world == world), None)

        self.job.wait_for(lambda: first() is not None, f"{world} ranks make no step")
        found = first()
        assert found is not None
        return found.step

    def loses(self, victims: list[Node], left: int) -> tuple[list[int], int]:
        """What they lose with these between two saves, some copies behind the first; see :meth:`loses_now`."""
        begun = self.job.newest()
        self.job.wait_for(
            lambda: self.job.newest() > begun + 10 and self.job.newest() % RARELY in range(10, RARELY - 10),
            "no step between two saves",
        )
        return self.loses_now(victims, left)

    def loses_now(self, victims: list[Node], left: int) -> tuple[list[int], int]:
        """Kill these nodes, so that ``left`` nodes train. The steps that all ranks had begun to copy, and the one that
        is resumed.
        """
        size = len(self.members())
        self._logged = {node.name: len(self.job.log(node.name)) for node in self.job.running}
        self.kill_nodes(*victims)
        copied = self.copied(self._before, size)
        return copied, self.taken_up(left) - 1

    def leaves(self, node: Node) -> tuple[int, int]:
        """Tell ``node`` to leave. The last step that was made with it, and the one that the others go on from."""
        self.begins()
        before, size = self._before, len(self.members())
        node.terminate()
        self.job.wait_for(lambda: not node.running, "it does not leave")
        resumed = self.taken_up(size) - 1
        steps = [line.step for line in self.job.lines() if line.event is LineKind.STEP and line.round <= before]
        return max(steps), resumed

    def loses_all(self) -> tuple[int, list[int], int]:
        """Kill all workers. The newest step that was saved, those that all had begun to copy, and the one resumed."""
        self.begins()
        size, saved = len(self.job.running), self.newest_saved()
        self.kill_all()
        copied = self.copied(self._before, size)
        return saved, copied, self.taken_up(size) - 1

    def loaded(self) -> set[str]:
        """What the workers that run now have loaded: "snapshot", "checkpoint"."""
        logs = [self.job.log(node.name)[self._logged[node.name] :] for node in self.job.running]
        return {kind for log in logs for kind in ("snapshot", "checkpoint") if f'"{kind}.loaded"' in log}

    def processes(self, *nodes: Node) -> dict[str, tuple[list[int], int]]:
        """Of each: its workers, and how much it has logged."""
        return {node.name: (self.workers(node), len(self.job.log(node.name))) for node in nodes}

    def kept(self, before: dict[str, tuple[list[int], int]], *nodes: Node) -> None:
        """Each has its process, unless another died while it was between its commit and the script's next step: where
        it cannot go on with the same group, its agent begins it anew."""
        for node in nodes:
            pids, logged = before[node.name]
            said = self.job.log(node.name)[logged:]
            anew = '"workers.restarted"' in said
            assert (self.workers(node) == pids) is not anew, (node.name, pids, said)

    def copied(self, round_: int, size: int) -> list[int]:
        """The steps that all ranks of a round had begun to copy."""
        whole = [path.read_text().rpartition("\n")[0].splitlines() for path in self.directory.glob("copies-*")]
        steps = [row["step"] for lines in whole for row in map(json.loads, lines) if row["round"] == round_]
        return sorted(step for step in {*steps} if steps.count(step) == size)

    def goes_ahead(self, group: list[Node]) -> None:
        """Wait until a group trains alone, and has no copy in memory that the other group has too."""
        self.train(*group)
        self.job.wait_for(lambda: len(self.copied(self._before, GROUP)) > SLOTS, "the group does not copy")


@pytest.mark.timeout(300)
def test_whole_groups_go_on_and_broken_ones_are_put_together(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """A node dies: the other of its group is a spare in its process, until a fresh one, which begins anew with its
    shards, makes it whole. Then one node of each group dies, with different shards: the rest are one group at once.

    No step is lost, until the newest shards of one rank are, with a node of each group, the second once its group is
    ahead: nobody holds a whole state, and the others, in their processes, resume what its neighbour has a copy of. All
    workers die at once: the next ones resume what the agents hold, or a checkpoint that is newer. Each sample counts
    once, and the result is that of one process.
    """
    saves: dict[str, Any] = {"save_every": 6, "snapshot_every_s": 0.1}
    drill = Groups(tmp_path, etcd_endpoint, run_id, pace_s=0.01, sgd=True, most=4, shard_nodes=GROUP, **saves)
    with drill.job as job:
        first, second, third, fourth = drill.train(*job.start(4))
        before, spare = drill.processes(first, third, fourth), drill.ready(job.add())
        drill.kill_nodes(second)
        assert drill.train(third, fourth) == [third, fourth]
        assert drill.train(first, third, fourth, spare) == [third, fourth, first, spare]
        drill.kept(before, first, third, fourth)
        assert '"workers.restarted"' in job.log(spare.name)
        drill.kill_nodes(third, spare)
        assert drill.train(first, fourth) == [first, fourth]
        drill.kept(before, first, fourth)
        drill.train(first, fourth, job.add(), job.add())
        drill.kept(before, first, fourth)
        assert Book(job.lines()).committed_again() == 0
        drill.await_saved()
        members = drill.members()
        before, left = drill.processes(*members), [members[0], members[3]]
        drill.kill_nodes(members[1])
        drill.goes_ahead(members[GROUP:])
        copied, resumed = drill.loses_now([members[2]], GROUP)
        assert resumed >= copied[-2], (copied, resumed)
        drill.train(*left, job.add(), job.add())
        drill.kept(before, *left)
        drill.await_saved()
        saved, copied, resumed = drill.loses_all()
        assert resumed >= max([saved, *copied[-2:-1]]), (saved, copied, resumed)
        drill.await_saved()
        error = drill.ended(tmp_path, restarted=True)
    print({"error": error})
    assert error < CLOSE


@pytest.mark.parametrize("model", [{}, MIXTURE | {"mesh": [1, 2]}], ids=["dense", "experts"])
def test_the_only_group_goes_on_in_place_from_copies_at_the_neighbour(
    tmp_path: Path, etcd_endpoint: str, run_id: str, model: dict[str, Any]
) -> None:
    """Nobody else holds the shards of a node that dies, but its neighbour has a copy: as soon as a spare has taken
    over, both resume the newest step that both had copied, one of them in its process. So does the next pair. A node
    that is told to leave costs no step. Each sample counts once, and the result is that of one process. Experts lie on
    both."""
    saves: dict[str, Any] = {"save_every": RARELY, "snapshot_every_s": 0.2, **model}
    drill = Groups(tmp_path, etcd_endpoint, run_id, pace_s=0.05, sgd=True, most=GROUP, shard_nodes=GROUP, **saves)
    with drill.job as job:
        drill.train(*job.start(GROUP))
        for shard_rank in (1, 0):
            members, spare = drill.members(), drill.ready(job.add())
            victim, other = members[shard_rank], members[1 - shard_rank]
            before = drill.processes(other)
            copied, resumed = drill.loses([victim], GROUP)
            assert resumed in copied[-2:], (resumed, copied)
            assert drill.loaded() == {"snapshot"}
            assert {*drill.members()} == {other, spare}
            drill.kept(before, other)
        (leaving, other), spare = drill.members(), drill.ready(job.add())
        before = drill.processes(other)
        made, resumed = drill.leaves(leaving)
        assert resumed == made
        drill.kept(before, other)
        error = drill.ended(tmp_path, restarted=True, ranks=GROUP)
    print({"error": error})
    assert error < CLOSE


def test_in_restart_mode_nodes_keep_no_shard_ranks(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """All workers start again, each with the shard rank that its rank gives it, and load their shards."""
    named: dict[str, Any] = {"recovery": "restart", "save_every": 5, "sgd": True, "shard_nodes": GROUP}
    drill = Groups(tmp_path, etcd_endpoint, run_id, pace_s=0.01, **named)
    with drill.job as job:
        first, second = drill.train(*job.start(2))
        job.await_steps(10)
        drill.kill_nodes(first)
        drill.train(second, job.add())
        error = drill.ended(tmp_path, restarted=True, ranks=GROUP)
    assert error < CLOSE


class WholeJob(Groups):
    def loses_last(self, count: int) -> tuple[list[int], int]:
        left = len(self.job.running) - count
        return self.loses(self.members()[left:], left)

    def await_saved_again(self) -> None:
        saved = self.newest_saved()
        self.job.wait_for(lambda: self.newest_saved() > saved, "nothing is saved")


def test_a_model_sharded_over_the_whole_job_is_sharded_anew_when_nodes_die_and_join(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """A node is killed, and its shards with it: the others resume, with one rank less, the newest state of which it
    had left a copy with its neighbour. Then one joins. Then two neighbours die at once: what is left resumes the newest
    checkpoint. Only steps behind these are repeated, each sample counts once, and the result is that of one process.
    """
    options: dict[str, Any] = {"recovery": "restart", "save_every": RARELY, "sgd": True, "whole_job": True}
    sizes = {"nodes": NODES, "least": NODES - 2}
    drill = WholeJob(tmp_path, etcd_endpoint, run_id, shards=1, pace_s=0.05, snapshot_every_s=0.2, **sizes, **options)
    with drill.job as job:
        job.start(NODES)
        drill.taken_up(NODES)
        copied, resumed = drill.loses_last(1)
        assert resumed in copied[-2:]
        assert drill.loaded() == {"snapshot"}
        drill.begins()
        job.add()
        drill.taken_up(NODES)
        drill.await_saved_again()
        saved = drill.newest_saved()
        copied, again = drill.loses_last(2)
        assert saved <= again < copied[-1]
        assert "checkpoint" in drill.loaded()
        error = drill.ended(tmp_path, restarted=True, ranks=NODES - 2)
    print({"resumed": resumed, "saved": saved, "again": again, "error": error})
    assert error < CLOSE
