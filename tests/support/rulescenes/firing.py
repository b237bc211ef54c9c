"""Scenes in which something is wrong: each names all alerts that fire in it, and no others may."""

from __future__ import annotations

from elastic_trainer.telemetry import families
from tests.support.rulescenes.job import PlayedJob
from tests.support.rulescenes.scene import Scene

STALLED = ("ElasticTrainerStalled", "critical", "a")
BELOW = ("ElasticTrainerBelowMinNodes", "critical", "a")
SLOW = ("ElasticTrainerRendezvousSlow", "warning", "a")
LOOP = ("ElasticTrainerRestartLoop", "critical", "a")
EXHAUSTING = ("ElasticTrainerRestartsExhausting", "warning", "a")
FLAPPING = ("ElasticTrainerMembershipFlapping", "warning", "a")
MISSING = ("ElasticTrainerRanksMissing", "warning", "a")
STRAGGLER = ("ElasticTrainerStraggler", "warning", "a")
GOODPUT = ("ElasticTrainerGoodputLow", "warning", "a")
STALE = ("ElasticTrainerCheckpointStale", "critical", "a")
FAILING = ("ElasticTrainerCheckpointFailing", "critical", "a")
DAMAGED = ("ElasticTrainerCheckpointFailing", "warning", "a")
NONFINITE = ("ElasticTrainerNonFiniteLoss", "critical", "a")
FAILED = ("ElasticTrainerRunFailed", "critical", "a")
STORE = ("ElasticTrainerStoreUnreachable", "critical", "a")
MONITOR_STORE = ("ElasticTrainerStoreUnreachable", "critical", "")
NO_MONITOR = ("ElasticTrainerMonitorDown", "warning", "")
UNWATCHED = ("ElasticTrainerMonitorDown", "warning", "a")


