"""The conductor between real sockets and a notebook: what workers say reaches the run, and its decisions reach them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import EXIT_CONFIG
from elastic_trainer.ipc.messages import (
    CHANNEL_VERSION,
    Drain,
    Evicted,
    Exit,
    Failed,
    Formation,
    Leaving,
    Over,
    Welcome,
)
from elastic_trainer.membership.cluster_view import NodeView, losses
from elastic_trainer.membership.documents import Ghost, Identity, NodeState, RoundState, RunResult
from elastic_trainer.model import Cause
from tests.support.crew import LIMIT_S, eventually
from tests.unit.agent.channel import KEY, OTHER, Stage, Worker, staged
from tests.unit.membership.scenes import Scene, node


@pytest.fixture
def stage() -> Iterator[Stage]:
    with staged() as stage:
        yield stage


def working(stage: Stage, number: int = 1) -> Worker:
    """A node of one worker that is in round ``number``."""
    stage.begin()
    worker = Worker(stage.conductor)
    worker.ready(number)
    stage.await_record(reported=number)
    stage.see(number)
    worker.await_one(Formation)
    return worker


# ---- meeting


def test_a_worker_is_welcomed_and_the_node_is_ready_when_all_are(stage: Stage) -> None:
    """A node of two workers shows itself ready, with the newest state, when both are free."""
    stage.begin(2)
    assert stage.notebook.record.state is NodeState.WARMING
    assert not stage.conductor.met.is_set()
    first, second = Worker(stage.conductor, 0), Worker(stage.conductor, 1)
    assert first.await_one(Welcome) == Welcome(run="run", node="me")
    assert stage.conductor.met.is_set()
    first.ready(1)
    second.ready(1, step=9, epoch=1, samples=64, batch=32)
    record = stage.await_record(state=NodeState.READY)
    assert (record.reported, record.acknowledged) == (1, 1)
    assert record.identity == Identity(round=0, step=9, epoch=1, samples=64, batch=32)


def test_a_worker_of_another_version_is_sent_away(stage: Stage) -> None:
    """With the status for wrong configuration, and both versions in the reason."""
    stage.begin()
    worker = Worker(stage.conductor, version=CHANNEL_VERSION + 1)
    told = worker.await_one(Exit)
    assert told.code == EXIT_CONFIG
    assert told.reason == f"the worker speaks channel version {CHANNEL_VERSION + 1}, its agent {CHANNEL_VERSION}"
    assert not stage.conductor.met.is_set()


def test_a_second_worker_of_one_rank_is_sent_away(stage: Stage) -> None:
    """It belongs to a life that is over, or to nobody."""
    stage.begin()
    Worker(stage.conductor).await_one(Welcome)
    assert Worker(stage.conductor).await_one(Exit).code != 0


def test_a_worker_that_talks_nonsense_counts_as_lost(stage: Stage) -> None:
    """It cannot be led; its round goes on without it."""
    worker = working(stage)
    worker.connection._socket.sendall(b'{"kind": "song"}\n')
    assert stage.await_break().number == 1


def test_what_ended_a_life_stays_in_the_record_of_the_next(stage: Stage) -> None:
    """Peers may break the round before this agent does, and whoever forms the next one has to know all the same."""
    worker = working(stage)
    stage.conductor._ports.verdicts._reasons[os.getpid()] = "it stood still"
    worker.connection.close()
    assert stage.await_break().record.ended_by is Cause.WORKER_HUNG
    stage.begin()
    assert stage.notebook.record.ended_by is Cause.WORKER_HUNG
    again = Worker(stage.conductor)
    again.ready(2)
    assert stage.await_record(reported=2).ended_by is Cause.WORKER_HUNG
    again.connection.close()
    stage.await_record(ended_by=Cause.WORKER_LOST)


# ---- rounds come and go


def test_a_formation_is_told_once_and_to_late_workers_too(stage: Stage) -> None:
    """The round may be known before a worker is ready: it is told when it is."""
    stage.begin(2)
    first = Worker(stage.conductor, 0)
    first.ready(1)
    members = (stage.member(3, 2),)
    document = stage.see(4, members=members, reason="all are here")
    stage.conductor.see(document)
    late = Worker(stage.conductor, 1)
    late.ready(1)
    told = late.await_one(Formation)
    assert (told.number, told.nonce, told.store, told.rank, told.world_size) == (4, "r4", "127.0.0.1:29500", 4, 2)
    assert first.await_one(Formation).rank == 3
    stage.conductor.see(document)
    stage.see(4, RoundState.BROKEN, members=members)
    first.await_one(Over)
    late.await_one(Over)
    assert [len(worker.of(Formation)) for worker in (first, late)] == [1, 1]


def test_a_broken_round_is_told_once_and_acknowledged_at_once(stage: Stage) -> None:
    """The run learns that the agent knows before the workers are free."""
    worker = working(stage)
    broken = stage.see(1, RoundState.BROKEN, reason="node other is gone")
    assert worker.await_one(Over) == Over(number=1, reason="node other is gone")
    assert stage.await_record(acknowledged=2).reported == 1
    stage.conductor.see(broken)
    worker.ready(2, step=5)
    assert stage.await_record(reported=2).state is NodeState.READY
    stage.see(2)
    worker.await_one(Formation, 2)
    assert len(worker.of(Over)) == 1


def test_a_planned_change_is_told_with_the_place_behind_it(stage: Stage) -> None:
    """Members get their new rank with the news; the formed round then says nothing new to them."""
    worker = working(stage)
    following = stage.document(2, members=(OTHER, stage.member(first_rank=1)))
    stage.see(1, RoundState.DRAINING, next=following, reason="node new joins")
    drain = worker.await_one(Drain)
    assert drain.next is not None
    assert (drain.number, drain.waits, drain.next.number, drain.next.rank) == (1, False, 2, 1)
    worker.ready(2, step=8, planned=True)
    stage.await_record(reported=2, planned=True)
    stage.conductor.see(following)
    stage.see(2, RoundState.BROKEN)
    assert worker.await_one(Over, len(worker.of(Over)) or 1).number <= 2
    eventually(lambda: worker.of(Over)[-1].number == 2, "the end of round 2 is not told")
    assert len(worker.of(Formation)) == 1
    assert len(worker.of(Drain)) == 1


def test_a_member_that_sees_its_round_only_when_that_ends_by_plan_enters_it(stage: Stage) -> None:
    """Those who leave may be gone by then, and nobody else would ever end the change that waits for this member."""
    stage.begin()
    worker = Worker(stage.conductor)
    worker.ready(1)
    stage.await_record(state=NodeState.READY)
    following = stage.document(2, members=(stage.member(first_rank=0),))
    stage.see(1, RoundState.DRAINING, next=following, reason="node other leaves")
    assert worker.await_one(Formation).number == 1
    drain = worker.await_one(Drain)
    assert drain.next is not None
    assert drain.next.number == 2


def test_a_newcomer_forms_the_next_round_while_the_others_still_drain(stage: Stage) -> None:
    """It waits for them there, not they for it."""
    stage.begin()
    worker = Worker(stage.conductor)
    worker.ready(1)
    stage.await_record(state=NodeState.READY)
    following = stage.document(8, members=(OTHER, stage.member(first_rank=1)))
    stage.see(7, RoundState.DRAINING, members=(OTHER,), next=following)
    assert worker.await_one(Formation).number == 8
    stage.conductor.see(following)
    stage.see(8, RoundState.BROKEN, members=following.members)
    worker.await_one(Over)
    assert len(worker.of(Formation)) == 1
    assert not worker.of(Drain)


def test_too_few_will_be_left_is_told_to_those_that_wait(stage: Stage) -> None:
    """They save before they leave the round."""
    worker = working(stage)
    stage.see(1, RoundState.DRAINING, next=None)
    drain = worker.await_one(Drain)
    assert drain.waits
    assert drain.next is None


def test_a_node_that_was_left_out_frees_its_workers_and_comes_back(stage: Stage) -> None:
    """It learns of its exclusion from the next round only; the change of its key makes it count again."""
    worker = working(stage)
    stage.see(2, members=(OTHER,), ghosts=(Ghost(node="me", mod_revision=4),))
    told = worker.await_one(Over)
    assert told.number == 1
    assert told.reason == "round 2 was formed without this node"
    assert stage.await_record(acknowledged=2)
    worker.ready(2, step=4)
    assert stage.await_record(reported=2).state is NodeState.READY


def test_a_member_that_never_heard_of_its_round_does_not_hold_up_the_next(stage: Stage) -> None:
    """The round was broken before this node saw it (news are merged): its workers have nothing to leave."""
    stage.begin()
    worker = Worker(stage.conductor)
    worker.ready(1)
    stage.await_record(state=NodeState.READY)
    stage.see(5, RoundState.BROKEN)
    worker.await_one(Over)
    record = stage.await_record(reported=6)
    assert (record.acknowledged, record.state) == (6, NodeState.READY)


def test_a_survivor_that_had_not_switched_is_free_for_the_round_behind(stage: Stage) -> None:
    """A planned change fails half-way: what is broken is its next round, which this worker never entered."""
    worker = working(stage)
    following = stage.document(2)
    stage.see(1, RoundState.DRAINING, next=following)
    worker.await_one(Drain)
    stage.see(2, RoundState.BROKEN)
    worker.await_one(Over)
    worker.ready(2, step=6)
    assert stage.await_record(reported=3).state is NodeState.READY


def test_one_that_had_switched_is_not_free_before_it_says_so(stage: Stage) -> None:
    """It is in the middle of forming the very round that is broken."""
    worker = working(stage)
    stage.see(1, RoundState.DRAINING, next=stage.document(2))
    worker.await_one(Drain)
    worker.ready(2, step=6, planned=True)
    stage.await_record(reported=2)
    stage.see(2, RoundState.BROKEN)
    worker.await_one(Over)
    assert stage.await_record(acknowledged=3).reported == 2
    worker.ready(3, step=6)
    stage.await_record(reported=3)


def test_a_round_that_follows_on_one_nobody_ended_frees_the_workers_of_that(stage: Stage) -> None:
    """All leases were lost at once, etcd having stood still, and the members met again: first the end, then a place."""
    worker = working(stage)
    stage.see(2)
    worker.await_one(Formation, 2)
    assert [type(message) for message in worker.heard] == [Welcome, Formation, Over, Formation]
    assert worker.await_one(Over).number == 1


def test_a_closed_run_ends_the_workers(stage: Stage) -> None:
    """With status 0 after a success, else with that of a failed job, and the reason."""
    for result, code in ((RunResult.SUCCEEDED, 0), (RunResult.FAILED, 1)):
        with staged() as other:
            other.begin()
            worker = Worker(other.conductor)
            worker.await_one(Welcome)
            other.see(3, RoundState.CLOSED, result=result, reason="over")
            assert worker.await_one(Exit) == Exit(code=code, reason="over")


# ---- failures


def test_a_failed_collective_breaks_the_round_if_nobody_has_told_yet(stage: Stage) -> None:
    """Named with what failed, in one write with the acknowledgement; old news are none."""
    worker = working(stage, 3)
    worker.say(Failed(number=2, error="late"))
    worker.say(Failed(number=3, error="Connection closed by peer"))
    broken = stage.await_break()
    assert broken.number == 3
    assert broken.reason == "node me lost contact with a peer (Connection closed by peer)"
    assert not broken.worker_failed
    assert (broken.record.acknowledged, broken.record.planned) == (4, False)
    stage.see(3, RoundState.BROKEN)
    worker.await_one(Over)
    worker.say(Failed(number=3, error="again"))
    worker.ready(4)
    stage.await_record(reported=4)
    assert len(stage.notebook.breaks) == 1


def test_a_failure_in_a_planned_change_breaks_the_round_behind_it(stage: Stage) -> None:
    """Nobody may go on in the next round when some cannot get there."""
    worker = working(stage)
    stage.see(1, RoundState.DRAINING, next=stage.document(2))
    worker.await_one(Drain)
    worker.say(Failed(number=1, error="closed"))
    assert stage.await_break().number == 2


_HOLDER = """
import os, sys, threading
from pathlib import Path
from elastic_trainer.ipc.channel import connect
from elastic_trainer.ipc.messages import Hello
from elastic_trainer.ipc.mutex import LifeMutex

