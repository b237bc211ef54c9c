"""Scenes in which something is wrong: each names all alerts that fire in it, and no others may."""

from __future__ import annotations

from functools import partial

from elastic_trainer.telemetry import families
from tests.support.rulescenes.job import PlayedJob, Rank
from tests.support.rulescenes.scene import Fires, Scene, into

STALLED = Fires("Stalled", "critical")
BELOW = Fires("BelowMinNodes", "critical")
SLOW = Fires("RendezvousSlow", "warning")
LOOP = Fires("RestartLoop", "critical")
EXHAUSTING = Fires("RestartsExhausting", "warning")
FLAPPING = Fires("MembershipFlapping", "warning")
MISSING = Fires("RanksMissing", "warning")
STRAGGLER = Fires("Straggler", "warning")
GOODPUT = Fires("GoodputLow", "warning")
STALE = Fires("CheckpointStale", "critical")
FAILING = Fires("CheckpointFailing", "critical")
DAMAGED = Fires("CheckpointFailing", "warning")
NONFINITE = Fires("NonFiniteLoss", "critical")
FAILED = Fires("RunFailed", "critical")
STORE = Fires("StoreUnreachable", "critical")
STORE_OF_ALL = Fires("StoreUnreachable", "critical", of_run=False)
NO_MONITOR = Fires("MonitorDown", "warning", of_run=False)
UNWATCHED = Fires("MonitorDown", "warning")

STOPPED = Fires("RunStopped", "info")
LOST = Fires("NodesLost", "warning")
SPARES = Fires("SparesUsedUp", "warning")
SPACE = Fires("CheckpointSpaceLow", "warning")
NO_LEADER = Fires("EtcdNoLeader", "critical", of_run=False)
MEMBER_DOWN = Fires("EtcdMemberDown", "warning", of_run=False)
ETCD_SPACE = Fires("EtcdSpaceLow", "warning", of_run=False)
ETCD_SLOW = Fires("EtcdSlow", "warning", of_run=False)
SWITCH = Fires("DeadMansSwitch", "none", of_run=False)

FIRING: list[Scene] = []
"""All of them."""
_scene = partial(into, FIRING)


# ---- progress


