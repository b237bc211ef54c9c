"""Drills as users meet them: the table of drills, the report, the options."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from elastic_trainer.cli import drill as command
from elastic_trainer.drills.measure import Effect
from elastic_trainer.drills.report import Report, show
from elastic_trainer.drills.run import DrillOptions, unmet
from elastic_trainer.drills.table import DRILLS, named
from elastic_trainer.errors import ConfigError


def report(*effects: Effect, problems: tuple[str, ...] = ()) -> Report:
    return Report("worker-kill", effects, problems, 7, Path("/nowhere"))


EFFECTS = [Effect("killed", recovery, 2 * recovery, 0, {"rejoin_s": 1.0}) for recovery in (0.3, 0.1, 0.2)]


def test_the_json_has_each_repeat_and_the_medians() -> None:
    """Under the names that programs rely on."""
    found = json.loads(json.dumps(report(*EFFECTS).as_json()))
    assert found["drill"] == "worker-kill"
    assert found["median"] == {"recovery_s": 0.2, "gap_s": 0.4, "steps_lost": 0}
    assert found["repeats"][0] == {
        "what": "killed",
        "recovery_s": 0.3,
        "gap_s": 0.6,
        "steps_lost": 0,
        "rejoin_s": 1.0,
    }
    assert found["ok"] is True


def test_a_problem_or_nothing_done_is_not_ok() -> None:
    """A drill that was never played must not look like one that was survived."""
    assert not report(*EFFECTS, problems=("no",)).ok
    assert not report().ok
    assert report().median() is None


@pytest.mark.parametrize("problems", [(), ("the samples are not exact",)])
def test_people_get_a_table_and_a_verdict(problems: tuple[str, ...]) -> None:
    """With the medians; and where everything is kept if it went wrong."""
    console = Console(file=io.StringIO(), width=160)
    show(report(*EFFECTS, problems=problems), console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.200 s" in said
    assert ("not ok; everything is kept in /nowhere" if problems else "samples exact") in said
    assert all(problem in said for problem in problems)


def test_what_a_repeat_did_not_keep_to_is_a_problem() -> None:
    """Steps lost; a survivor that was restarted; a recovery that takes longer than the limit and the slack."""
    options = DrillOptions("node-freeze", slack_s=1.0)
    slow = Effect("frozen", 3.5, 3.5, 0)
    assert unmet(DRILLS["node-freeze"], options, [slow]) == ["repeat 1: recovery took 3.50 s, more than 1.6 s"]
    assert unmet(DRILLS["worker-kill"], options, [slow]) == []
    lossy = Effect("killed", 0.1, 0.1, 2, problems=("the worker of n0, a survivor, was restarted",))
    assert unmet(DRILLS["worker-kill"], options, [EFFECTS[0], lossy]) == [
        "repeat 2: the worker of n0, a survivor, was restarted",
        "repeat 2: survivors committed 2 steps again",
    ]


def test_all_drills_are_listed_in_the_help() -> None:
    """With what they do."""
    parser = argparse.ArgumentParser()
    command.configure(parser)
    said = parser.format_help()
    assert all(drill.name in said and drill.summary in said for drill in DRILLS.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["worker-kill", "--repeats", "0"], "--repeats 0"),
        (["etcd-outage", "--seconds", "-1"], "--seconds -1"),
        (["worker-kill", "--slack", "nan"], "--slack nan"),
        (["worker-killing"], "no drill 'worker-killing'"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(words: list[str], said: str) -> None:
    """Before anything is started."""
    parser = argparse.ArgumentParser()
    command.configure(parser)
    with pytest.raises(ConfigError, match=said):
        command.run(parser.parse_args(words))


def test_networks_need_root_and_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a sentence of its own."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="needs root"):
        named("node-partition")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(ConfigError, match="needs the program 'ip'"):
        named("node-partition")
