"""A mixture of experts in place: 2 nodes of 2 x 2 ranks, killed amid all-to-alls, in the commit barrier, at random."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.clock import pause
from tests.drills.sharded.moe import MoeNet
from tests.drills.sharded.test_sharded import CLOSE, MIXTURE, PACE_S, Sharded
from tests.unit.checkpoint.states import newest_of

pytestmark = pytest.mark.usefixtures("sharded_torch")


def test_whatever_is_killed_amid_dispatch_the_survivors_go_on_and_no_step_is_lost(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    sharded = Sharded(tmp_path, etcd_endpoint, run_id, shards=4, pace_s=PACE_S, save_every=20, **MIXTURE)
    with sharded.job as job:
        job.start(2)
        sharded.await_together()
        for fault in ("dispatch", "return", "barrier", "half"):
            sharded.strike(fault)
        chance = random.Random(1)
        for kind in ("worker", "node"):
            pause(chance.uniform(0.0, 0.5))
            sharded.kill(chance, kind)
        error = sharded.ended(tmp_path)
    print({"error": error})
    assert error < CLOSE
    MoeNet().load_state_dict(newest_of(CheckpointManager(sharded.directory / "checkpoints")).state["model"])


def test_counts_of_tokens_that_an_aborted_kernel_leaves_are_no_error_of_the_script(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    """Over groups that behave like NCCL's: the script computes sizes with garbage before it hears of the lost peer."""
    sharded = Sharded(tmp_path, etcd_endpoint, run_id, pace_s=PACE_S, like_nccl=1, **(MIXTURE | {"mesh": [1, 2]}))
    with sharded.job as job:
        job.start(2)
        sharded.await_together()
        for fault in ("counts", "dispatch", "return"):
            sharded.strike(fault)
        error = sharded.ended(tmp_path)
    print({"error": error})
    assert error < CLOSE
    assert sum(int(each.read_text()) for each in sharded.directory.glob("aborts-*")) > 0
