"""Scenes in which no alert may fire, and scenes in which something is wrong: each names all alerts that fire in it."""

from __future__ import annotations

from operator import methodcaller as do

from elastic_trainer.telemetry import families
from tests.support.rulescenes.scene import Fires, Happens, Monitor, PlayedJob, Scene

TWO, THREE, FOUR = ("n0", "n1"), ("n0", "n1", "n2"), ("n0", "n1", "n2", "n3")
ALL_HIDDEN = do("become", hidden=set(FOUR))
UNANSWERED, ANSWERED = do("monitor", answers=False), do("monitor", answers=True)
UNREAD, READ = do("monitor", reads=False), do("monitor", reads=True)
FAIL, SUCCEED = do("close", "failed"), do("close", "succeeded")
STAND_STILL = do("rank", moves=False)
COMPILE = do("rank", moves=False, step_s=0.0, compute_s=0.0)
FORGOTTEN = do("become", exists=False)
ABANDON_SAVES = do("become", due_at=float("inf"))
OPEN_AGAIN = do("regroup", *TWO, reason="node_joined", fresh=True)
SPARE = do("show_beside", {4: "n4"}, "waiting", step_s=0.0, compute_s=0.0)
NO_ROUND = do("become", state="gathering", round=0, ranks={}, gathering_since=1.0, step=0.0)
HANDOVER: list[Happens] = [
    (20, lambda job: job.become(state="changing", nodes={**job.nodes, "n0": "draining"})),
    (20.5, do("regroup", "n1", "n2", "n3", reason="node_left"), do("show_beside", {3: "n0"}, "ending")),  # a moment
    (21, do("drop", 3)),
]


def _unequal(job: PlayedJob) -> None:
    for rank, compute_s in zip(job.ranks.values(), (0.004, 0.002, 0.002, 0.0), strict=True):
        rank.compute_s, rank.step_s = compute_s, 0.005


def _born_with_nan(job: PlayedJob) -> None:
    """New processes, on other nodes."""
    job.regroup(reason="worker_lost", fresh=True)
    for number, rank in job.ranks.items():
        job.find_nonfinite(number)
        rank.node = rank.node.replace("n", "m")
    job.nodes = {rank.node: "ready" for rank in job.ranks.values()}


