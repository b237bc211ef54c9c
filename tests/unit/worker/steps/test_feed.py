"""A script with several loops over batches: a rank that begins later passes through those that are over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch

from elastic_trainer.data.plan import EpochPlan
from elastic_trainer.data.sampler import Batch
from elastic_trainer.data.workers import Loading
from elastic_trainer.errors import ConfigError
from elastic_trainer.model import Cursor
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.model.replica import DataPart
from elastic_trainer.worker.report import HeartbeatReporter
from elastic_trainer.worker.state.training_state import Position
from elastic_trainer.worker.steps.feed import DataFeed
from tests.unit.worker.ranks import run_ranks
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
