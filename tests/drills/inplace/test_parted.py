"""Two nodes that do not reach each other, while both reach etcd and the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.requirements import needs_hosts

pytestmark = [pytest.mark.timeout(400), pytest.mark.root, pytest.mark.usefixtures("etcd_binary")]

SCRIPT = Path(__file__).with_name("scripts") / "parted.py"


def test_a_newcomer_that_does_not_reach_a_member_is_left_out_until_it_does(tmp_path: Path) -> None:
    """The round with it cannot be formed, then the others go on without it, in the same processes and without a step
    lost. It stays away while it is cut off, and joins when it is not. Samples and parameters are exact."""
    needs_hosts()
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stdout + done.stderr
