"""The gradient of the tree: that of the whole batch, with equal bits at any number of ranks that compute alike."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from elastic_trainer.data.plan import EpochPlan, cut
from elastic_trainer.data.sampler import Batch, Fetcher, Sampler
from elastic_trainer.errors import ConfigError
from elastic_trainer.model import Cursor
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.model import tree
from elastic_trainer.worker.model.tree import (
    Block,
    Stack,
    TreeReduction,
    arithmetic,
    blocks_of,
    check_ranks,
    check_resumed,
    fold,
)
from elastic_trainer.worker.session import Session
from tests.unit.worker.ranks import outcome, run_ranks
from tests.unit.worker.toys import data, linear, loss_of, model


def formula(total: int, world: int) -> str:
    """The tree over ``total`` leaves, put together by ``world`` ranks."""
    found: dict[Block, str] = {}
    for rank in range(world):
        stack: Stack[str] = Stack(lambda left, right: f"({left}+{right})")
        for leaf in range(*cut(total, world, rank)):
            stack.push(leaf, str(leaf))
        found |= dict(stack.held)
    return fold(total, found, lambda left, right: f"({left}+{right})")


def test_the_tree_is_the_one_described() -> None:
    """Halves are whole powers of two; what lies beyond the last leaf does not exist."""
    assert formula(1, 1) == "0"
    assert formula(4, 2) == "((0+1)+(2+3))"
    assert formula(7, 3) == formula(7, 9) == "(((0+1)+(2+3))+((4+5)+6))"
    with pytest.raises(ValueError, match="leaf 1 of 3 is missing"):
        fold(3, {Block(0, 0): "a", Block(2, 0): "c"}, lambda left, right: left + right)


@given(total=st.integers(1, 4096), world=st.integers(1, 64))
def test_a_rank_exchanges_few_sums(total: int, world: int) -> None:
    """No more than two for each level of the tree, one where ranks divide the leaves as powers of two."""
    most = max(len(blocks_of(total, world, rank)) for rank in range(world))
    assert most <= 2 * total.bit_length()
    if total % world == 0 and (total // world) & (total // world - 1) == 0:
        assert most == 1


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def combined(plan: EpochPlan, world: int) -> list[list[torch.Tensor]]:
    x, y = data(plan.length).tensors
    made = network()  # by one thread: all draw from one generator

    def body(control: Control) -> list[torch.Tensor]:
        module = deepcopy(made)
        tree = TreeReduction(module, [], [])
        tree.bind(control, control.group)
        sampler = Sampler(Fetcher(TensorDataset(x, y), torch.device("cpu")), plan)
        batch = sampler.draw(Cursor(0, 0), control.rank, control.world_size)
        for part in batch.micro_batches:
            grow(tree, module, part)
        tree.combine(batch.parts)
        return [*(each.grad.clone() for each in module.parameters() if each.grad is not None), torch.tensor(tree.loss)]

    return run_ranks(world, body)


def grow(tree: TreeReduction, module: nn.Module, part: Batch) -> None:
    loss = nn.functional.mse_loss(module(part.x), part.y) * (len(part.ids) / part.global_size)
    loss.backward()  # type: ignore[no-untyped-call]
    if part.number is None:
        tree.discard()
    else:
        tree.capture(part.number, len(part.ids) / part.global_size, loss)


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 40),
    micro=st.integers(1, 6),
    parts=st.integers(1, 9),
    world=st.integers(2, 5),
    seed=st.integers(0, 9),
)
def test_gradients_have_equal_bits_and_are_those_of_the_whole_batch(
    length: int, micro: int, parts: int, world: int, seed: int
) -> None:
    """For any size of data set, batch and micro-batch, seed and number of ranks; on every rank."""
    plan = EpochPlan(length, micro * parts, micro, seed)
    (alone,) = combined(plan, 1)
    for rank in combined(plan, world):
        assert all(torch.equal(mine, other) for mine, other in zip(rank, alone, strict=True))
    ids = torch.from_numpy(np.array(plan.global_batch_at(Cursor(0, 0)).ids)).long()
    x, y = data(length).tensors
    module = network()
    nn.functional.mse_loss(module(x[ids]), y[ids]).backward()  # type: ignore[no-untyped-call]
    for mine, parameter in zip(alone, module.parameters(), strict=False):
        assert parameter.grad is not None
        assert torch.allclose(mine, parameter.grad, atol=1e-6)


def test_segments_of_any_size_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = EpochPlan(23, 22, 3, 1)
    whole = combined(plan, 3)
    monkeypatch.setattr("elastic_trainer.worker.model.tree.SEGMENT_BYTES", 1)
    for mine, other in pairwise([*whole, *combined(plan, 3)]):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def test_a_16_bit_gradient_is_added_up_in_32_bits() -> None:
    """256 micro-batches of which all but one are too small to count in bfloat16 beside the first."""
    module = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    tree = TreeReduction(module, [], [])
    tree.bind(Control(), None)
    for number in range(257):
        module.weight.grad = torch.full_like(module.weight, 1.0 if number == 0 else 2.0**-10)
        tree.capture(number, 1.0, torch.tensor(0.0))
    tree.combine(257)
    assert module.weight.grad is not None
    assert module.weight.grad.dtype is torch.bfloat16
    assert float(module.weight.grad) == 1.25


def in_session(
    body: Callable[[Any, Any, Any], None], micro: int | None = 4, scale_from: int | None = None, **options: Any
) -> None:
    with Session(device="cpu") as session:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        wrapped = session.wrap(module, optimizer=optimizer, reduction="tree", **options)
        sizes: dict[str, Any] = {"global_batch_size": 16, "micro_batch_size": micro, "scale_from": scale_from}
        batch = next(session.batches(data(), **sizes, epochs=1))
        with session.step() as step:
            body(step, wrapped, batch)
            optimizer.step()


def whole_batch(step: Any, wrapped: Any, batch: Any) -> None:
    step.backward(loss_of(wrapped, batch))


def two_losses(step: Any, wrapped: Any, batch: Any) -> None:
    for part in step.micro_batches(batch):
        step.backward(loss_of(wrapped, part))
        step.backward(loss_of(wrapped, part))


def left_out(step: Any, wrapped: Any, batch: Any) -> None:
    for part in step.micro_batches(batch):
        if part.number != 1:
            step.backward(loss_of(wrapped, part))


def replaced(step: Any, wrapped: Any, batch: Any) -> None:
    wrapped[1].running_mean = torch.ones(8)
    step._steps.replica.begin_step()


def sparse(step: Any, wrapped: Any, batch: Any) -> None:
    for part in step.micro_batches(batch):
        parameter = wrapped[0].weight
        parameter.grad = torch.zeros_like(parameter).to_sparse()
        step._steps.replica.tree.capture(part.number, 1.0, torch.tensor(0.0))


@pytest.mark.parametrize(
    ("body", "micro", "options", "says"),
    [
        (whole_batch, None, {}, r"adds up micro-batches \(draw with"),
        (whole_batch, 4, {}, r"loop over step.micro_batches\(\)"),
        (two_losses, 4, {}, "a second backward pass of one micro-batch"),
        (left_out, 4, {}, "had no backward pass"),
        (replaced, 4, {}, r"buffer '1.running_mean' was replaced"),
        (sparse, 4, {}, "a gradient is sparse"),
        (whole_batch, 4, {"ddp_options": {"bucket_cap_mb": 1}}, "does not go with ddp_options"),
        (whole_batch, 4, {"sync_batchnorm": True}, "does not go with sync_batchnorm"),
        (whole_batch, 4, {"scale_from": 2}, "leave one of them out"),
    ],
)
def test_what_has_no_place_in_the_tree_is_refused(body: Any, micro: int | None, options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        in_session(body, micro, **options)


def test_a_parameter_that_is_a_part_of_another_tensor_is_refused() -> None:
    """Its elements do not lie side by side; any order of dimensions is fine."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(4, 8).t())
    TreeReduction(module, [], [])
    module.weight = nn.Parameter(torch.randn(4, 8)[:, :4])
    with pytest.raises(ConfigError, match=r"clone\(\)"):
        TreeReduction(module, [], [])


