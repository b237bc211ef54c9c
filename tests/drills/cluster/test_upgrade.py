"""A fleet is upgraded node by node: nodes of the last release and of this tree train together, in place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.errors import EXIT_LEFT
from elastic_trainer.membership.documents import PROTOCOL_VERSION
from tests.drills.endings.job import Job

ROOT = Path(__file__).parents[3]
DOCUMENTS = "elastic_trainer/membership/documents.py"
PROTOCOL = f"version: Literal[{PROTOCOL_VERSION}]"
NEW_OPTIONS = ("sick_machines",)
"""Those of ``tests.support.running`` that the last release does not know."""
OPTIONS = {"recovery": "in_place", "ttl": "10", "last_call": "1", "connect_timeout": "60"}


def git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)


def last_release(directory: Path) -> str:
    """The package as of the last tag, unpacked below ``directory``; the path to import it from.

    Without tags, or where the protocol is newer than the last one: as of the first commit with this protocol.
    """
    if git("rev-parse", "HEAD").returncode:
        pytest.skip("this is no clone with its history")
    tag = git("describe", "--tags", "--abbrev=0").stdout.decode().strip()
    if not tag or PROTOCOL not in git("show", f"{tag}:{DOCUMENTS}").stdout.decode():
        tag = (
            git("log", "--reverse", "--format=%H", f"-S{PROTOCOL}", "--", DOCUMENTS).stdout.decode().partition("\n")[0]
        )
    assert tag, "a new protocol begins with the commit that raises it"
    packed = git("archive", tag, "elastic_trainer")
    if packed.returncode:
        pytest.skip(f"this clone lacks its history: {packed.stderr.decode().strip()}")
    directory.mkdir()
    subprocess.run(["tar", "-x", "-C", str(directory)], input=packed.stdout, check=True)
    return str(directory)


def importing(path: str) -> dict[str, Any]:
    """What starts a node whose processes import the package from ``path``."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    where = [sys.executable, "-c", "import elastic_trainer; print(elastic_trainer.__file__)"]
    found = subprocess.run(where, env=environment, capture_output=True, check=True, text=True)
    assert found.stdout.startswith(path), found.stdout
    return {"environment": environment}


@pytest.mark.timeout(300)
def test_nodes_are_upgraded_one_by_one_under_a_running_job(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """Two nodes of the last release train. One of this tree joins them, an old one leaves by plan, the other one is
    killed, and a second new one joins: every sample is used once, and no committed step is made again."""
    old, new = importing(last_release(tmp_path / "release")), importing(str(ROOT))
    with Job(tmp_path / "job", etcd_endpoint, run_id, least=1, options=OPTIONS) as job:
        old["options"] = {name: each for name, each in job.spec.options.items() if name not in NEW_OPTIONS}
        first, second = job.add_with(**old), job.add_with(**old)
        after = job.await_world("n0", "n1")
        job.add_with(**new)
        after = job.await_world("n0", "n1", "n2", after=after)
        first.terminate()
        assert job.exit_code(first) == EXIT_LEFT
        after = job.await_world("n1", "n2", after=after)
        assert second.kill() is not None
        after = job.await_world("n2", after=after)
        job.add_with(**new)
        job.await_world("n2", "n3", after=after)
        assert list(job.finish().values())[2:] == [0, 0]
        job.check_lossless()
