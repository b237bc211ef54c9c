"""The end of a round frees whoever is in it."""

from __future__ import annotations

from typing import Any, cast

from elastic_trainer.worker.inplace.escape import Escape


def test_the_end_of_a_round_aborts_all_groups_whose_kernels_wait() -> None:
    """A sharded model has several communicators; one that cannot be aborted keeps none of the others."""
    freed: list[str] = []

    def refuse() -> None:
        raise RuntimeError("no communicator was made yet\nC++ stack")

    escape = Escape(cast("Any", None))
    works = escape.enter(3, [])
    works.abort_with(refuse)
    works.abort_with(lambda: freed.append("shards"))
    escape.over(2)
    assert freed == []
    escape.over(3)
    assert freed == ["shards"]
    escape.leave(planned=True)