connection = connect(Path(sys.argv[1]))
mutex = LifeMutex(Path(sys.argv[1]).parent / f"life-{os.getpid()}")
if os.fork() == 0:
    sys.stdin.read()  # keeps the socket open after its parent's death, so that only the mutex can tell
    os._exit(0)
mutex.hold()
connection.send(Hello(pid=os.getpid(), local_rank=1, mutex=str(mutex.path)))
sys.stdin.read()
"""


def test_siblings_of_a_killed_worker_are_told_to_exit_by_its_mutex(stage: Stage) -> None:
    """The failure domain is the node. The kernel tells of the death through the mutex; the socket is still open."""
    stage.begin(2)
    sibling = Worker(stage.conductor, 0)
    sibling.ready(1)
    command = [sys.executable, "-c", _HOLDER, str(stage.conductor.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as holder:
        try:
            eventually(lambda: len(stage.conductor._life.workers) == 2, "the worker does not come")
            stage.see(1, members=(stage.member(0, 2), OTHER))
            sibling.await_one(Formation)
            began = SYSTEM.monotonic()
            os.kill(holder.pid, signal.SIGKILL)
            told = sibling.await_one(Exit)
            assert SYSTEM.monotonic() - began < LIMIT_S / 2
        finally:
            holder.kill()
    assert (told.code, told.reason) == (1, "its worker 1 was lost")
    broken = stage.await_break()
    assert broken.worker_failed
    assert broken.reason == "node me left the round: its worker 1 was lost"
    assert (broken.record.state, broken.record.life) == (NodeState.WARMING, stage.conductor.life)


def test_what_a_dead_life_says_counts_for_nothing(stage: Stage) -> None:
    """A sibling may still have things to say; the node's key is that of the next life already."""
    stage.begin(2)
    lost, sibling = Worker(stage.conductor, 0), Worker(stage.conductor, 1)
    sibling.await_one(Welcome)
    lost.await_one(Welcome)
    life = stage.conductor.life
    lost.connection.close()
    sibling.await_one(Exit)
    sibling.ready(1)
    sibling.say(Failed(number=1, error="closed"))
    stage.begin(1)
    fresh = Worker(stage.conductor)
    fresh.ready(1)
    record = stage.await_record(state=NodeState.READY)
    assert record.life == life + 1
    assert stage.notebook.breaks == []


