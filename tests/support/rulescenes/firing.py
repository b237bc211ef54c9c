"""Scenes in which no alert may fire, and scenes in which something is wrong: each names all alerts that fire in it."""

from __future__ import annotations

from functools import partial

from elastic_trainer.telemetry import families
from tests.support.rulescenes.scene import Fires, Monitor, PlayedJob, Rank, Scene, into

SILENT: list[Scene] = []
"""All of them."""
_silent = partial(into, SILENT)


# ---- planned changes


@_silent("scale-down", "two of four nodes are drained as planned", 60)
def _scale_down(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.state = "changing"
        job.nodes |= {"n2": "draining", "n3": "draining"}
    if minute == 20.5:  # the monitor knows the new round, Prometheus has not scraped the nodes since
        job.regroup({"n0": "ready", "n1": "ready"}, reason="node_left")
        job.ranks |= {number: Rank(f"n{number}", phase="ending", last_step=job.now) for number in (2, 3)}
        job.passive = {2, 3}
    if minute == 21:
        job.ranks = {number: rank for number, rank in job.ranks.items() if number < 2}
        job.passive = set()


@_silent("handover", "the node of rank 0 is drained, and another becomes rank 0", 60)
def _handover(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.state, job.nodes["n0"] = "changing", "draining"
    if minute == 20.5:
        job.regroup({"n1": "ready", "n2": "ready", "n3": "ready"}, reason="node_left")
        job.ranks[3] = Rank("n0", phase="ending", last_step=job.now)  # it goes a moment later
        job.passive = {3}
    if minute == 21:
        del job.ranks[3]
        job.passive = set()


@_silent("join", "a third node joins, and compiles for ten minutes in its first step", 60, nodes=2)
def _join(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.nodes["n2"] = "warming"
    if minute == 23:
        job.state, job.nodes["n2"] = "changing", "ready"
    if minute == 23.5:
        job.regroup({"n0": "ready", "n1": "ready", "n2": "ready"}, reason="node_joined")
    if 23.5 <= minute < 33:  # the newcomer compiles in its first step, and all wait for it
        job.ranks[2].moves = False
    if minute == 33:
        job.ranks[2].moves = True


@_silent("scale-up", "five nodes join one after another", 60, bounds=(2, 9))
def _scaling_up(job: PlayedJob, minute: float) -> None:
    if minute in (10, 12, 14, 16, 18):
        job.nodes = {f"n{number}": "ready" for number in range(len(job.nodes) + 1)}
        job.regroup(reason="node_joined")


@_silent("spare", "a spare node waits above the maximum all the time", 60)
def _waiting_spare(job: PlayedJob, minute: float) -> None:
    if minute == 5:
        job.nodes["n4"] = "ready"
        job.ranks[4] = Rank("n4", phase="waiting", last_step=job.now, step_s=0.0, compute_s=0.0)
        job.passive = {4}


@_silent("late-nodes", "the second node comes four minutes after the first, before the first round", 60)
def _late_nodes(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.state, job.round, job.nodes, job.ranks, job.gathering_since = "gathering", 0, {"n0": "ready"}, {}, 1.0
        job.step = job.saved_at = 0
    if minute == 4:
        job.regroup({"n0": "ready", "n1": "ready"}, reason="node_joined", fresh=True)


# ---- ends and pauses


@_silent("scaled-to-zero", "a run is stopped on request, and its nodes come back one by one, an hour later", 120)
def _scaled_to_zero(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.state, job.nodes, job.ranks = "stopped", {}, {}
    if minute == 80:
        job.state, job.nodes, job.gathering_since = "gathering", {"n0": "ready"}, job.now
    if minute == 84:
        job.regroup({"n0": "ready", "n1": "ready", "n2": "ready", "n3": "ready"}, reason="node_joined", fresh=True)


@_silent("old-nan", "a NaN of long ago gets another rank by a handover, and the run ends", 90)
def _old_nan(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.find_nonfinite(2, 3)
    _handover(job, minute)
    if minute == 60:
        job.close("succeeded")


@_silent("end", "ranks end for a quarter of an hour, one by one, and the run succeeds and is forgotten", 90)
def _normal_end(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.all_in("ending")
        job.nodes = dict.fromkeys(job.nodes, "finishing")
    if minute == 30:
        job.nodes |= {"n1": "done", "n2": "done", "n3": "done"}
        job.ranks = {0: job.ranks[0]}
    if minute == 36:
        job.close("succeeded")
    if minute == 60:
        job.exists = False


@_silent("failed-long-ago", "etcd comes with a run that failed two hours before, and the monitor is started anew", 60)
def _failed_long_ago(job: PlayedJob, minute: float) -> None:
    job.exists = minute >= 10
    if minute == 10:
        job.close("failed")
        job.ended_at -= 7200.0
    job.monitors[0].answers = not 30 <= minute < 34


@_silent("given-up", "a run was stopped long ago, and nobody has taken it up again", 60)
def _given_up(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.state, job.nodes, job.ranks, job.gathering_since = "gathering", {}, {}, 1.0


@_silent(
    "after-a-pause", "a job that saves every hour goes on from a checkpoint of three hours ago", 220, interval_s=3600.0
)
def _after_a_pause(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.saved_at = 1.0
    if minute == 10:
        job.close("succeeded")
    if minute == 190:  # the run is extended by more epochs
        job.regroup({"n0": "ready", "n1": "ready"}, reason="node_joined")
        job.due_at = job.now + 3600.0


@_silent("no-session", "a script without a Session trains for two hours: nobody knows its steps", 120, interval_s=0.0)
def _no_session(job: PlayedJob, minute: float) -> None:
    job.sessions = False
    if minute == 60:
        job.regroup({"n0": "ready", "n1": "ready"}, reason="node_lost", fresh=True)


# ---- what takes long


@_silent("compile", "the first step takes 25 minutes", 60)
def _slow_compile(job: PlayedJob, minute: float) -> None:
    for rank in job.ranks.values():
        rank.moves = minute >= 25
        if minute == 0:
            rank.step_s, rank.compute_s = 0.0, 0.0


@_silent("evaluation", "all ranks evaluate for half an hour, twice, and save nothing meanwhile", 180)
def _evaluation(job: PlayedJob, minute: float) -> None:
    if minute in (20, 80):
        job.all_in("evaluation")
    if minute in (50, 110):
        job.all_in("training")


@_silent("long-save", "all ranks stand still for a save of 25 minutes", 90)
def _long_save(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.all_in("checkpoint")
    if minute == 45:
        job.all_in("training")


@_silent("fast-steps", "steps take 5 ms", 60, step_s=0.005)
@_silent("slow-steps", "steps take ten minutes", 150, step_s=600.0, interval_s=1200.0)
@_silent("saves-by-steps", "a job that does not save by time", 90, interval_s=0.0)
def _nothing(job: PlayedJob, minute: float) -> None:
    """Train."""


@_silent("unequal", "tiny steps are unequal by 2 ms", 60, step_s=0.005)
def _unequal(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        for rank, compute_s in zip(job.ranks.values(), (0.004, 0.002, 0.002, 0.0), strict=True):
            rank.compute_s, rank.step_s = compute_s, 0.005


# ---- small faults


@_silent("some-failures", "three failures are survived", 90)
def _some_failures(job: PlayedJob, minute: float) -> None:
    if minute in (20, 24, 28):
        job.state = "recovering"
    if minute in (20.5, 24.5, 28.5):
        job.regroup(reason="worker_lost" if minute < 28 else "node_lost", fresh=True)


@_silent("one-failed-save", "saves fail for two minutes, and then succeed", 60)
def _one_failed_save(job: PlayedJob, minute: float) -> None:
    job.saves = not 20 <= minute < 22


@_silent("scrape-gap", "endpoints are missed in one scrape, one of them for three minutes", 60)
def _scrape_gap(job: PlayedJob, minute: float) -> None:
    job.hidden = {"n0", "n1", "n2", "n3"} if minute in (20, 30) else {"n2"} if 40 <= minute < 43 else set()


@_silent("etcd-blink", "etcd is away for a minute", 60)
def _etcd_blink(job: PlayedJob, minute: float) -> None:
    away = 20 <= minute < 21
    job.cut_off = dict.fromkeys(job.nodes, 19.5 * 60) if away else {}
    job.monitors[0].reads = not away


@_silent(
    "monitor-restart", "the monitor is away for three minutes and comes back under another address", 90, alone=True
)
def _monitor_restart(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.monitors[0].answers = False
    if minute == 23:
        job.monitors = [Monitor("monitor-1:9470")]


@_silent("two-monitors", "two monitors show the same, one a little later, and one goes for good", 150)
def _two_monitors(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.monitors.append(Monitor("monitor-1:9470"))
    if minute == 20:
        job.regroup({"n0": "ready", "n1": "ready", "n2": "ready"}, reason="node_lost")
        job.monitors[1].reads = False  # one scrape later than the other
    if minute == 20.5:
        job.monitors[1].reads = True
    if minute == 40:
        job.monitors[1].answers = False  # for good: one is enough
    if minute == 60:
        job.close("succeeded")


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
_firing = partial(into, FIRING)


# ---- progress


@_firing("stalled", "no rank makes a step any more", 40, STALLED, not_before=25)
def _stall(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        for rank in job.ranks.values():
            rank.moves = False


@_firing(
    "stalled-slow-steps", "steps took four minutes, and end", 140, STALLED, not_before=96, step_s=240.0, interval_s=0.0
)
def _stall_slow_steps(job: PlayedJob, minute: float) -> None:
    if minute == 60:
        _stall(job, 20)


@_firing("never-a-step", "the first step does not end", 50, STALLED, not_before=30)
def _never_a_step(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.step = 0.0
        for rank in job.ranks.values():
            rank.moves, rank.step_s, rank.compute_s = False, 0.0, 0.0


@_firing("endless-evaluation", "an evaluation does not end", 120, STALLED, not_before=79)
def _endless_evaluation(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.all_in("evaluation")


@_firing("stalled-unseen", "nothing moves, and no endpoint of a node is reached", 70, STALLED, MISSING, not_before=4.5)
def _stall_unseen(job: PlayedJob, minute: float) -> None:
    job.hidden = set(job.nodes)
    if minute == 20:
        _stall(job, 20)


@_firing("never-a-round", "there are nodes enough, and no round comes", 60, SLOW, STALLED, not_before=5)
def _never_a_round(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.state, job.round, job.ranks, job.gathering_since, job.step = "gathering", 0, {}, 1.0, 0.0


@_firing("failed", "the run is closed as failed", 60, FAILED, not_before=19)
def _fails(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.close("failed")


@_firing(
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


@_firing(
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


@_firing("too-few", "one node of at least two is left", 40, BELOW, SLOW, not_before=21.5)
def _too_few(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.state, job.nodes, job.ranks = "gathering", {"n0": "ready"}, {}
        job.gathering_since = job.now


@_firing("all-gone", "all nodes die at once", 40, BELOW, not_before=21.5)
def _all_gone(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.state, job.nodes, job.ranks = "gathering", {}, {}


@_firing("too-few-at-the-start", "the second node does not come", 40, BELOW, SLOW, not_before=5)
def _too_few_at_the_start(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        _never_a_round(job, 0)
        job.nodes = {"n0": "ready"}


@_firing("rank-unseen", "the endpoint of one node is not reached", 40, MISSING, not_before=24.5)
def _one_unseen(job: PlayedJob, minute: float) -> None:
    job.hidden = {"n2"} if minute >= 20 else set()


@_firing("ranks-unseen", "no endpoint is reached; what the store knows moves", 90, MISSING, not_before=24.5)
def _all_unseen(job: PlayedJob, minute: float) -> None:
    job.hidden = set(job.nodes) if minute >= 20 else set()


@_firing("restart-loop", "six rounds end by a crash in ten minutes", 60, LOOP, EXHAUSTING, not_before=25)
def _loop(job: PlayedJob, minute: float) -> None:
    if 20 <= minute < 32 and minute % 2 == 0:
        job.regroup(reason="worker_lost", fresh=True)


@_firing("restarts", "a worker hangs every half an hour", 200, EXHAUSTING, not_before=100)
def _failures(job: PlayedJob, minute: float) -> None:
    if 20 <= minute <= 140 and minute % 30 == 20:
        job.regroup(reason="worker_hung", fresh=True)


@_firing("flapping", "a node comes and goes", 80, FLAPPING, not_before=38)
def _flapping(job: PlayedJob, minute: float) -> None:
    if 20 <= minute < 50 and minute % 6 == 2:
        job.regroup({"n0": "ready", "n1": "ready"}, reason="node_left" if minute < 30 else "node_lost")
    if 20 <= minute < 50 and minute % 6 == 5:
        job.regroup({"n0": "ready", "n1": "ready", "n2": "ready"}, reason="node_joined")


# ---- speed


@_firing("straggler", "one rank computes twice as long", 60, STRAGGLER, not_before=29)
def _slow_rank(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.ranks[2].compute_s = 0.3


@_firing("wasteful", "three of four minutes are spent healing", 180, GOODPUT, not_before=120)
def _wasteful(job: PlayedJob, minute: float) -> None:
    if minute >= 90:
        job.all_in("healing" if minute % 4 >= 1 else "training")


@_firing("somewhat-wasteful", "three of ten minutes are spent waiting for data", 400, GOODPUT, not_before=360)
def _somewhat_wasteful(job: PlayedJob, minute: float) -> None:
    job.all_in("data" if minute % 10 >= 7 else "training")


# ---- checkpoints


@_firing("rare-saves-stop", "saves every quarter of an hour end", 120, STALE, not_before=60, interval_s=900.0)
@_firing("saves-stop", "nothing is saved any more", 60, STALE, not_before=26)
def _saves_stop(job: PlayedJob, minute: float) -> None:
    job.due_at = float("inf") if minute >= 20 else 0.0


@_firing("saves-stop-unseen", "the same, with no endpoint reached", 60, STALE, MISSING, not_before=4.5)
def _saves_stop_unseen(job: PlayedJob, minute: float) -> None:
    job.hidden = set(job.nodes)
    _saves_stop(job, minute)


@_firing("never-saved", "a job never saves", 120, STALE, not_before=59, interval_s=300.0)
def _never_saved(job: PlayedJob, minute: float) -> None:
    job.due_at = float("inf")


@_firing("saves-fail", "every save fails", 50, FAILING, STALE, not_before=22)
def _saves_fail(job: PlayedJob, minute: float) -> None:
    job.saves = minute < 20


@_firing("rare-save-fails", "one of two saves in an hour fails", 58, FAILING, not_before=29, interval_s=1800.0)
def _a_rare_save_fails(job: PlayedJob, minute: float) -> None:
    job.saves = not 30 <= minute < 30.5


@_firing("damaged", "a checkpoint cannot be loaded", 40, DAMAGED, not_before=19)
def _damaged(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.count(families.CHECKPOINTS, op="load", result="failed")


# ---- losses


@_firing("nan", "two losses are NaN", 50, NONFINITE, not_before=19)
def _nan(job: PlayedJob, minute: float) -> None:
    if minute in (20, 20.5):
        job.find_nonfinite(1)


@_firing("nan-kills", "all workers die of a NaN, twice", 50, NONFINITE, not_before=19)
def _nan_kills(job: PlayedJob, minute: float) -> None:
    if minute in (20, 20.5):  # the worker that found it was never scraped
        job.count(families.NONFINITE_LOSSES, 4)
        job.regroup(reason="worker_lost", fresh=True)


@_firing(
    "nan-unwatched", "a loss is NaN while there is no monitor", 40, NO_MONITOR, NONFINITE, not_before=14, alone=True
)
def _nan_unwatched(job: PlayedJob, minute: float) -> None:
    job.monitors[0].answers = minute < 10
    if minute == 20:
        job.find_nonfinite(1)


@_firing("nan-at-birth", "new processes count a NaN before they are first scraped", 50, NONFINITE, not_before=19)
def _nan_at_birth(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.regroup(reason="worker_lost", fresh=True)
        for number, rank in job.ranks.items():
            job.find_nonfinite(number)
            rank.node = rank.node.replace("n", "m")  # on other nodes
        job.nodes = {rank.node: "ready" for rank in job.ranks.values()}


# ---- etcd and the monitor


@_firing("node-without-etcd", "one node does not reach etcd", 40, STORE, not_before=21)
def _node_without_etcd(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.cut_off = {"n1": job.now}


@_firing("etcd-away", "nobody reaches etcd, and training goes on", 120, STORE, STORE_OF_ALL, not_before=21, alone=True)
def _etcd_away(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.cut_off = dict.fromkeys(job.nodes, job.now)
        job.monitors[0].reads = False


@_firing(
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


@_firing("monitor-gone", "the monitor does not come back", 90, NO_MONITOR, not_before=24, alone=True)
def _monitor_gone(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.monitors[0].answers = False


@_firing("run-unwatched", "the monitor does not know the run any more", 70, UNWATCHED, not_before=24)
def _run_unwatched(job: PlayedJob, minute: float) -> None:
    if minute == 20:  # the monitor answers without the run: perhaps it reads another etcd
        job.exists = False


@_firing("etcd-without-leader", "members of etcd have no leader", 40, NO_LEADER, not_before=22, alone=True)
def _no_leader(job: PlayedJob, minute: float) -> None:
    job.scrapes_etcd = True
    for member in job.etcd:
        member.leads = float(minute < 20)


@_firing("etcd-member-down", "one member of etcd is down", 40, MEMBER_DOWN, not_before=22, alone=True)
def _member_down(job: PlayedJob, minute: float) -> None:
    job.scrapes_etcd = True
    job.etcd[1].answers = minute < 20


@_firing("etcd-nearly-full", "etcd is near its quota", 40, ETCD_SPACE, not_before=24, alone=True)
def _etcd_fills_up(job: PlayedJob, minute: float) -> None:
    job.scrapes_etcd = True
    job.etcd[0].share = 0.1 if minute < 20 else 0.85


@_firing("etcd-slow", "the disk of an etcd is slow", 60, ETCD_SLOW, not_before=29, alone=True)
def _etcd_slow(job: PlayedJob, minute: float) -> None:
    job.scrapes_etcd = True
    job.etcd[2].slow_syncs = 0.0 if minute < 20 else 5.0


@_firing("alive", "all is well, and the dead man's switch says so", 20, SWITCH, alone=True)
def _alive(job: PlayedJob, minute: float) -> None:
    """Train."""


# ---- nodes and space that are missed


@_firing("stopped", "a run is stopped on request, and nobody takes it up", 560, STOPPED, not_before=480)
def _stopped(job: PlayedJob, minute: float) -> None:
    if minute == 5:
        job.state, job.nodes, job.ranks = "stopped", {}, {}


@_firing("abandoned", "the last node gives up", 60, BELOW, LOST, not_before=21.5)
def _abandoned(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.state, job.nodes, job.ranks, job.lost = "gathering", {"n0": "ready"}, {}, 3
    if minute == 30:
        job.state, job.nodes = "abandoned", {}


@_firing("nodes-lost", "two of four nodes are lost and none comes", 60, LOST, not_before=34)
def _nodes_lost(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.regroup({"n0": "ready", "n1": "ready"}, reason="node_lost")
        job.lost = 2


@_firing("spares-used-up", "the spare node replaces a lost one", 60, SPARES, not_before=29)
def _spares_used_up(job: PlayedJob, minute: float) -> None:
    if minute == 5:
        job.nodes["n4"] = "ready"
        job.ranks[4] = Rank("n4", phase="waiting", last_step=job.now, step_s=0.0, compute_s=0.0)
        job.passive = {4}
    if minute == 20:
        job.passive = set()
        job.regroup({"n0": "ready", "n1": "ready", "n2": "ready", "n4": "ready"}, reason="node_lost")


@_firing("disk-fills-up", "there is room for four checkpoints", 60, SPACE, not_before=24)
def _disk_fills_up(job: PlayedJob, minute: float) -> None:
    job.free_bytes = 100e9 if minute < 20 else 4e9


@_firing(
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


@_firing(
    "failed-and-etcd-away", "etcd is away after a run has failed", 60, FAILED, STORE_OF_ALL, alone=True, lasts=(25, 55)
)
def _failed_and_etcd_away(job: PlayedJob, minute: float) -> None:
    _fails(job, minute)
    job.monitors[0].reads = not 30 <= minute < 40
