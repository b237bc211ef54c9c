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
    """Each rank's share where models are not sharded."""
    return DataPart(control.rank, control.world_size)


@pytest.mark.parametrize(("count", "world"), [(10, 1), (10, 3), (2, 4), (1, 3), (7, 2)])
def test_each_sample_is_counted_once_over_uneven_and_empty_shards(count: int, world: int) -> None:
    """Sums and counts are those of one process, all ranks get them, and all take equally many turns."""
    data = TensorDataset(torch.arange(float(count)))

    def body(control: Control) -> tuple[dict[str, float], int, list[int]]:
        turns: list[int] = []
        seen: list[int] = []

        def measure(module: nn.Module, batch: Any) -> dict[str, Any]:
            seen.extend(int(i) for i in batch.ids)
            return {"mean": (batch.x.sum(), len(batch)), "none": (1.0, 0)}

        fetch = Fetcher(data, torch.device("cpu"))
        result = evaluate(nn.Identity(), fetch, 2, measure, control, lambda: turns.append(1), whole(control))
        return result, len(turns), seen

    results = run_ranks(world, body)
    assert {result["mean"] for result, _, _ in results} == {(count - 1) / 2}
    assert all(result["none"] != result["none"] for result, _, _ in results)  # nan: nothing was counted
    assert len({turns for _, turns, _ in results}) == 1
    assert [i for _, _, seen in results for i in seen] == list(range(count))


def test_a_directory_that_rank_0_cannot_write_ends_all_ranks(tmp_path: Path) -> None:
    """No rank waits for rank 0; each says why."""
    (tmp_path / "file").write_text("")

    def body(control: Control) -> str:
        directory = tmp_path / ("file" if control.rank == 0 else "fine") / "runs"
        return outcome(lambda: check_storage(CheckpointManager(directory), control, WorkerEnvironment()))

    first, second = run_ranks(2, body)
    assert first.startswith("StorageError: ")
    assert second.startswith("StorageError: rank 0: ")


@pytest.mark.parametrize(("count", "world"), [(10, 1), (10, 3), (2, 4), (1, 3), (7, 2)])
def test_predictions_come_in_the_order_of_the_data_set(count: int, world: int) -> None:
    """All ranks get a row for each sample, also where shards are uneven or empty; ranks of any dtype."""
    data = TensorDataset(torch.arange(float(count)))

    def body(control: Control) -> torch.Tensor:
        def both(module: nn.Module, batch: Any) -> torch.Tensor:
            return torch.stack([batch.x, batch.x * 2], dim=1).to(torch.bfloat16)

        return predict(
            nn.Identity(), Fetcher(data, torch.device("cpu")), 2, both, control, lambda: None, whole(control)
        )

    expected = torch.stack([torch.arange(float(count)), 2 * torch.arange(float(count))], dim=1).to(torch.bfloat16)
    for result in run_ranks(world, body):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_a_prediction_without_a_row_for_each_sample_is_refused() -> None:
    """A mean over the batch cannot be put in order."""
    fetch = Fetcher(TensorDataset(torch.arange(6.0)), torch.device("cpu"))
    error = outcome(lambda: predict(nn.Identity(), fetch, 4, lambda m, b: b.x.mean(), Control(), _nothing, ALL))
    assert error.startswith("ConfigError: the prediction for 4 samples is ()")


@pytest.mark.parametrize(("count", "world"), [(10, 3), (2, 4), (1, 2)])
def test_ranks_that_compute_together_make_equally_many_forward_passes(count: int, world: int) -> None:
    """A shard group would wait for ever for a rank without samples; results of fillers and of peers do not count."""
    data = TensorDataset(torch.arange(float(count)))

    def body(control: Control) -> tuple[dict[str, float], int]:
        passes: list[int] = []

        def measure(module: nn.Module, batch: Any) -> dict[str, Any]:
            passes.append(1)
            return {"sum": (batch.x.sum(), 1)}

        half, peer = divmod(control.rank, 2)
        part = DataPart(half, world, 2, first=peer == 0, always_even=True)
        fetch = Fetcher(data, torch.device("cpu"))
        return evaluate(nn.Identity(), fetch, count, measure, control, lambda: None, part), len(passes)

    results = run_ranks(2 * world, body)
    assert {result["sum"] for result, _ in results} == {count * (count - 1) / 2}
    assert {passes for _, passes in results} == {1}
