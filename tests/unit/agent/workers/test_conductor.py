"""The conductor: what workers say reaches the run, and the run's decisions reach the workers."""

from __future__ import annotations

import pytest

from elastic_trainer.agent.workers.conductor import ENOUGH_STEPS, LONGEST_S, Backoff, FalseStart
from elastic_trainer.ipc.channel import Drain, Evicted, Exit, Failed, Formation, Identity, Leaving, Over, Ready, Welcome
from elastic_trainer.membership.documents import NodeState, RoundState
from elastic_trainer.model import Cause
from tests.unit.agent.stage import OTHER, Stage, Worker
from tests.unit.membership.scenes import node

SUSPECTS = (node("other", 5, mod=9).ghost,)


@pytest.fixture
def stage() -> Stage:
    return Stage()


# ---- meeting


def test_a_worker_is_welcomed_and_the_node_is_ready_when_all_are(stage: Stage) -> None:
    """A node of two workers shows itself ready, with the newest state, when both are free."""
    stage.begin(2)
    assert stage.record().state is NodeState.WARMING
    assert not stage.conductor.met.is_set()
    first, second = Worker(stage, 0), Worker(stage, 1)
    assert first.one(Welcome) == Welcome(run="run", node="me")
    assert stage.conductor.met.is_set()
    first.ready(1)
    assert stage.record().state is NodeState.WARMING
    second.ready(1, step=9, epoch=1, samples=64, batch=32)
    assert (stage.record().state, stage.record().reported, stage.record().acknowledged) == (NodeState.READY, 1, 1)
    assert stage.record().identity == Identity(round=0, step=9, epoch=1, samples=64, batch=32)
    again = Worker(stage, 1)  # a second worker of one rank is sent away
    assert again.seat is None
    assert again.one(Exit).code != 0


def test_what_ended_a_life_stays_in_the_record_of_the_next(stage: Stage) -> None:
    """Peers may break the round before this agent does, and whoever forms the next one has to know all the same."""
    worker = stage.working()
    stage.hung[worker.pid] = "it stood still"
    worker.die()
    assert stage.only_break.record.ended_by is Cause.WORKER_HUNG
    stage.begin()
    assert stage.record().ended_by is Cause.WORKER_HUNG
    again = Worker(stage)
    again.ready(2)
    assert stage.record().ended_by is Cause.WORKER_HUNG
    again.die()
    assert stage.record().ended_by is Cause.WORKER_LOST


# ---- rounds come and go


def test_the_end_of_a_round_is_sent_once_and_acknowledged_at_once(stage: Stage) -> None:
    worker = stage.working()
    broken = stage.see(1, RoundState.BROKEN, reason="node other is gone")
    assert (stage.record().acknowledged, stage.record().reported) == (2, 1)
    stage.conductor.see(broken)
    assert worker.one(Over) == Over(number=1, reason="node other is gone")
    worker.ready(2, step=5)
    assert (stage.record().reported, stage.record().state) == (2, NodeState.READY)
    stage.see(2)
    assert [each.number for each in worker.of(Formation)] == [1, 2]


def test_a_planned_change_is_sent_with_the_place_behind_it(stage: Stage) -> None:
    """Members get their new rank with the news; the formed round then says nothing new to them."""
    worker = stage.working()
    following = stage.document(2, members=(OTHER, stage.member(first_rank=1)))
    stage.see(1, RoundState.DRAINING, next=following, reason="node new joins")
    drain = worker.one(Drain)
    assert drain.next is not None
    assert (drain.number, drain.waits, drain.next.number, drain.next.rank) == (1, False, 2, 1)
    worker.ready(2, step=8, planned=True)
    assert (stage.record().reported, stage.record().planned) == (2, True)
    stage.conductor.see(following)
    stage.see(2, RoundState.BROKEN)
    assert worker.of(Over)[-1].number == 2
    assert [len(worker.of(kind)) for kind in (Formation, Drain)] == [1, 1]


# ---- failures


def test_a_failed_collective_breaks_the_round_if_it_is_still_on(stage: Stage) -> None:
    """Named with what failed, in one write with the acknowledgement; old news are none. A step that is given up is no
    lost contact."""
    worker = stage.working(3)
    worker.say(Failed(number=2, error="late"))
    worker.say(Failed(number=3, error="Connection closed by peer"))
    failure, record = stage.only_break
    assert (failure.number, failure.worker_failed) == (3, False)
    assert failure.reason == "node me lost contact with a peer (Connection closed by peer)"
    assert (record.acknowledged, record.planned) == (4, False)
    stage.see(3, RoundState.BROKEN)
    worker.say(Failed(number=3, error="again"))
    assert len(stage.notebook.breaks) == 1
    stage.see(4)
    worker.say(Failed(number=4, error="rank 1 ran out of memory in step 5", given_up=True))
    failure = stage.notebook.breaks[-1].failure
    assert (failure.cause, failure.reason) == (Cause.STEP_GIVEN_UP, "rank 1 ran out of memory in step 5")


