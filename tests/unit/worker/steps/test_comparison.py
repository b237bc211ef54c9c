"""What is found of ranks that differ, and the numbers that it is found with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint.codec import fingerprint
from elastic_trainer.errors import CheckpointError
from elastic_trainer.worker.comm.control import Control, EqualityCheck, Purpose
from elastic_trainer.worker.model import digests
from elastic_trainer.worker.steps.engine import Comparison, Difference, difference
from elastic_trainer.worker.steps.options import CheckOptions
from tests.unit.worker.ranks import run_ranks

NAMES = ("a", "b", "c")


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([[1, 2, 3], [1, 2, 3]], None),
        ([[1, 2, 3], [1, 0, 0]], Difference(0, (1,), "b", 2)),
        ([[0, 2, 3], [1, 2, 3], [1, 2, 3]], Difference(1, (0,), "a", 1)),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 4], [1, 2, 3]], Difference(0, (1, 2), "c", 1)),
    ],
)
def test_the_state_of_most_ranks_counts(rows: list[list[int]], found: Difference | None) -> None:
    """Among equally many that of the lowest rank; the first parameter that differs anywhere is named."""
    assert difference(NAMES, rows) == found


@pytest.mark.parametrize("numbers", [(7, 7, 7), (7, 8, 7), (0, 1 << 59, 0), (1 << 19, 1 << 20, 1 << 21)])
def test_one_sum_says_whether_all_ranks_have_the_same_number(numbers: tuple[int, ...]) -> None:
    def ask(control: Control) -> bool:
        return EqualityCheck(control, Purpose.COMPARE, numbers[control.rank]).wait()

    assert set(run_ranks(len(numbers), ask)) == {len(set(numbers)) == 1}


@pytest.mark.parametrize("whole", [True, False])
def test_a_rank_that_is_alone_notes_the_number_of_a_state_and_never_that_of_a_shard(whole: bool) -> None:
    """Ranks of one node have different shards, and one ledger."""
    noted: list[int] = []
    shard: Any = SimpleNamespace(named=lambda: [("a", torch.ones(3))])
    context: Any = SimpleNamespace(
        options=SimpleNamespace(checks=CheckOptions(compare_every_steps=2)),
        records=SimpleNamespace(add_digest=lambda step, number, on_device: noted.append(step)),
        tracker=None,
        environment=SimpleNamespace(node="n0"),
    )
    alone: Any = SimpleNamespace(alone=True)
    comparison = Comparison(alone, shard, context, None, whole=whole)
    for step in range(1, 6):
        comparison.after_step(step)
    assert noted == ([2, 4] if whole else [])


def assorted() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    kinds = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16)
    found = [torch.randn(3, 5, generator=generator).to(kind) for kind in kinds]
    return [*found, torch.randn(4, 3, generator=generator).t(), torch.zeros(0), torch.tensor(2.0), torch.ones(4) > 0]


@pytest.mark.parametrize("by_device", [True, False])
def test_each_element_and_its_place_is_in_the_number_of_its_tensor(
    by_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In that one alone, also where a tensor is cut into several pieces."""
    monkeypatch.setattr(digests, "SEGMENT", 7)

    def numbers(of: list[torch.Tensor]) -> Any:
        return digests.summed(of).tolist() if by_device else list(digests.begun(of)())

    before = numbers(assorted())
    assert numbers(assorted()) == before
    for place in range(6):
        changed = assorted()
        first, last = changed[place][0, 0].clone(), changed[place][-1, -1].clone()
        changed[place][0, 0], changed[place][-1, -1] = last, first
        now = numbers(changed)
        assert [one for one in range(len(now)) if now[one] != before[one]] == [place]


def test_the_name_of_a_state_depends_on_types_and_structure_too() -> None:
    """And not on where a tensor lies in memory, which is another after a state has travelled."""
    tensor = assorted()[5]
    values = (1, 1.0, True, "1", [1], (1,), b"1", None, 1 << 80)
    plain = tensor.contiguous()  # hashed where it lies, unlike a view
    first, last = plain.clone(), plain.clone()
    for flipped, place in ((first, 0), (last, -1)):
        flipped.view(torch.int32)[place, place] ^= 1
    tensors = (plain, first, last, tensor.t(), tensor.bfloat16(), tensor.to(torch.float64))
    states: list[dict[Any, Any]] = [{"x": each} for each in (*values, *tensors)]
    states += [{1: 1}, {"1": 1}]
    assert len({fingerprint(each) for each in states}) == len(states)
    assert (
        fingerprint({"x": tensor})
        == fingerprint({"x": plain})
        == fingerprint({"x": torch.nn.Parameter(tensor.clone().contiguous())})
    )
    with pytest.raises(CheckpointError, match=r"state\['x'\]"):
        fingerprint({"x": object()})
