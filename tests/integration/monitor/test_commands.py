"""The commands against a real etcd and a real job: monitor, status and events tell what is so, through outages too."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import EXIT_CONFIG, EXIT_UNAVAILABLE
from elastic_trainer.local.etcd import EtcdServer
from elastic_trainer.membership.documents import RoundState
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.store import connect
from elastic_trainer.variables import ENV_ENDPOINT
from tests.support.following import COMMAND, LIMIT_S, following, monitor
from tests.support.monitored import Writer, health, incident, rank
from tests.support.plainjob import PlainJob


def command(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment
    )


def ask(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def await_answer(port: int, path: str, wanted: Callable[[int, bytes], bool]) -> bytes:
    deadline = Deadline.after(LIMIT_S)
    while not wanted(*(answer := ask(port, path))):
        assert not deadline.expired, answer
        pause(0.1)
    return answer[1]


def run_values(port: int, run: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    found = await_answer(port, f"/api/runs/{run}", lambda status, text: status == 200 and wanted(json.loads(text)))
    values: dict[str, Any] = json.loads(found)
    return values


def ranks(values: dict[str, Any]) -> list[tuple[str, list[int]]]:
    return [(node["node"], [each["rank"] for each in node["ranks"]]) for node in values["nodes"] if node["in_round"]]


@pytest.fixture
def writer(etcd_endpoint: str, run_id: str) -> Iterator[Writer]:
    """The nodes of a run below a prefix of its own, in the shared etcd."""
    store = connect(StoreSettings(endpoints=parse_endpoints(etcd_endpoint)))
    writer = Writer(store, run_id, f"/{run_id}")
    writer.start()
    yield writer
    store.close()


@pytest.fixture
def options(etcd_endpoint: str, run_id: str) -> Sequence[str]:
    return ("--endpoint", etcd_endpoint, "--prefix", f"/{run_id}")


@pytest.mark.timeout(300)
def test_the_ranks_of_a_real_job_are_shown_through_a_loss(tmp_path: Path, etcd_endpoint: str, run_id: str) -> None:
    """Nodes that tell nothing of their workers: state, round, nodes and ranks are right from round and keys alone. A
    killed node leaves the round, and what happened is told."""
    brief = {"ttl": "20"}  # the key of the killed node stays for so long
    with (
        PlainJob(tmp_path, etcd_endpoint, run_id, least=2, most=3, options=brief) as job,
        monitor(etcd_endpoint) as (_, port),
    ):
        job.start(3)
        order = job.await_order()
        first = job.await_world(*order)
        values = run_values(port, run_id, lambda values: values["state"] == "training")
        assert ranks(values) == [(name, [number]) for number, name in enumerate(order)]
        assert (values["world_size"], values["round"], values["min_nodes"], values["max_nodes"]) == (3, first, 2, 3)
        shown = command("status", run_id, "--endpoint", etcd_endpoint, "--json")
        assert ranks(json.loads(shown.stdout)) == ranks(values)
        shown = command("status", run_id, "--endpoint", etcd_endpoint, "-o", "yaml")
        assert ranks(yaml.safe_load(shown.stdout)) == ranks(values)
        assert run_id in command("status", "--endpoint", etcd_endpoint, "-o", "name").stdout.split()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, ENV_ENDPOINT: etcd_endpoint, "PATH": path}
        script = command("completion", "bash").stdout
        assert "timeout 3 " in script, "nobody waits longer for a completion"
        patient = script.replace("timeout 3 ", "timeout 50 ")  # a busy machine does
        offered = subprocess.run(
            ["bash", "-c", f'{patient}\n_elastic_trainer_runs "{run_id[:-1]}"'],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert run_id in offered.stdout.split(), "a shell completes the names of runs"

        assert job.node(order[0]).kill() is not None
        job.await_world(*order[1:], after=first)
        values = run_values(port, run_id, lambda values: values["round"] > first and values["state"] == "training")
        assert ranks(values) == [(order[1], [0]), (order[2], [1])]
        told = [
            json.loads(line)
            for line in command("events", run_id, "--endpoint", etcd_endpoint, "--json").stdout.splitlines()
        ]
        listed = yaml.safe_load(command("events", run_id, "--endpoint", etcd_endpoint, "-o", "yaml").stdout)
        assert [each["type"] for each in listed[: len(told)]] == [each["type"] for each in told]
        states = [(each["round"], each["state"]) for each in told if each["type"] == "transition"]
        assert states == [(first, "active"), (first, "broken"), (first + 1, "active")]
        table = command("status", run_id, "--endpoint", etcd_endpoint).stdout
        assert "training" in table
        assert order[1] in table
        _, text = ask(port, "/metrics")
        assert f'elastic_trainer_world_size{{run="{run_id}"}} 2.0' in text.decode()
        job.finish()
        # The killed node's key is there until its lease ends, on a quick machine after the end of the run.
        values = run_values(port, run_id, lambda values: values["state"] == "succeeded" and not values["nodes"])
        assert (values["world_size"], values["nodes"]) == (0, [])


IMPATIENT = """
from elastic_trainer.cli.main import main
from elastic_trainer.monitor import serve

