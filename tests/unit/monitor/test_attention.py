"""What needs attention in a run, and which runs come first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_trainer.membership.documents import Departure, RoundState, RunResult, Saved, Spec
from elastic_trainer.monitor.attention import concerns
from elastic_trainer.monitor.snapshot import StoreStatus, listing, summary
from elastic_trainer.monitor.state import Observer, RunDocuments
from tests.support.monitored import entry, health, incident, rank, run

TWO = Spec(min_nodes=2, max_nodes=4)


def without(documents: RunDocuments, node: str) -> RunDocuments:
    """The same once the key of ``node`` has expired."""
    return replace(documents, nodes={name: each for name, each in documents.nodes.items() if name != node})


GAVE_UP = Departure(wall=1.0, node="n0", planned=False, reason="no peer", exit_code=1)
NO_SAVE = {"n0": health("n0", [rank(0)], {"save.failed": 2.0}, saves_failing=2)}
LATE = {"n0": health("n0", [rank(0)], saves_failing=1, save_interval_s=5.0, saved=Saved(step=1, wall=900.0))}
IN_TIME = {"n0": health("n0", [rank(0)], saves_failing=1, saved=Saved(step=1, wall=900.0))}
BY_NOW = {"n0": health("n0", [rank(0)], {"save.failed": 2.0}, saved=Saved(step=1, wall=900.0))}
HUNG = {
    "n0": health("n0", [rank(0, waits=True, still_s=6.0), rank(1, 1, still_s=6.0)]),
    "n1": health("n1", [rank(2, waits=True, still_s=6.0), rank(3, 1, waits=True, still_s=6.0)]),
}


SLOW = {
    "n0": health("n0", [rank(0), rank(1, 1, compute_s=0.23)]),
    "n1": health("n1", [rank(2), rank(3, 1, phase="data", still_s=74.0)]),
}
AT_ONCE = [entry(1, nodes=("n0", "n1", "n2"), world_size=6), entry(2, RoundState.BROKEN), entry(3, nodes=("n0", "n1"))]


FAILED, DONE = ({"result": result} for result in (RunResult.FAILED, RunResult.SUCCEEDED))
UNSAVED, NOT_YET = (
    {"n0": LATE["n0"].model_copy(update={"saves_failing": 0, "save_interval_s": s})} for s in (49.0, 51.0)
)
REASONS: dict[str, tuple[RunDocuments, list[str]]] = {
    "nothing": (run(2, spec=TWO), []),
    "few": (run(1, spec=TWO), ["bad: 1 of 2 nodes needed: 1 node is present, training needs 2."]),
    "early": (run(1, spec=TWO, round=None), ["warn: 1 of 2 nodes needed: 1 node is present, training needs 2."]),
    "gone": (without(run(3), "n2"), ["bad: 1 gone: 1 node is gone: n2 (heard 21 s ago)."]),
    "gone, few": (
        without(run(2, spec=TWO), "n1"),
        ["bad: 1 of 2 nodes needed: 1 node is present, training needs 2. Gone: n1."],
    ),
    "leaving": (without(run(3, state=RoundState.DRAINING), "n2"), []),
    "lost": (run(2, journal=tuple(AT_ONCE)), ["warn: 1 lost, not replaced: 1 node was lost and not replaced: n2."]),
    "abandoned": (
        run(0, spec=TWO, departure=GAVE_UP),
        [
            "bad: abandoned: its last node gave up: Node n0 was the last and gave up: no peer (exit code 1)."
            " Start nodes to continue."
        ],
    ),
    "stopped": (run(0, spec=TWO, departure=GAVE_UP.model_copy(update={"planned": True})), []),
    "failed": (run(2, state=RoundState.CLOSED, round_=FAILED), ["bad: failed: The run has failed."]),
    "succeeded": (run(2, state=RoundState.CLOSED, round_=DONE), []),
    "slow": (
        run(2, health=SLOW),
        [
            "bad: 1 standing still: 1 rank makes no progress: rank 3 on n1 (waiting for data, for 1 min 14 s).",
            "warn: 1 slow: 1 rank is slow: rank 1 on n0 (2.3 times as long).",
        ],
    ),
    "held up": (
        run(2, health=HUNG),
        [
            "bad: rank 1 on n0 holds up the others: 1 rank makes no progress, the others wait for it: rank 1 on n0"
            " (training, for 6.0 s)."
        ],
    ),
    "never saved": (run(2, health=NO_SAVE), ["bad: the last 2 saves failed: The last 2 saves failed."]),
    "not saved, late": (run(2, health=LATE), ["bad: the last save failed: The last save failed."]),
    "not saved": (run(2, health=IN_TIME), ["warn: the last save failed: The last save failed."]),
    "saved by now": (run(2, health=BY_NOW), []),
    "late": (
        run(2, health=UNSAVED),
        ["warn: checkpoint late: The last checkpoint is 1 min 40 s old; one is due every 49 s."],
    ),
    "soon late": (run(2, health=NOT_YET), []),
    "unreadable": (
        replace(run(2), unreadable=("/p/r/spec",)),
        ["warn: keys of another version: 1 document is of another version: /p/r/spec."],
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_needs_attention(reason: str) -> None:
    """In a few words, with how bad it is, and in a sentence that names nodes, ranks and times."""
    documents, found = REASONS[reason]
    seen = replace(Observer().observe(documents, 100.0, 1000.0), arrived={"n2": 79.0})
    assert [f"{each.look}: {each.words}: {each.sentence}" for each in concerns(documents, seen)] == found


def test_silence_counts_after_half_a_minute_and_a_failure_for_a_day() -> None:
    """A node that is still there and reports no more; a run that failed long ago would stay above all at work."""
    documents = run(2)
    for age_s, words in ((29.0, []), (31.0, ["1 silent"])):
        seen = replace(Observer().observe(documents, 100.0, 1000.0), arrived={"n0": 100.0, "n1": 100.0 - age_s})
        assert [each.words for each in concerns(documents, seen)] == words
    failed, observer = run(2, state=RoundState.CLOSED, round_=FAILED), Observer()
    observer.observe(run(2), 0.0, 1000.0)
    observer.observe(failed, 1.0, 1001.0)
    for hours, found in ((1, 1), (25, 0)):
        seen = observer.observe(failed, 1.0 + hours * 3600.0, 1001.0 + hours * 3600.0)
        assert len(concerns(failed, seen)) == found


def test_sick_runs_come_first() -> None:
    """Those that do not train, then those that limp, then the others, then those that are over."""
    every = {
        "a": run(2, spec=TWO),
        "b": run(2, state=RoundState.CLOSED, round_={"result": RunResult.SUCCEEDED}),
        "c": replace(run(2, spec=TWO), unreadable=("k",)),
        "d": run(1, spec=TWO),
    }
    rows = [
        summary(replace(documents, run=name), Observer().observe(documents, 100.0, 1000.0))
        for name, documents in every.items()
    ]
    assert [each.run for each in listing(rows, StoreStatus(True, 0.0), 1.0).runs] == ["d", "c", "a", "b"]


@pytest.mark.parametrize(
    ("walls", "steps", "look"),
    [
        ((200.0, 210.0), (12, 12), None),
        ((99.0, 500.0, 900.0), (12, 12, 12), None),
        ((200.0, 500.0, 900.0), (12, 12, 12), "bad"),
        ((200.0, 500.0, 900.0), (10, 11, 12), "warn"),
    ],
    ids=["twice", "long ago", "without a step", "with steps"],
)
def test_a_run_that_breaks_again_and_again_needs_attention(
    walls: tuple[float, ...], steps: tuple[int, ...], look: str | None
) -> None:
    """Also if it has recovered each time; more so if it gets nowhere."""
    documents = run(
        2,
        health={"n0": health("n0", [rank(0)])},
        journal=tuple(entry(number, RoundState.BROKEN, wall=wall) for number, wall in enumerate(walls)),
        incidents=tuple(incident(number, step=step) for number, step in enumerate(steps)),
    )
    found = concerns(documents, Observer().observe(documents, 100.0, 1000.0))
    words = "3 rounds broke in the last 15 min" + (", without a new step between" if look == "bad" else "")
    assert [(each.look, each.words) for each in found] == ([(look, words)] if look else [])