def test_a_crash_outside_the_round_breaks_nothing(stage: Stage) -> None:
    """A spare's worker dies: its own business."""
    stage.begin()
    spare = Worker(stage.conductor)
    spare.ready(1)
    stage.await_record(state=NodeState.READY)
    stage.see(4, members=(OTHER,))
    spare.connection.close()
    stage.await_record(state=NodeState.WARMING, life=1)
    assert stage.notebook.breaks == []


def test_a_spare_whose_worker_died_can_be_taken_in_without_a_break(stage: Stage) -> None:
    """It has left no round: what it shows must not look as if it had, or the planned change with it would be broken."""
    stage.begin()
    spare = Worker(stage.conductor)
    spare.ready(1)
    stage.await_record(state=NodeState.READY)
    document = stage.see(4, members=(OTHER,))
    spare.connection.close()
    stage.await_record(state=NodeState.WARMING, life=1)
    stage.begin()
    Worker(stage.conductor).ready(1)
    record = stage.await_record(state=NodeState.READY, life=1)
    following = stage.document(5, members=(OTHER, stage.member(first_rank=1)))
    scene = Scene(me="other").show(node("other", OTHER.create_revision), NodeView("me", KEY, KEY + 1, record))
    scene.adopt(document.model_copy(update={"state": RoundState.DRAINING, "next": following}))
    assert losses(scene.view()) == []


