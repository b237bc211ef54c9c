"""Scenes in which no alert may fire: planned changes, good ends, and what only takes long."""

from __future__ import annotations

from functools import partial

from tests.support.rulescenes.job import Monitor, PlayedJob, Rank
from tests.support.rulescenes.scene import Scene, into

SILENT: list[Scene] = []
"""All of them."""
_scene = partial(into, SILENT)


# ---- planned changes


@_scene("scale-down", "two of four nodes are drained as planned", 60)
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


@_scene("handover", "the node of rank 0 is drained, and another becomes rank 0", 60)
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


@_scene("join", "a third node joins, and compiles for ten minutes in its first step", 60, nodes=2)
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


@_scene("scale-up", "five nodes join one after another", 60, bounds=(2, 9))
def _scaling_up(job: PlayedJob, minute: float) -> None:
    if minute in (10, 12, 14, 16, 18):
        job.nodes = {f"n{number}": "ready" for number in range(len(job.nodes) + 1)}
        job.regroup(reason="node_joined")


@_scene("spare", "a spare node waits above the maximum all the time", 60)
def _waiting_spare(job: PlayedJob, minute: float) -> None:
    if minute == 5:
        job.nodes["n4"] = "ready"
        job.ranks[4] = Rank("n4", phase="waiting", last_step=job.now, step_s=0.0, compute_s=0.0)
        job.passive = {4}


@_scene("late-nodes", "the second node comes four minutes after the first, before the first round", 60)
def _late_nodes(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.state, job.round, job.nodes, job.ranks, job.gathering_since = "gathering", 0, {"n0": "ready"}, {}, 1.0
        job.step = job.saved_at = 0
    if minute == 4:
        job.regroup({"n0": "ready", "n1": "ready"}, reason="node_joined", fresh=True)


# ---- ends and pauses


@_scene("scaled-to-zero", "a run is stopped on request, and its nodes come back one by one, an hour later", 120)
def _scaled_to_zero(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.state, job.nodes, job.ranks = "stopped", {}, {}
    if minute == 80:
        job.state, job.nodes, job.gathering_since = "gathering", {"n0": "ready"}, job.now
    if minute == 84:
        job.regroup({"n0": "ready", "n1": "ready", "n2": "ready", "n3": "ready"}, reason="node_joined", fresh=True)


@_scene("old-nan", "a NaN of long ago gets another rank by a handover, and the run ends", 90)
def _old_nan(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.find_nonfinite(2, 3)
    _handover(job, minute)
    if minute == 60:
        job.close("succeeded")


@_scene("end", "ranks end for a quarter of an hour, one by one, and the run succeeds and is forgotten", 90)
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


@_scene("failed-long-ago", "etcd comes with a run that failed two hours before, and the monitor is started anew", 60)
def _failed_long_ago(job: PlayedJob, minute: float) -> None:
    job.exists = minute >= 10
    if minute == 10:
        job.close("failed")
        job.ended_at -= 7200.0
    job.monitors[0].answers = not 30 <= minute < 34


@_scene("given-up", "a run was stopped long ago, and nobody has taken it up again", 60)
def _given_up(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        job.state, job.nodes, job.ranks, job.gathering_since = "gathering", {}, {}, 1.0


@_scene(
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


@_scene("no-session", "a script without a Session trains for two hours: nobody knows its steps", 120, interval_s=0.0)
def _no_session(job: PlayedJob, minute: float) -> None:
    job.sessions = False
    if minute == 60:
        job.regroup({"n0": "ready", "n1": "ready"}, reason="node_lost", fresh=True)


# ---- what takes long


@_scene("compile", "the first step takes 25 minutes", 60)
def _slow_compile(job: PlayedJob, minute: float) -> None:
    for rank in job.ranks.values():
        rank.moves = minute >= 25
        if minute == 0:
            rank.step_s, rank.compute_s = 0.0, 0.0


@_scene("evaluation", "all ranks evaluate for half an hour, twice, and save nothing meanwhile", 180)
def _evaluation(job: PlayedJob, minute: float) -> None:
    if minute in (20, 80):
        job.all_in("evaluation")
    if minute in (50, 110):
        job.all_in("training")


@_scene("long-save", "all ranks stand still for a save of 25 minutes", 90)
def _long_save(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.all_in("checkpoint")
    if minute == 45:
        job.all_in("training")


@_scene("fast-steps", "steps take 5 ms", 60, step_s=0.005)
@_scene("slow-steps", "steps take ten minutes", 150, step_s=600.0, interval_s=1200.0)
@_scene("saves-by-steps", "a job that does not save by time", 90, interval_s=0.0)
def _nothing(job: PlayedJob, minute: float) -> None:
    """Train."""


@_scene("unequal", "tiny steps are unequal by 2 ms", 60, step_s=0.005)
def _unequal(job: PlayedJob, minute: float) -> None:
    if minute == 0:
        for rank, compute_s in zip(job.ranks.values(), (0.004, 0.002, 0.002, 0.0), strict=True):
            rank.compute_s, rank.step_s = compute_s, 0.005


# ---- small faults


@_scene("some-failures", "three failures are survived", 90)
def _some_failures(job: PlayedJob, minute: float) -> None:
    if minute in (20, 24, 28):
        job.state = "recovering"
    if minute in (20.5, 24.5, 28.5):
        job.regroup(reason="worker_lost" if minute < 28 else "node_lost", fresh=True)


@_scene("one-failed-save", "saves fail for two minutes, and then succeed", 60)
def _one_failed_save(job: PlayedJob, minute: float) -> None:
    job.saves = not 20 <= minute < 22


@_scene("scrape-gap", "endpoints are missed in one scrape, one of them for three minutes", 60)
def _scrape_gap(job: PlayedJob, minute: float) -> None:
    job.hidden = {"n0", "n1", "n2", "n3"} if minute in (20, 30) else {"n2"} if 40 <= minute < 43 else set()


@_scene("etcd-blink", "etcd is away for a minute", 60)
def _etcd_blink(job: PlayedJob, minute: float) -> None:
    away = 20 <= minute < 21
    job.cut_off = dict.fromkeys(job.nodes, 19.5 * 60) if away else {}
    job.monitors[0].reads = not away


@_scene("monitor-restart", "the monitor is away for three minutes and comes back under another address", 90, alone=True)
def _monitor_restart(job: PlayedJob, minute: float) -> None:
    if minute == 20:
        job.monitors[0].answers = False
    if minute == 23:
        job.monitors = [Monitor("monitor-1:9470")]


@_scene("two-monitors", "two monitors show the same, one a little later, and one goes for good", 150)
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
