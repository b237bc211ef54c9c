"""An etcd that asks who is there: users, certificates, endpoints of which one is dead. Secrets stay secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.local.hosts import free_ports
from tests.drills.endings.job import Job
from tests.support.certificates import Authority
from tests.support.etcd import TlsEtcdServer, guard

PASSWORD = "s3same-0pen"


def train_and_be_refused(job: Job, wrong: dict[str, str], code: int, sentence: str) -> None:
    """Two nodes train; one with ``wrong`` options is told so in one sentence; the two end in success."""
    job.start(2)
    stranger = job.add_with(options={name: value for name, value in {**job.spec.options, **wrong}.items() if value})
    assert job.exit_code(stranger) == code, job.log(stranger.name)
    (said,) = job.sentences(stranger.name)
    assert sentence in said
    assert "Traceback" not in job.log(stranger.name)
    job.await_world("n0", "n1", count=10)
    job.tell("stop")
    assert [job.exit_code(node) for node in job.nodes[:2]] == [0, 0]
    job.check_lossless()


@pytest.mark.timeout(300)
def test_a_job_with_user_and_password(tmp_path: Path, own_etcd: EtcdServer, run_id: str) -> None:
    """Given in ``--rdzv-conf``. A wrong password is one sentence, and no password is in any log."""
    guard(own_etcd, PASSWORD)
    login: dict[str, Any] = {"user": "trainer", "password": PASSWORD}
    with Job(tmp_path, own_etcd.endpoint, run_id, most=2, options=login, store=login) as job:
        train_and_be_refused(job, {"password": "gue55ed"}, 78, "credentials")
        logs = "".join(job.log(node.name) for node in job.nodes)
        assert PASSWORD not in logs
        assert "gue55ed" not in logs


@pytest.mark.timeout(300)
def test_a_job_with_client_certificates_and_a_dead_endpoint(tmp_path: Path, etcd_binary: str, run_id: str) -> None:
    """Mutual TLS, three endpoints of which the first two are dead. Who does not bring the authority's certificate is
    told so."""
    nobody = free_ports(1)[0]
    authority = Authority(tmp_path / "certificates")
    certificate, key = authority.issue("server")
    mine, my_key = authority.issue("agent")
    served = authority.certificate, certificate, key
    files: dict[str, Any] = {"ca_cert": authority.certificate, "cert": mine, "key": my_key}
    with TlsEtcdServer(tmp_path / "etcd", *served, binary=etcd_binary) as server:
        endpoints = f"127.0.0.1:{nobody},localhost:{nobody},{server.endpoint}"
        options = {name: str(path) for name, path in files.items()}
        with Job(tmp_path / "job", endpoints, run_id, most=2, options=options, store=files) as job:
            nothing = dict.fromkeys(files, "")
            train_and_be_refused(job, nothing | {"connect_timeout": "5"}, 78, "TLS")
