"""Rounds of 2 or 4 nodes alone: who is one too many stands by with its process, and comes back with the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.drills.run import conclusions
from elastic_trainer.drills.stage import Setting, Stage, staged
from elastic_trainer.drills.strikes import kill_nodes
from elastic_trainer.membership.documents import RoundState

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("etcd_binary")]


def test_only_sizes_that_are_allowed_train(tmp_path: Path) -> None:
    """One of four is killed: two go on at once, in the same processes, and the third stands by until a fourth comes.

    No step is lost or made twice by those who go on, and each sample counts once.
    """
    options = {"regroup_grace": "10", "sizes": "2:4"}
    setting = Setting(nodes=4, max_nodes=4, pause_s=0.04, limit_s=180.0, options=options)
    with staged(setting, tmp_path) as stage:
        before = stage.await_steps()
        kill_nodes(stage, [before.nodes[3]])
        two = stage.until(lambda: training(stage, 2), "a round of two")
        third = next(name for name in before.nodes[:3] if name not in two)
        waiting = stage.node(third).worker()
        assert waiting is not None
        assert waiting.pid == before.pids[third]
        stage.restore()
        after = stage.await_steps()
        assert {name: after.pids[name] for name in before.nodes[:3]} == {
            name: before.pids[name] for name in before.nodes[:3]
        }
        assert conclusions(stage) == []
        assert {len(document.members) for document in stage.history if document.members} == {2, 4}


def training(stage: Stage, nodes: int) -> tuple[str, ...] | None:
    """The names of the nodes of an active round of ``nodes`` in which all have made steps."""
    standing, document = stage.observe(), stage.document
    if standing is None or document is None or document.state is not RoundState.ACTIVE:
        return None
    made = standing.world == nodes == len(standing.nodes) and standing.least_steps() > 5
    return tuple(standing.nodes) if made else None
