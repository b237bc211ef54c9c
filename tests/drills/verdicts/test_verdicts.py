"""Each labelled fault strikes a job of real nodes; its verdict names what failed, where, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drills.verdicts.faults import FAULTS, Labelled
from tests.drills.verdicts.fifth import FIFTH
from tests.drills.verdicts.fourth import FOURTH
from tests.drills.verdicts.other import OTHER
from tests.drills.verdicts.striking import play
from tests.drills.verdicts.third import THIRD

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("etcd_binary")]


@pytest.mark.parametrize(
    "fault", [*FAULTS, *OTHER, *THIRD, *FOURTH, *FIFTH], ids=lambda each: f"{each.kind}: {each.name}"
)
def test_the_verdict_names_what_failed(tmp_path: Path, etcd_endpoint: str, run_id: str, fault: Labelled) -> None:
    """The culprit, the node, and what to do; the run goes on unless it cannot."""
    found = play(fault, tmp_path, etcd_endpoint, run_id)
    print(f"{fault.kind}: {fault.name}: {found.verdict_s} s: {found.incident.verdict}")
    assert found.mistakes(fault) == [], (found.incident.reason, found.incident.verdict)
    if fault.ends:
        assert 0 not in found.codes
