"""A job among others in an etcd that asks who is there: it goes on through all that happens to its login, and no secret
is found in anything that it, the commands or the monitor have written."""

from __future__ import annotations

import http.client
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.local.cluster import Node
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.membership.documents import NodeHealth
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store.accounts import Accounts
from elastic_trainer.store.api import Read
from tests.drills.endings.job import Job
from tests.support.following import COMMAND, LIMIT_S, monitor
from tests.support.waiting import eventually

SECRETS = {
    "root": "r00t-of-all-evil",
    "monitor": "m0nitors-passw0rd",
    "first": "f1rst-of-the-run",
    "second": "sec0nd-of-the-run",
    "wrong": "gue55ed-by-a-stranger",
    "node token": "t0ken-of-the-nodes",
    "page token": "t0ken-of-the-page",
}
TOKEN_S = 1
"""etcd forgets a token that nobody has used for so long."""


@pytest.fixture
def forgetful(etcd_binary: str, tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path / "etcd", binary=etcd_binary, arguments=[f"--auth-token-ttl={TOKEN_S}"]) as server:
        yield server


class Safe:
    """The files with the secrets, and what was written elsewhere."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self.found: dict[str, bytes] = {}
        for name, secret in SECRETS.items():
            self.put(name, secret)

    def put(self, name: str, secret: str) -> None:
        self.file(name).write_text(f"{secret}\n")

    def file(self, name: str) -> Path:
        return self._directory / name.replace(" ", "-")

    def note(self, where: str, text: bytes) -> None:
        self.found[where] = text

    def leaks(self) -> list[str]:
        return [
            f"{name} in {where}"
            for where, text in self.found.items()
            for name, secret in SECRETS.items()
            if secret.encode() in text
        ]


def settings(server: EtcdServer, user: str) -> StoreSettings:
    return StoreSettings(endpoints=parse_endpoints(server.endpoint), user=user, password=SECRETS[user])


def ask(port: int, path: str, token: str) -> bytes:
    """The body of an answer, with the token shown."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        assert answer.status == 200, (path, answer.status)
        return str(answer.getheaders()).encode() + answer.read()
    finally:
        connection.close()


def nodes_endpoint(job: Job, node: str) -> int:
    """The port of the node's metrics, once it has told."""
    found = list[int]()

    def told() -> bool:
        item = job.store.get(job.keys.node_health(node), Deadline.after(LIMIT_S)).first
        if item is not None and (url := NodeHealth.decode(item.value, item.key).metrics):
            found.append(int(url.rpartition(":")[2]))
        return bool(found)

    job.wait_for(told, f"{node} does not tell where its metrics are")
    return found[0]


def note_processes(job: Job, safe: Safe) -> None:
    for node in job.nodes:
        for process in node.family():
            for what in ("cmdline", "environ"):
                path = Path(f"/proc/{process.pid}/{what}")
                safe.note(f"{what} of {node.name}'s {process.pid}", path.read_bytes())


def note_commands(server: EtcdServer, run: str, safe: Safe, environment: Mapping[str, str]) -> None:
    """What the commands say, to whom may ask and to a stranger."""
    stranger = {**environment, "ELASTIC_TRAINER_PASSWORD_FILE": str(safe.file("wrong"))}
    for words in (["status", run], ["status", run, "--json"], ["events", run], ["events", run, "--json"]):
        for who, variables in (("owner", environment), ("stranger", stranger)):
            done = subprocess.run(
                [*COMMAND, *words, "--endpoint", server.endpoint],
                env={**os.environ, **variables},
                capture_output=True,
                timeout=LIMIT_S,
                check=False,
            )
            assert done.returncode == (0 if who == "owner" else 78), done.stderr
            safe.note(f"{' '.join(words)} of {who}", done.stdout + done.stderr)


def note_pages(port: int, run: str, safe: Safe) -> None:
    for path in ("/", f"/runs/{run}", "/api/runs", f"/api/runs/{run}", "/metrics", "/sd/nodes"):
        safe.note(f"monitor {path}", ask(port, path, SECRETS["page token"]))


