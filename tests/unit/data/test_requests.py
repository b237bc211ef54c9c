"""What a rank will ask for next, from a place on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.data.plan import Course, EpochPlan, Place, asked, spanning
from elastic_trainer.model import Cursor


def walked(course: Course, cursor: Cursor, *, span: bool = False) -> list[Place]:
    """What a rank asks for in fact, step by step, without the same thing twice in a row."""
    places: list[Place] = []
    while cursor.epoch < course.until:
        while not course.plan.ended(cursor):
            whole = course.plan.global_batch_at(cursor)
            pieces = course.pieces(whole)
            requests = [asked(whole, spanning(pieces))] if span else [asked(whole, piece) for piece in pieces]
            places += [request.place for request in requests if [request.place] != places[-1:]]
            cursor = whole.following
        cursor = Cursor(cursor.epoch + 1, 0)
    return places


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12), st.integers(1, 5)),
    where=st.tuples(st.integers(0, 4), st.integers(0, 40)),
    span=st.booleans(),
)
def test_what_is_foreseen_is_what_is_asked_for(
    sizes: tuple[int, int, int, int], where: tuple[int, int], span: bool
) -> None:
    """From any global batch on, over the ends of epochs, for micro-batches and for whole parts."""
    length, size, micro, world = sizes
    plan = EpochPlan(length, size, min(micro, size), seed=3)
    course = Course(plan, where[0] % world, world, until=3)
    cursor = Cursor(0, min(where[1] // size * size, (length - 1) // size * size))
    whole = plan.global_batch_at(cursor)
    pieces = course.pieces(whole)
    first = asked(whole, spanning(pieces) if span else pieces[0], span=span)
    assert [request.place for request in course.from_request(first)] == walked(course, cursor, span=span)


def test_what_is_asked_for_in_the_middle_of_a_part_goes_on_from_there() -> None:
    course = Course(EpochPlan(12, 6, 2, shuffle=False), 0, 1, until=1)
    whole = course.plan.global_batch_at(Cursor(0, 0))
    second = asked(whole, course.pieces(whole)[1])
    assert [request.position for request in course.from_request(second)] == [2, 4, 6, 8, 10]


def test_a_place_that_is_not_this_ranks_is_followed_by_the_next_global_batch() -> None:
    """Somebody holds a batch of an earlier round: it is fetched, and the present course goes on behind it."""
    plan = EpochPlan(12, 6, 2, shuffle=False)
    whole = plan.global_batch_at(Cursor(0, 0))
    of_rank_1 = asked(whole, Course(plan, 1, 2, until=1).pieces(whole)[0])
    course = Course(plan, 0, 2, until=1)
    assert [request.position for request in course.from_request(of_rank_1)] == [4, 6, 8]
