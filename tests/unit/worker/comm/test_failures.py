"""A collective that lost a peer is recognised by the error's origin, not by its words."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from elastic_trainer.errors import ConfigError, RoundBrokenError
from elastic_trainer.worker.comm.abort import collective, is_collective_failure, summary, trail, tried
from elastic_trainer.worker.comm.control import Control
from tests.unit.worker.ranks import run_ranks

PLACE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538]"


def test_errors_of_torch_count_also_behind_others() -> None:
    """By their type, or by the place in gloo's source that each of gloo's names; not if they are no RuntimeErrors, nor
    by the words of a script."""
    assert is_collective_failure(RuntimeError(f"{PLACE} Connection closed by peer [127.0.0.1]:1"))
    assert is_collective_failure(RuntimeError("[enforce fail at ../third_party/gloo/gloo/a.cc:83] x != nullptr"))
    assert is_collective_failure(dist.DistBackendError("anything"))
    assert is_collective_failure(RoundBrokenError("over"))
    outer = ValueError("my loop failed")
    outer.__cause__ = RuntimeError(f"{PLACE} Connection closed by peer")
    assert is_collective_failure(outer)
    assert not is_collective_failure(ConfigError(f"{PLACE} is in the text"))
    for words in ("S3 GET: socket timeout", "connection reset by peer", "gloo is not what I wanted", "nccl: timed out"):
        assert not is_collective_failure(RuntimeError(words))


def test_people_see_no_numbers_of_gloo() -> None:
    """The port is one that the peer had for this attempt alone."""
    error = RuntimeError(f"{PLACE} timed out connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]:25001$1")
    assert summary(error) == "timed out connecting: SO_ERROR: Connection refused, remote=[10.0.0.2]"
    assert tried(error) == "10.0.0.2"


def test_a_real_error_of_gloo_is_known() -> None:
    def body(control: Control) -> bool:
        if control.rank == 1:
            return True
        try:
            control._group.recv([torch.ones(1)], 1, 0).wait()
        except RuntimeError as error:
            return is_collective_failure(error)
        return False

    assert run_ranks(2, body, forming_s=1.0) == [True, True]


def test_where_a_collective_is_called_only_peers_can_be_the_reason() -> None:
    """Whatever the text; errors of other kinds pass through. The log gets all that lies behind it, with the calls."""
    with pytest.raises(RoundBrokenError, match="a peer was lost") as raised, collective("all_reduce"):
        raise RuntimeError("Operation timed out!")
    first, second = trail(raised.value)
    assert "test_failures.py" in first
    assert second.startswith("RuntimeError: Operation timed out! (")
    with suppress(KeyError), collective("all_reduce"):
        raise KeyError("other")