serve.UNREAD_LIMIT_S = 3.0
raise SystemExit(main())
"""


@pytest.mark.timeout(300)
def test_an_outage_of_etcd_is_said_and_ends(own_etcd: EtcdServer) -> None:
    """What was read stays, with its age; after a while (here: 3 s) the monitor is not ready, and it is again when etcd
    is. A status that watches says so too, and a follower of events misses nothing."""
    store = connect(StoreSettings(endpoints=parse_endpoints(own_etcd.endpoint)))
    writer = Writer(store)
    writer.start()
    where = ("--endpoint", own_etcd.endpoint)
    with (
        monitor(own_etcd.endpoint, command=[sys.executable, "-c", IMPATIENT]) as (running, port),
        following("status", "r", "--watch", "--json", *where) as watching,
        following("events", "r", "--follow", "--json", *where) as events,
    ):
        await_answer(port, "/readyz", lambda status, _: status == 200)
        run_values(port, "r", lambda values: values["round"] == 1)
        assert json.loads(watching.line())["store"]["connected"] is True
        assert json.loads(events.line())["round"] == 1
        own_etcd.kill()
        values = run_values(port, "r", lambda values: not values["store"]["connected"])
        assert values["round"] == 1
        watching.until(lambda line: not json.loads(line)["store"]["connected"])
        text = await_answer(port, "/readyz", lambda status, _: status == 503)
        assert b"the store was last read" in text
        assert ask(port, "/healthz")[0] == 200
        assert ask(port, "/sd/nodes")[0] == 200
        own_etcd.start()
        await_answer(port, "/readyz", lambda status, _: status == 200)
        writer.round(2, {"n0": 2})
        run_values(port, "r", lambda values: values["round"] == 2 and values["store"]["connected"])
        assert json.loads(events.line())["round"] == 2
        writer.round(2, {"n0": 2}, RoundState.CLOSED, result="succeeded")
        last = watching.until(lambda line: json.loads(line)["state"] == "succeeded")
        assert json.loads(last)["store"]["connected"] is True
        assert watching.process.wait(LIMIT_S) == 0
        assert running.end() == 0
    store.close()


def test_a_monitor_starts_while_etcd_is_away() -> None:
    """It is alive and not ready; SIGTERM ends it with 0 all the same, SIGINT too."""
    for number in (signal.SIGTERM, signal.SIGINT):
        with monitor("127.0.0.1:1") as (running, port):
            assert ask(port, "/healthz")[0] == 200
            assert ask(port, "/readyz")[0] == 503
            assert json.loads(ask(port, "/api/runs")[1])["store"] == {"connected": False, "age_s": None}
            assert running.end(number) == 0


def test_status_shows_ranks_stragglers_and_incidents(writer: Writer, options: Sequence[str]) -> None:
    """One table for one run; without a name the list; the endpoint may come from the environment."""
    told = [rank(0), rank(1, 1, compute_s=0.4, phase="checkpoint")]
    writer.put(writer.keys.node_health("n0"), health("n0", told))
    writer.put(writer.keys.node_health("n1"), health("n1", [rank(2), rank(3, 1)]))
    writer.put(writer.keys.incident(1), incident(1, reason="worker 1 of n1 died"))
    run = writer.keys.run_id
    shown = command("status", run, *options)
    assert shown.returncode == 0, shown.stderr
    assert "straggler x4" in shown.stdout
    assert "checkpoint 3.0 s" in shown.stdout
    assert "worker_lost, round 1 -> 2" in shown.stdout
    listed = command("status", *options[2:], environment={ENV_ENDPOINT: options[1], "PATH": "/usr/bin:/bin"})
    assert run in listed.stdout, listed.stderr


def test_a_run_that_is_not_there_is_one_sentence_with_those_that_are(writer: Writer, options: Sequence[str]) -> None:
    """And the exit code of all mistakes on a command line; an etcd that does not answer has its own."""
    for words in (("status", "nobody"), ("events", "nobody")):
        done = command(*words, *options)
        assert (done.returncode, done.stdout) == (EXIT_CONFIG, "")
        assert f"there is no run 'nobody' in the etcd at {options[1]} (there are: {writer.keys.run_id})" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = command("status", "--endpoint", options[1], "--prefix", "/nothing/here")
    assert (done.returncode, done.stdout.strip()) == (0, "there are no runs")
    done = command("status", "nobody", "--endpoint", "127.0.0.1:1")
    assert done.returncode == EXIT_UNAVAILABLE
    assert "nothing listens at 127.0.0.1:1" in done.stderr


@pytest.mark.parametrize("words", [("status", "--watch", "--json"), ("events", "--follow", "--json")])
def test_who_watches_waits_for_a_run_that_is_not_there_yet(
    words: Sequence[str], etcd_endpoint: str, run_id: str
) -> None:
    """Its nodes may start just now; what is waited for is said."""
    store = connect(StoreSettings(endpoints=parse_endpoints(etcd_endpoint)))
    where = ("--endpoint", etcd_endpoint, "--prefix", f"/{run_id}")
    with following(words[0], "r", *words[1:], *where, complaints=True) as watching:
        assert "waiting: there is no run 'r' in the etcd" in watching.line()
        Writer(store, "r", f"/{run_id}").start()
        while (told := json.loads(watching.line())["round"]) is None:
            pass  # the run's first keys are there, and its first round is not
        assert told == 1
    store.close()
