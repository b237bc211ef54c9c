"""Every kind of sharded training, under plain torchrun, against a loop of torch alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.drills.sharded.train import SAMPLES
from tests.drills.sharded.variants import KINDS
from tests.integration.worker.launch import run, standalone

pytestmark = pytest.mark.usefixtures("sharded_torch")

SCRIPT = Path(__file__).with_name("variants.py")
CLOSE, ROUGH = 5e-6, 3e-3
FOUR = [name for name in KINDS if name.startswith(("tp", "twice", "experts"))]
TWO = [name for name in KINDS if name not in FOUR]


def found(directory: Path, ranks: int, *names: str) -> dict[str, list[dict[str, float]]]:
    run(standalone(ranks, str(SCRIPT), directory, *names), directory / "log", {"PYTHONPATH": str(Path.cwd())})
    return {
        name: [json.loads((directory / f"{name}-{rank}.json").read_text()) for rank in range(ranks)] for name in names
    }


def test_each_kind_of_sharded_training_does_what_a_loop_of_torch_does(tmp_path: Path) -> None:
    """Accumulated, clipped, in 16 bits, recomputed, compiled, averaged, scaled (one shard overflows), saved, resumed.

    In two stages, with micro-batches of unequal sizes, and in four, two on each rank or all on both. Metrics and
    predictions are alike on both ranks. A model that begins on the meta device is initialised by shards.
    """
    results = found(tmp_path, 2, *TWO)
    for meta in results.pop("meta"):
        assert meta == {"alike": 0.0, "moved": 0.0}
    for name, ranks in results.items():
        limit = ROUGH if name in ("bf16", "reduced") else CLOSE
        for each in ranks:
            assert each["parameters"] < limit, (name, each)
            assert each["rows"] < 50 * limit, (name, each)
    assert [results[name][0]["stored"] for name in ("resumed", "staged", "interleaved")] == [0.0] * 3


def test_tensor_parallel_within_sharding_replicas_and_experts_do_too(tmp_path: Path) -> None:
    """2 x 2 ranks: peers of tensor parallel draw the same samples, those of sharding and of experts different ones.

    With a mesh of 2 the node has two replicas, whose gradients are summed during the backward pass or after it. Experts
    are compared with a model that sends no token.
    """
    results = found(tmp_path, 4, *FOUR)
    assert results["experts"][0]["stored"] == 0.0
    drawn = {name: sum(each["drawn"] for each in ranks) for name, ranks in results.items()}
    assert [drawn[name] for name in ("tp", "twice", "experts")] == [2 * SAMPLES, SAMPLES, SAMPLES]
    for name, ranks in results.items():
        limit = ROUGH if "reduced" in name else 2 * CLOSE
        for each in ranks:
            assert each["parameters"] < limit, (name, each)
            assert each["rows"] < 50 * limit, (name, each)


@pytest.mark.parametrize("more", ["forward", "step"])
def test_ranks_that_call_the_model_unequally_often_get_a_sentence(tmp_path: Path, more: str) -> None:
    """A rank calls it once more before its backward pass, or makes one more pass of both kinds. No rank hangs."""
    log, script = tmp_path / "log", str(SCRIPT.with_name("train.py"))
    words = standalone(2, script, tmp_path, json.dumps({"more": more, "steps": 2}))
    run(words, log, {"PYTHONPATH": str(Path.cwd())}, expected=1)
    assert "all ranks that share a sharded model must call it, and step.backward(), equally often" in log.read_text()