def test_the_end_of_a_life_leaves_word_of_how_far_it_came(stage: Stage) -> None:
    """Where nobody survives, the count of failures at one place rests on it."""
    worker = working(stage)
    worker.progress(1, 41)
    worker.progress(1, 42)
    eventually(lambda: len(stage.progress) == 2, "no progress")
    worker.connection.close()
    record = stage.await_break().record
    assert record.reached is not None
    assert record.reached.step == 42
    assert record.identity is None


def test_the_page_of_a_worker_that_died_says_more_than_its_last_report(stage: Stage) -> None:
    """Reports come at a bounded rate: counted from them, failures at step 3 would be failures "after step 1"."""
    worker = working(stage)
    worker.progress(1, 41)
    eventually(lambda: len(stage.progress) == 1, "no progress")
    stage.committed[os.getpid()] = (1, 43)  # by the connection, not by what it says
    worker.connection.close()
    record = stage.await_break().record
    assert record.reached is not None
    assert (record.reached.round, record.reached.step) == (1, 43)
    assert record.identity is None


def test_a_life_under_another_key_takes_no_part(stage: Stage) -> None:
    """The node has come back under a new key: the round means one that was replaced."""
    stage.begin()
    worker = Worker(stage.conductor)
    worker.ready(1)
    stage.await_record(state=NodeState.READY)
    old = stage.member()._replace(create_revision=KEY - 1)
    stage.see(3, members=(old, OTHER))
    assert worker.await_one(Over).number == 2
    assert not worker.of(Formation)
    worker.connection.close()
    stage.await_record(state=NodeState.WARMING)
    assert stage.notebook.breaks == []


