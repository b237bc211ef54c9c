"""Processes of a local cluster, which may end at any moment while somebody looks at them."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from elastic_trainer.local import processes
from tests.support.waiting import LIMIT_S


def test_who_has_ended_since_it_was_found_has_no_environment() -> None:
    """Nor is it anybody's child."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"MARK": "a"})
    found = psutil.Process(child.pid)
    assert found in processes.children(os.getpid())
    assert processes.environment(found) == {"MARK": "a"}
    child.kill()
    child.communicate(timeout=LIMIT_S)
    assert found not in processes.children(os.getpid())
    assert processes.children(found.pid) == []
    assert processes.environment(found) == {}
