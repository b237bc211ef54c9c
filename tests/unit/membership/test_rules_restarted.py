"""The membership rules of restart mode, where workers begin again and again: what ends the run, and what does not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastic_trainer.membership.documents import Identity, NodeState, RoundDocument, RoundState, RunResult
from elastic_trainer.membership.rules import Action, Decision
from elastic_trainer.model import Cause

from .scenes import LIMITS, Scene, node, round_of

MEMBERS = "abc"


def running(members: str = MEMBERS, number: int = 1) -> Scene:
    nodes = [node(name, i + 1, acknowledged=number, reported=number) for i, name in enumerate(members)]
    return Scene().show(*nodes).adopt(round_of(number, nodes))


def again(scene: Scene, step: int | None, culprits: Sequence[str], gone: Sequence[str] = ()) -> Decision:
    """The workers of all nodes are started again: they had come to ``step``, and those of ``culprits`` had failed."""
    assert scene.round is not None
    number = scene.round.number
    scene.adopt(scene.round.model_copy(update={"state": "broken", "worker_failed": bool(culprits)}))
    for member in scene.round.members:
        if member.node in gone:
            scene.lose(member.node)
            continue
        reached = Identity(round=number, step=step, epoch=0, samples=96, batch=32) if step is not None else None
        kind = Cause.WORKER_LOST if member.node in culprits else Cause.CONTACT_LOST
        free: dict[str, Any] = {"acknowledged": number + 1, "reported": number + 1}
        last: dict[str, Any] = {"reached": reached, "ended_by": kind}
        scene.show(node(member.node, member.create_revision, life=member.life + 1, mod=99 + number, **free, **last))
    decision = scene.decide()
    assert decision.round is not None
    scene.adopt(decision.round)
    return decision


def names(document: RoundDocument | None) -> str:
    assert document is not None
    return "".join(member.node for member in document.members)


def test_lives_that_end_at_the_same_step_end_the_run() -> None:
    """The third failure closes it, and names the step and the samples, whoever computed them."""
    scene = running()
    assert again(scene, 3, "a").action is Action.FORM
    assert again(scene, 3, "b").action is Action.FORM
    closed = again(scene, 3, "a")
    assert closed.action is Action.CLOSE
    assert closed.round is not None
    assert closed.round.result is RunResult.FAILED
    place = "3 worker failures after step 3, without a step committed since (epoch 0, samples 96 to 127 of its order)"
    assert closed.reason.startswith(place)


def test_failures_at_random_steps_never_end_the_run() -> None:
    """Also where each life began at the same checkpoint, and none came as far as the first."""
    scene, dice = running(), random.Random(3)
    for _ in range(60):
        last = scene.round.last_step if scene.round is not None else None
        step = dice.choice([each for each in range(100, 160) if each != last])
        assert again(scene, step, dice.choice(MEMBERS)).action is Action.FORM
        assert scene.round is not None
        assert (scene.round.last_step, scene.round.failures) == (step, 1)


@pytest.mark.parametrize(("step", "culprits", "gone"), [(3, "a", "c"), (3, "", ""), (None, "ab", "")])
def test_what_is_no_failure_of_a_worker_at_a_step_neither_counts_nor_resets(
    step: int | None, culprits: str, gone: str
) -> None:
    scene = running()
    again(scene, 3, "a")
    again(scene, 3, "b")
    assert again(scene, step, culprits, gone).action is Action.FORM
    assert scene.round is not None
    assert (scene.round.last_step, scene.round.failures) == (3, 2)


def test_one_node_that_alone_fails_is_left_out_before_the_run_is_given_up() -> None:
    """It may be the machine: the others try without it, and it does not come back into that round."""
    scene = running()
    again(scene, 3, "c")
    again(scene, 3, "c")
    assert again(scene, 3, "c").action is Action.FORM
    assert names(scene.round) == "ab"
    assert scene.decide(after_s=600.0).action is Action.WAIT
    scene.show(node("c", 77))  # another process of that name, on another machine perhaps
    scene.decide()
    assert scene.decide(after_s=600.0).action is Action.DRAIN


def test_the_next_failure_at_that_step_was_the_batch() -> None:
    scene = running()
    for _ in range(3):
        again(scene, 3, "c")
    assert again(scene, 3, "a").action is Action.CLOSE


def show_false_starts(scene: Scene, count: int, **what: str) -> Decision:
    for name, text in what.items():
        shown = scene.nodes[name].record.model_copy(update={"false_start": text, "false_starts": count})
        scene.show(node(name, scene.nodes[name].create_revision, **shown.model_dump()))
    return scene.decide()


def test_a_script_that_cannot_start_anywhere_ends_the_run_the_second_time() -> None:
    alike = dict.fromkeys(MEMBERS, "exit code 2")
    assert show_false_starts(running(), 1, **alike).action is Action.BREAK
    closed = show_false_starts(running(), 2, **alike)
    assert closed.action is Action.CLOSE
    assert closed.reason.startswith(
        "the script fails at startup in the same way on all nodes (exit code 2), 2 times in a row"
    )


@pytest.mark.parametrize("what", [{"a": "exit code 1", "b": "exit code 1"}, {**dict.fromkeys("ab", "x"), "c": "y"}])
def test_what_only_some_nodes_show_or_show_differently_decides_nothing(what: dict[str, str]) -> None:
    assert show_false_starts(running(), 5, **what).action is Action.WAIT


def test_in_place_it_ends_the_run_before_there_is_any_round() -> None:
    """Workers that open no Session come to none; as many nodes as a round needs must show the same, twice."""
    alike = dict.fromkeys(MEMBERS, "exit code 2")
    gathering = Scene().show(*(node(name, i + 1, state=NodeState.WARMING) for i, name in enumerate(MEMBERS)))
    assert show_false_starts(gathering, 1, **alike).action is Action.WAIT
    assert show_false_starts(gathering, 2, **(alike | {"c": "exit code 3"})).action is Action.WAIT
    closed = show_false_starts(gathering, 2, **alike)
    assert closed.action is Action.CLOSE
    assert closed.round is not None
    assert (closed.round.state, closed.round.result, closed.round.members) == (RoundState.CLOSED, RunResult.FAILED, ())
    few = Scene(limits=replace(LIMITS, min_nodes=2)).show(node("a", 1, state=NodeState.WARMING))
    assert show_false_starts(few, 5, a="exit code 2").action is Action.WAIT
