"""The platform of the production overlay as real processes: etcd with its members, certificates and users, the monitor,
and a node of a run that is let in."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from elastic_trainer.cli.main import main
from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import AccessDeniedError, ElasticTrainerError
from elastic_trainer.local.hosts import HOST, free_ports
from elastic_trainer.settings import StoreSettings, rendezvous_options
from elastic_trainer.store import connect_checked
from tests.integration.store.support import put
from tests.support.agreement import Training
from tests.support.commands import quiet
from tests.support.deployment import DEPLOY
from tests.support.manifests import Container, container, jobs, named, rendered, settings_of
from tests.support.platform import RenderedEtcd, status, variables
from tests.support.requirements import needs
from tests.support.waiting import eventually

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The Secrets that `deploy/etcd/certificates.sh` makes, as directories by where they are mounted."""
    needs("openssl", "it makes the certificates")
    made = tmp_path_factory.mktemp("certificates")
    subprocess.run(["bash", str(DEPLOY / "etcd/certificates.sh"), str(made)], check=True, timeout=100)
    paths = {"server": "/etc/etcd-server-tls", "peer": "/etc/etcd-peer-tls", "client": "/etc/elastic-trainer-tls"}
    mounted = {}
    for name, path in paths.items():
        mounted[path] = made / f"etcd-{name}-tls"
        mounted[path].mkdir()
        for file, source in (("ca.crt", "ca.crt"), ("tls.crt", f"{name}.crt"), ("tls.key", f"{name}.key")):
            shutil.copy(made / source, mounted[path] / file)
    return mounted


@pytest.fixture(scope="module")
def etcd(volumes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RenderedEtcd]:
    with RenderedEtcd(rendered("overlays/production"), tmp_path_factory.mktemp("etcd"), volumes) as running:
        yield running


@pytest.fixture(scope="module")
def passwords(etcd: RenderedEtcd, volumes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What k8s/README.md does once and for each run: users for the monitor and the run, as directories of Secrets."""
    directory = tmp_path_factory.mktemp("users")
    (directory / "root-password").write_text("the password of root\n")
    options = ["--user", "root", "--password-file", str(directory / "root-password"), "--format", "kubernetes"]
    known = settings_of(rendered("overlays/production"))["elastic-trainer"]
    here = {name: etcd.local(value) for name, value in known.items() if "PASSWORD" not in name}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in here.items():
            patch.setenv(name, value)
        for words in (["init"], ["grant", "gpt"]):
            file = directory / f"{words[-1]}.json"
            assert main(["admin", *words, *options, "--output", str(file)]) == 0
            made = json.loads(file.read_text())
            secret = directory / made["metadata"]["name"]
            secret.mkdir()
            for key, value in made["stringData"].items():
                (secret / key).write_text(value)
    return directory


def environment(etcd: RenderedEtcd, started: Container, secret: Path) -> dict[str, str]:
    """The variables of a container, with the Secret of its user at ``secret``."""
    here = {name: etcd.local(value) for name, value in variables(started).items()}
    here = {name: value.replace("/etc/elastic-trainer-etcd", str(secret)) for name, value in here.items()}
    assert here["ELASTIC_TRAINER_USER"] == f"username of {secret.name}"
    return here | {"ELASTIC_TRAINER_USER": (secret / "username").read_text()}


def test_three_members_come_up_and_their_probes_tell(etcd: RenderedEtcd) -> None:
    """etcd takes each flag and variable; probes need no certificate; clients without one are refused."""
    asked = [(name, probe) for name in etcd.names for probe in ("startupProbe", "livenessProbe", "readinessProbe")]
    # On a slow machine they may elect a leader anew in between.
    eventually(lambda: all(etcd.answers(*each) == 200 for each in asked), "not all probes of all members are answered")
    assert len(etcd.names) == 3
    client = f"{HOST}:{etcd.ports['etcd-0']['client']}"
    assert status(f"https://{client}/health") is None
    endpoint = StoreSettings.model_validate({"endpoints": [{"host": HOST, "port": etcd.ports["etcd-0"]["client"]}]})
    with pytest.raises(ElasticTrainerError):
        connect_checked(endpoint, Deadline.after(5.0)).close()


def peers_port(etcd: RenderedEtcd, secret: Path) -> int | None:
    """The status that a member's port for members has for the holder of a certificate; None: it hangs up."""
    context = ssl.create_default_context(cafile=secret / "ca.crt")
    context.load_cert_chain(secret / "tls.crt", secret / "tls.key")
    try:
        with urllib.request.urlopen(
            f"https://{HOST}:{etcd.ports['etcd-0']['peer']}/members", timeout=30, context=context
        ) as answer:
            return int(answer.status)
    except OSError:
        return None


def test_a_client_is_no_member(etcd: RenderedEtcd, volumes: dict[str, Path]) -> None:
    """All certificates have one authority; only the members' own opens the port by which they agree."""
    assert peers_port(etcd, volumes["/etc/etcd-peer-tls"]) == 200
    assert peers_port(etcd, volumes["/etc/elastic-trainer-tls"]) is None


@contextmanager
def running(command: list[str], environ: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out, subprocess.Popen(command, env=environ, stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_the_monitor_gets_ready_with_its_own_user(etcd: RenderedEtcd, passwords: Path, tmp_path: Path) -> None:
    """Its rendered command and variables are enough to read etcd, and its readiness says so."""
    objects = rendered("overlays/production")
    monitor = container(named(objects, "Deployment", "monitor")["spec"]["template"], settings_of(objects))
    (port,) = free_ports(1)
    path, number = monitor.probe("readinessProbe")
    command = [part.replace(f"0.0.0.0:{number}", f"{HOST}:{port}") for part in monitor.command]
    assert command[0] == "elastic-trainer"
    environ = quiet(os.environ) | environment(etcd, monitor, passwords / "etcd-user-monitor")
    log = tmp_path / "monitor.log"
    with running([sys.executable, "-m", "elastic_trainer.cli.main", *command[1:]], environ, log) as process:
        deadline = Deadline.after(LIMIT_S)
        while status(f"http://{HOST}:{port}{path}") != 200:
            assert process.poll() is None, log.read_text()
            assert not deadline.expired, log.read_text()
            pause(0.2)


def test_a_node_of_the_run_is_let_in_and_sees_no_other_run(
    etcd: RenderedEtcd, passwords: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the arguments and variables of the rendered Job, and the Secret that `admin grant` printed."""
    objects = rendered("overlays/production-gpt")
    settings = settings_of(objects)
    settings["elastic-trainer"] = settings_of(rendered("overlays/production"))["elastic-trainer"]
    (job,) = jobs(objects)
    it = Training(job, settings)
    for name, value in environment(etcd, it.trainer, passwords / "etcd-user-gpt").items():
        monkeypatch.setenv(name, value)
    options = rendezvous_options(_parse_rendezvous_config(it.torchrun.rdzv_conf))
    run, endpoint = it.torchrun.rdzv_id, etcd.local(it.torchrun.rdzv_endpoint)
    store = connect_checked(options.store(endpoint), Deadline.after(LIMIT_S), run=run)
    try:
        assert put(store, f"{options.prefix}/{run}/spec", b"{}")
        with pytest.raises(AccessDeniedError):
            put(store, f"{options.prefix}/other/spec", b"{}")
    finally:
        store.close()
