"""Two nodes are cut off from each other, then reunited; an assertion fails if that goes otherwise than it should.

``parted.py DIRECTORY``. A process of its own: threads that were started before would stay in the old network.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elastic_trainer.drills.run import conclusions
from elastic_trainer.drills.stage import Setting, Stage, staged
from elastic_trainer.local import agents
from elastic_trainer.local.hosts import Segment
from elastic_trainer.membership.documents import RoundDocument, RoundState


def play(directory: Path) -> None:
    """The whole story."""
    options = {"regroup_grace": "10", "form_timeout": "3", "join_interval": "10"}
    setting = Setting(nodes=2, min_nodes=2, max_nodes=3, pause_s=0.04, limit_s=180.0, options=options)
    with Segment() as segment, staged(setting, directory) as stage:
        before = stage.settled()
        name = stage.cluster.add().name
        segment.part(before.nodes[1], name)
        document = stage.until(lambda: left_out(stage), f"a round without {name}")
        assert document.left_out == name
        assert [member.node for member in document.members] == list(before.nodes)
        assert sum(each.state is RoundState.BROKEN for each in stage.history) == 1
        stage.retire(name)
        alone = stage.settled()
        assert alone.pids == before.pids
        tried = attempts(stage, name)
        stage.until(lambda: stage.node(name).log.read_text().count('"node.quarantined"') > 1, "two vain looks")
        stage.look()
        assert attempts(stage, name) == tried
        segment.reunite(before.nodes[1], name)
        stage.welcome(name)
        joined = stage.settled()
        assert {node: joined.pids[node] for node in before.nodes} == dict(before.pids)
        assert conclusions(stage) == []


def left_out(stage: Stage) -> RoundDocument | None:
    """The first round that was formed without somebody who could not be reached."""
    stage.look()
    return next((each for each in stage.history if each.left_out is not None), None)


def attempts(stage: Stage, name: str) -> int:
    """Rounds that ``name`` was to be a member of."""
    return len({each.number for each in stage.history if each.member(name) is not None})


if __name__ == "__main__":
    agents.preload()
    play(Path(sys.argv[1]))
