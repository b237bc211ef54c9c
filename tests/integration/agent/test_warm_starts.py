"""torchrun starts its workers from a template, and nothing else about them changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.local import agents, processes
from tests.support.plainjob import PlainJob


def starts(job: PlainJob, node: str) -> list[dict[str, Any]]:
    lines = [line for line in job.log(node).splitlines() if '"worker.started"' in line]
    return [json.loads(line[line.index("{") :]) for line in lines]


@pytest.mark.timeout(300)
def test_workers_are_forked_killed_and_replaced(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """A forked worker is torchrun's child and shows its own command and environment; SIGKILL of it is seen, the round
    goes on with forked ones. A template that is killed costs one cold start. The nodes end with 0 and leave nothing."""
    with PlainJob(tmp_path, etcd_endpoint, run_id, most=2, options={"preload": "auto"}) as job:
        job.start(2)
        first = job.await_world(*(order := job.await_order()))
        victim = job.node(order[1])
        worker = victim.worker()
        assert worker is not None
        assert worker.cmdline()[-2:] == job.spec.entry
        assert processes.environment(worker)["RANK"] == "1"
        assert (killed := victim.kill_worker()) is not None
        assert killed.pids == (worker.pid,)
        second = job.await_world(*order, after=first)
        assert [each["warm"] for each in starts(job, victim.name)] == [True, True]

        (template,) = [each for each in victim.family()[1:] if "template" in each.cmdline()]
        template.kill()
        assert victim.kill_worker() is not None
        third = job.await_world(*order, after=second)
        cold = starts(job, victim.name)[-1]
        assert not cold["warm"]
        assert cold["reason"].startswith("the template has ended")
        assert victim.kill_worker() is not None
        job.await_world(*order, after=third)
        assert starts(job, victim.name)[-1]["warm"]
        family = victim.family()
        assert set(job.finish().values()) == {0}
        assert not [each for each in family if processes.alive(each)]


@pytest.mark.timeout(300)
def test_output_goes_where_torchrun_sends_it(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """--redirects writes each stream of a forked worker to its file, and the exit code of one that fails is seen."""
    script = tmp_path / "speaks.py"
    script.write_text("import sys\nprint('said')\nprint('erred', file=sys.stderr)\nsys.exit(7)\n")
    logs = tmp_path / "torchrun"
    entry = ["--redirects=3", f"--log-dir={logs}", str(script)]
    options = {"preload": "json", "last_call": "0"}
    with PlainJob(
        tmp_path, etcd_endpoint, run_id, least=1, most=1, options=options, entry=entry, max_restarts=0
    ) as job:
        (node,) = job.start(1)
        assert job.exit_code(node) == 1
        (start,) = starts(job, node.name)
        assert start["warm"], start["reason"]
        assert "exitcode  : 7" in job.log(node.name)
        assert [path.read_text() for path in logs.rglob("stdout.log")] == ["said\n"]
        assert [path.read_text() for path in logs.rglob("stderr.log")] == ["erred\n"]


@pytest.mark.timeout(300)
def test_the_others_train_on_until_a_new_node_has_imported(
    tmp_path: Path, etcd_endpoint: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins when its template has imported: in a new round all would wait for the workers it could not yet start."""
    (modules := tmp_path / "modules").mkdir()
    (modules / "heavy.py").write_text(
        f"import pathlib, time\nplace = pathlib.Path({str(tmp_path)!r})\n(place / 'begun').touch()\n"
        "while not (place / 'go').exists():\n    time.sleep(0.01)\n"
        "(place / 'imported').write_text(str(time.monotonic()))\n"
    )
    with PlainJob(tmp_path, etcd_endpoint, run_id, least=1, most=2, flags=["--alone"],
                  options={"preload": "json", "last_call": "0"}) as job:  # fmt: skip
        (first,) = job.start(1)
        begun = job.await_world(first.name)
        monkeypatch.setattr(agents, "_free", [])  # a node that is itself a fork has inherited its template
        heavy = {"options": dict(job.spec.options) | {"preload": "heavy"}, "environment": {"PYTHONPATH": str(modules)}}
        second = job.add_with(**heavy)
        job.wait_for((tmp_path / "begun").exists, "its template imports nothing")
        job.await_steps(first.name, 100)
        assert not job.present(second.name)
        (tmp_path / "go").touch()
        job.await_round(first.name, second.name, after=begun)
        last = max(step.t for step in job.steps(first.name) if step.round == begun)
        assert last > float((tmp_path / "imported").read_text())
        assert [each["warm"] for each in starts(job, second.name)] == [True]
        job.finish()
