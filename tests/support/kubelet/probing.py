"""Asks a container's probes, each when it is due, and decides what their answers mean: started, ready, to be restarted.

*Runs in* the node's thread, and one short-lived thread for each question, which inherits the node's network.
*Owns* nothing. *Fails by* counting whatever goes wrong as a bad answer.
"""

from __future__ import annotations

import http.client
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from queue import Empty, SimpleQueue

from tests.support.kubelet.objects import Container, Probe


class Kind(StrEnum):
    """What a probe is for."""

    STARTUP = "startup"
    READINESS = "readiness"
    LIVENESS = "liveness"


def probes(container: Container) -> dict[Kind, Probe]:
    """The probes of a container."""
    return {
        Kind.STARTUP: container.startup_probe,
        Kind.READINESS: container.readiness_probe,
        Kind.LIVENESS: container.liveness_probe,
    }


@dataclass(frozen=True, slots=True)
class Health:
    """What is known about a running container. ``unfit`` says why it is to be ended; empty: it is not."""

    started: bool = False
    ready: bool = False
    unfit: str = ""
    bad: tuple[tuple[Kind, int], ...] = ()
    """Bad answers in a row, by probe."""

    @property
    def wanted(self) -> tuple[Kind, ...]:
        """The probes that are asked now: until the container has started, only the startup probe."""
        return (Kind.READINESS, Kind.LIVENESS) if self.started else (Kind.STARTUP,)

    def answered(self, kind: Kind, probe: Probe, good: bool) -> Health:
        """What is known after an answer to this probe."""
        bad = {**dict(self.bad), kind: 0 if good else dict(self.bad).get(kind, 0) + 1}
        health = replace(self, bad=tuple(bad.items()))
        if good:
            return replace(health, started=True, ready=self.ready or kind is Kind.READINESS)
        if bad[kind] < probe.failure_threshold:
            return health
        if kind is Kind.READINESS:
            return replace(health, ready=False)
        return replace(health, unfit=f"{kind} probe failed {bad[kind]} times in a row")


@dataclass(slots=True)
class Prober:
    """The probes of one life of a container."""

    container: Container
    address: str
    inside: Callable[[Sequence[str]], tuple[list[str], dict[str, str]]]
    health: Health = Health()
    last_bad: str = ""
    _next: dict[Kind, float] = field(default_factory=dict)
    _asking: set[Kind] = field(default_factory=set)
    _answers: SimpleQueue[tuple[Kind, str]] = field(default_factory=SimpleQueue)

    def tick(self, now: float) -> Health:
        """Take the answers that have come, and ask what is due; what is known then."""
        self._take()
        if not self.health.unfit:
            for kind in self.health.wanted:
                if now >= self._next.get(kind, 0.0) and kind not in self._asking:
                    probe = probes(self.container)[kind]
                    self._next[kind] = now + probe.period_seconds
                    self._asking.add(kind)
                    threading.Thread(target=self._ask, args=(kind, probe), name=f"probe-{kind}", daemon=True).start()
        return self.health

    def _take(self) -> None:
        while True:
            try:
                kind, why = self._answers.get_nowait()
            except Empty:
                return
            self._asking.discard(kind)
            self.last_bad = f"{kind}: {why}" if why else self.last_bad
            if kind in self.health.wanted:
                self.health = self.health.answered(kind, probes(self.container)[kind], not why)

    def _ask(self, kind: Kind, probe: Probe) -> None:
        try:
            why = self._complaint(probe)
        except (OSError, http.client.HTTPException, subprocess.SubprocessError) as error:
            why = f"{type(error).__name__}: {error}"
        self._answers.put((kind, why))

    def _complaint(self, probe: Probe) -> str:
        """What is wrong; empty if nothing is."""
        if probe.exec is not None:
            words, environment = self.inside(probe.exec.command)
            ran = subprocess.run(
                words, env=environment, capture_output=True, timeout=probe.timeout_seconds, check=False
            )
            return "" if ran.returncode == 0 else f"exit code {ran.returncode}"
        asked = probe.http_get
        assert asked is not None
        port = self.container.port(asked.port)
        connection = http.client.HTTPConnection(self.address, port, timeout=probe.timeout_seconds)
        try:
            connection.request("GET", asked.path, headers={"User-Agent": "kube-probe/1.32"})
            answer = connection.getresponse()
            return "" if 200 <= answer.status < 400 else f"status {answer.status}"
        finally:
            connection.close()
