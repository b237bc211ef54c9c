"""The page for operators does what it says: each command is carried out, in order, in one shell.

In a network of its own: the page names the ports that everybody knows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deployment import DEPLOY, ROOT
from tests.support.pages import DOCS, blocks_of, section
from tests.support.requirements import needs, needs_root

PAGE, HEADING = DOCS / "tutorials/service.md", "On one machine"
LIMIT_S = 900.0
APART = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""All that the page starts ends with its shell."""

pytestmark = [pytest.mark.timeout(1000), pytest.mark.root]


def shell(directory: Path, text: str) -> str:
    """What ``text`` prints in a shell in ``directory`` with a loopback of its own; it must end well."""
    script = directory / "page.sh"
    script.write_text(f"set -eu\nip link set lo up\n{text}", encoding="utf-8")
    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]
    environment = {**os.environ, "PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*APART, "bash", str(script)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    logs = "".join(f"\n== {path.name}\n{path.read_text()[-2000:]}" for path in directory.glob("runs/service/*.log"))
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}{logs}"
    return done.stdout


DELIVERED = f"""
for _ in $(seq {LIMIT_S / 3:.0f}); do
  amtool --alertmanager.url=http://127.0.0.1:9093 alert | grep -q DeadMansSwitch && break
  sleep 1
done
promtool query instant http://127.0.0.1:9090 'up == 1'
"""
"""An operator would look a second time: the first alert is sent within 15 s, or after a minute if Alertmanager came up
behind Prometheus."""


def test_the_page_leads_to_a_job_that_is_watched(tmp_path: Path) -> None:
    """etcd, monitor, Prometheus and Alertmanager come up; the job trains on three nodes, which hold unequal parts of
    each batch, and reads 97 of 100 unseen digits, as the ready-made job promises; Prometheus knows it, and nobody is
    woken."""
    needs_root("the page gets a network of its own")
    for program in ("ip", "unshare", "prometheus", "prometheus-alertmanager", "promtool", "amtool"):
        needs(
            program, "the operator's page uses it (Debian: iproute2, util-linux, prometheus, prometheus-alertmanager)"
        )
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    page = blocks_of(section(PAGE, HEADING), PAGE.name)
    commands = [block.text for block in page if block.language == "sh" and block.not_run is None]
    assert len(commands) >= 3
    said = shell(tmp_path, "".join([*commands[:-1], DELIVERED, commands[-1]]))
    assert "run digits  succeeded" in said
    assert {"elastic-trainer-etcd", "elastic-trainer-monitor"} <= set(re.findall(r'^up\{.*job="([\w-]+)"', said, re.M))
    assert re.search(r'elastic_trainer_run_state\{.*run="digits".*\} => 1', said), said[-2000:]
    assert set(re.findall(r"ElasticTrainer\w+", said)) == {"ElasticTrainerDeadMansSwitch"}  # which always fires
    results = [json.loads(line) for line in (tmp_path / "runs/digits/metrics.jsonl").read_text().splitlines()]
    assert results[-1]["metrics"]["accuracy"] >= 0.97
    assert [each["step"] for each in results] == list(range(63, 631, 63))
    logs = [(tmp_path / f"runs/service/{node}.log").read_text() for node in "abc"]
    progressed = [json.loads(line) for log in logs for line in log.splitlines() if '"training.progressed"' in line]
    assert {line["rank"] for line in progressed} == {0}
    assert all(line["samples_per_s"] > 0 for line in progressed)
    for log in logs:  # on a slow machine the third one is there from the beginning
        assert '"event": "round.entered"' in log
        assert '"result": "succeeded"' in log
