"""Ranks that hold different parameters, for whatever reason: it is found, and ends the training or is mended."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.drills.inplace.leading import ROOT, SCRIPTS, Lead, Worker, leading
from tests.integration.worker.launch import run, standalone, tail

JOB = "differing.py"


def ended(directory: Path) -> list[Any]:
    return [torch.load(each, weights_only=True) for each in sorted(directory.glob("result-*"))]


def alike(states: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(mine, first) for state in states for mine, first in zip(state, states[0], strict=True))


def test_under_torchrun_a_difference_stops_the_training_or_is_mended(tmp_path: Path) -> None:
    """Of three ranks the one that differs is named, with the parameter; in the last steps, it is seen at the end.

    Healed it goes on with the bits of the two others, optimizer and all. Without comparisons nobody would know.
    """
    cases = ("3:stop:4", "100:stop:11", "3:heal:4", "0:stop:4")
    run(standalone(3, str(SCRIPTS / JOB), tmp_path / "result", *cases), tmp_path / "log", {"PYTHONPATH": str(ROOT)})
    ranks = ended(tmp_path)
    assert len(ranks) == 3
    for in_time, at_the_end, healed, unseen in ranks:
        assert in_time[0].startswith("after step 6 rank 0 holds another '4.weight' than rank 1"), in_time[0]
        assert at_the_end[0].startswith("after step 12 rank 0 holds another"), at_the_end[0]
        assert (healed[0], unseen[0]) == ("", "")
    assert alike([rank[2][1] for rank in ranks])
    assert not alike([rank[3][1] for rank in ranks])
    assert '"event": "ranks.differed"' in tail(tmp_path / "log")


def test_in_place_a_difference_is_mended_within_the_round(lead: Lead) -> None:
    """Of two ranks the state of the first counts."""
    workers = [lead.start(name, JOB, lead.directory / "result", "2:heal:3") for name in "ab"]
    lead.form(workers)
    lead.await_done(workers)
    lines = [json.loads(line) for line in workers[0].log.read_text().splitlines() if '"ranks.' in line]
    assert [(each["event"], each["ranks"]) for each in lines] == [("ranks.differed", [1]), ("ranks.healed", [1])]
    assert lines[0]["nodes"] == ["b"]
    ranks = ended(lead.directory)
    assert [each[0][0] for each in ranks] == ["", ""]
    assert alike([each[0][1] for each in ranks])


@contextmanager
def audited(place: Path, names: Sequence[str], faults: Sequence[str]) -> Iterator[tuple[Lead, list[Worker]]]:
    """Workers in their first round, which audit each other in each of twelve steps."""
    place.mkdir()
    with leading(place) as lead:
        words = [place / "result", "dies", 12, 0, *faults]
        workers = [lead.start(name, "auditing.py", *words) for name in names]
        lead.form(workers)
        yield lead, workers


def test_in_place_a_step_with_a_wrong_result_is_repeated_and_no_bit_of_it_stays(tmp_path: Path) -> None:
    """A bit flips in an activation, in a gradient, and in a weight of rank 0, whose state no other rank adopts then.

    With the tree, since DistributedDataParallel rounds otherwise in the first step of a round.
    """
    states: list[list[torch.Tensor]] = []
    for name, faults in (("clean", ()), ("faulty", ("3:activation:1", "5:gradient:2", "8:weight:0"))):
        with audited(tmp_path / name, "abc", faults) as (lead, workers):
            for _ in faults:
                lead.await_failed(workers)
                assert lead.gave_up(workers) == ["a", "b", "c"]
                lead.end()
                lead.form(workers)
            lead.await_done(workers)
            lines = workers[0].log.read_text().splitlines()
            named = [json.loads(line)["nodes"] for line in lines if '"audit.mismatch"' in line]
            assert named == [["abc"[int(each[-1])]] for each in faults]
        states += ended(tmp_path / name)
    assert len(states) == 6
    assert alike(states)


def test_in_place_a_rank_that_is_killed_in_an_audit_is_lost_as_in_any_step(tmp_path: Path) -> None:
    """The others, who wait for what it would have found, repeat the step without it and audit each other.

    All bits are those of two ranks that met no fault.
    """
    states: list[list[torch.Tensor]] = []
    for names, faults in (("ab", ()), (("a", "b", "dies"), ("8:activation:1",))):
        with audited(tmp_path / names[-1], names, faults) as (lead, workers):
            if faults:
                lead.wait(lambda dying=workers[2]: dying.process.poll() == -signal.SIGKILL, "the kill")  # type: ignore[misc]
                lead.end()
                lead.form(workers[:2])
                lead.await_failed(workers[:2])  # the wrong result
                lead.end()
                lead.form(workers[:2])
            lead.await_done(workers[:2])
            assert ('"audit.mismatch"' in workers[0].log.read_text()) == bool(faults)
        states += ended(tmp_path / names[-1])
    assert len(states) == 4
    assert alike(states)