def lose_worker(job: Job, node: Node, after: int) -> int:
    """Kill one worker; the number of the round that goes on without a lost step."""
    assert node.kill_worker() is not None
    return job.await_world("n0", "n1", after=after, count=5)


@pytest.mark.timeout(300)
def test_a_jobs_login_is_lost_and_its_secrets_are_not(tmp_path: Path, forgetful: EtcdServer, run_id: str) -> None:
    """Its user may use the keys of this run alone, and that is all it needs: nodes are checked, join, form rounds, tell
    of themselves, lose workers. Its tokens expire again and again, etcd restarts and forgets them, its password is
    changed under it: no step is lost. No secret is in any log, file, key, page, metric, command line or environment."""
    safe = Safe(tmp_path / "safe")
    with Accounts(settings(forgetful, "root"), Deadline.after(LIMIT_S)) as accounts:
        accounts.initialize("/elastic_trainer", SECRETS["root"], SECRETS["monitor"])
        accounts.grant("/elastic_trainer", run_id, SECRETS["first"])
    safe.put("password", SECRETS["first"])
    login = {"ELASTIC_TRAINER_USER": f"run-{run_id}", "ELASTIC_TRAINER_PASSWORD_FILE": str(safe.file("password"))}
    options = {
        "preflight": "warn",
        "metrics_token_file": str(safe.file("node token")),
    }
    with Job(
        tmp_path / "job",
        forgetful.endpoint,
        run_id,
        most=2,
        options=options,
        store={"user": "root", "password": SECRETS["root"]},
        environment={"OMP_NUM_THREADS": "1", "ELASTIC_TRAINER_LOG_LEVEL": "debug", "LOGLEVEL": "INFO"} | login,
    ) as job:
        job.start(2)
        round_ = job.await_world("n0", "n1", count=5)
        wrong = {**job.spec.environment, "ELASTIC_TRAINER_PASSWORD_FILE": str(safe.file("wrong"))}
        stranger = job.add_with(environment=wrong, options={**job.spec.options, "connect_timeout": "60"})
        assert job.exit_code(stranger) == 78, job.log(stranger.name)
        assert "refuses the credentials" in job.sentences(stranger.name)[0]
        note_processes(job, safe)

        pause(3.0 * TOKEN_S)  # long enough for tokens to expire; what uses one after that logs in again
        round_ = lose_worker(job, job.nodes[0], round_)
        forgetful.restart()
        round_ = lose_worker(job, job.nodes[1], round_)
        with Accounts(settings(forgetful, "root"), Deadline.after(LIMIT_S)) as accounts:
            accounts.grant("/elastic_trainer", run_id, SECRETS["second"])
        job.await_steps(20)
        safe.put("password", SECRETS["second"])
        round_ = lose_worker(job, job.nodes[0], round_)

        for node in ("n0", "n1"):
            port_there = nodes_endpoint(job, node)
            with job.near(node):
                safe.note(f"metrics of {node}", ask(port_there, "/metrics", SECRETS["node token"]))
        note_commands(forgetful, run_id, safe, login)
        watching = ("--user", "monitor", "--password-file", str(safe.file("monitor")))
        with monitor(forgetful.endpoint, *watching, "--token-file", str(safe.file("page token"))) as (_, port):
            eventually(lambda: run_id.encode() in ask(port, "/api/runs", SECRETS["page token"]), "no run is listed")
            note_pages(port, run_id, safe)
        job.tell("stop")
        assert [job.exit_code(node) for node in job.nodes[:2]] == [0, 0], job.describe()
        job.check_lossless()
        everything = job.store.transact([], [Read("\0", "\0")], deadline=Deadline.after(LIMIT_S)).reads[0]
    for item in everything.items:
        safe.note(f"key {item.key}", item.key.encode() + item.value)
    for path in (tmp_path / "job").rglob("*"):
        if path.is_file():
            safe.note(str(path), path.read_bytes())
    safe.note("etcd's log", forgetful.log_path.read_bytes())
    assert len(safe.found) > 40, sorted(safe.found)
    assert sum(run_id.encode() in text for text in safe.found.values()) > 10
    assert safe.leaks() == []