def test_siblings_of_a_lost_worker_have_to_exit_and_the_round_is_broken(stage: Stage) -> None:
    """The failure domain is the node. A sibling may still have things to say: they count for nothing, and the next
    life begins."""
    stage.begin(2)
    lost, sibling = Worker(stage, 1), Worker(stage, 0)
    for worker in (lost, sibling):
        worker.ready(1)
    stage.see(1, members=(stage.member(0, 2), OTHER))
    life = stage.conductor.life
    for _ in range(2):  # its socket, and the mutex that it held
        lost.die()
    assert (sibling.one(Exit).code, sibling.one(Exit).reason) == (1, "its worker 1 was lost")
    failure, record = stage.only_break
    assert (failure.worker_failed, failure.reason) == (True, "node me left the round: its worker 1 was lost")
    assert (record.state, record.life) == (NodeState.WARMING, life + 1)
    sibling.ready(1)
    sibling.say(Failed(number=1, error="closed"))
    stage.begin(1)
    Worker(stage).ready(1)
    assert (stage.record().state, stage.record().life) == (NodeState.READY, life + 1)
    assert len(stage.notebook.breaks) == 1


def test_a_spare_begins_anew_at_another_place_and_a_member_does_not(stage: Stage) -> None:
    """Its workers exit, its next life shows the new slot, and they did not fail: there is no back-off."""
    stage.begin()
    assert stage.conductor.record_at(0).shard_slot == 0
    worker = Worker(stage)
    worker.ready(1)
    stage.see(1)
    stage.conductor.restart_workers("needed elsewhere")
    assert (worker.of(Exit), stage.record().shard_slot) == ([], 0)
    stage.see(2, members=(OTHER,))
    worker.ready(3)
    for _ in range(5):
        stage.conductor.restart_workers("needed elsewhere")
        assert stage.notebook.breaks == []
        stage.begin()
        assert (stage.conductor.record_at(1).shard_slot, stage.record().cause) == (1, "")
        worker = Worker(stage)
        worker.ready(3)
        assert stage.record().state is NodeState.READY


def test_a_node_has_met_the_rounds_that_all_its_workers_have(stage: Stage) -> None:
    """A round ended while its ranks came to one state: one worker had met in it, the other not."""
    stage.begin(2)
    for rank, met in enumerate((("two", "one"), ("one", "none"))):
        Worker(stage, rank).say(Ready(number=3, met=met))
    assert stage.record().met == ("one",)


def test_a_member_left_behind_in_a_call_begins_anew_and_one_between_two_steps_waits(stage: Stage) -> None:
    """The others make the call without it, and are elsewhere in the script when it could join them. While its worker is
    still in the old round nothing is known; what it said of an earlier round does not count."""
    worker = stage.working()
    stage.see(1, RoundState.BROKEN)
    worker.say(Ready(number=2, joinable=False, in_call=True))
    stage.see(2)
    for number, in_call in ((3, False), (4, True)):
        stage.see(number - 1, RoundState.BROKEN)
        stage.see(number, members=(OTHER,))
        assert (worker.of(Exit), stage.record().life) == ([], 0)
        worker.say(Ready(number=number, joinable=False, in_call=in_call))
        if not in_call:
            assert stage.record().state is NodeState.READY
            stage.see(number)
    assert worker.one(Exit).reason == "round 4 was formed without it in the middle of a call"
    assert (stage.record().state, stage.record().life) == (NodeState.WARMING, 1)
    assert stage.notebook.breaks == []


def test_a_worker_that_was_left_behind_begins_anew_before_anybody_counts_on_it(stage: Stage) -> None:
    """It says so itself, where ranks compare what they have met. Its record never says that it is ready, and the run
    counts no failure."""
    worker = stage.working()
    stage.see(1, RoundState.BROKEN)
    records = len(stage.notebook.records)
    worker.say(Ready(number=2, joinable=False, left_behind=True))
    assert worker.one(Exit).reason == "the others have gone on from where its script is"
    assert {(each.state, each.ended_by) for each in stage.notebook.records[records:]} == {(NodeState.WARMING, None)}
    assert not any(each.failure.worker_failed for each in stage.notebook.breaks)


@pytest.mark.parametrize("page", [None, (1, 43)])
def test_the_end_of_a_life_leaves_word_of_how_far_it_came(stage: Stage, page: tuple[int, int] | None) -> None:
    """Where nobody survives, the count of failures at one point rests on it. Reports come at a bounded rate: the page
    of the worker says more than the last one."""
    worker = stage.working()
    worker.progress(1, 41)
    worker.progress(1, 42)
    if page is not None:
        stage.committed[worker.pid] = page
    worker.die()
    record = stage.only_break.record
    assert record.reached is not None
    assert (record.reached.round, record.reached.step) == (1, 42 if page is None else 43)
    assert record.identity is None


