"""A script that cannot start: told apart from machines that fail, and ended at once where it is the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.membership.documents import RoundState, RunResult
from tests.support.plainjob import SCRIPT, PlainJob

FAILING = """
import os, sys
from pathlib import Path
node = os.environ["ELASTIC_TRAINER_NODE"]
with Path(sys.argv[1], f"starts-{node}").open("a") as file:
    file.write("x")
if node in sys.argv[2:]:
    import no_such_module
import runpy
sys.argv = [sys.argv[0], sys.argv[1]]
runpy.run_path(SCRIPT, run_name="__main__")
"""


def failing(directory: Path, *nodes: str) -> list[str]:
    """The command of a script that cannot start on these nodes."""
    script = directory / "failing.py"
    script.write_text(FAILING.replace("SCRIPT", repr(str(SCRIPT))))
    return [str(script), str(directory), *nodes]


def starts(directory: Path, node: str) -> int:
    return len((directory / f"starts-{node}").read_text())


@pytest.mark.timeout(200)
@pytest.mark.parametrize("recovery", ["restart", "in_place"])
def test_a_script_that_cannot_start_ends_the_run_at_once(
    tmp_path: Path, etcd_endpoint: str, run_id: str, recovery: str
) -> None:
    """On two nodes, twice, with a hundred restarts left: one sentence on each of them, and a run that is closed."""
    entry, options = failing(tmp_path, "n0", "n1"), {"recovery": recovery}
    with PlainJob(tmp_path, etcd_endpoint, run_id, most=2, entry=entry, options=options) as job:
        job.start(2)
        assert [job.exit_code(node) for node in job.nodes] == [1, 1]
        assert (job.document().state, job.document().result) == (RoundState.CLOSED, RunResult.FAILED)
        for name in ("n0", "n1"):
            assert starts(tmp_path, name) == 2
            (sentence,) = [line for line in job.log(name).splitlines() if line.startswith("elastic-trainer: ")]
            why = "exit code 1: ModuleNotFoundError: No module named 'no_such_module'"
            assert f"the script fails at startup in the same way on all nodes ({why}), 2 times in a row" in sentence


@pytest.mark.timeout(200)
def test_one_node_on_which_it_cannot_start_ends_nobody_elses_run(
    tmp_path: Path, etcd_endpoint: str, run_id: str
) -> None:
    entry = failing(tmp_path, "n1")
    with PlainJob(tmp_path, etcd_endpoint, run_id, least=1, most=2, entry=entry, max_restarts=2) as job:
        job.start(2)
        assert job.exit_code(job.node("n1")) == 1
        assert starts(tmp_path, "n1") == 3
        job.await_world("n0")
        job.finish()
        assert job.exit_code(job.node("n0")) == 0