# fmt: off
SILENT = [
    # ---- planned changes
    Scene("scale-down", "two of four nodes are drained as planned", 60, [
        (20, lambda job: job.become(state="changing", nodes={**job.nodes, "n2": "draining", "n3": "draining"})),
        # the monitor knows the new round, Prometheus has not scraped the nodes since
        (20.5, do("regroup", *TWO, reason="node_left"), do("show_beside", {2: "n2", 3: "n3"}, "ending")),
        (21, do("drop", 2, 3)),
    ]),
    Scene("handover", "the node of rank 0 is drained, and another becomes rank 0", 60, HANDOVER),
    Scene("join", "a third node joins, and compiles for ten minutes in its first step, for which all wait", 60, [
        (20, lambda job: job.become(nodes={**job.nodes, "n2": "warming"})),
        (23, lambda job: job.become(state="changing", nodes={**job.nodes, "n2": "ready"})),
        (23.5, do("regroup", *THREE, reason="node_joined"), do("rank", 2, moves=False)),
        (33, do("rank", 2, moves=True)),
    ], job={"nodes": 2}),
    Scene("scale-up", "five nodes join one after another", 60, [
        (range(10, 20, 2), lambda job: job.regroup(*job.nodes, f"n{len(job.nodes)}", reason="node_joined")),
    ], job={"bounds": (2, 9)}),
    Scene("spare", "a spare node waits above the maximum all the time", 60, [
        (5, lambda job: job.become(nodes={**job.nodes, "n4": "ready"}), SPARE),
    ]),
    Scene("late-nodes", "the second node comes four minutes after the first, before the first round", 60, [
        (0, NO_ROUND, do("become", nodes={"n0": "ready"}, saved_at=0)), (4, OPEN_AGAIN),
    ]),
    # ---- ends and pauses
    Scene("scaled-to-zero", "a run is stopped on request, and its nodes come back one by one, an hour later", 120, [
        (20, do("become", state="stopped", nodes={}, ranks={})), (80, do("gather", "n0")),
        (84, do("regroup", *FOUR, reason="node_joined", fresh=True)),
    ]),
    Scene("old-nan", "a NaN of long ago gets another rank by a handover, and the run ends", 90, [
        (0, do("find_nonfinite", 2, 3)), *HANDOVER, (60, SUCCEED),
    ]),
    Scene("end", "ranks end for a quarter of an hour, one by one, and the run succeeds and is forgotten", 90, [
        (20, do("all_in", "ending"), do("become", nodes=dict.fromkeys(FOUR, "finishing"))),
        (30, do("become", nodes={**dict.fromkeys(FOUR, "done"), "n0": "finishing"}), do("drop", 1, 2, 3)),
        (36, SUCCEED), (60, FORGOTTEN),
    ]),
    Scene("failed-long-ago", "etcd comes with a run that failed two hours before; the monitor is started anew", 60, [
        (0, FORGOTTEN), (10, FAIL, lambda job: job.become(exists=True, ended_at=job.ended_at - 7200.0)),
        (30, UNANSWERED), (34, ANSWERED),
    ]),
    Scene("given-up", "a run was stopped long ago, and nobody has taken it up again", 60, [
        (0, do("become", state="gathering", nodes={}, ranks={}, gathering_since=1.0)),
    ]),
    Scene("after-a-pause", "a job that saves every hour goes on from a checkpoint of three hours ago", 220, [
        (0, do("become", saved_at=1.0)), (10, SUCCEED),
        # the run is extended by more epochs
        (190, do("regroup", *TWO, reason="node_joined"), lambda job: job.become(due_at=job.now + 3600.0)),
    ], job={"interval_s": 3600.0}),
    Scene("no-session", "a script without a Session trains for two hours: nobody knows its steps", 120, [
        (0, do("become", sessions=False)), (60, do("regroup", *TWO, reason="node_lost", fresh=True)),
    ], job={"interval_s": 0.0}),
    # ---- what takes long
    Scene("compile", "the first step takes 25 minutes", 60, [(0, COMPILE), (25, do("rank", moves=True))]),
    Scene("evaluation", "all ranks evaluate for half an hour, twice, and save nothing meanwhile", 180, [
        ((20, 80), do("all_in", "evaluation")), ((50, 110), do("all_in", "training")),
    ]),
    Scene("long-save", "all ranks stand still for a save of 25 minutes", 90, [
        (20, do("all_in", "checkpoint")), (45, do("all_in", "training")),
    ]),
    Scene("fast-steps", "steps take 5 ms", 60, job={"step_s": 0.005}),
    Scene("slow-steps", "steps take ten minutes", 150, job={"step_s": 600.0, "interval_s": 1200.0}),
    Scene("saves-by-steps", "a job that does not save by time", 90, job={"interval_s": 0.0}),
    Scene("unequal", "tiny steps are unequal by 2 ms", 60, [(0, _unequal)], job={"step_s": 0.005}),
    # ---- small faults
    Scene("some-failures", "three failures are survived", 90, [
        ((20, 24, 28), do("become", state="recovering")),
        ((20.5, 24.5), do("regroup", reason="worker_lost", fresh=True)),
        (28.5, do("regroup", reason="node_lost", fresh=True)),
    ]),
    Scene("one-failed-save", "saves fail for two minutes, and then succeed", 60, [
        (20, do("become", saves=False)), (22, do("become", saves=True)),
    ]),
    Scene("scrape-gap", "endpoints are missed in one scrape, one of them for three minutes", 60, [
        ((20, 30), ALL_HIDDEN), (40, do("become", hidden={"n2"})), ((20.5, 30.5, 43), do("become", hidden=set())),
    ]),
    Scene("etcd-blink", "etcd is away for a minute", 60, [
        (20, UNREAD, do("become", cut_off=dict.fromkeys(FOUR, 19.5 * 60))), (21, READ, do("become", cut_off={})),
    ]),
    Scene("monitor-restart", "the monitor is away for three minutes and comes back under another address", 90, [
        (20, UNANSWERED), (23, do("become", monitors=[Monitor("monitor-1:9470")])),
    ], alone=True),
    Scene("two-monitors", "two monitors show the same, one a scrape later, and one goes for good", 150, [
        (0, do("become", monitors=[Monitor("monitor-0:9470"), Monitor("monitor-1:9470")])),
        (20, do("regroup", *THREE, reason="node_lost"), do("monitor", 1, reads=False)),
        (20.5, do("monitor", 1, reads=True)), (40, do("monitor", 1, answers=False)), (60, SUCCEED),
    ]),
]

