"""Which samples make up a batch, how they are divided, and what a rank will ask for next."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.data.plan import Course, EpochPlan, Extent, LrRule, Piece, asked, epoch_order, share, spanning
from elastic_trainer.errors import ConfigError, DataError
from elastic_trainer.model import Cursor

plans = st.tuples(st.integers(1, 400), st.integers(1, 64), st.integers(0, 2**31), st.booleans()).flatmap(
    lambda t: st.one_of(st.none(), st.integers(1, t[1])).map(lambda micro: EpochPlan(t[0], t[1], micro, t[2], t[3]))
)


def divide(count: int, micro_batch: int | None, world: int, *, even: bool = False) -> list[tuple[Piece, ...]]:
    return [share(count, micro_batch, world, rank, even=even) for rank in range(world)]


@given(
    count=st.integers(1, 500),
    world=st.integers(1, 20),
    micro=st.one_of(st.none(), st.integers(1, 64)),
    even=st.booleans(),
)
def test_weights_give_the_gradient_of_the_mean_over_the_global_batch(
    count: int, world: int, micro: int | None, even: bool
) -> None:
    """Each sample's influence is 1/count after the average over ranks, for every sample alike."""
    for pieces in divide(count, micro, world, even=even):
        for piece in pieces:
            if piece.counts:
                assert piece.weight / world / piece.size == pytest.approx(1 / count)
    assert sum(p.weight for pieces in divide(count, micro, world, even=even) for p in pieces) == pytest.approx(world)


@given(count=st.integers(1, 500), world=st.integers(1, 20), micro=st.integers(1, 64), even=st.booleans())
def test_shares_differ_by_at_most_one_micro_batch_and_none_is_empty(
    count: int, world: int, micro: int, even: bool
) -> None:
    """A rank has at least one micro-batch with at least one sample; with ``even`` all have equally many."""
    shares = divide(count, micro, world, even=even)
    real = [sum(piece.counts for piece in pieces) for pieces in shares]
    assert max(real) - min(real) <= 1
    assert sum(real) == -(-count // micro)
    assert all(pieces and all(0 < piece.size <= micro for piece in pieces) for pieces in shares)
    if even:
        assert len({len(pieces) for pieces in shares}) == 1


def test_epochs_and_seeds_have_orders_of_their_own_which_never_change() -> None:
    """A changed permutation would make resumed jobs repeat and miss samples."""
    assert epoch_order(10, 0, 0, True).tolist() == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]
    assert epoch_order(10, 12345, 3, True).tolist() == [3, 0, 2, 6, 1, 4, 7, 8, 5, 9]
    assert epoch_order(5, 7, 0, False).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("passes", "drop_last", "sizes"),
    [(None, False, [8, 8, 7]), (None, True, [8, 8]), (2, True, [8, 8, 4]), (4, True, [8, 8, 6])],
)
def test_the_last_batch_is_smaller_or_dropped(passes: int | None, drop_last: bool, sizes: list[int]) -> None:
    """With ``passes``, what fills no pass is dropped: as a DataLoader, whose batch is a pass, drops it."""
    plan, cursor, seen = EpochPlan(23, 8, passes=passes, drop_last=drop_last), Cursor(3, 0), []
    while not plan.is_over(cursor):
        whole = plan.global_batch_at(cursor)
        seen.append(len(whole.ids))
        assert whole.index == len(seen) - 1
        cursor = whole.following
    assert seen == sizes
    assert plan.steps == len(sizes)
    with pytest.raises(ValueError, match="nothing is left"):
        plan.global_batch_at(cursor)
    assert EpochPlan(23, 8, scale_from=2, drop_last=True).for_world(4).steps == 1


