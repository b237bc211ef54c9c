"""Each way to break a job, on real processes: the others go on, and nothing of the training is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_trainer.checkpoint import CheckpointManager
from elastic_trainer.cli.main import main
from elastic_trainer.drills.job import CHECKPOINTS
from elastic_trainer.drills.run import DRILLS, conclusions
from elastic_trainer.drills.stage import Setting, staged
from elastic_trainer.errors import EXIT_CONFIG
from tests.drills.cluster.undisturbed import undisturbed
from tests.drills.sharded.test_sharded import CLOSE
from tests.integration.training.launch import ran
from tests.support.requirements import needs_hosts
from tests.unit.checkpoint.states import newest_of

OUTAGE_S = 8.0
SLOW = "20"
"""Slack in seconds for a machine that is busy: what is too slow is for people to judge, from the figures."""

# A busy machine may keep a living agent from answering in the usual half second.
PATIENT = {"regroup_grace": "10"}
THREE = Setting(nodes=3, pause_s=0.04, limit_s=240.0, options={**PATIENT, "hang_timeout": "6"})
FOUR = Setting(nodes=4, max_nodes=4, pause_s=0.04, limit_s=180.0, options=PATIENT)
ETCD_OF_THREE = Setting(nodes=3, etcd_members=3, pause_s=0.04, limit_s=180.0, options=PATIENT)
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("etcd_binary")]


def patient(name: str) -> Setting:
    """What the drill ``name`` is played with, on a machine that may be busy."""
    setting = DRILLS[name].setting
    return replace(setting, limit_s=180.0, options={**setting.options, **PATIENT})


def play(names: Sequence[str], setting: Setting, directory: Path) -> None:
    """Play the drills ``names`` one after the other on one job; a name twice is its next repeat."""
    with staged(replace(setting, outage_s=OUTAGE_S), directory) as stage:
        for number, name in enumerate(names):
            effect = DRILLS[name].play(stage, names[:number].count(name))
            assert effect.problems == (), (name, effect)
            assert effect.steps_lost == 0, (name, effect)
            assert effect.recovery_s > 0, (name, effect)
            assert effect.gap_s > 0, (name, effect)
        assert conclusions(stage) == []


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        pytest.param(FOUR, ["double-kill", "kill-during-recovery", "kill-during-recovery"], id="two_at_once"),
        pytest.param(
            THREE,
            ["node-kill", "worker-hang", "kill-during-join", "kill-during-join", "etcd-outage"],
            id="one_after_the_other",
        ),
        pytest.param(ETCD_OF_THREE, ["etcd-leader-loss"], id="etcd_leader"),
        pytest.param(patient("shard-kill"), ["shard-kill", "shard-join"], id="sharded_in_each_node"),
        pytest.param(patient("group-kill"), ["group-kill"], id="sharded_in_groups"),
    ],
)
def test_the_others_go_on_and_nothing_is_lost(tmp_path: Path, setting: Setting, names: list[str]) -> None:
    """Two of four nodes die in one moment; two workers, the second during the recovery from the first.

    A node is killed, and replaced. Of a worker that is frozen for good the agent lives on, and ends it in time. A
    member, then the newcomer itself, is killed in the moment in which a planned change begins. etcd goes away for
    longer than a lease: no round ends, and a worker killed meanwhile recovers when it is back; so does one killed with
    the leader of three. Shards come from those that are left, as nothing is saved here. Each time the others go on in
    the same processes, no step is made twice, every sample counts once, and replicas hold equal bits.
    """
    play(names, setting, tmp_path)


def test_a_model_that_is_sharded_anew_comes_out_as_in_one_process(tmp_path: Path) -> None:
    """Over the whole job, of which a node is killed and another joins: nothing is lost that was saved, and the last
    checkpoint has the parameters of one process after as many steps, to rounding."""
    setting = patient("reshard")
    play(["reshard"], setting, tmp_path / "job")
    found = newest_of(CheckpointManager(tmp_path / "job" / CHECKPOINTS))
    undisturbed(setting, tmp_path / "alone", found.manifest.step)
    expected = newest_of(CheckpointManager(tmp_path / "alone" / CHECKPOINTS))
    assert expected.manifest.step == found.manifest.step
    for name, whole in expected.state["model"].items():
        torch.testing.assert_close(found.state["model"][name], whole, rtol=0.0, atol=CLOSE)


def reported(code: int, out: str) -> dict[str, Any]:
    """The JSON of a drill that went as it must."""
    report: dict[str, Any] = json.loads(out)
    assert (code, report["ok"]) == (0, True), report
    assert report["problems"] == []
    assert report["median"]["steps_lost"] == 0
    assert report["compared"] > 0
    return report


def test_the_command_reports_a_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Members train on while a node comes; the report is one JSON object with the medians, and the files are kept
    where they were asked for."""
    code = main(["drill", "node-join", "--json", "--run-dir", str(tmp_path / "run")])
    report = reported(code, capsys.readouterr().out)
    (only,) = report["repeats"]
    assert report["drill"] == "node-join"
    assert report["median"]["gap_s"] == only["gap_s"] < only["recovery_s"]
    assert (tmp_path / "run" / "logs" / "n2.log").exists()


@pytest.mark.root
def test_a_node_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    """Its network falls silent, and the others go on; mended, it joins by a planned change. The machine's own network
    is what it was before."""
    needs_hosts()
    before = interfaces()
    words = ["node-partition", "--json", "--slack", SLOW, "--run-dir", str(tmp_path / "run")]
    done = ran(["-m", "elastic_trainer.cli.main", "drill", *words])  # whose threads are all in the new network
    report = reported(done.code, done.out)
    assert report["repeats"][0]["rejoin_s"] > 0
    assert interfaces() == before


def test_what_cannot_be_played_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A drill that does not exist; a run directory that is in use. One sentence, exit code 78."""
    (tmp_path / "ledger").mkdir()
    for words, said in ((["nonsense"], "there is no drill 'nonsense'"), (["worker-kill"], "holds an earlier run")):
        assert main(["drill", *words, "--run-dir", str(tmp_path)]) == EXIT_CONFIG
        assert said in capsys.readouterr().err


def interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))
