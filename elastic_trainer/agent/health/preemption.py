"""Asks the cloud's metadata service whether it will take this machine back soon, and then has the node leave.

The node leaves as after a SIGTERM: by a planned change, with exit code 143, which Kubernetes and Slurm count as no
failure. Notices come 30 s (GCE, Azure) to two minutes (EC2) before the end.

*Runs in* the agent: a thread named ``preemption``. *Owns* it.
*Fails by* nothing: a service that does not answer is logged once and asked again.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from elastic_trainer.agent.workers.periodic import IDLE_S, PeriodicThread
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.telemetry.logs import logger

EVERY_S: Final = 3.0
LIMIT_S: Final = 2.0
SILENT_TURNS: Final = 3
"""Turns without an answer after which the log says so: right after its start a machine's service may not be there."""
_LARGEST: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class MetadataAnswer:
    """What the service said; ``text`` without white space at its ends."""

    status: int
    text: str


Ask = Callable[[str, str, Mapping[str, str]], MetadataAnswer]
"""``ask(method, path, headers)``. *Fails by* OSError and HTTPException."""


def ec2(ask: Ask) -> str | None:
    """A spot instance's notice (IMDSv2, which hands out a token first); 404 means that there is none."""
    token = ask("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    if token.status != http.client.OK:
        raise OSError(f"no token: status {token.status}")
    found = ask("GET", "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token.text})
    if found.status == http.client.NOT_FOUND:
        return None
    action = _object(found)
    return f"EC2 will {action.get('action')} this instance at {action.get('time')}"


def gce(ask: Ask) -> str | None:
    """A preempted or spot VM, and a host whose maintenance ends its VMs."""
    for path, bad in (("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")):
        found = ask("GET", f"/computeMetadata/v1/instance/{path}", {"Metadata-Flavor": "Google"})
        if found.status != http.client.OK:
            raise OSError(f"status {found.status}")
        if found.text == bad:
            return f"Compute Engine takes this VM back: {path} is {bad}"
    return None


def azure(ask: Ask) -> str | None:
    """Scheduled events that end this VM; those of others in its scale set are shown too."""
    headers = {"Metadata": "true"}
    name = ask("GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    if name.status != http.client.OK:
        raise OSError(f"status {name.status}")
    for event in _object(ask("GET", "/metadata/scheduledevents?api-version=2020-07-01", headers)).get("Events", ()):
        kind, when = event.get("EventType"), event.get("NotBefore") or "once"
        if kind in ("Preempt", "Terminate", "Reboot", "Redeploy") and name.text in event.get("Resources", ()):
            return f"Azure will {kind} this VM, not before {when}"
    return None


def _object(found: MetadataAnswer) -> dict[str, Any]:
    if found.status != http.client.OK:
        raise OSError(f"status {found.status}")
    value = json.loads(found.text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


CLOUDS: Final[Mapping[str, tuple[Callable[[Ask], str | None], str]]] = {
    "ec2": (ec2, "http://169.254.169.254"),
    "gce": (gce, "http://169.254.169.254"),
    "azure": (azure, "http://169.254.169.254"),
}
"""What to ask, and where."""


def asking(base: str) -> Ask:
    """Asks the service at ``base``: without proxies and redirects, and never for long."""
    address = urlsplit(base)

    def ask(method: str, path: str, headers: Mapping[str, str]) -> MetadataAnswer:
        connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=LIMIT_S)
        try:
            connection.request(method, path, headers=dict(headers))
            found = connection.getresponse()
            return MetadataAnswer(found.status, found.read(_LARGEST).decode("utf-8", "replace").strip())
        finally:
            connection.close()

    return ask


def _leave() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class PreemptionWatch:
    """See the module. ``source`` is a cloud's name, or ``name@http://HOST:PORT`` for a service elsewhere."""

    def __init__(self, node: str, source: str, clock: Clock = SYSTEM, leave: Callable[[], None] = _leave) -> None:
        name, _, base = source.partition("@")
        self._node, self._leave = node, leave
        self._notice, usual = CLOUDS[name]
        self._ask = asking(base or usual)
        self._silent = 0
        self._thread = PeriodicThread("preemption", self.look, clock)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._thread.close()

    def look(self) -> float:
        """One turn: leave if the machine is to go; seconds until the next."""
        try:
            reason = self._notice(self._ask)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._silent += 1
            if self._silent == SILENT_TURNS:
                logger().warning("preemption.unwatched", node=self._node, error=str(error) or type(error).__name__)
            return EVERY_S
        self._silent = 0
        if reason is None:
            return EVERY_S
        logger().warning("node.preempted", node=self._node, reason=reason)
        self._leave()
        return IDLE_S
