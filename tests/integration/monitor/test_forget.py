"""``forget`` on a real etcd with a real job: kept while it runs, gone afterwards, and its name is free again."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.cli.main import main
from elastic_trainer.clock import SYSTEM
from elastic_trainer.errors import EXIT_CONFIG
from elastic_trainer.membership.documents import JournalEntry, RoundDocument, RoundState, RunResult
from elastic_trainer.settings import StoreSettings
from elastic_trainer.store import connect
from elastic_trainer.store.api import Put, RunKeys
from tests.support.plainjob import PlainJob
from tests.support.waiting import soon


@pytest.mark.timeout(200)
def test_a_job_is_forgotten_when_it_is_over(
    tmp_path: Path, etcd_endpoint: str, run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """While nodes are in it the command refuses, with 78 and their names; a second call finds no such run."""
    call = ["forget", run_id, "--endpoint", etcd_endpoint]
    with PlainJob(tmp_path, etcd_endpoint, run_id, least=1, most=1, flags=["--alone"]) as job:
        job.start(1)
        job.await_world("n0")
        assert main([*call, "--unfinished"]) == EXIT_CONFIG
        assert f"run {run_id!r} has nodes: n0" in capsys.readouterr().err
        job.await_steps("n0", 2)
        assert job.finish() == {"n0": 0}
        assert main([*call, "--dry-run"]) == 0
        assert "would forget" in capsys.readouterr().out
        assert main(call) == 0
        assert f"forgot {run_id}: " in capsys.readouterr().out
        assert not job.store.range(job.keys.root, soon()).items
    assert main(call) == EXIT_CONFIG
    assert "there is no run" in capsys.readouterr().err


def test_only_old_runs_are_pruned(etcd_settings: StoreSettings, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three runs, one over for ten days, one since an hour, one that is open, the first one goes."""
    store, now = connect(etcd_settings), SYSTEM.wall()
    ended = {"old": (now - 10 * 86400.0, True), "fresh": (now - 3600.0, True), "open": (now - 10 * 86400.0, False)}
    for name, (wall, over) in ended.items():
        keys, state = RunKeys(etcd_settings.prefix, name), RoundState.CLOSED if over else RoundState.BROKEN
        result = RunResult.SUCCEEDED if over else None
        current = RoundDocument(number=2, nonce="x", state=state, members=(), result=result)
        entry = JournalEntry(wall=wall, by="a", round=2, state=state, reason="r", nodes=(), world_size=0)
        writes = [Put(keys.round, current.encode()), Put(keys.event(8), entry.encode())]
        store.transact([], writes, deadline=soon())
    where = ["--endpoint", str(etcd_settings.endpoints[0]), "--prefix", etcd_settings.prefix]
    assert main(["forget", "--older-than-days", "7", *where]) == 0
    assert capsys.readouterr().out == "forgot old: 2 keys\n"
    left = {item.key.split("/")[2] for item in store.range(f"{etcd_settings.prefix}/", soon()).items}
    assert left == {"fresh", "open"}
    assert main(["forget", "--older-than-days", "7", *where]) == 0
    assert "no run below" in capsys.readouterr().out
    store.close()


@pytest.mark.parametrize(
    "words",
    [[], ["run", "--older-than-days", "3"], ["--older-than-days", "3", "--unfinished"], ["--older-than-days", "-1"]],
)
def test_a_command_that_cannot_be_meant_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, before anything is asked of etcd."""
    assert main(["forget", *words, "--endpoint", "127.0.0.1:1"]) == EXIT_CONFIG
    assert "older-than-days" in capsys.readouterr().err
