"""What the page of a run says in each state: only what is known, and nothing that is not so."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_trainer.monitor import page
from tests.support import snapshots
from tests.unit.monitor.page.test_pages import part, words

AWAY = {"connected": False, "age_s": 43.0}
LEFT = {"node": "n1", "planned": True, "reason": "SIGTERM", "exit_code": 143, "wall": 1.0}
NOBODY: dict[str, Any] = {"nodes": [], "world_size": 0}


def ended(**more: Any) -> dict[str, Any]:
    """A run whose last round broke, and was followed by none."""
    values = {"round": 1, "next_round": None, "detect_s": 30.0, "regroup_s": 1.0, "resume_s": 0.0} | more
    return {"incidents": [snapshots.incident(1.0, "worker_lost", **values)]}


STATES = [
    # what is there, the part of the page, what it says, what it must not say
    ({}, "Needs attention", "Nothing: no node is missing", "Unknown"),
    ({"store": AWAY}, "Needs attention", "Unknown: the monitor cannot reach the store.", "no node is missing"),
    ({"state": "stopped", "departure": LEFT, **NOBODY}, "Needs attention", "Stopped on request (SIGTERM).", "needs"),
    ({"state": "gathering", "min_nodes": 1}, "Needs attention", "nodes are joining", "no node is missing"),
    ({"state": "recovering"}, "Needs attention", "the next round is forming", "no node is missing"),
    ({"attention": [{"look": "bad", "words": "3 rounds broke in the last 15 min",
      "sentence": "3 rounds broke in the last 15 min."}]}, "Needs attention",
     "3 rounds broke in the last 15 min.", "Nothing"),
    ({"state": "succeeded"}, "Needs attention", "The run has ended.", "missing"),
    ({"state": "failed", **ended()}, "Last incident", "The run did not continue after it.", "stood still"),
    ({"state": "failed", **ended()}, "Last incident", "Worker lost", "was lost"),
    ({"state": "recovering", **ended(open=True)}, "Last incident", "Worker lost", "did not continue"),
    (ended(next_round=2), "Last incident", "No step was lost. Training stood still for 31 s: 30 s until", "did not"),
    (ended(next_round=2, detect_s=0.0), "Last incident", "Nobody knows since when training stood still", "still for"),
    (ended(next_round=2, resumed=False), "Last incident", "No step of round 2 is known", "was lost"),
    (ended(next_round=2, before_s=29.0), "Last incident", "1 min: 29 s in rounds without a step, 30 s", "did not"),
    (ended(next_round=2, steps_lost=3), "Last incident", "3 steps were lost.", "No step"),
    (ended(next_round=2, steps_lost=1), "Last incident", "1 step was lost.", "1 steps"),
]  # fmt: skip


def test_a_run_that_has_ended_still_says_who_trained_and_how_long() -> None:
    """Not that nothing runs, which everybody knows of a run that has ended."""
    last = {"number": 7, "world_size": 6, "nodes": 1, "duration_s": 3720.0}
    assert "3 nodes, 1 node needed." in page.run_page(snapshots.healthy(min_nodes=1, max_nodes=1))
    html = page.run_page(snapshots.healthy(state="succeeded", last=last, **NOBODY))
    assert "Round 7 was the last: 6 ranks on 1 node, 2 to 4 nodes allowed. It took 1 h 2 min from" in html
    assert "at the end" in html
    row = {"run": "r", "state": "succeeded", "last": last, "world_size": 0, "nodes": 0, "min_nodes": 1, "max_nodes": 4}
    assert "1 of 1 to 4" in page.runs_page({"runs": [row]})


def test_the_rank_that_the_others_wait_for_is_told_from_its_victims() -> None:
    """In the strip of its node, and in its own row."""
    ranks = [snapshots.rank(0, still_s=42.0, stall="awaited"), snapshots.rank(1, still_s=42.0, stall="waits")]
    html = page.run_page(snapshots.healthy(nodes=[snapshots.node(0, ranks=ranks)], step_s=None))
    shown = words(part(html, "Nodes and ranks"))
    assert "no step for 42 s, the others wait for it" in shown
    assert "waits for 42 s" in shown
    assert "1 training, held up: the others wait for it, 1 waiting for others" in shown


@pytest.mark.parametrize(("there", "name", "said", "unsaid"), STATES, ids=range(len(STATES)))
def test_each_state_has_its_sentence(there: dict[str, Any], name: str, said: str, unsaid: str) -> None:
    """The table of states."""
    shown = words(part(page.run_page(snapshots.healthy(**there)), name))
    assert said in shown
    assert unsaid not in shown


def test_a_state_that_is_old_is_called_so() -> None:
    """While the store does not answer nothing is shown as if it were so now."""
    html = page.run_page(snapshots.healthy(store=AWAY))
    assert "Training when last seen" in html
    assert "look-good" not in html.partition("</section>")[0]
    assert "not known" in page.runs_page(snapshots.listing() | {"store": AWAY})


def test_shard_groups_and_places_are_named() -> None:
    """In the headline, in the row of each node, and of those that wait."""
    nodes = [snapshots.node(0) | {"group": 0, "place": 0}, snapshots.node(1) | {"group": 0, "place": 1}]
    spare = snapshots.node(2, in_round=False) | {"group": None, "place": 1}
    html = page.run_page(snapshots.healthy(shard_nodes=2, min_nodes=2, max_nodes=4, nodes=[*nodes, spare]))
    assert "2 to 4 nodes allowed in shard groups of 2" in html
    assert "node-2 (place 1) is ready and not in the round" in html
    assert "group 0, place 1" in html
