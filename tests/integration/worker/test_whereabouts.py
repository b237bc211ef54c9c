"""A rank goes another way than the others: all end at once, with one sentence that names both."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.errors import EXIT_CONFIG
from elastic_trainer.ipc.channel import Failed
from tests.drills.inplace.leading import leading
from tests.integration.worker.launch import SCRIPTS, run, standalone

HERE = str(Path(__file__).parents[3])
WAYS = {
    "break": "rank 1 has left its training loop after step 6, and rank 0 is inside step 7",
    "exit": "rank 1 has left its training loop after step 6, and rank 0 is inside step 7",
    "evaluate": "rank 1 evaluates after step 6, and rank 0 is inside step 7",
    "fewer epochs": "rank 0 has come to 'plan' after step 6, and rank 1 has left its training loop after step 6",
}


@pytest.mark.parametrize("how", WAYS)
def test_ranks_that_part_are_named_long_before_a_collectives_timeout(how: str, tmp_path: Path) -> None:
    """Of two ranks, each by itself: torchrun reports one sentence and exit code of both."""
    run(standalone(2, "leaving.py", how), tmp_path / "log", {"PYTHONPATH": HERE}, expected=1)
    said = (tmp_path / "log").read_text()
    assert said.count(f"error: {WAYS[how]} (") == 1
    assert said.count(f"traceback : {WAYS[how]} (") == 2
    assert f"exitcode  : {EXIT_CONFIG}" in said


def test_in_place_no_other_round_is_tried(tmp_path: Path) -> None:
    """The nodes are named; the agents hear of no failed collective, after which ranks would meet again."""
    with leading(tmp_path) as lead:
        workers = [lead.start(name, str(SCRIPTS / "leaving.py"), "break") for name in "ab"]
        lead.form(workers)
        lead.tolerate(workers)
        for worker in workers:
            lead.wait(lambda worker=worker: worker.process.poll() is not None, "its end")  # type: ignore[misc]
            assert worker.process.returncode == EXIT_CONFIG
            assert worker.last(Failed) is None
        said = workers[0].log.read_text()
    assert "rank 1 (node b) has left its training loop after step 6, and rank 0 (node a) is inside step 7" in said
