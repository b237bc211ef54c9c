"""In how many files the nodes of a round write a checkpoint."""

from __future__ import annotations

import pytest
import torch

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.groups import RankAssignment
from elastic_trainer.worker.state.saver import MOST_WRITERS, SHARED_FROM, Shares, Writers, following
from elastic_trainer.worker.steps.options import SavingOptions


def place(rank: int, world: int, local: int) -> RankAssignment:
    return RankAssignment(1, rank, world, rank % local, local)


@pytest.mark.parametrize(
    ("rank", "world", "local", "expected"),
    [
        (0, 1, 1, Shares(1, 0)),
        (3, 4, 4, Shares(1, 0)),
        (4, 12, 4, Shares(3, 1)),
        (8, 12, 4, Shares(3, 2)),
        (20, 64, 1, Shares(MOST_WRITERS, 20)),
    ],
)
def test_each_node_has_a_file_up_to_a_limit(rank: int, world: int, local: int, expected: Shares) -> None:
    assert Shares.among(place(rank, world, local)) == expected


def test_rank_0_writes_alone_if_it_is_to_or_the_model_is_small() -> None:
    assert Shares.among(place(1, 4, 1), Writers.RANK0) == Shares()
    small, large = torch.nn.Linear(8, 8), torch.nn.Linear(SHARED_FROM // 4, 1, device="meta")
    assert not Shares(4).worthwhile(small)
    assert Shares(4).worthwhile(large)
    assert not Shares().worthwhile(large)


def test_other_writers_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="writers is 'all'") as caught:
        SavingOptions(writers="all")
    assert "'auto', 'rank0'" in str(caught.value.hint)


def test_copies_go_to_the_next_node() -> None:
    """Of nodes of two ranks each; past those without an agent of this package, and to nobody from or among such."""
    rows = ["a", "a", "b", "b", "", "", "c", "c"]
    assert [following(rows, rank) for rank in range(8)] == ["b", "b", "c", "c", "", "", "a", "a"]
    assert following(["a", "a"], 1) == ""