def test_a_node_whose_workers_get_nowhere_joins_later_each_time(stage: Stage) -> None:
    """From the third such life on; a ready worker waits for the end of the back-off, then the node offers itself."""
    for life in (1, 2):
        worker = working(stage, life)
        worker.connection.close()
        stage.await_record(state=NodeState.WARMING, life=life)
    stage.begin()
    began = SYSTEM.monotonic()
    worker = Worker(stage.conductor)
    worker.ready(3)
    stage.await_record(state=NodeState.READY)
    assert SYSTEM.monotonic() - began > 0.5


# ---- leaving, progress, the end


def test_an_evicted_worker_makes_its_node_leave(stage: Stage) -> None:
    """By a planned change; when it has left by agreement nobody waits for its process."""
    worker = working(stage)
    worker.say(Evicted(reason="SIGTERM"))
    stage.await_record(state=NodeState.DRAINING)
    stage.see(1, RoundState.DRAINING, next=stage.document(2, members=(OTHER,)))
    assert worker.await_one(Drain).next is None
    worker.say(Leaving(status="stopped", step=5))
    record = stage.await_record(reported=3)
    assert (record.state, record.planned) == (NodeState.DRAINING, True)
    worker.connection.close()
    worker.ended.wait(LIMIT_S)
    assert stage.notebook.breaks == []


def test_a_node_that_lives_on_after_the_eviction_of_a_worker_joins_again(stage: Stage) -> None:
    """Somebody told one worker alone to go; torchrun starts another."""
    worker = working(stage)
    worker.say(Evicted(reason="SIGTERM"))
    stage.await_record(state=NodeState.DRAINING)
    worker.say(Leaving(status="stopped", step=5))
    worker.connection.close()
    stage.begin()
    fresh = Worker(stage.conductor)
    fresh.ready(1)
    stage.await_record(state=NodeState.READY)


