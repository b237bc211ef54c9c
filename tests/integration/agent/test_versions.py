"""Nodes of two protocol versions meet: real torchrun processes, one of them with a package of another version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import elastic_trainer
from elastic_trainer.errors import EXIT_CONFIG
from elastic_trainer.membership.documents import PROTOCOL_VERSION
from tests.support.plainjob import PlainJob

LIMIT_S = 120.0
OTHER = PROTOCOL_VERSION + 1


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with this package as a later version would be: the same, with another protocol version."""
    home = tmp_path_factory.mktemp("later")
    copy = home / "elastic_trainer"
    ignored = shutil.ignore_patterns("__pycache__", "static")
    shutil.copytree(Path(elastic_trainer.__file__).parent, copy, ignore=ignored)
    documents = copy / "membership" / "documents.py"
    text = documents.read_text(encoding="utf-8")
    for old in (f"PROTOCOL_VERSION = {PROTOCOL_VERSION}\n", f"Literal[{PROTOCOL_VERSION}] = {PROTOCOL_VERSION}\n"):
        assert text.count(old) == 1
        text = text.replace(old, old.replace(str(PROTOCOL_VERSION), str(OTHER)))
    documents.write_text(text, encoding="utf-8")
    return home


def node(home: Path | None, endpoint: str, run: str, script: Path) -> subprocess.CompletedProcess[str]:
    """One node of ``run`` by the package in ``home`` (None: this one); it ends by itself."""
    paths = [str(home)] if home is not None else []
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--max-restarts=100"]
    command += ["--rdzv-backend=etcd3", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run}", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *filter(None, sys.path)])}
    return subprocess.run(  # elsewhere than in a checkout, whose package would come first
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def sentences(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("elastic-trainer: ")]


@pytest.mark.timeout(300)
def test_a_newer_node_is_refused_by_an_older_run_which_goes_on(
    tmp_path: Path, etcd_endpoint: str, run_id: str, later: Path
) -> None:
    """Exit code 78, one sentence with both versions and the way on; the running node never notices."""
    with PlainJob(tmp_path, etcd_endpoint, run_id, least=1, most=1, flags=["--alone"]) as job:
        job.start(1)
        job.await_world("n0")
        refused = node(later, etcd_endpoint, run_id, tmp_path / "never_started.py")
        assert refused.returncode == EXIT_CONFIG, refused.stderr
        (sentence,) = sentences(refused)
        assert f"run {run_id!r} was started by an older elastic_trainer" in sentence
        assert f"it has protocol version {PROTOCOL_VERSION}, this node has {OTHER}" in sentence
        assert f"'elastic-trainer forget {run_id} --unfinished'" in sentence
        job.await_steps("n0", 5)
        assert len(job.journal()) == 1
        assert job.finish() == {"n0": 0}
