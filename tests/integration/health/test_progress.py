"""What a run says of its progress on Kubernetes, to a server that keeps what it was told."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.agent.health.progress import EVERY_S, PREFIX, REFUSED_S, ProgressReports
from elastic_trainer.local.hosts import reachable
from elastic_trainer.membership.documents import RunProgress
from elastic_trainer.settings import ProgressTarget, progress_targets
from tests.drills.endings.job import Job
from tests.support.certificates import Authority


@dataclass
class Server:
    """``heard``: method, path, token and body of each request, which is answered with ``code``."""

    address: str
    ca: Path
    token: Path
    heard: list[tuple[str, str, str, dict[str, Any]]] = field(default_factory=list)
    code: int = 200


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue("api")
    token = tmp_path / "token"
    token.write_text("first\n")

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            kept.heard.append((self.command, self.path, self.headers["Authorization"], body))
            self.send_response(kept.code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_PATCH = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    made = ThreadingHTTPServer((reachable(), 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    made.socket = context.wrap_socket(made.socket, server_side=True)
    kept = Server(f"{reachable()}:{made.server_port}", authority.certificate, token)
    threading.Thread(target=made.serve_forever, name="api", daemon=True).start()
    yield kept
    made.shutdown()
    made.server_close()


def test_the_job_is_annotated_with_what_has_changed(server: Server, tmp_path: Path) -> None:
    """Nothing is sent twice, a refusal is waited out, the token is read anew, and another node says nothing."""
    (tmp_path / "namespace").write_text("training")
    (tmp_path / "ca.crt").write_bytes(server.ca.read_bytes())  # beside the token, as Kubernetes mounts them
    host, port = server.address.split(":")
    variables = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port, "ELASTIC_TRAINER_KUBE_JOB": "gpt"}
    (target,) = progress_targets(variables, tmp_path)
    at = [RunProgress(step=50, epoch=1, epochs=4, part=0.25, left_s=150.4, lr=0.001)]
    reports = ProgressReports(target, lambda: (at[0], 1.5, "node n2 was lost") if at else None)
    assert (reports.turn(), reports.turn()) == (EVERY_S, EVERY_S)
    ((method, path, token, body),) = server.heard
    assert (method, path, token) == ("PATCH", "/apis/batch/v1/namespaces/training/jobs/gpt", "Bearer first")
    said = {"step": "50", "epoch": "2/4", "percent": "25.0", "eta-seconds": "150", "loss": "1.5"}
    said |= {"learning-rate": "0.001", "last-incident": "node n2 was lost"}
    assert body == {"metadata": {"annotations": {PREFIX + name: value for name, value in said.items()}}}
    at[0], server.code = RunProgress(step=60, epoch=1), 403
    assert reports.turn() == REFUSED_S
    server.code = 200
    server.token.write_text("second")
    assert reports.turn() == EVERY_S
    assert server.heard[-1][2] == "Bearer second"
    at.clear()
    assert (reports.turn(), len(server.heard)) == (EVERY_S, 3)


@pytest.mark.timeout(120)
def test_a_run_tells_kubeflow_how_far_it_is(server: Server, tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """The node of rank 0 does, with the percentage and the time that is left."""
    variables = {
        "OMP_NUM_THREADS": "1",
        "KUBEFLOW_TRAINER_SERVER_URL": f"https://{server.address}/status",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(server.token),
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(server.ca),
    }
    with Job(tmp_path, etcd_endpoint, run_id, most=2, environment=variables) as job:
        job.start(2)
        job.wait_for(lambda: any("progressPercentage" in each[3]["trainerStatus"] for each in server.heard), "no word")
        assert job.finish() == {"n0": 0, "n1": 0}
    method, path, _, body = server.heard[-1]
    assert (method, path) == ("POST", "/status")
    status = body["trainerStatus"]
    assert 0 <= status["progressPercentage"] <= 100
    assert status["estimatedRemainingSeconds"] > 0
    assert {"step", "epoch", "learning_rate"} <= {each["name"] for each in status["metrics"]}


def test_a_server_that_is_away_holds_up_nothing(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "ca").write_text("no certificate")
    target = ProgressTarget(url="https://127.0.0.1:9/x", token=tmp_path / "token", ca=tmp_path / "ca", kubeflow=True)
    assert ProgressReports(target, lambda: (RunProgress(step=1, epoch=0), None, "")).turn() == REFUSED_S
