"""Two nodes that do not reach each other, while both reach etcd and the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.drills.run import conclusions
from elastic_trainer.drills.stage import Setting, Stage, staged
from elastic_trainer.local.hosts import Segment
from elastic_trainer.membership.documents import RoundDocument, RoundState
from tests.drills.inplace.leading import played
from tests.support.requirements import needs_hosts

pytestmark = [pytest.mark.timeout(400), pytest.mark.root, pytest.mark.usefixtures("etcd_binary")]


def test_a_newcomer_that_does_not_reach_a_member_is_left_out_until_it_does(tmp_path: Path) -> None:
    """The round with it cannot be formed, then the others go on without it, in the same processes and without a step
    lost. It stays away while it is cut off, and joins when it is not. Samples and parameters are exact."""
    needs_hosts()
    played(play, tmp_path, 360.0)


def play(directory: Path) -> None:
    options = {"regroup_grace": "10", "form_timeout": "3", "join_interval": "10"}
    setting = Setting(nodes=2, min_nodes=2, max_nodes=3, pause_s=0.04, limit_s=180.0, options=options)
    with Segment() as segment, staged(setting, directory) as stage:
        before = stage.await_steps()
        name = stage.cluster.add().name
        segment.part(before.nodes[1], name)
        segment.part(name, before.nodes[1])
        document = stage.until(lambda: left_out(stage), f"a round without {name}")
        assert document.left_out == name
        assert [member.node for member in document.members] == list(before.nodes)
        assert sum(each.state is RoundState.BROKEN for each in stage.history) == 1
        stage.retire(name)
        alone = stage.await_steps()
        assert alone.pids == before.pids
        tried = attempts(stage, name)
        stage.until(lambda: stage.node(name).log.read_text().count('"node.quarantined"') > 1, "two vain looks")
        stage.observe()
        assert attempts(stage, name) == tried
        segment.reunite(before.nodes[1], name)
        segment.reunite(name, before.nodes[1])
        stage.welcome(name)
        joined = stage.await_steps()
        assert {node: joined.pids[node] for node in before.nodes} == dict(before.pids)
        assert conclusions(stage) == []


def left_out(stage: Stage) -> RoundDocument | None:
    """The first round that was formed without somebody who could not be reached."""
    stage.observe()
    return next((each for each in stage.history if each.left_out is not None), None)


def attempts(stage: Stage, name: str) -> int:
    """Rounds that ``name`` was to be a member of."""
    return len({each.number for each in stage.history if each.member(name) is not None})
