"""What a rank draws: several loops, and plans that ranks compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from elastic_trainer.data.plan import EpochPlan, LrRule
from elastic_trainer.data.sampler import Batch
from elastic_trainer.data.workers import Loading
from elastic_trainer.errors import ConfigError
from elastic_trainer.model import Cursor
from elastic_trainer.worker.comm.control import Control, Purpose
from elastic_trainer.worker.model.replica import DataPart
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.training_state import Position
from elastic_trainer.worker.steps.feed import DataFeed, DataPlanCheck, RankDataPlan, mark, refusals
from tests.unit.worker.ranks import outcome, run_ranks
from tests.unit.worker.toys import data

FIRST, SECOND = EpochPlan(60, 16, seed=3), EpochPlan(60, 30, seed=3)


def drawn(feed: DataFeed, plan: EpochPlan, epochs: int | None = None, steps: int | None = None) -> Iterator[Batch]:
    return feed.batches(data(), plan, None, epochs, steps, Loading(), lambda: False)


def made(control: Control, *, given: EpochPlan | None = None, resumed: EpochPlan | None = None) -> DataFeed:
    """The feed of a rank whose state is from the second loop: steps 10 and on, epochs 2 and 3."""
    feed = DataFeed(Position(step=10, cursor=Cursor(2, 30)), torch.device("cpu"), (), HeartbeatReporter())
    known = [{} if plan is None else asdict(plan) for plan in (resumed, given)]
    feed.bind(control, DataPart(control.rank, control.world_size), *known)
    return feed


def test_a_newcomer_passes_through_the_loops_that_are_over_and_compares_the_next() -> None:
    """With the collectives of the ranks that have trained on, which are none before its first step."""

    def body(control: Control) -> tuple[int, int]:
        feed = made(control, given=SECOND if control.rank else None)
        over = len(list(drawn(feed, FIRST, epochs=2))) if control.rank else 0
        size = next(drawn(feed, SECOND, epochs=4)).ids.size
        feed.plan_check.at_step(2)
        return over, size

    assert run_ranks(2, body) == [(0, 15), (0, 15)]


@pytest.mark.parametrize("names", ["given", "resumed"])
def test_only_a_loop_that_is_over_may_differ(names: str) -> None:
    feed = made(Control(None, 1, 2), **{names: SECOND})
    for limit in ({"epochs": 3}, {"epochs": 4}, {"steps": 11}):
        with pytest.raises(ConfigError, match="'global_batch' is 16"):
            drawn(feed, FIRST, **limit)
    for limit in ({"epochs": 2}, {"steps": 10}):
        assert list(drawn(feed, FIRST, **limit)) == []
        assert feed.fields == {}
    with pytest.raises(ConfigError, match="'global_batch' is 16"):
        drawn(feed, FIRST, epochs=4)
    drawn(feed, SECOND, epochs=4)
    assert feed.fields["global_batch"] == 30


PLAN = EpochPlan(320, 32, 4, seed=3)
OTHERS: dict[str, dict[str, Any]] = {
    "length": {"length": 319},
    "global_batch": {"global_batch": 64},
    "micro_batch": {"micro_batch": 8},
    "seed": {"seed": 4},
    "shuffle": {"shuffle": False},
    "scale_from": {"scale_from": 4},
    "lr_rule": {"scale_from": 4, "lr_rule": LrRule.SQRT},
    "passes": {"passes": 2},
    "drop_last": {"drop_last": True},
}


def cuts(*plans: EpochPlan, trained: tuple[int, ...] = ()) -> list[RankDataPlan]:
    return [RankDataPlan(rank, f"n{rank}", asdict(plan), rank in trained) for rank, plan in enumerate(plans)]


@pytest.mark.parametrize("name", OTHERS)
def test_every_field_of_a_plan_is_compared_and_named(name: str) -> None:
    """So that no field can be added to the plan and forgotten here; both values and both ranks are in the sentence."""
    assert set(OTHERS) == set(asdict(PLAN))
    plan = replace(PLAN, micro_batch=None) if name == "passes" else PLAN
    other = replace(plan, **OTHERS[name])
    same = plan if name != "lr_rule" else replace(PLAN, scale_from=4, lr_rule=LrRule.LINEAR)
    sentence = refusals(cuts(same, other))[1]
    mine, theirs = asdict(other)[name], asdict(same)[name]
    assert f"'{name}' is {mine} on rank 1 (node n1) and {theirs} on rank 0 (node n0)" in sentence
    assert mark(asdict(same)) != mark(asdict(other))


def test_who_differs_from_those_who_have_trained_is_wrong_and_all_are_where_nobody_has() -> None:
    """Whatever their number and rank; one without a plan at all differs, too. All get the first difference."""
    other = replace(PLAN, seed=4)
    found = refusals(cuts(PLAN, PLAN, other))
    assert sorted(found) == [0, 1, 2]
    assert len(set(found.values())) == 1
    assert refusals(cuts(PLAN, PLAN)) == {}
    assert list(refusals(cuts(other, other, PLAN, trained=(2,)))) == [0, 1]
    without = RankDataPlan(1, "n1", {}, trained=False)
    assert "'drop_last' is not set on rank 1" in refusals([*cuts(PLAN, trained=(0,)), without])[1]


def test_they_compare_at_the_first_step_of_a_round_and_not_at_its_others() -> None:
    """In the second round ranks 0 and 1 have trained, and go on without the newcomer."""

    def body(control: Control) -> list[str]:
        newcomer = control.rank == 2
        plan = [replace(PLAN, shuffle=False) if newcomer else PLAN]
        check = DataPlanCheck(f"n{control.rank}", lambda: (asdict(plan[0]), 1))
        if not newcomer:
            check.bind(Control(), {})
            check.at_step(0)
        check.bind(control, {})
        said = [outcome(lambda: check.at_step(0))]
        if not newcomer:
            plan[0] = replace(PLAN, seed=9)
            said.append(outcome(lambda: check.at_step(0)))  # no collective: the newcomer takes part in none
        return said

    first, second, third = run_ranks(3, body)
    assert first == second == ["", ""]
    assert "'shuffle' is False on rank 2 (node n2) and True on rank 0 (node n0)" in third[0]


def test_ranks_in_different_places_get_an_error_instead_of_a_hang() -> None:
    """One opens its first step while the other saves."""

    def body(control: Control) -> str:
        check = DataPlanCheck("n", lambda: ({}, 0))
        check.bind(control, {})
        return outcome(lambda: check.at_step(0) if control.rank else control.sum(Purpose.SAVE))

    assert all("another rank did something else" in said for said in run_ranks(2, body))
