"""Scripts that change what they train: frozen, unfrozen, regrouped; alone, under torchrun and in place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.drills.inplace.leading import SCRIPTS, Lead
from tests.drills.inplace.scripts.changing import plain_loop, refusal, trained
from tests.integration.worker.launch import run, standalone

SENTENCES = {
    "tree:inside": "parameter '2.weight' was unfrozen inside a step",
    "tree:replaced": "parameter '0.weight' is not the one that session.wrap() was given",
    "tree:apart": "parameter '2.weight' is trained on rank 1 and frozen on rank 0",
    "ddp:": "parameter '2.weight' was unfrozen after session.wrap()",
    "ddp:bypass": "gradients were not summed over the ranks",
}


def assert_like_the_plain_loop(parameters: Sequence[torch.Tensor]) -> None:
    for mine, expected in zip(parameters, plain_loop(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


def ended(directory: Path) -> list[list[str]]:
    (refused, parameters), (others_refused, others) = (
        torch.load(each, weights_only=True) for each in directory.glob("result-*")
    )
    assert all(map(torch.equal, parameters, others))
    assert_like_the_plain_loop(parameters)
    return [refused, others_refused]


def assert_said(refused: Sequence[Sequence[str]], mistakes: Sequence[str]) -> None:
    for said in refused:
        assert [SENTENCES[name] in text for name, text in zip(mistakes, said, strict=True)] == [True] * len(said), said


@pytest.mark.parametrize("reduction", ["ddp", "tree"])
def test_alone_a_change_of_what_is_trained_is_followed(reduction: str) -> None:
    """Gradients of layers outside of the optimizer are new in each step: they count in the norm, as they do in torch.

    What is not followed is refused here too, since the job may go on with more ranks.
    """
    assert_like_the_plain_loop(trained(reduction)[1])
    assert_like_the_plain_loop(trained(reduction, scaled=True)[1])
    assert SENTENCES["tree:replaced"] in refusal(reduction, "replaced")


def test_in_place_a_change_is_followed(lead: Lead) -> None:
    """What is unfrozen is averaged over the ranks from its first step on, and no step is made without."""
    workers = [lead.start(name, "changing.py", lead.directory / "result", "ddp:bypass") for name in "ab"]
    lead.form(workers)
    lead.await_done(workers)
    assert_said(ended(lead.directory), ["ddp:bypass"])


def test_under_torchrun_the_tree_follows_it(tmp_path: Path) -> None:
    """DistributedDataParallel is in the script's hands there, so that its case is refused, as are mistakes."""
    mistakes = ("tree:inside", "tree:replaced", "tree:apart", "ddp:")
    run(standalone(2, str(SCRIPTS / "changing.py"), tmp_path / "result", "tree", *mistakes), tmp_path / "log")
    assert_said([said[:-1] for said in ended(tmp_path)], mistakes)
