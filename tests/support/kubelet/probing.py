"""Asks a container's probes, each when it is due, as the kubelet does it from the node's side.

*Runs in* the node's thread, and one short-lived thread for each question, which inherits the node's network.
*Owns* nothing. *Fails by* counting whatever goes wrong as a bad answer.
"""

from __future__ import annotations

import http.client
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from tests.support.kubelet.pod_spec import Container, Probe
from tests.support.kubelet.probe_rules import Health, Kind, answered, at_start, probes, wanted

Exec = Callable[[list[str], float], int]


@dataclass(slots=True)
class Prober:
    """The probes of one life of a container. ``run`` carries out a command in it and returns its exit code."""

    container: Container
    address: str
    run: Exec
    began: float
    health: Health = field(init=False)
    last_bad: str = ""
    _next: dict[Kind, float] = field(default_factory=dict)
    _asking: set[Kind] = field(default_factory=set)
    _answers: SimpleQueue[tuple[Kind, bool, str]] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        self.health = at_start(self.container)

    def tick(self, now: float) -> Health:
        """Take the answers that have come, and ask what is due; what is known then."""
        self._take()
        if not self.health.unfit:
            for kind in wanted(self.container, self.health):
                probe = probes(self.container)[kind]
                due = self._next.setdefault(kind, max(now, self.began + probe.initial_delay_seconds))
                if now >= due and kind not in self._asking:
                    self._next[kind] = now + probe.period_seconds
                    self._asking.add(kind)
                    threading.Thread(target=self._ask, args=(kind, probe), name=f"probe-{kind}", daemon=True).start()
        return self.health

    def _take(self) -> None:
        while True:
            try:
                kind, good, why = self._answers.get_nowait()
            except Empty:
                return
            self._asking.discard(kind)
            self.last_bad = why or self.last_bad
            if kind in wanted(self.container, self.health):
                self.health = answered(self.container, self.health, kind, good)

    def _ask(self, kind: Kind, probe: Probe) -> None:
        try:
            why = self._complaint(probe)
        except (OSError, http.client.HTTPException, subprocess.SubprocessError) as error:
            why = f"{type(error).__name__}: {error}"
        self._answers.put((kind, not why, f"{kind}: {why}" if why else ""))

    def _complaint(self, probe: Probe) -> str:
        """What is wrong; empty if nothing is."""
        limit_s = probe.timeout_seconds
        if probe.exec is not None:
            code = self.run(probe.exec.command, limit_s)
            return f"exit code {code}" if code else ""
        if probe.tcp_socket is not None:
            address = (self.address, self.container.port(probe.tcp_socket.port))
            socket.create_connection(address, timeout=limit_s).close()
            return ""
        return self._http_complaint(probe, limit_s)

    def _http_complaint(self, probe: Probe, limit_s: float) -> str:
        asked = probe.http_get
        if asked is None:
            return "nothing to ask"
        connection = http.client.HTTPConnection(self.address, self.container.port(asked.port), timeout=limit_s)
        try:
            connection.request("GET", asked.path, headers={"User-Agent": "kube-probe/1.32"})
            answer = connection.getresponse()
            return "" if 200 <= answer.status < 400 else f"status {answer.status}"
        finally:
            connection.close()
