"""The membership rules of restart mode, where workers begin again and again: what ends the run, and what does not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from elastic_trainer.ipc.channel import Identity
from elastic_trainer.membership.documents import NodeState, RoundDocument, RunResult
from elastic_trainer.membership.rules import Action
from elastic_trainer.model import Cause
from tests.unit.membership.scenes import LIMITS, Scene, made, names, node, round_of

MEMBERS = "abc"


def running() -> Scene:
    nodes = [node(name, i + 1, acknowledged=1, reported=1) for i, name in enumerate(MEMBERS)]
    return Scene().show(*nodes).adopt(round_of(1, nodes))


def standing(scene: Scene) -> RoundDocument:
    assert scene.round is not None
    return scene.round


def again(scene: Scene, step: int | None, culprits: str, gone: str = "") -> str:
    """The workers of all nodes are started again: they had come to ``step``, and those of ``culprits`` had failed."""
    current = standing(scene)
    number = current.number
    scene.adopt(current.model_copy(update={"state": "broken", "worker_failed": bool(culprits)}))
    for member in current.members:
        if member.node in gone:
            scene.lose(member.node)
            continue
        reached = Identity(round=number, step=step, epoch=0, samples=96, batch=32) if step is not None else None
        kind = Cause.WORKER_LOST if member.node in culprits else Cause.CONTACT_LOST
        free: dict[str, Any] = {"acknowledged": number + 1, "reported": number + 1}
        last: dict[str, Any] = {"reached": reached, "ended_by": kind}
        scene.show(node(member.node, member.create_revision, life=member.life + 1, mod=99 + number, **free, **last))
    return scene.follow()


GIVEN_UP = "close failed: 3 worker failures after step 3, without a step committed since"


def test_lives_that_end_at_the_same_step_end_the_run() -> None:
    """The third failure closes it, and names the step and the samples, whoever computed them."""
    scene = running()
    assert [again(scene, 3, each) for each in "ab"] == ["form 2: a b c", "form 3: a b c"]
    assert again(scene, 3, "a").startswith(f"{GIVEN_UP} (epoch 0, samples 96 to 127 of its order)")


def test_failures_at_random_steps_never_end_the_run() -> None:
    """Also where each life began at the same checkpoint, and none came as far as the first."""
    scene, dice = running(), random.Random(3)
    for _ in range(60):
        step = dice.choice([each for each in range(100, 160) if each != standing(scene).last_step])
        assert again(scene, step, dice.choice(MEMBERS)).startswith("form")
        assert (standing(scene).last_step, standing(scene).failures) == (step, 1)


@pytest.mark.parametrize(("step", "culprits", "gone"), [(3, "a", "c"), (3, "", ""), (None, "ab", "")])
def test_what_is_no_failure_of_a_worker_at_a_step_neither_counts_nor_resets(
    step: int | None, culprits: str, gone: str
) -> None:
    """The loss of a node, of contact alone, and scripts that report no steps."""
    scene = running()
    for each in "ab":
        again(scene, 3, each)
    assert again(scene, step, culprits, gone).startswith("form")
    assert (standing(scene).last_step, standing(scene).failures) == (3, 2)


def test_one_node_that_alone_fails_is_left_out_before_the_run_is_given_up() -> None:
    """It may be the machine: the others try without it, and it does not come back into that round, unless as another
    process of that name, on another machine perhaps. The next failure at that step, of others, was the batch."""
    scene = running()
    for _ in range(2):
        again(scene, 3, "c")
    assert again(scene, 3, "c") == "form 4: a b"
    without = standing(scene)
    assert scene.said(after_s=600.0) == "all is well"
    scene.show(node("c", 77)).decide()
    assert scene.said(after_s=600.0) == "drain: node c joins"
    assert again(scene.adopt(without), 3, "a").startswith(GIVEN_UP.replace("3 worker", "4 worker"))


def show_false_starts(scene: Scene, count: int, **what: str) -> str:
    for name, text in what.items():
        shown = scene.nodes[name].record.model_copy(update={"false_start": text, "false_starts": count})
        scene.show(node(name, scene.nodes[name].create_revision, **shown.model_dump()))
    return scene.said()


ALIKE = dict.fromkeys(MEMBERS, "exit code 2")
SENTENCE = "the script fails at startup in the same way on all nodes (exit code 2)"


def test_a_script_that_cannot_start_anywhere_ends_the_run_the_second_time() -> None:
    """The first time all are started again at once. What only some nodes show, or show differently, decides nothing:
    they break the round themselves when they have waited for the others."""
    assert show_false_starts(running(), 1, **ALIKE) == f"break 1: {SENTENCE}"
    assert show_false_starts(running(), 2, **ALIKE).startswith(f"close failed: {SENTENCE}, 2 times in a row")
    for what in ({"a": "exit code 1", "b": "exit code 1"}, {**dict.fromkeys("ab", "x"), "c": "y"}):
        assert show_false_starts(running(), 5, **what) == "all is well"


def test_how_a_script_failed_is_told_as_far_as_all_have_said_it() -> None:
    """Numbers may differ from node to node; types and names may not."""
    said = {"a": "exit code 2: KeyError: 'run-1'", "b": "exit code 2: KeyError: 'run-2'"}
    alike = SENTENCE.replace("(exit code 2)", f"({said['a']})")
    assert show_false_starts(running(), 1, **said, c="exit code 2: KeyError: 'run-3'") == f"break 1: {alike}"
    assert show_false_starts(running(), 1, **said, c="exit code 2") == f"break 1: {SENTENCE}"
    for other in ("exit code 2: KeyError: 'lr'", "exit code 2: OSError: 'run-3'", "exit code 3: KeyError: 'run-3'"):
        assert show_false_starts(running(), 5, **said, c=other) == "all is well"


def test_in_place_it_ends_the_run_before_there_is_any_round() -> None:
    """Workers that open no Session come to none; as many nodes as a round needs must show the same, twice."""
    gathering = Scene().show(*(node(name, i + 1, state=NodeState.WARMING) for i, name in enumerate(MEMBERS)))
    too_few = "0 of at least 2 nodes are ready"
    assert show_false_starts(gathering, 1, **ALIKE) == too_few
    assert show_false_starts(gathering, 2, **(ALIKE | {"c": "exit code 3"})) == too_few
    show_false_starts(gathering, 2, **ALIKE)
    closed = made(gathering.decide(), Action.CLOSE)
    assert (closed.state, closed.result, names(closed)) == ("closed", RunResult.FAILED, "")
    few = Scene(limits=LIMITS).show(node("a", 1, state=NodeState.WARMING))
    assert show_false_starts(few, 5, a="exit code 2") == too_few
