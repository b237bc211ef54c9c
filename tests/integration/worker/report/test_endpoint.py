"""A worker without an agent of this package answers Prometheus by itself, if it is asked to."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from elastic_trainer.local.hosts import free_ports

SCRIPT = """
import sys, torch
from elastic_trainer import Session
with Session() as session:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = session.wrap(model, optimizer=optimizer)
    for _ in range(3):
        with session.step() as step:
            step.backward(model(torch.ones(4, 2)).mean())
            optimizer.step()
    print("trained", flush=True)
    sys.stdin.readline()
"""


def test_a_process_of_its_own_is_scraped_with_its_token(tmp_path: Path) -> None:
    """Its steps, phase and versions; nothing without the token; nothing is open when it has ended."""
    (port,), token = free_ports(1), tmp_path / "token"
    token.write_text("a-long-secret\n")
    asked = {"ELASTIC_TRAINER_METRICS_PORT": str(port), "ELASTIC_TRAINER_METRICS_TOKEN_FILE": str(token)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **asked},
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "trained"
        assert status(port, None) == 401
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/metrics", headers={"Authorization": "Bearer a-long-secret"}
        )
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            families = {each.name: each for each in text_string_to_metric_families(answer.read().decode())}
    finally:
        process.communicate("\n", timeout=60.0)
    assert process.returncode == 0
    assert [sample.value for sample in families["elastic_trainer_step"].samples] == [3.0]
    phases = {s.labels["phase"]: s.value for s in families["elastic_trainer_phase"].samples}
    assert phases["training"] == 1.0
    assert sum(phases.values()) == 1.0
    assert "elastic_trainer_store_errors" not in families


def status(port: int, token: str | None) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30.0) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
