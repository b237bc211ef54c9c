"""Ranks whose bits are flipped are found and named, and audits change nothing.

``ELASTIC_TRAINER_AUDITED_STEPS=N`` lets N steps pass without a fault, after 50 faults; 10000 take some 10 minutes.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from elastic_trainer.variables import ENV_LOG_FORMAT
from tests.integration.worker.launch import LIMIT_S, run, standalone

CLEAN = int(os.environ.get("ELASTIC_TRAINER_AUDITED_STEPS", "300"))
FAULTS = 50 if CLEAN > 300 else 20
EXTRA = {"PYTHONPATH": str(Path(__file__).parents[4]), ENV_LOG_FORMAT: "json"}


@pytest.mark.timeout(600 + CLEAN)
def test_a_flipped_bit_of_one_of_three_ranks_is_found_and_its_rank_named_and_clean_steps_raise_no_alarm(
    tmp_path: Path,
) -> None:
    """Bits of gradients, activations and weights, at any place. Then steps with dropout and BatchNorm, with and without
    audits: their results have the same bits."""
    found, planned, clean = audited(tmp_path, 3, faults=FAULTS, clean=CLEAN)
    assert len(planned) == FAULTS
    assert {kind for _, kind, _ in planned} == {"gradient", "activation", "weight"}
    assert found == [(step, "wrong", [rank], [f"node-{rank}"]) for step, _, rank in planned]
    assert not re.search(r"audit\.|ranks\.differed", clean), clean


def test_two_ranks_name_the_one_that_erred_once_and_both_where_the_fault_stays(tmp_path: Path) -> None:
    """A wrong weight stays until the parameters are compared, at the end of the step, which names its rank."""
    found, planned, clean = audited(tmp_path, 2, faults=6, clean=4)
    for each, (step, kind, rank) in zip(found, planned, strict=True):
        if kind == "weight":
            assert each == (step, "one_of_two", [0, 1], ["node-0", "node-1"])
        else:
            assert each == (step, "wrong", [rank], [f"node-{rank}"])
    assert not re.search(r"audit\.", clean), clean


def audited(
    place: Path, world: int, *, faults: int, clean: int
) -> tuple[list[tuple[int, str, list[int], list[str]]], list[tuple[int, str, int]], str]:
    """The findings of the steps with faults, the faults, and the log of the steps without."""
    log, result = place / "log", place / "result"
    run(standalone(world, "audited.py", faults, clean, result), log, EXTRA, limit_s=LIMIT_S + clean)
    answer = json.loads(result.read_text())
    assert answer["equal"]
    before, _, after = log.read_text().partition("faults end")
    lines = [json.loads(line) for line in before.splitlines() if '"audit.mismatch"' in line]
    found = [(each["step"], each["finding"], each["ranks"], each["nodes"]) for each in lines]
    return found, [tuple(each) for each in answer["faults"]], after
