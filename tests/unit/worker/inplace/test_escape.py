"""The end of a round frees whoever is in it."""

from __future__ import annotations

import socket
from typing import Any, cast

import pytest

from elastic_trainer.worker.comm.groups import CollectiveAborter


def test_the_end_of_a_round_aborts_all_groups_whose_kernels_wait() -> None:
    """A sharded model has several communicators; one that cannot be aborted keeps none of the others."""
    freed: list[str] = []

    def refuse() -> None:
        raise RuntimeError("no communicator was made yet\nC++ stack")

    escape = CollectiveAborter(cast("Any", None))
    works = escape.enter(3, [])
    works.abort_with(refuse)
    works.abort_with(lambda: freed.append("shards"))
    escape.over(2)
    assert freed == []
    escape.over(3)
    assert freed == ["shards"]
    escape.leave(planned=True)


def test_the_end_of_a_round_does_not_reach_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the thread that severs comes: its round was left meanwhile, and the next has its connections."""
    escape = CollectiveAborter(cast("Any", None))
    escape.enter(1, [])
    aborted: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as store:

        def next_round() -> None:
            escape.leave(planned=True)
            escape.enter(2, [store.getsockname()]).abort_with(lambda: aborted.append("of round 2"))

        monkeypatch.setattr("elastic_trainer.worker.comm.groups.abort_nccl", next_round)
        escape.over(1)
        assert aborted == []
        with socket.create_connection(store.getsockname()):
            escape.free(1, "it was not formed in time")
            assert escape.sockets.sever(1) == 0
            assert escape.sockets.sever(2) == 1
    escape.leave(planned=True)
