"""Workers that get stuck, or slow, while their processes live: found by their own node, and the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.agent.health.node_health import told_by_all
from elastic_trainer.clock import Deadline
from elastic_trainer.drills.job import STUCK, Wedge, ask
from elastic_trainer.drills.run import DRILLS, conclusions
from elastic_trainer.drills.stage import Setting, Stage, staged
from elastic_trainer.membership.documents import Incident
from elastic_trainer.model import Cause

PATIENT = {"regroup_grace": "10"}
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("etcd_binary")]


def incidents(stage: Stage) -> list[Incident]:
    """All that the run has told, oldest first."""
    items = stage.meeting.store.range(stage.meeting.keys.incidents, Deadline.after(10.0)).items
    return [Incident.decode(item.value, item.key) for item in items]


def test_stuck_workers_are_ended_and_nothing_is_lost(tmp_path: Path) -> None:
    """Interpreter locked, endless loop, silent data set: the worker's own agent ends it, with its stacks in
    the log, and the others go on in the same processes. Where all ranks wait for each other no process ends. No step
    is made twice, every sample counts once, parameters stay equal; each incident is told once, with its cause."""
    options = {**PATIENT, "hang_timeout": "6", "step_timeout": "6", "first_step_timeout": "120"}
    with staged(Setting(nodes=3, wedges=True, limit_s=180.0, options=options), tmp_path) as stage:
        for repeat, wedge in enumerate(STUCK):
            effect = DRILLS["worker-wedge"].play(stage, repeat)
            assert effect.problems == (), effect
            assert effect.steps_lost == 0, effect
            # It was not killed for another reason; one that answers nothing is passed over before its limit.
            assert effect.recovery_s > 2.0 or wedge is Wedge.LOCK, effect
        stage.until(lambda: len(ended(stage)) >= len(STUCK), "all incidents")
        told = ended(stage)
        counters = told_by_all(stage.meeting.store, stage.meeting.keys)
        assert conclusions(stage) == []
    assert [each.cause for each in told] == [Cause.WORKER_HUNG] * 3 + [Cause.STALLED]
    assert all(each.steps_lost == 0 and each.next_round is not None for each in told)
    assert all(each.detect_s > 2.0 for each in told[1:]), told
    killed = sum(health.counters.get("workers_killed", 0.0) for health in counters.values())
    assert killed == 3
    logs = "".join(path.read_text(errors="replace") for path in (tmp_path / "logs").iterdir())
    assert "in inside_step" in logs
    assert logs.count('"event": "worker.hung"') == 3


def ended(stage: Stage) -> list[Incident]:
    """The incidents of rounds that a failure has ended."""
    planned = (Cause.NODE_JOINED, Cause.NODE_LEFT)
    return [each for each in incidents(stage) if each.kind == "round" and not each.open and each.cause not in planned]


def test_a_slow_node_goes_where_another_stands_ready(tmp_path: Path) -> None:
    """Four nodes for three places; one of the three becomes slow: it is named, leaves by a planned change, the fourth
    takes its place, and no step is lost."""
    setting = Setting(nodes=4, max_nodes=3, wedges=True, limit_s=240.0, options={**PATIENT, "evict_stragglers": "true"})
    with staged(setting, tmp_path) as stage:
        before = stage.until(lambda: _three(stage), "three nodes that train")
        slow = before.nodes[-1]
        stage.retire(slow)
        ask(tmp_path, slow, Wedge.SLOW)
        stage.until(lambda: (now := stage.observe()) and slow not in now.nodes and len(now.nodes) == 3, f"{slow} to go")
        stage.until(lambda: not stage.node(slow).running, f"the end of {slow}")
        assert stage.node(slow).exit_code() == 143
        stage.until(lambda: any(each.cause is Cause.NODE_LEFT for each in incidents(stage)), "the incident")
        told = incidents(stage)
        assert conclusions(stage) == []
    stragglers = [each for each in told if each.kind == "straggler"]
    assert {each.nodes for each in stragglers} == {(slow,)}  # told again once the fourth is there to take its place
    left = next(each for each in told if each.cause is Cause.NODE_LEFT)
    assert slow in left.nodes
    assert left.steps_lost == 0


def _three(stage: Stage) -> object:
    standing = stage.observe()
    return standing if standing is not None and len(standing.nodes) == 3 and standing.least_steps() > 20 else None
