"""One way between two members falls silent, then a whole node; an assertion fails if that goes otherwise.

``silent.py DIRECTORY``. A process of its own: threads that were started before would stay in the old network.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elastic_trainer.drills.run import conclusions
from elastic_trainer.drills.stage import Setting, staged
from elastic_trainer.drills.strikes import node_partition, pair_partition
from elastic_trainer.local import agents
from elastic_trainer.local.hosts import Segment
from tests.drills.inplace.test_suspicion import LIMIT_S, UNTOLD, broken_after


def play(directory: Path) -> None:
    """The whole story."""
    setting = Setting(pause_s=0.04, limit_s=LIMIT_S, options=UNTOLD)
    with Segment(), staged(setting, directory) as stage:
        before = stage.settled()
        effect = pair_partition(stage, 0)
        assert (effect.steps_lost, effect.problems) == (0, ()), effect
        assert "does not answer its peer" in broken_after(stage, before.round).reason
        without = next(each for each in stage.history if each.left_out)
        assert without.number == before.round + 1, "a round was formed in vain"
        assert without.left_out == before.nodes[1], "the more junior one of two equals"
        before = stage.settled()
        effect = node_partition(stage, 0)
        assert (effect.steps_lost, effect.problems) == (0, ()), effect
        assert "does not answer its peer" in broken_after(stage, before.round).reason
        assert conclusions(stage) == []


if __name__ == "__main__":
    agents.preload()
    play(Path(sys.argv[1]))