@_scene("stalled", "no rank makes a step any more", 40, STALLED, not_before=25)
def _stall(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        for rank in job.ranks.values():
            rank.moves = False


@_scene(
    "stalled-slow-steps", "steps took four minutes, and end", 140, STALLED, not_before=96, step_s=240.0, interval_s=0.0
)
def _stall_slow_steps(job: PlayedJob, minute: float) -> None:
    if minute == 60:
        _stall(job, 20)


@_scene("never-a-step", "the first step does not end", 50, STALLED, not_before=30)
def _never_a_step(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.step = 0.0
        for rank in job.ranks.values():
            rank.moves, rank.step_s, rank.compute_s = False, 0.0, 0.0


@_scene("endless-evaluation", "an evaluation does not end", 120, STALLED, not_before=79)
def _endless_evaluation(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.all_in("evaluation")


@_scene("stalled-unseen", "nothing moves, and no endpoint of a node is reached", 70, STALLED, MISSING, not_before=4.5)
def _stall_unseen(job: PlayedJob, minute: float) -> None:
    job.hidden = set(job.nodes)
    if minute == 20:
        _stall(job, 20)


@_scene("never-a-round", "there are nodes enough, and no round comes", 60, SLOW, STALLED, not_before=5)
def _never_a_round(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.state, job.round, job.ranks, job.gathering_since, job.step = "gathering", 0, {}, 1.0, 0.0


@_scene("failed", "the run is closed as failed", 60, FAILED, not_before=19)
def _fails(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.close("failed")


@_scene(
    "failed-at-start",
    "a run is first seen when it has failed; its monitor is away for four minutes, and the run is opened an hour later",
    120,
    FAILED,
    not_before=19,
    lasts=(20.0, 79.0),
)
def _fails_unseen(job: PlayedJob, minute: float) -> None:
    job.exists = minute >= 20
    if minute == 20:
        job.close("failed")
    job.monitors[0].answers = not 30 <= minute < 34
    if minute == 90:
        job.regroup({"n0": "ready", "n1": "ready"}, reason="node_joined", fresh=True)


@_scene(
    "opened-and-unseen",
    "a failed run is opened after 20 minutes, and unseen for seven",
    60,
    FAILED,
    UNWATCHED,
    lasts=(20.0, 39.0),
)
def _opened_and_unseen(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.close("failed")
    if minute == 40:
        job.regroup({"n0": "ready", "n1": "ready"}, reason="node_joined", fresh=True)
    job.monitors[0].answers = not 43 <= minute < 50


# ---- membership


@_scene("too-few", "one node of at least two is left", 40, BELOW, SLOW, not_before=21.5)
def _too_few(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.state, job.nodes, job.ranks = "gathering", {"n0": "ready"}, {}
        job.gathering_since = job.now


@_scene("all-gone", "all nodes die at once", 40, BELOW, not_before=21.5)
def _all_gone(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.state, job.nodes, job.ranks = "gathering", {}, {}


@_scene("too-few-at-the-start", "the second node does not come", 40, BELOW, SLOW, not_before=5)
def _too_few_at_the_start(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        _never_a_round(job, 0)
        job.nodes = {"n0": "ready"}


@_scene("rank-unseen", "the endpoint of one node is not reached", 40, MISSING, not_before=24.5)
def _one_unseen(job: PlayedJob, minute: float) -> None:
    job.hidden = {"n2"} if minute >= 20 else set()


@_scene("ranks-unseen", "no endpoint is reached; what the store knows moves", 90, MISSING, not_before=24.5)
def _all_unseen(job: PlayedJob, minute: float) -> None:
    job.hidden = set(job.nodes) if minute >= 20 else set()


@_scene("restart-loop", "six rounds end by a crash in ten minutes", 60, LOOP, EXHAUSTING, not_before=25)
def _loop(job: PlayedJob, minute: float) -> None:
    if 20 <= minute < 32 and minute % 2 == 0:
        job.regroup(reason="worker_lost", fresh=True)


@_scene("restarts", "a worker hangs every half an hour", 200, EXHAUSTING, not_before=100)
def _failures(job: PlayedJob, minute: float) -> None:
    if 20 <= minute <= 140 and minute % 30 == 20:
        job.regroup(reason="worker_hung", fresh=True)


@_scene("flapping", "a node comes and goes", 80, FLAPPING, not_before=38)
def _flapping(job: PlayedJob, minute: float) -> None:
    if 20 <= minute < 50 and minute % 6 == 2:
        job.regroup({"n0": "ready", "n1": "ready"}, reason="node_left" if minute < 30 else "node_lost")
    if 20 <= minute < 50 and minute % 6 == 5:
        job.regroup({"n0": "ready", "n1": "ready", "n2": "ready"}, reason="node_joined")


# ---- speed


@_scene("straggler", "one rank computes twice as long", 60, STRAGGLER, not_before=29)
def _slow_rank(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.ranks[2].compute_s = 0.3


@_scene("wasteful", "three of four minutes are spent healing", 180, GOODPUT, not_before=120)
def _wasteful(job: PlayedJob, minute: float) -> None:
    if minute >= 90:
        job.all_in("healing" if minute % 4 >= 1 else "training")


@_scene("somewhat-wasteful", "three of ten minutes are spent waiting for data", 400, GOODPUT, not_before=360)
def _somewhat_wasteful(job: PlayedJob, minute: float) -> None:
    job.all_in("data" if minute % 10 >= 7 else "training")


# ---- checkpoints


@_scene("rare-saves-stop", "saves every quarter of an hour end", 120, STALE, not_before=60, interval_s=900.0)
@_scene("saves-stop", "nothing is saved any more", 60, STALE, not_before=26)
def _saves_stop(job: PlayedJob, minute: float) -> None:
    job.due_at = float("inf") if minute >= 20 else 0.0


@_scene("saves-stop-unseen", "the same, with no endpoint reached", 60, STALE, MISSING, not_before=4.5)
def _saves_stop_unseen(job: PlayedJob, minute: float) -> None:
    job.hidden = set(job.nodes)
    _saves_stop(job, minute)


@_scene("never-saved", "a job never saves", 120, STALE, not_before=59, interval_s=300.0)
def _never_saved(job: PlayedJob, minute: float) -> None:
    job.due_at = float("inf")


@_scene("saves-fail", "every save fails", 50, FAILING, STALE, not_before=22)
def _saves_fail(job: PlayedJob, minute: float) -> None:
    job.saves = minute < 20


@_scene("rare-save-fails", "one of two saves in an hour fails", 58, FAILING, not_before=29, interval_s=1800.0)
def _a_rare_save_fails(job: PlayedJob, minute: float) -> None:
    job.saves = not 30 <= minute < 30.5


@_scene("damaged", "a checkpoint cannot be loaded", 40, DAMAGED, not_before=19)
def _damaged(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.count(families.CHECKPOINTS, op="load", result="failed")


# ---- losses


@_scene("nan", "two losses are NaN", 50, NONFINITE, not_before=19)
def _nan(job: PlayedJob, minute: float) -> None:
    if minute in (20, 20.5):
        job.find_nonfinite(1)


@_scene("nan-kills", "all workers die of a NaN, twice", 50, NONFINITE, not_before=19)
def _nan_kills(job: PlayedJob, minute: float) -> None:
    if minute in (20, 20.5):  # the worker that found it was never scraped
        job.count(families.NONFINITE_LOSSES, 4)
        job.regroup(reason="worker_lost", fresh=True)


@_scene(
    "nan-unwatched", "a loss is NaN while there is no monitor", 40, NO_MONITOR, NONFINITE, not_before=14, alone=True
)
def _nan_unwatched(job: PlayedJob, minute: float) -> None:
    job.monitors[0].answers = minute < 10
    if minute == 20:
        job.find_nonfinite(1)


@_scene("nan-at-birth", "new processes count a NaN before they are first scraped", 50, NONFINITE, not_before=19)
def _nan_at_birth(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.regroup(reason="worker_lost", fresh=True)
        for number, rank in job.ranks.items():
            job.find_nonfinite(number)
            rank.node = rank.node.replace("n", "m")  # on other nodes
        job.nodes = {rank.node: "ready" for rank in job.ranks.values()}


# ---- etcd and the monitor


@_scene("node-without-etcd", "one node does not reach etcd", 40, STORE, not_before=21)
def _node_without_etcd(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.cut_off = {"n1": job.now}


@_scene("etcd-away", "nobody reaches etcd, and training goes on", 120, STORE, STORE_OF_ALL, not_before=21, alone=True)
def _etcd_away(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.cut_off = dict.fromkeys(job.nodes, job.now)
        job.monitors[0].reads = False


@_scene(
    "etcd-away-monitor-slow",
    "every other scrape of the monitor fails, too",
    60,
    STORE_OF_ALL,
    NO_MONITOR,
    not_before=21,
    alone=True,
)
def _etcd_away_monitor_slow(job: PlayedJob, minute: float) -> None:
    job.monitors[0].reads = minute < 20
    job.monitors[0].answers = minute < 20 or minute % 2 != 0


@_scene("monitor-gone", "the monitor does not come back", 90, NO_MONITOR, not_before=24, alone=True)
def _monitor_gone(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.monitors[0].answers = False


@_scene("run-unwatched", "the monitor does not know the run any more", 70, UNWATCHED, not_before=24)
def _run_unwatched(job: PlayedJob, minute: float) -> None:
    if minute == 20:  # the monitor answers without the run: perhaps it reads another etcd
        job.exists = False


@_scene("etcd-without-leader", "members of etcd have no leader", 40, NO_LEADER, not_before=22, alone=True)
def _no_leader(job: PlayedJob, minute: float) -> None:
    job.scrapes_etcd = True
    for member in job.etcd:
        member.leads = float(minute < 20)


@_scene("etcd-member-down", "one member of etcd is down", 40, MEMBER_DOWN, not_before=22, alone=True)
def _member_down(job: PlayedJob, minute: float) -> None:
    job.scrapes_etcd = True
    job.etcd[1].answers = minute < 20


@_scene("etcd-nearly-full", "etcd is near its quota", 40, ETCD_SPACE, not_before=24, alone=True)
def _etcd_fills_up(job: PlayedJob, minute: float) -> None:
    job.scrapes_etcd = True
    job.etcd[0].share = 0.1 if minute < 20 else 0.85


@_scene("etcd-slow", "the disk of an etcd is slow", 60, ETCD_SLOW, not_before=29, alone=True)
def _etcd_slow(job: PlayedJob, minute: float) -> None:
    job.scrapes_etcd = True
    job.etcd[2].slow_syncs = 0.0 if minute < 20 else 5.0


@_scene("alive", "all is well, and the dead man's switch says so", 20, SWITCH, alone=True)
def _alive(job: PlayedJob, minute: float) -> None:
    """Train."""


# ---- nodes and space that are missed


@_scene("stopped", "a run is stopped on request, and nobody takes it up", 560, STOPPED, not_before=480)
def _stopped(job: PlayedJob, minute: float) -> None:
    if minute == 5:
        job.state, job.nodes, job.ranks = "stopped", {}, {}


@_scene("abandoned", "the last node gives up", 60, BELOW, LOST, not_before=21.5)
def _abandoned(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.state, job.nodes, job.ranks, job.lost = "gathering", {"n0": "ready"}, {}, 3
    if minute == 30:
        job.state, job.nodes = "abandoned", {}


@_scene("nodes-lost", "two of four nodes are lost and none comes", 60, LOST, not_before=34)
def _nodes_lost(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.regroup({"n0": "ready", "n1": "ready"}, reason="node_lost")
        job.lost = 2


@_scene("spares-used-up", "the spare node replaces a lost one", 60, SPARES, not_before=29)
def _spares_used_up(job: PlayedJob, minute: float) -> None:
    if minute == 5:
        job.nodes["n4"] = "ready"
        job.ranks[4] = Rank("n4", phase="waiting", last_step=job.now, step_s=0.0, compute_s=0.0)
        job.passive = {4}
    if minute == 20:
        job.passive = set()
        job.regroup({"n0": "ready", "n1": "ready", "n2": "ready", "n4": "ready"}, reason="node_lost")


@_scene("disk-fills-up", "there is room for four checkpoints", 60, SPACE, not_before=24)
def _disk_fills_up(job: PlayedJob, minute: float) -> None:
    job.free_bytes = 100e9 if minute < 20 else 4e9


@_scene(
    "too-few-and-etcd-away",
    "etcd is away while too few nodes are left: that alert goes on, and is not sent anew",
    60,
    BELOW,
    SLOW,
    STORE_OF_ALL,
    not_before=21.5,
    alone=True,
    lasts=(25.0, 55.0),
)
def _too_few_and_etcd_away(job: PlayedJob, minute: float) -> None:
    _too_few(job, minute)
    job.monitors[0].reads = not 30 <= minute < 40


@_scene(
    "failed-and-etcd-away", "etcd is away after a run has failed", 60, FAILED, STORE_OF_ALL, alone=True, lasts=(25, 55)
)
def _failed_and_etcd_away(job: PlayedJob, minute: float) -> None:
    _fails(job, minute)
    job.monitors[0].reads = not 30 <= minute < 40
