"""Metrics over shards of any size, and storage that only rank 0 can judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.data.sampler import Fetcher
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.evaluation import evaluate, predict
from elastic_trainer.worker.model.replica import DataPart
from elastic_trainer.worker.state.saver import check_storage
from tests.unit.worker.ranks import outcome, run_ranks

ALL = DataPart(0, 1)


def _nothing() -> None:
    """No turn."""


def whole(control: Control) -> DataPart:
    return DataPart(control.rank, control.world_size)


@pytest.mark.parametrize(("count", "world"), [(10, 1), (10, 3), (2, 4), (1, 3), (7, 2)])
def test_each_sample_is_counted_once_and_predicted_in_its_place_over_uneven_and_empty_shards(
    count: int, world: int
) -> None:
    """Sums, counts and rows are those of one process, all ranks get them, and all take equally many turns."""
    fetch = Fetcher(TensorDataset(torch.arange(float(count))), torch.device("cpu"))

    def body(control: Control) -> tuple[dict[str, float], int, list[int], torch.Tensor]:
        turns: list[int] = []
        seen: list[int] = []

        def measure(module: nn.Module, batch: Any) -> dict[str, Any]:
            seen.extend(int(i) for i in batch.ids)
            return {"mean": (batch.x.sum(), len(batch)), "none": (1.0, 0)}

        def both(module: nn.Module, batch: Any) -> torch.Tensor:
            return torch.stack([batch.x, batch.x * 2], dim=1).to(torch.bfloat16)

        result = evaluate(nn.Identity(), fetch, 2, measure, control, lambda: turns.append(1), whole(control))
        return result, len(turns), seen, predict(nn.Identity(), fetch, 2, both, control, _nothing, whole(control))

    results = run_ranks(world, body)
    assert {result["mean"] for result, *_ in results} == {(count - 1) / 2}
    assert all(result["none"] != result["none"] for result, *_ in results)  # nan: nothing was counted
    assert len({turns for _, turns, *_ in results}) == 1
    assert [i for _, _, seen, _ in results for i in seen] == list(range(count))
    expected = torch.stack([torch.arange(float(count)), 2 * torch.arange(float(count))], dim=1).to(torch.bfloat16)
    for *_, rows in results:
        torch.testing.assert_close(rows, expected, rtol=0, atol=0)


def test_a_prediction_without_a_row_for_each_sample_is_refused() -> None:
    fetch = Fetcher(TensorDataset(torch.arange(6.0)), torch.device("cpu"))
    error = outcome(lambda: predict(nn.Identity(), fetch, 4, lambda m, b: b.x.mean(), Control(), _nothing, ALL))
    assert error.startswith("ConfigError: the prediction for 4 samples is ()")


def test_a_directory_that_rank_0_cannot_write_ends_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def body(control: Control) -> str:
        directory = tmp_path / ("file" if control.rank == 0 else "fine") / "runs"
        return outcome(lambda: check_storage(CheckpointManager(directory), control, WorkerEnvironment()))

    first, second = run_ranks(2, body)
    assert first.startswith("StorageError: ")
    assert second.startswith("StorageError: rank 0: ")