def _stall(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        for rank in job.ranks.values():
            rank.moves = False


def _stall_slow_steps(job: PlayedJob, minute: float) -> None:
    if minute == 60:
        _stall(job, 20)


def _never_a_step(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.step = 0.0
        for rank in job.ranks.values():
            rank.moves, rank.step_s, rank.compute_s = False, 0.0, 0.0


def _endless_evaluation(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.all_in("evaluation")


def _stall_unseen(job: PlayedJob, minute: float) -> None:
    job.hidden = set(job.nodes)
    if minute == 20:
        _stall(job, 20)


def _never_a_round(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.state, job.round, job.ranks, job.gathering_since, job.step = "gathering", 0, {}, 1.0, 0.0


def _too_few(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.state, job.nodes, job.ranks = "gathering", {"n0": "ready"}, {}
        job.gathering_since = job.now


def _all_gone(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.state, job.nodes, job.ranks = "gathering", {}, {}


def _too_few_at_the_start(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        _never_a_round(job, 0)
        job.nodes = {"n0": "ready"}


def _one_unseen(job: PlayedJob, minute: float) -> None:
    job.hidden = {"n2"} if minute >= 20 else set()


def _all_unseen(job: PlayedJob, minute: float) -> None:
    job.hidden = set(job.nodes) if minute >= 20 else set()


def _loop(job: PlayedJob, minute: float) -> None:
    if 20 <= minute < 32 and minute % 2 == 0:
        job.regroup(reason="worker_lost", fresh=True)


def _failures(job: PlayedJob, minute: float) -> None:
    if 20 <= minute <= 140 and minute % 30 == 20:
        job.regroup(reason="worker_hung", fresh=True)


def _flapping(job: PlayedJob, minute: float) -> None:
    if 20 <= minute < 50 and minute % 6 == 2:
        job.regroup({"n0": "ready", "n1": "ready"}, reason="node_left" if minute < 30 else "node_lost")
    if 20 <= minute < 50 and minute % 6 == 5:
        job.regroup({"n0": "ready", "n1": "ready", "n2": "ready"}, reason="node_joined")


def _slow_rank(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.ranks[2].compute_s = 0.3


def _saves_stop(job: PlayedJob, minute: float) -> None:
    job.due_at = float("inf") if minute >= 20 else 0.0


def _never_saved(job: PlayedJob, minute: float) -> None:
    job.due_at = float("inf")


def _saves_stop_unseen(job: PlayedJob, minute: float) -> None:
    job.hidden = set(job.nodes)
    _saves_stop(job, minute)


def _seldom_saves_stop() -> PlayedJob:
    job = PlayedJob()
    job.interval_s = 900.0
    return job


def _saves_fail(job: PlayedJob, minute: float) -> None:
    job.saves = minute < 20


def _a_rare_save_fails(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.interval_s = 1800.0
    job.saves = not 30 <= minute < 30.5


def _damaged(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.count(families.CHECKPOINTS, op="load", result="failed")


def _nan(job: PlayedJob, minute: float) -> None:
    if minute in (20, 20.5):
        job.find_nonfinite(1)


def _nan_kills(job: PlayedJob, minute: float) -> None:
    if minute in (20, 20.5):  # nobody has looked at the worker that found it
        job.count(families.NONFINITE_LOSSES, 4)
        job.regroup(reason="worker_lost", fresh=True)


def _nan_unwatched(job: PlayedJob, minute: float) -> None:
    job.monitors[0].answers = minute < 10
    if minute == 20:
        job.find_nonfinite(1)


def _nan_at_birth(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.regroup(reason="worker_lost", fresh=True)
        for number, rank in job.ranks.items():
            job.find_nonfinite(number)
            rank.node = rank.node.replace("n", "m")  # on other nodes
        job.nodes = {rank.node: "ready" for rank in job.ranks.values()}


def _fails(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.close("failed")


def _wasteful(job: PlayedJob, minute: float) -> None:
    if minute >= 90:
        job.all_in("healing" if minute % 4 >= 1 else "training")


def _somewhat_wasteful(job: PlayedJob, minute: float) -> None:
    job.all_in("data" if minute % 10 >= 7 else "training")


def _node_without_etcd(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.cut_off = {"n1": job.now}


def _etcd_away(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.cut_off = dict.fromkeys(job.nodes, job.now)
        job.monitors[0].reads = False


def _monitor_gone(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.monitors[0].answers = False


def _run_unwatched(job: PlayedJob, minute: float) -> None:
    if minute == 20:  # the monitor answers, and knows nothing of the run: that of another etcd, perhaps
        job.exists = False


FIRING = (
    Scene("stalled", "no rank makes a step any more", 40, _stall, fires=(STALLED,), not_before=25),
    Scene(
        "stalled-slow-steps",
        "steps took four minutes, and end",
        140,
        _stall_slow_steps,
        lambda: _slow(),
        fires=(STALLED,),
        not_before=96,
    ),
    Scene("never-a-step", "the first step does not end", 50, _never_a_step, fires=(STALLED,), not_before=30),
    Scene(
        "endless-evaluation", "an evaluation does not end", 120, _endless_evaluation, fires=(STALLED,), not_before=79
    ),
    Scene(
        "stalled-unseen",
        "nothing moves, and no endpoint of a node is reached",
        70,
        _stall_unseen,
        fires=(STALLED, MISSING),
        not_before=4.5,
    ),
    Scene(
        "never-a-round",
        "there are nodes enough, and no round comes",
        60,
        _never_a_round,
        fires=(SLOW, STALLED),
        not_before=5,
    ),
    Scene("too-few", "one node of at least two is left", 40, _too_few, fires=(BELOW, SLOW), not_before=21.5),
    Scene("all-gone", "all nodes die at once", 40, _all_gone, fires=(BELOW,), not_before=21.5),
    Scene(
        "too-few-at-the-start",
        "the second node does not come",
        40,
        _too_few_at_the_start,
        fires=(BELOW, SLOW),
        not_before=5,
    ),
    Scene("rank-unseen", "the endpoint of one node is not reached", 40, _one_unseen, fires=(MISSING,), not_before=24.5),
    Scene(
        "ranks-unseen",
        "no endpoint is reached; what the store knows moves",
        90,
        _all_unseen,
        fires=(MISSING,),
        not_before=24.5,
    ),
    Scene(
        "restart-loop", "six rounds end by a crash in ten minutes", 60, _loop, fires=(LOOP, EXHAUSTING), not_before=25
    ),
    Scene("restarts", "a worker hangs every half an hour", 200, _failures, fires=(EXHAUSTING,), not_before=100),
    Scene("flapping", "a node comes and goes", 80, _flapping, fires=(FLAPPING,), not_before=38),
    Scene("straggler", "one rank computes twice as long", 60, _slow_rank, fires=(STRAGGLER,), not_before=29),
    Scene("saves-stop", "nothing is saved any more", 60, _saves_stop, fires=(STALE,), not_before=26),
    Scene(
        "saves-stop-unseen",
        "the same, with no endpoint reached",
        60,
        _saves_stop_unseen,
        fires=(STALE, MISSING),
        not_before=4.5,
    ),
    Scene(
        "rare-saves-stop",
        "saves every quarter of an hour end",
        120,
        _saves_stop,
        _seldom_saves_stop,
        fires=(STALE,),
        not_before=60,
    ),
    Scene("never-saved", "a job never saves", 120, _never_saved, lambda: _unsaved(), fires=(STALE,), not_before=59),
    Scene("saves-fail", "every save fails", 50, _saves_fail, fires=(FAILING, STALE), not_before=22),
    Scene(
        "rare-save-fails", "one of two saves in an hour fails", 58, _a_rare_save_fails, fires=(FAILING,), not_before=29
    ),
    Scene("damaged", "a checkpoint cannot be loaded", 40, _damaged, fires=(DAMAGED,), not_before=19),
    Scene("nan", "two losses are NaN", 50, _nan, fires=(NONFINITE,), not_before=19),
    Scene("nan-kills", "all workers die of a NaN, twice", 50, _nan_kills, fires=(NONFINITE,), not_before=19),
    Scene(
        "nan-unwatched",
        "a loss is NaN while there is no monitor",
        50,
        _nan_unwatched,
        fires=(NO_MONITOR, NONFINITE),
        not_before=14,
    ),
    Scene(
        "nan-at-birth",
        "new processes count a NaN before they are first scraped",
        50,
        _nan_at_birth,
        fires=(NONFINITE,),
        not_before=19,
    ),
    Scene("failed", "the run is closed as failed", 60, _fails, fires=(FAILED,), not_before=19),
    Scene("wasteful", "three of four minutes are spent healing", 180, _wasteful, fires=(GOODPUT,), not_before=120),
    Scene(
        "somewhat-wasteful",
        "three of ten minutes are spent waiting for data",
        420,
        _somewhat_wasteful,
        fires=(GOODPUT,),
        not_before=360,
    ),
    Scene("node-without-etcd", "one node does not reach etcd", 40, _node_without_etcd, fires=(STORE,), not_before=21),
    Scene(
        "etcd-away",
        "nobody reaches etcd, and training goes on",
        120,
        _etcd_away,
        fires=(STORE, MONITOR_STORE),
        not_before=21,
    ),
    Scene("monitor-gone", "the monitor does not come back", 90, _monitor_gone, fires=(NO_MONITOR,), not_before=24),
    Scene(
        "run-unwatched",
        "the monitor does not know the run any more",
        70,
        _run_unwatched,
        fires=(UNWATCHED,),
        not_before=24,
    ),
)
"""All of them."""


def _slow() -> PlayedJob:
    job = PlayedJob(step_s=240.0)
    job.interval_s = 0.0
    return job


def _unsaved() -> PlayedJob:
    job = PlayedJob()
    job.interval_s, job.saved_at = 300.0, 0.0
    return job
