"""Nodes and workers that stand still are found by asking, long before any lease or time limit would tell of them.

Leases and limits are longer than the test waits: what is found at all was found by a question.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.drills.run import conclusions
from elastic_trainer.drills.stage import Setting, Stage, staged
from elastic_trainer.drills.strikes import busy_machine, node_freeze, node_partition, pair_partition, worker_freeze
from elastic_trainer.local.hosts import Segment
from elastic_trainer.membership.documents import RoundDocument, RoundState
from tests.drills.inplace.leading import played
from tests.support.requirements import needs_hosts

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("etcd_binary")]

BUSY_S = 6.0
LIMIT_S = 240.0
UNTOLD = {"ttl": "500", "hang_timeout": "500", "sever_timeout": "500", "regroup_grace": "500", "form_timeout": "500"}
"""With these nothing but a question tells within the limit of the drill."""


def test_who_stands_still_is_found_by_asking(tmp_path: Path) -> None:
    """A machine that is busy with other things; then a worker is frozen, then a whole node, rank 0's among them.

    The others go on in the same processes without a step made twice. Each that is thawed comes back as it was, without
    a break. Samples and parameters are exact.
    """
    setting = Setting(pause_s=0.04, outage_s=BUSY_S, limit_s=LIMIT_S, options=UNTOLD)
    with staged(setting, tmp_path) as stage:
        calm = busy_machine(stage, 0)
        assert (calm.steps_lost, calm.problems) == (0, ())
        assert calm.details["steps"] > 0
        for repeat, act, found in (
            (0, worker_freeze, "its process is stopped"),
            (0, node_freeze, "does not answer"),
            (2, node_freeze, "does not answer"),  # rank 0's
        ):
            before = stage.await_steps().round
            effect = act(stage, repeat)
            assert (effect.steps_lost, effect.problems) == (0, ()), effect
            assert found in broken_after(stage, before).reason
        assert conclusions(stage) == []


def broken_after(stage: Stage, number: int) -> RoundDocument:
    """The first broken round from ``number`` on."""
    stage.observe()
    return next(each for each in stage.history if each.state is RoundState.BROKEN and each.number >= number)


@pytest.mark.root
def test_who_cannot_be_reached_is_found_by_asking(tmp_path: Path) -> None:
    """What one node sends to another vanishes, though both reach all others: one of the two is left out, in the first
    round that follows. A node whose whole network falls silent. Both come back when they can be reached."""
    needs_hosts()
    played(fall_silent, tmp_path, 800.0)


def fall_silent(directory: Path) -> None:
    setting = Setting(pause_s=0.04, limit_s=LIMIT_S, options=UNTOLD)
    with Segment(), staged(setting, directory) as stage:
        before = stage.await_steps()
        effect = pair_partition(stage, 0)
        assert (effect.steps_lost, effect.problems) == (0, ()), effect
        assert "does not answer its peer" in broken_after(stage, before.round).reason
        without = next(each for each in stage.history if each.left_out)
        assert without.number == before.round + 1, "a round was formed in vain"
        assert without.left_out == before.nodes[1], "the more junior one of two equals"
        before = stage.await_steps()
        effect = node_partition(stage, 0)
        assert (effect.steps_lost, effect.problems) == (0, ()), effect
        assert "does not answer its peer" in broken_after(stage, before.round).reason
        assert conclusions(stage) == []