STALLED, BELOW = Fires("Stalled", "critical"), Fires("BelowMinNodes", "critical")
SLOW, LOOP = Fires("RendezvousSlow", "warning"), Fires("RestartLoop", "critical")
VERDICT = Fires("Verdict", "warning")
EXHAUSTING, FLAPPING = Fires("RestartsExhausting", "warning"), Fires("MembershipFlapping", "warning")
MISSING, STRAGGLER = Fires("RanksMissing", "warning"), Fires("Straggler", "warning")
GOODPUT, STALE = Fires("GoodputLow", "warning"), Fires("CheckpointStale", "critical")
FAILING, DAMAGED = Fires("CheckpointFailing", "critical"), Fires("CheckpointFailing", "warning")
NONFINITE, FAILED = Fires("NonFiniteLoss", "critical"), Fires("RunFailed", "critical")
STORE, STORE_OF_ALL = Fires("StoreUnreachable", "critical"), Fires("StoreUnreachable", "critical", of_run=False)
UNWATCHED, NO_MONITOR = Fires("MonitorDown", "warning"), Fires("MonitorDown", "warning", of_run=False)
STOPPED, LOST = Fires("RunStopped", "info"), Fires("NodesLost", "warning")
SPARES, SPACE = Fires("SparesUsedUp", "warning"), Fires("CheckpointSpaceLow", "warning")
NO_LEADER, MEMBER_DOWN, ETCD_SPACE, ETCD_SLOW, SWITCH = (
    Fires(alert, severity, of_run=False) for alert, severity in (
        ("EtcdNoLeader", "critical"), ("EtcdMemberDown", "warning"), ("EtcdSpaceLow", "warning"),
        ("EtcdSlow", "warning"), ("DeadMansSwitch", "none"),
    )
)