@pytest.mark.parametrize(
    ("values", "kind", "says"),
    [
        ((0, 4), DataError, "empty"),
        ((5, 0), ConfigError, "global_batch_size is 0"),
        ((5, 4, 8), ConfigError, "micro_batch_size is 8"),
        ((5, 4, 0), ConfigError, "micro_batch_size is 0"),
        ((5, 4, None, -1), ConfigError, "seed is -1"),
        ((5, 4, None, 0, True, 0), ConfigError, "scale_from is 0"),
        ((5, 4, None, 0, True, None, LrRule.LINEAR), ConfigError, "the global batch is fixed"),
        ((5, 8, None, 0, True, None, LrRule.NONE, None, True), DataError, "drop_last leaves none"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(values: tuple[Any, ...], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        EpochPlan(*values)


happenings = st.lists(
    st.tuples(st.sampled_from(["commit", "commit", "commit", "give up", "save", "crash"]), st.integers(1, 9)),
    min_size=1,
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(plan=plans, schedule=happenings, even=st.booleans())
def test_each_sample_counts_once_whatever_is_given_up_and_wherever_it_crashes(
    plan: EpochPlan, schedule: list[tuple[str, int]], even: bool
) -> None:
    """Steps that are given up come again, crashes go back to the last save, and the world size changes at every step.
    Read rank by rank, all is in the order of one rank."""
    counted: list[int] = []
    cursor, saved, step = Cursor(5, 0), (Cursor(5, 0), 0), 0
    while not plan.is_over(cursor):
        what, world = schedule[step] if step < len(schedule) else ("commit", 3)
        step += 1
        whole = plan.global_batch_at(cursor)
        parts = divide(len(whole.ids), plan.micro_batch, world, even=even)
        if what == "save":
            saved = (cursor, len(counted))
        elif what == "crash":
            cursor = saved[0]
            del counted[saved[1] :]
        elif what == "commit":
            taken = [piece for pieces in parts for piece in pieces if piece.counts]
            counted += [int(i) for piece in taken for i in whole.ids[piece.start : piece.stop]]
            cursor = whole.following
    assert sorted(counted) == list(range(plan.length))
    assert counted == [int(i) for i in plan.order(5)]


# ---- a global batch that follows the number of ranks


def scaled(**changes: object) -> EpochPlan:
    values = {"length": 1000, "global_batch": 64, "scale_from": 4, "lr_rule": LrRule.LINEAR} | changes
    return EpochPlan(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("world", "batch"), [(1, 16), (2, 32), (3, 48), (4, 64), (8, 128)])
def test_the_batch_is_proportional_to_the_ranks(world: int, batch: int) -> None:
    assert scaled().for_world(world).global_batch == batch
    assert scaled().lr_factor(world) == world / 4
    assert scaled(lr_rule=LrRule.SQRT).lr_factor(world) == pytest.approx(math.sqrt(world / 4))
    assert scaled(lr_rule=LrRule.NONE).lr_factor(world) == 1.0
    fixed = EpochPlan(1000, 64, 8)
    assert (fixed.for_world(world).global_batch, fixed.lr_factor(world)) == (64, 1.0)


def test_a_batch_that_does_not_divide_is_rounded_and_never_empty() -> None:
    """The learning rate follows the batch that there is; a micro-batch is never larger than the batch."""
    plan = scaled(global_batch=10, scale_from=16, micro_batch=5)
    one, more = plan.for_world(1), plan.for_world(24)
    assert (one.global_batch, one.micro_batch, plan.lr_factor(1)) == (1, 1, 0.1)
    assert (more.global_batch, more.micro_batch) == (15, 5)


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
    while not plan.is_over(cursor):
        world = worlds[step % len(worlds)]
        whole = plan.for_world(world).global_batch_at(cursor)
        for pieces in divide(len(whole.ids), None, world):
            used += [int(i) for piece in pieces if piece.counts for i in whole.ids[piece.start : piece.stop]]
        cursor, step = whole.following, step + 1
    assert sorted(used) == list(range(length))


def walked(course: Course, cursor: Cursor, *, span: bool = False) -> list[Extent]:
    """What a rank asks for in fact, step by step, without the same thing twice in a row."""
    extents: list[Extent] = []
    while cursor.epoch < course.until:
        while not course.plan.is_over(cursor):
            whole = course.plan.global_batch_at(cursor)
            pieces = course.pieces(whole)
            requests = [asked(whole, spanning(pieces))] if span else [asked(whole, piece) for piece in pieces]
            extents += [request.extent for request in requests if [request.extent] != extents[-1:]]
            cursor = whole.following
        cursor = Cursor(cursor.epoch + 1, 0)
    return extents


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12), st.integers(1, 5)),
    where=st.tuples(st.integers(0, 4), st.integers(0, 40), st.integers(0, 12)),
    span=st.booleans(),
)
def test_what_is_foreseen_is_what_is_asked_for(
    sizes: tuple[int, int, int, int], where: tuple[int, int, int], span: bool
) -> None:
    """From any micro-batch or whole part on, over the ends of epochs."""
    length, size, micro, world = sizes
    plan = EpochPlan(length, size, min(micro, size), seed=3)
    course = Course(plan, where[0] % world, world, until=3)
    cursor = Cursor(0, min(where[1] // size * size, (length - 1) // size * size))
    whole = plan.global_batch_at(cursor)
    pieces = course.pieces(whole)
    begin = 0 if span else where[2] % len(pieces)
    first = asked(whole, spanning(pieces) if span else pieces[begin], span=span)
    extents = walked(course, cursor, span=span)
    assert [request.extent for request in course.from_request(first)] == extents[extents.index(first.extent) :]


def test_an_extent_that_is_not_this_ranks_is_followed_by_the_next_global_batch() -> None:
    """Somebody holds a batch of an earlier round: it is fetched, and the present course goes on behind it."""
    plan = EpochPlan(12, 6, 2, shuffle=False)
    whole = plan.global_batch_at(Cursor(0, 0))
    of_rank_1 = asked(whole, Course(plan, 1, 2, until=1).pieces(whole)[0])
    course = Course(plan, 0, 2, until=1)
    assert [request.position for request in course.from_request(of_rank_1)] == [4, 6, 8]
