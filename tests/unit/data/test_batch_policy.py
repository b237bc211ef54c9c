"""The global batch may grow with the number of ranks, if that is asked for, and the learning rate with it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.data.plan import EpochPlan, LrRule, divide
from elastic_trainer.errors import ConfigError
from elastic_trainer.model import Cursor


def scaled(**changes: object) -> EpochPlan:
    values = {"length": 1000, "global_batch": 64, "scale_from": 4, "lr_rule": LrRule.LINEAR} | changes
    return EpochPlan(**values)  # type: ignore[arg-type]


def test_by_default_nothing_depends_on_the_ranks() -> None:
    """Neither the batch nor the learning rate."""
    plan = EpochPlan(1000, 64, 8)
    assert [plan.at(world).global_batch for world in (1, 3, 500)] == [64, 64, 64]
    assert plan.lr_factor(500) == 1.0


@pytest.mark.parametrize(("world", "batch"), [(1, 16), (2, 32), (3, 48), (4, 64), (8, 128)])
def test_the_batch_is_proportional_to_the_ranks(world: int, batch: int) -> None:
    """And the learning rate follows by the rule that was named."""
    assert scaled().at(world).global_batch == batch
    assert scaled().lr_factor(world) == world / 4
    assert scaled(lr_rule=LrRule.SQRT).lr_factor(world) == pytest.approx(math.sqrt(world / 4))
    assert scaled(lr_rule=LrRule.NONE).lr_factor(world) == 1.0


def test_a_batch_that_does_not_divide_is_rounded_and_never_empty() -> None:
    """The learning rate follows the batch that there is; a micro-batch is never larger than the batch."""
    plan = scaled(global_batch=10, scale_from=16, micro_batch=5)
    assert (plan.at(1).global_batch, plan.at(1).micro_batch) == (1, 1)
    assert plan.lr_factor(1) == 0.1
    assert (plan.at(24).global_batch, plan.at(24).micro_batch) == (15, 5)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 300),
    batch=st.integers(1, 40),
    scale_from=st.integers(1, 8),
    worlds=st.lists(st.integers(1, 12), min_size=1, max_size=12),
)
def test_each_sample_is_used_once_while_the_batch_follows_the_ranks(
    length: int, batch: int, scale_from: int, worlds: list[int]
) -> None:
    """World sizes that change at every step, and the batch with them, neither repeat nor miss a sample."""
    plan, cursor, used, step = scaled(length=length, global_batch=batch, scale_from=scale_from), Cursor(0, 0), [], 0
    while not plan.ended(cursor):
        world = worlds[step % len(worlds)]
        whole = plan.at(world).global_batch_at(cursor)
        for pieces in divide(len(whole.ids), None, world):
            used += [int(i) for piece in pieces if piece.counts for i in whole.ids[piece.start : piece.stop]]
        cursor, step = whole.following, step + 1
    assert sorted(used) == list(range(length))


def test_what_makes_no_sense_is_refused() -> None:
    """In one sentence that says what to do."""
    with pytest.raises(ConfigError, match="scale_from is 0"):
        scaled(scale_from=0)
    with pytest.raises(ConfigError, match="the global batch is fixed"):
        scaled(scale_from=None)
