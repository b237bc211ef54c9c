"""An etcd with certificates and endpoints of which one is dead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.errors import EXIT_CONFIG
from elastic_trainer.local.hosts import free_ports
from tests.drills.endings.job import Job
from tests.support.certificates import Authority
from tests.support.etcd import TlsEtcdServer


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
            job.start(2)
            without = {name: value for name, value in job.spec.options.items() if name not in files}
            stranger = job.add_with(options=without | {"connect_timeout": "5"})
            assert job.exit_code(stranger) == EXIT_CONFIG, job.log(stranger.name)
            (said,) = job.sentences(stranger.name)
            assert "TLS" in said
            assert "Traceback" not in job.log(stranger.name)
            job.await_world("n0", "n1", count=10)
            job.tell("stop")
            assert [job.exit_code(node) for node in job.nodes[:2]] == [0, 0]
            job.check_lossless()