def test_only_rank_0_reports_how_far_the_job_is(stage: Stage) -> None:
    """One writer; what others say is kept for this node alone."""
    stage.begin(2)
    workers = [Worker(stage.conductor, 0), Worker(stage.conductor, 1)]
    for worker in workers:
        worker.ready(1)
    stage.await_record(state=NodeState.READY)
    stage.see(1, members=(stage.member(0, 2), OTHER))
    workers[1].progress(1, 10)
    workers[0].progress(1, 11)
    eventually(lambda: [each.step for each in stage.progress] == [11], lambda: f"{stage.progress}")
    stage.see(1, members=(OTHER._replace(first_rank=0), stage.member(1, 2)))
    workers[0].progress(1, 12)
    workers[0].say(Failed(number=1, error="last"))
    stage.await_break()
    assert [each.step for each in stage.progress] == [11]


def test_a_node_whose_workers_are_done_is_finishing_and_no_failure(stage: Stage) -> None:
    """They have left the training; their processes may take a while, and their sockets close."""
    worker = working(stage)
    worker.say(Leaving(status="done", step=9))
    stage.await_record(state=NodeState.FINISHING)
    worker.connection.close()
    worker.ended.wait(LIMIT_S)
    stage.see(1, RoundState.BROKEN)
    stage.await_record(acknowledged=2, state=NodeState.FINISHING)
    assert stage.notebook.breaks == []


def test_no_agent_no_worker(stage: Stage) -> None:
    """When the conductor ends, its workers' connections close and its directory is gone."""
    stage.begin()
    worker = Worker(stage.conductor)
    worker.await_one(Welcome)
    stage.conductor.close()
    assert worker.ended.wait(LIMIT_S)
    assert not Path(stage.conductor.path).parent.exists()


# ---- suspicions


def test_a_suspicion_breaks_the_round_and_names_whom_this_node_does_not_reach(stage: Stage) -> None:
    """In one write. This node has not left the round: if the write comes too late, nothing has happened."""
    working(stage)
    document, workers = stage.conductor.at_work()
    assert document is not None
    assert len(workers) == 1
    suspects = (Ghost(node="other", mod_revision=9),)
    stage.conductor.accuse(document, suspects, "node other does not answer")
    told = stage.await_break()
    assert (told.number, told.suspects, told.cause) == (1, suspects, Cause.CONTACT_LOST)
    assert (told.record.unreachable, told.record.acknowledged) == (("other",), 1)


def test_a_suspicion_of_a_round_that_is_another_now_is_dropped(stage: Stage) -> None:
    """It may have been broken for the same reason by somebody else."""
    working(stage)
    document, _ = stage.conductor.at_work()
    assert document is not None
    stage.see(1, RoundState.BROKEN)
    stage.conductor.accuse(document, (Ghost(node="other", mod_revision=9),), "late")
    assert stage.notebook.breaks == []


def test_a_worker_that_stands_still_is_passed_over_until_it_is_free(stage: Stage) -> None:
    """Its node breaks the round once and says that nobody need wait for it; thawed, it comes back with its report."""
    worker = working(stage)
    _, (mine,) = stage.conductor.at_work()
    for _ in range(2):
        stage.conductor.pass_over(mine, "its process is stopped")
    told = stage.await_break()
    assert told.reason == "worker 0 of node me does not get on: its process is stopped"
    assert (told.record.stuck, told.record.acknowledged, told.record.reported) == (True, 2, 1)
    assert (told.cause, told.worker_failed, len(stage.notebook.breaks)) == (Cause.WORKER_HUNG, False, 1)
    stage.see(1, RoundState.BROKEN)
    worker.await_one(Over)
    worker.ready(2, step=7)
    assert stage.await_record(reported=2).stuck is False


def test_a_node_without_a_part_in_the_round_has_nobody_at_work(stage: Stage) -> None:
    """A newcomer waits for nobody, and nobody for it."""
    assert stage.conductor.at_work() == (None, [])
    working(stage)
    stage.see(2, members=(OTHER,))
    assert stage.conductor.at_work() == (None, [])