def test_a_node_whose_workers_get_nowhere_joins_later_each_time(stage: Stage) -> None:
    """From the third such life on; a ready worker waits for the end of the back-off, then the node offers itself."""
    for life in (1, 2):
        stage.working(life).die()
    stage.begin()
    Worker(stage).ready(3)
    stage.run_for(0.9)
    assert stage.record().state is NodeState.WARMING
    stage.run_for(0.2)
    assert stage.record().state is NodeState.READY


def test_the_pause_of_such_a_node_doubles_up_to_a_limit_until_it_gets_somewhere() -> None:
    def after(*lives: int) -> Backoff:
        backoff = Backoff()
        for steps in lives:
            backoff = backoff.after(steps)
        return backoff

    assert [after(*[0] * count).back_off_s() for count in range(8)] == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert after(*[0] * 5000).back_off_s() == LONGEST_S
    assert after(0, ENOUGH_STEPS - 1).count == 2
    assert after(0, 0, ENOUGH_STEPS) == Backoff()


# ---- leaving, progress, the end


def test_a_failure_at_startup_stays_in_the_record_until_a_worker_opens_a_session(stage: Stage) -> None:
    """Also behind the end of the back-off: another node may fail in the same way more than a second later."""
    for life in (1, 2):
        stage.working(life).die()
    stage.notebook.announce(stage.conductor.begin(1, start=FalseStart("exit code 1", 2)))
    before = len(stage.notebook.records)
    stage.run_for(1.1)
    assert len(stage.notebook.records) > before
    assert (stage.record().false_start, stage.record().false_starts) == ("exit code 1", 2)
    Worker(stage).ready(3)
    assert (stage.record().false_start, stage.record().false_starts) == ("", 0)


def test_an_evicted_worker_makes_its_node_leave(stage: Stage) -> None:
    """By a planned change; when it has left by agreement nobody waits for its process."""
    worker = stage.working()
    worker.say(Evicted(reason="SIGTERM"))
    assert stage.record().state is NodeState.DRAINING
    stage.see(1, RoundState.DRAINING, next=stage.document(2, members=(OTHER,)))
    assert worker.one(Drain).next is None
    worker.say(Leaving(status="stopped", step=5))
    assert (stage.record().reported, stage.record().state, stage.record().planned) == (3, NodeState.DRAINING, True)
    worker.die()
    assert stage.notebook.breaks == []


def test_only_rank_0_reports_how_far_the_job_is(stage: Stage) -> None:
    stage.begin(2)
    workers = [Worker(stage, 0), Worker(stage, 1)]
    for worker in workers:
        worker.ready(1)
    stage.see(1, members=(stage.member(0, 2), OTHER))
    workers[1].progress(1, 10)
    workers[0].progress(1, 11)
    stage.see(1, members=(OTHER._replace(first_rank=0), stage.member(1, 2)))
    workers[0].progress(1, 12)
    assert [each.step for each in stage.progress] == [11]


def test_a_node_whose_workers_are_done_is_finishing_and_no_failure(stage: Stage) -> None:
    """They have left the training; their processes may take a while, and their sockets close."""
    worker = stage.working()
    worker.say(Leaving(status="done", step=9))
    assert (stage.record().state, stage.record().passed) == (NodeState.FINISHING, True)
    worker.die()
    stage.see(1, RoundState.BROKEN)
    assert (stage.record().acknowledged, stage.record().state) == (2, NodeState.FINISHING)
    assert stage.notebook.breaks == []


def test_no_agent_no_worker(stage: Stage) -> None:
    worker = stage.working()
    stage.conductor.close()
    assert not worker.connected


# ---- suspicions


def test_a_suspicion_breaks_the_round_and_names_whom_this_node_does_not_reach(stage: Stage) -> None:
    """In one write. This node has not left the round: if the write comes too late, nothing has happened."""
    stage.working()
    document, workers = stage.conductor.at_work()
    assert document is not None
    assert len(workers) == 1
    stage.conductor.suspect(document, SUSPECTS, "node other does not answer")
    failure, record = stage.only_break
    assert (failure.number, failure.suspects, failure.cause) == (1, SUSPECTS, Cause.CONTACT_LOST)
    assert (record.unreachable, record.acknowledged) == (("other",), 1)


def test_a_worker_that_stands_still_is_excluded_until_it_is_free(stage: Stage) -> None:
    """Its node breaks the round once and says that nobody need wait for it; thawed, it comes back with its report."""
    worker = stage.working()
    _, (mine,) = stage.conductor.at_work()
    for _ in range(2):
        stage.conductor.exclude(mine, "its process is stopped")
    failure, record = stage.only_break
    assert failure.reason == "worker 0 of node me hangs: its process is stopped"
    assert (record.stuck, record.acknowledged, record.reported) == (True, 2, 1)
    assert (failure.cause, failure.worker_failed) == (Cause.WORKER_HUNG, False)
    stage.see(1, RoundState.BROKEN)
    worker.ready(2, step=7)
    assert (stage.record().reported, stage.record().stuck) == (2, False)