FIRING = [
    # ---- progress
    Scene("stalled", "no rank makes a step any more", 40, [(20, STAND_STILL)], (STALLED,), 25),
    Scene("stalled-slow-steps", "steps took four minutes, and end", 140, [(60, STAND_STILL)], (STALLED,), 96,
          job={"step_s": 240.0, "interval_s": 0.0}),
    Scene("never-a-step", "the first step does not end", 50, [(0, COMPILE, do("become", step=0.0))], (STALLED,), 30),
    Scene("endless-evaluation", "an evaluation does not end", 120, [(20, do("all_in", "evaluation"))], (STALLED,), 79),
    Scene("stalled-unseen", "nothing moves, and no endpoint of a node is reached", 70,
          [(0, ALL_HIDDEN), (20, STAND_STILL)], (STALLED, MISSING), 4.5),
    Scene("never-a-round", "there are nodes enough, and no round comes", 60, [(0, NO_ROUND)], (SLOW, STALLED), 5),
    Scene("failed", "the run is closed as failed", 60, [(20, FAIL)], (FAILED,), 19),
    Scene("failed-at-start", "a run is first seen when it has failed; its monitor is away for four minutes, and "
          "the run is opened an hour later", 120, [
        (0, FORGOTTEN), (20, do("become", exists=True), FAIL), (30, UNANSWERED), (34, ANSWERED), (90, OPEN_AGAIN),
    ], (FAILED,), 19, lasts=(20.0, 79.0)),
    Scene("opened-and-unseen", "a failed run is opened after 20 minutes, and unseen for seven", 60, [
        (20, FAIL), (40, OPEN_AGAIN), (43, UNANSWERED), (50, ANSWERED),
    ], (FAILED, UNWATCHED), lasts=(20.0, 39.0)),
    # ---- membership
    Scene("too-few", "one node of at least two is left", 40, [(20, do("gather", "n0"))], (BELOW, SLOW), 21.5),
    Scene("all-gone", "all nodes die at once", 40,
          [(20, do("become", state="gathering", nodes={}, ranks={}))], (BELOW,), 21.5),
    Scene("too-few-at-the-start", "the second node does not come", 40,
          [(0, NO_ROUND, do("become", nodes={"n0": "ready"}))], (BELOW, SLOW), 5),
    Scene("rank-unseen", "the endpoint of one node is not reached", 40,
          [(20, do("become", hidden={"n2"}))], (MISSING,), 24.5),
    Scene("ranks-unseen", "no endpoint is reached; what the store knows moves", 90,
          [(20, ALL_HIDDEN)], (MISSING,), 24.5),
    Scene("restart-loop", "six rounds end by a crash in ten minutes", 60, [
        (range(20, 32, 2), do("regroup", reason="worker_lost", fresh=True)),
    ], (LOOP, EXHAUSTING), 25),
    Scene("restarts", "a worker hangs every half an hour", 200, [
        (range(20, 141, 30), do("regroup", reason="worker_hung", fresh=True)),
    ], (EXHAUSTING,), 100),
    Scene("verdict", "a machine is found to be at fault, after faults for which nothing has to be done", 120, [
        ((10, 15), do("count", families.VERDICTS, culprit="outside", advice="go_on")),
        (20, do("count", families.VERDICTS, culprit="machine", advice="leave_out")),
    ], (VERDICT,), 19, lasts=(20.0, 84.5)),
    Scene("flapping", "a node comes and goes", 80, [
        ((20, 26), do("regroup", *TWO, reason="node_left")), ((32, 38, 44), do("regroup", *TWO, reason="node_lost")),
        (range(23, 50, 6), do("regroup", *THREE, reason="node_joined")),
    ], (FLAPPING,), 38),
    # ---- speed
    Scene("straggler", "one rank computes twice as long", 60, [(20, do("rank", 2, compute_s=0.3))], (STRAGGLER,), 29),
    Scene("wasteful", "three of four minutes are spent healing", 180, [
        ((90, *range(93, 181, 4)), do("all_in", "healing")), (range(92, 181, 4), do("all_in", "training")),
    ], (GOODPUT,), 120),
    Scene("somewhat-wasteful", "three of ten minutes are spent waiting for data", 400, [
        (range(7, 401, 10), do("all_in", "data")), (range(10, 401, 10), do("all_in", "training")),
    ], (GOODPUT,), 360),
    # ---- checkpoints
    Scene("saves-stop", "nothing is saved any more", 60, [(20, ABANDON_SAVES)], (STALE,), 26),
    Scene("rare-saves-stop", "saves every quarter of an hour end", 120, [(20, ABANDON_SAVES)], (STALE,), 60,
          job={"interval_s": 900.0}),
    Scene("saves-stop-unseen", "the same, with no endpoint reached", 60,
          [(0, ALL_HIDDEN), (20, ABANDON_SAVES)], (STALE, MISSING), 4.5),
    Scene("never-saved", "a job never saves", 120, [(0, ABANDON_SAVES)], (STALE,), 59, job={"interval_s": 300.0}),
    Scene("saves-fail", "every save fails", 50, [(20, do("become", saves=False))], (FAILING, STALE), 22),
    Scene("rare-save-fails", "one of two saves in an hour fails", 58, [
        (30, do("become", saves=False)), (30.5, do("become", saves=True)),
    ], (FAILING,), 29, job={"interval_s": 1800.0}),
    Scene("damaged", "a checkpoint cannot be loaded", 40, [
        (20, do("count", families.CHECKPOINTS, op="load", result="failed")),
    ], (DAMAGED,), 19),
    # ---- losses
    Scene("nan", "two losses are NaN", 50, [((20, 20.5), do("find_nonfinite", 1))], (NONFINITE,), 19),
    Scene("nan-kills", "all workers die of a NaN, twice; those that found it were never scraped", 50, [
        ((20, 20.5), do("count", families.NONFINITE_LOSSES, 4), do("regroup", reason="worker_lost", fresh=True)),
    ], (NONFINITE,), 19),
    Scene("nan-unwatched", "a loss is NaN while there is no monitor", 40, [
        (10, UNANSWERED), (20, do("find_nonfinite", 1)),
    ], (NO_MONITOR, NONFINITE), 14, alone=True),
    Scene("nan-at-birth", "new processes count a NaN before they are first scraped", 50,
          [(20, _born_with_nan)], (NONFINITE,), 19),
    # ---- etcd and the monitor
    Scene("node-without-etcd", "one node does not reach etcd", 40,
          [(20, do("become", cut_off={"n1": 1200.0}))], (STORE,), 21),
    Scene("etcd-away", "nobody reaches etcd, and training goes on", 120, [
        (20, UNREAD, do("become", cut_off=dict.fromkeys(FOUR, 1200.0))),
    ], (STORE, STORE_OF_ALL), 21, alone=True),
    Scene("etcd-away-monitor-slow", "every other scrape of the monitor fails, too", 60, [
        (20, UNREAD), (range(20, 61, 2), UNANSWERED), ([minute + 0.5 for minute in range(20, 61, 2)], ANSWERED),
    ], (STORE_OF_ALL, NO_MONITOR), 21, alone=True),
    Scene("monitor-gone", "the monitor does not come back", 90, [(20, UNANSWERED)], (NO_MONITOR,), 24, alone=True),
    Scene("run-unwatched", "the monitor does not know the run any more: perhaps it reads another etcd", 70,
          [(20, FORGOTTEN)], (UNWATCHED,), 24),
    Scene("etcd-without-leader", "members of etcd have no leader", 40,
          [(0, do("member")), (20, do("member", 0, 1, 2, leads=0.0))], (NO_LEADER,), 22, alone=True),
    Scene("etcd-member-down", "one member of etcd is down", 40,
          [(0, do("member")), (20, do("member", 1, answers=False))], (MEMBER_DOWN,), 22, alone=True),
    Scene("etcd-nearly-full", "etcd is near its quota", 40,
          [(0, do("member")), (20, do("member", 0, share=0.85))], (ETCD_SPACE,), 24, alone=True),
    Scene("etcd-slow", "the disk of an etcd is slow", 60,
          [(0, do("member")), (20, do("member", 2, slow_syncs=5.0))], (ETCD_SLOW,), 29, alone=True),
    Scene("alive", "all is well, and the dead man's switch says so", 20, fires=(SWITCH,), alone=True),
    # ---- nodes and space that are missed
    Scene("stopped", "a run is stopped on request, and nobody takes it up", 560,
          [(5, do("become", state="stopped", nodes={}, ranks={}))], (STOPPED,), 480),
    Scene("abandoned", "the last node gives up", 60, [
        (20, do("become", state="gathering", nodes={"n0": "ready"}, ranks={}, lost=3)),
        (30, do("become", state="abandoned", nodes={})),
    ], (BELOW, LOST), 21.5),
    Scene("nodes-lost", "two of four nodes are lost and none comes", 60, [
        (20, do("regroup", *TWO, reason="node_lost"), do("become", lost=2)),
    ], (LOST,), 34),
    Scene("spares-used-up", "the spare node replaces a lost one", 60, [
        (5, lambda job: job.become(nodes={**job.nodes, "n4": "ready"}), SPARE),
        (20, do("become", passive=set()), do("regroup", *THREE, "n4", reason="node_lost")),
    ], (SPARES,), 29),
    Scene("disk-fills-up", "there is room for four checkpoints", 60,
          [(20, do("become", free_bytes=4e9))], (SPACE,), 24),
    Scene("too-few-and-etcd-away", "etcd is away while too few nodes are left: that alert goes on, and is not sent "
          "anew", 60, [(20, do("gather", "n0")), (30, UNREAD), (40, READ)], (BELOW, SLOW, STORE_OF_ALL), 21.5,
          alone=True, lasts=(25.0, 55.0)),
    Scene("failed-and-etcd-away", "etcd is away after a run has failed", 60,
          [(20, FAIL), (30, UNREAD), (40, READ)], (FAILED, STORE_OF_ALL), alone=True, lasts=(25, 55)),
]
# fmt: on
