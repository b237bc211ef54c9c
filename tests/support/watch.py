"""A real Prometheus and a real Alertmanager beside a job, with the shipped rules and routes made faster.

    with Watch(tmp_path, nodes=["127.0.0.1:9471"], monitors=["127.0.0.1:9470"], scale=1 / 30) as watch:
        assert watch.value('elastic_trainer_world_size{run="a"}') == 3
        watch.wait_alert("ElasticTrainerStalled", run="a")
        assert watch.wait_message("ElasticTrainerStalled").receiver == "on-call"

*Runs in* a test. *Owns* two processes, which die with this one, and a :class:`Mailbox`.
*Fails by* AssertionError that says what was seen instead, when a wait is over; TimeoutError with the end of the log
when a process does not come up. A test without the two programs is skipped, and fails in CI.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.local.etcd import spawn
from elastic_trainer.local.hosts import HOST, free_ports
from tests.support.deployment import DEPLOY, PROMETHEUS, load
from tests.support.requirements import needs

START_LIMIT_S = 60.0
STOP_LIMIT_S = 20.0
WAIT_S = 120.0
"""Generous: a slow machine must not fail a test."""
_POLL_S = 0.1
FoundT = TypeVar("FoundT")


@dataclass(frozen=True, slots=True)
class Sample:
    labels: dict[str, str]
    value: float


ALWAYS = "ElasticTrainerDeadMansSwitch"
"""Fires as long as alerts are delivered."""


@dataclass(frozen=True, slots=True)
class FiringAlert:
    name: str
    state: str
    """``pending`` or ``firing``."""
    labels: dict[str, str]
    annotations: dict[str, str]


@dataclass(frozen=True, slots=True)
class Message:
    receiver: str
    status: str
    """``firing`` or ``resolved``."""
    labels: dict[str, str]
    annotations: dict[str, str]

    @property
    def name(self) -> str:
        return self.labels.get("alertname", "")


class Mailbox:
    """Takes the messages that Alertmanager sends, in the place of people, by a server and its thread."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._lock = threading.Lock()
        mailbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                mailbox.take(self.path.strip("/"), json.loads(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="mailbox", daemon=True)
        self._thread.start()

    def take(self, receiver: str, content: dict[str, Any]) -> None:
        with self._lock:
            self._messages += [
                Message(receiver, each["status"], each["labels"], each["annotations"]) for each in content["alerts"]
            ]

    @property
    def messages(self) -> list[Message]:
        with self._lock:
            return list(self._messages)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Watch:
    """See the module.

    ``nodes`` and ``monitors`` are ``host:port``; ``nodes_from`` is the URL of a list of nodes (http_sd), instead of or
    beside ``nodes``. All times of the rules are multiplied by ``scale``: 1/30 makes two seconds of a minute; for
    ``scales`` see :func:`shortened_rules`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        nodes: Sequence[str] = (),
        monitors: Sequence[str] = (),
        nodes_from: str | None = None,
        etcd: Sequence[str] = (),
        scale: float = 1 / 30,
        scrape_s: float = 0.5,
        scales: Mapping[str, float] | None = None,
    ) -> None:
        self._prometheus_binary = needs("prometheus", "it scrapes a real job")
        self._alertmanager_binary = needs("prometheus-alertmanager", "it tells of alerts")
        self._directory, self.scale, self._scrape_s = directory, scale, scrape_s
        self._nodes, self._monitors, self._nodes_from, self._etcd = nodes, monitors, nodes_from, etcd
        self._scales = scales
        self._processes: list[subprocess.Popen[bytes]] = []
        self.mailbox = Mailbox()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End both processes; what they wrote stays in the directory."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self.mailbox.close()

    # ---- questions

    def query(self, expression: str) -> list[Sample]:
        """The instant vector (or scalar) that ``expression`` is now."""
        data = self._get("/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
        if data["resultType"] == "scalar":
            return [Sample({}, float(data["result"][1]))]
        return [Sample(dict(each["metric"]), float(each["value"][1])) for each in data["result"]]

    def value(self, expression: str) -> float | None:
        """The one value of ``expression``; None if there is none."""
        found = self.query(expression)
        assert len(found) <= 1, f"{expression} has several values: {found}"
        return found[0].value if found else None

    def alerts(self, state: str = "firing") -> list[FiringAlert]:
        """All alerts in ``state`` but the one that always fires."""
        return [
            FiringAlert(each["labels"]["alertname"], each["state"], each["labels"], each["annotations"])
            for each in self._get("/api/v1/alerts")["alerts"]
            if each["state"] == state and each["labels"]["alertname"] != ALWAYS
        ]

    def fired(self, run: str | None = None) -> set[str]:
        """The names of all alerts that have fired since the start (for ``run``)."""
        matcher = f',run="{run}"' if run is not None else ""
        found = self.query(f'group by (alertname) (last_over_time(ALERTS{{alertstate="firing"{matcher}}}[1d]))')
        return {each.labels["alertname"] for each in found} - {ALWAYS}

    # ---- waits

    def wait(self, what: str, look: Callable[[], FoundT | None], within_s: float = WAIT_S) -> FoundT:
        """What ``look`` finds, as soon as it finds something; ``what`` says in words what that is."""
        deadline = Deadline.after(within_s)
        while True:
            if found := look():
                return found
            assert not deadline.expired, f"{what}: not within {within_s:g} s; firing: {self.alerts()}"
            pause(_POLL_S)

    def wait_value(self, expression: str, within_s: float = WAIT_S) -> list[Sample]:
        """Wait until ``expression`` has a value: comparisons have one when they are true."""
        return self.wait(expression, lambda: self.query(expression), within_s)

    def wait_alert(self, name: str, run: str | None = None, within_s: float = WAIT_S) -> FiringAlert:

        def look() -> FiringAlert | None:
            return next(
                (each for each in self.alerts() if each.name == name and run in (None, each.labels.get("run"))), None
            )

        return self.wait(f"{name} fires", look, within_s)

    def wait_resolved(self, name: str, run: str | None = None, within_s: float = WAIT_S) -> None:
        self.wait(
            f"{name} is resolved",
            lambda: not any(each.name == name and run in (None, each.labels.get("run")) for each in self.alerts()),
            within_s,
        )

    def wait_message(
        self, name: str, status: str = "firing", run: str | None = None, within_s: float = WAIT_S
    ) -> Message:
        """Wait until somebody has been told of the alert."""

        def look() -> Message | None:
            return next(
                (
                    each
                    for each in self.mailbox.messages
                    if (each.name, each.status) == (name, status) and run in (None, each.labels.get("run"))
                ),
                None,
            )

        return self.wait(f"a message that {name} is {status}", look, within_s)

    # ---- the two processes

    def _start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        port, alertmanager_port = free_ports(2)
        self.url = f"http://{HOST}:{port}"
        config = redirected(load(DEPLOY / "alertmanager/alertmanager.yml"), self.mailbox.url, 0.2)
        self._write("alertmanager.yml", config)
        for name in ("rules.yml", "alerts.yml"):
            self._write(name, shortened_rules(load(PROMETHEUS / name), self.scale, 4 * self._scrape_s, self._scales))
        self._write("prometheus.yml", self._config(f"{HOST}:{alertmanager_port}"))
        self._spawn(
            self._alertmanager_binary,
            "--config.file=alertmanager.yml",
            "--storage.path=alertmanager",
            f"--web.listen-address={HOST}:{alertmanager_port}",
            "--cluster.listen-address=",
        )
        self._await_ready(f"http://{HOST}:{alertmanager_port}/-/ready", "prometheus-alertmanager")
        self._spawn(
            self._prometheus_binary,
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=prometheus",
            f"--web.listen-address={HOST}:{port}",
        )
        self._await_ready(f"{self.url}/-/ready", "prometheus")

    def _config(self, alertmanager: str) -> dict[str, Any]:
        """The shipped configuration, with these targets and a faster pace."""
        config = load(PROMETHEUS / "prometheus.yml")
        pace = duration(self._scrape_s)
        config["global"] = {"scrape_interval": pace, "scrape_timeout": pace, "evaluation_interval": pace}
        config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [alertmanager]
        monitor, nodes, etcd = config["scrape_configs"]
        monitor["static_configs"] = [{"targets": list(self._monitors)}]
        etcd["static_configs"] = [{"targets": list(self._etcd)}]
        del nodes["http_sd_configs"]
        nodes["static_configs"] = [{"targets": list(self._nodes)}]
        if self._nodes_from is not None:
            nodes["http_sd_configs"] = [{"url": self._nodes_from, "refresh_interval": "1s"}]
        return dict(config)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        (self._directory / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")

    def _spawn(self, binary: str, *arguments: str) -> None:
        placed = [
            each.replace("=", f"={self._directory}/", 1) if each.startswith(("--config", "--storage")) else each
            for each in arguments
        ]
        with (self._directory / f"{Path(binary).name}.log").open("wb") as log:
            self._processes.append(spawn([binary, *placed], log))

    def _await_ready(self, url: str, name: str) -> None:
        deadline = Deadline.after(START_LIMIT_S)
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5.0) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            if deadline.expired or self._processes[-1].poll() is not None:
                log = (self._directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")
                raise TimeoutError(f"{name} does not come up:\n{log[-2000:]}")
            pause(_POLL_S)

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30.0) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode(errors='replace')}") from error


# ---- all times made shorter, so that a test can wait for them

# Rules write lengths of time in three ways: as durations of ``for`` and ``keep_firing_for``, as ranges and offsets,
# and, to compare values with, as ``N * 60`` or ``N * 3600``.
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}
_DURATION = r"(?:\d+(?:ms|[smhdwy]))+"
_RANGE = re.compile(rf"\[({_DURATION})\]")
_OFFSET = re.compile(rf"\boffset ({_DURATION})")
_LENGTH = re.compile(r"\b(\d+) \* (60|3600)\b")
_WAITS = ("group_wait", "group_interval", "repeat_interval")


def seconds(duration: str) -> float:
    if not re.fullmatch(_DURATION, duration):
        raise ValueError(f"{duration!r} is not a duration")
    return sum(int(number) * _UNITS_S[unit] for number, unit in re.findall(r"(\d+)(ms|[smhdwy])", duration))


def duration(value_s: float) -> str:
    """``value_s`` as a duration of Prometheus, to the millisecond."""
    return f"{max(1, round(value_s * 1000))}ms"


def shortened_expression(
    expression: str, scale: float, range_scale: float | None = None, least_range_s: float = 0.0
) -> str:
    """All times multiplied by ``scale``, ranges by ``range_scale`` if it is given.

    Ranges stay at least ``least_range_s``, or rates would find no two samples.
    """
    range_scale = scale if range_scale is None else range_scale
    text = _LENGTH.sub(lambda found: f"{int(found[1]) * int(found[2]) * scale:.6g}", expression)
    text = _RANGE.sub(lambda found: f"[{duration(max(seconds(found[1]) * range_scale, least_range_s))}]", text)
    return _OFFSET.sub(lambda found: f"offset {duration(seconds(found[1]) * scale)}", text)


def shortened_rules(
    rules: dict[str, Any], scale: float, least_range_s: float = 0.0, scales: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """The content of a file of rules, with all times times ``scale``, those of queries in annotations too.

    ``scales``: for some rules, by what they record or alert, by what their ranges and their ``for`` are multiplied
    instead. Rules of one name keep their order: the one that is due first inhibits the others.
    """
    groups = []
    for group in rules["groups"]:
        changed = []
        for rule in group["rules"]:
            own_scale = (scales or {}).get(rule.get("record") or rule["alert"], scale)
            new = {**rule, "expr": shortened_expression(rule["expr"], scale, own_scale, least_range_s)}
            if "annotations" in rule:
                new["annotations"] = {
                    name: shortened_expression(text, scale, own_scale, least_range_s)
                    for name, text in rule["annotations"].items()
                }
            wait_scales = {"for": own_scale, "keep_firing_for": scale}
            new |= {
                name: duration(seconds(rule[name]) * wait_scale)
                for name, wait_scale in wait_scales.items()
                if name in rule
            }
            changed.append(new)
        groups.append({**group, "rules": changed})
    return {**rules, "groups": groups}


def redirected(config: dict[str, Any], url: str, wait_s: float) -> dict[str, Any]:
    """The same routes, with ``url/<name>`` in the place of each receiver, told within some ``wait_s``."""
    receivers = [
        {"name": each["name"], "webhook_configs": [{"url": f"{url}/{each['name']}", "send_resolved": True}]}
        for each in config["receivers"]
    ]
    return {**config, "route": _hurried(config["route"], wait_s), "receivers": receivers}


def _hurried(route: dict[str, Any], wait_s: float) -> dict[str, Any]:
    new = {name: value for name, value in route.items() if name not in _WAITS}
    if "receiver" in route and "group_by" in route:  # the root, from which all others inherit
        new |= {"group_wait": duration(wait_s), "group_interval": duration(2 * wait_s), "repeat_interval": "1h"}
    if "routes" in route:
        new["routes"] = [_hurried(each, wait_s) for each in route["routes"]]
    return new
