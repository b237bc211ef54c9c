"""Equal bits are claimed only between processes that compute alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic_trainer.errors import ConfigError
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.model import tree
from elastic_trainer.worker.model.tree import arithmetic, check_ranks, check_resumed
from elastic_trainer.worker.session import Session
from tests.unit.worker.ranks import outcome, run_ranks
from tests.unit.worker.toys import data, linear, loss_of

MINE = arithmetic(torch.device("cpu"))


def test_only_ranks_that_differ_from_the_first_refuse() -> None:
    """The others can go on without them; the sentence names the difference and what to set."""

    def body(control: Control) -> str:
        mine = MINE | ({"threads": "17"} if control.rank == 1 else {})
        return outcome(lambda: check_ranks(control, mine))

    first, second, third = run_ranks(3, body)
    assert first == third == ""
    assert f"'threads' is 17 here and {MINE['threads']} on rank 0" in second
    assert "OMP_NUM_THREADS" in second


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