def moved_by(count: bool) -> torch.Tensor:
    """The running mean after one step, with mean losses or with counted sums that mean the same."""
    with Session(device="cpu", seed=1) as session:
        module = model(0.0)
        torch.manual_seed(4)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        wrapped = session.wrap(module, optimizer=optimizer, reduction="tree")
        batch = next(session.batches(data(), global_batch_size=16, micro_batch_size=4, epochs=1))
        with session.step() as step:
            for part in step.micro_batches(batch):
                loss = loss_of(wrapped, part)
                step.backward(*((loss * len(part), len(part)) if count else (loss,)))
            optimizer.step()
        mean: torch.Tensor = module[1].running_mean  # type: ignore[index]
        return mean


def test_what_batchnorm_moves_does_not_depend_on_how_losses_are_counted() -> None:
    assert moved_by(count=False).abs().max() > 0.01
    assert torch.equal(moved_by(count=True), moved_by(count=False))


MINE = arithmetic(torch.device("cpu"))


def test_every_difference_has_its_advice() -> None:
    for name in MINE:
        with pytest.raises(ConfigError, match=f"'{name}'"):
            check_resumed(MINE, MINE | {name: "other"}, ())
    check_resumed(MINE, MINE | {"torch": "other"}, ("arithmetic",))
    check_resumed(MINE, None, ())


def test_a_checkpoint_computed_otherwise_is_refused_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training with the tree on another number of threads; without the tree nothing was promised."""

    def train(epochs: int, reduction: str = "tree", allow: tuple[str, ...] = ()) -> None:
        with Session(tmp_path, device="cpu", allow_changed=allow) as session:
            optimizer, wrapped = linear(session, reduction=reduction)
            for batch in session.batches(data(), global_batch_size=20, micro_batch_size=5, epochs=epochs):
                with session.step() as step:
                    for part in step.micro_batches(batch):
                        step.backward(loss_of(wrapped, part))
                    optimizer.step()

    train(1)
    train(2)
    monkeypatch.setattr(tree, "arithmetic", lambda device: MINE | {"threads": "17"})
    with pytest.raises(ConfigError, match=r"'threads' is 17 here .* when the checkpoint was saved"):
        train(3)
    train(3, reduction="ddp")
    train(4)  # nothing was promised in between
    monkeypatch.setattr(tree, "arithmetic", lambda device: MINE | {"threads": "18"})
    train(5, allow=("arithmetic",))


def test_only_ranks_that_differ_from_the_first_refuse() -> None:
    """The others can go on without them; the sentence names the difference and what to set."""

    def body(control: Control) -> str:
        mine = MINE | ({"threads": "17"} if control.rank == 1 else {})
        return outcome(lambda: check_ranks(control, mine))

    first, second, third = run_ranks(3, body)
    assert first == third == ""
    assert f"'threads' is 17 here and {MINE['threads']} on rank 0" in second
    assert "OMP_NUM_THREADS" in second
