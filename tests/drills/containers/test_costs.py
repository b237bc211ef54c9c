"""What the loss of a container costs the others, beside the loss of a node of local processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median

import pytest

from elastic_trainer.drills.job import DIGESTS, STOP_FILE
from elastic_trainer.drills.measure import compared, read_digest, sample_problems, state_problems
from elastic_trainer.drills.run import DrillOptions, run_drill
from elastic_trainer.drills.stage import IN_PLACE, Setting
from elastic_trainer.local.ledger import FileTail
from tests.drills.containers.fleet import ALL, FOLDER, Composed, Fleet, say

KILLS = 3


def test_docker_kill_costs_what_a_node_kill_costs(
    composed: Composed, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same job with the same options, on the same machine, in turn; the states of all ranks were equal.

    The figures are printed, and judge nothing: they are those of a machine that does other things too.
    """
    setting = Setting()
    conf = ",".join(f"{name}={value}" for name, value in IN_PLACE.items())
    job = setting.job(Path(FOLDER))
    nnodes = f"{setting.min_nodes}:{setting.max_nodes}"
    effects, from_command_s = [], []
    with Fleet(composed, "cost", tmp_path, job, nnodes, conf) as fleet:
        say("three containers do what the drill node-kill breaks")
        fleet.start(*ALL)
        for number in range(KILLS):
            before = fleet.settled(*ALL)
            victim = before.nodes[1 + number % 2]
            moment = fleet.kill(victim)
            effects.append(fleet.aftermath(before, f"docker kill {victim}", moment.sent, victim))
            from_command_s.append(effects[-1].recovery_s + moment.sent - moment.asked)
            fleet.engine.docker("start", victim)
        fleet.settled(*ALL)
        (tmp_path / STOP_FILE).touch()
        assert [fleet.code(name) for name in ALL] == [0, 0, 0], fleet.describe()
        fleet.look()
        texts = [text for path in (tmp_path / DIGESTS).glob("*.jsonl") for text in FileTail(path).read()]
        digests = [each for each in map(read_digest, texts) if each is not None]
        assert sample_problems(fleet.book.lines, setting.samples) == []
        members = {each.node for each in digests if each.event == "end"}
        assert state_problems(digests, members) == []
        assert {name.partition("-")[0] for name in members} == set(ALL)
        assert compared(digests) > 0
    say("the same faults among local processes")
    report = run_drill(DrillOptions("node-kill", repeats=KILLS, directory=tmp_path_factory.mktemp("local")))
    assert report.ok, report.problems
    engine = {
        "recovery_s": median(each.recovery_s for each in effects),
        "gap_s": median(each.gap_s for each in effects),
        "from_command_s": median(from_command_s),
    }
    local = report.median()
    assert local is not None
    figures = {
        "docker_kill": {name: round(value, 3) for name, value in engine.items()},
        "node_kill": local,
        "ratio": {name: round(engine[name] / local[name], 2) for name in ("recovery_s", "gap_s")},
        "repeats": KILLS,
        "load": os.getloadavg()[0],
    }
    say(json.dumps(figures))
