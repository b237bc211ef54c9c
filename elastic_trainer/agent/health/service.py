"""This node's health, all of it: heartbeat pages, watchdog, incidents, metrics endpoint, preemption notices.

*Runs in* the agent: built in torchrun's main thread; the parts have threads of their own, such as ``preemption``.
*Owns* those parts.
*Fails by* ConfigError for an endpoint that somebody asked for and that cannot be opened; else nothing: a metadata
service that does not answer is logged once and asked again.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from elastic_trainer.agent.health.incidents import Incidents
from elastic_trainer.agent.health.node_health import (
    Evictions,
    Health,
    HealthPorts,
    HealthStore,
    HealthSubject,
    RunOrders,
    SaveRequests,
    StragglerWatch,
    leave_as_asked,
)
from elastic_trainer.agent.health.pages import Pages
from elastic_trainer.agent.health.progress import ProgressReports
from elastic_trainer.agent.health.verdicts import Clues, KernelLog, VerdictLimits, VerdictPorts, Verdicts, machine_name
from elastic_trainer.agent.workers import hang_rules
from elastic_trainer.agent.workers.conductor_shell import records_of
from elastic_trainer.agent.workers.deaths import Death
from elastic_trainer.agent.workers.machine import LogTails, Machine
from elastic_trainer.agent.workers.periodic import IDLE_S, PeriodicThread
from elastic_trainer.agent.workers.watchdog import HungWorkers, process_state
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.ipc.channel import Progress
from elastic_trainer.membership.documents import RoundDocument, RoundState, added_up, goodput
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.writes import RoundFailure
from elastic_trainer.model import Cause, Phase, as_text
from elastic_trainer.settings import RendezvousOptions, progress_targets
from elastic_trainer.store.api import RunKeys
from elastic_trainer.store.metered import MeteredStore
from elastic_trainer.store.untrusted import cleaned
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.variables import ENV_GROUP_TIMEOUT, ENV_PAGES, ENV_REACHED
from elastic_trainer.web.node import NodeCollector, NodeEndpoint

_BREAK_S = 10.0


class HealthService:
    """The health of one node, with all its parts. ``address`` is the one that other nodes reach this one by."""

    def __init__(
        self,
        member: Member,
        store: MeteredStore,
        keys: RunKeys,
        options: RendezvousOptions,
        address: str,
        clock: Clock = SYSTEM,
    ) -> None:
        self._node, self._member, self._clock = member.node_id, member, clock
        self.pages = Pages(clock)
        self.clues = Clues(self._node, self._round_number, lambda: self.health.publish_soon(), clock)
        self.hung = HungWorkers(partial(self.pages.count_event, "workers_killed"), self.pages.path_of, self._hung)
        self._endpoint: NodeEndpoint | None = None
        if options.metrics_address:
            pages = self.pages
            collector = NodeCollector(
                keys.run_id,
                self._node,
                pages.living,
                pages.nonfinite_losses,
                pages.counters,
                lambda: (store.errors, store.last_success_wall),
            )
            self._endpoint = _endpoint(options, collector, self._not_ready)
        self._told = HealthStore(store, keys, self._node)
        self._reached, self._group_timeout_s = _reached_before(store, keys), options.group_timeout_s
        self._incidents = Incidents(self._node, self._reached)
        self._told.fold(member.observation().nodes)
        records = partial(records_of, store, keys)
        subject = HealthSubject(
            self._node,
            hang_rules.HangLimits(options.step_timeout, options.first_step_timeout, options.phase_timeout),
            host=socket.gethostname(),
            metrics=self._endpoint.url(address) if self._endpoint is not None else "",
            max_nodes=member.limits.max_nodes,
            alive=_touched(options.alive_file),
            logs=log_location(socket.gethostname()),
            evicts_mismatched=options.evict_mismatched,
            min_nodes=member.limits.min_nodes,
            machine=machine_name(os.environ),
        )
        obeys = options.evict_stragglers or options.evict_mismatched or options.evict_faulty
        evictions = Evictions(
            self._node,
            store,
            keys,
            member.create_revision,
            self._leave_workers,
            obeys=obeys,
            told=self.clues.told_to_leave,
        )
        limits = member.limits
        judging = VerdictLimits(limits.min_nodes, limits.shard_nodes, limits.failure_limit, options.evict_faulty)
        acting = VerdictPorts(self._told.read, evictions.ask_any, self._end)
        verdicts = Verdicts(self.clues, store, keys, judging, acting, clock)
        ports = HealthPorts(
            self.pages,
            self._told,
            self._incidents,
            evictions,
            StragglerWatch(self._node, evictions, records, evicts=options.evict_stragglers, clock=clock),
            SaveRequests(store, keys, self._node),
            RunOrders(store, keys, self._node),
            self.hung,
            Machine(),
            LogTails(options.log_lines),
            self.clues,
            KernelLog(),
            verdicts,
            lambda: member.observation().round,
            self._give_up,
        )
        self.health = Health(subject, ports, clock)
        self._preemption = (
            PreemptionWatch(self._node, options.preemption, clock, self._preempted) if options.preemption else None
        )
        self._progress = [ProgressReports(each, self.health.known_progress, clock) for each in progress_targets()]
        member.on_round(self._see)
        if (current := member.observation().round) is not None:
            self._see(current)  # the member has followed the run for a while: nobody else may know how this round ends
        self.health.start()
        if self._preemption is not None:
            self._preemption.start()
        for each in self._progress:
            each.start()

    @property
    def made_steps(self) -> bool:
        """Whether workers of this node have made steps, dead ones too."""
        return self.pages.counters().get("steps", 0.0) > 0.0

    def busy(self, pid: int) -> str:
        """What keeps the worker ``pid`` in a round that is over, for good reason; empty where nothing is known to."""
        reading = self.pages.reading(pid)
        stopped = process_state(pid) == "stopped"  # whatever it was busy with
        return hang_rules.busy(reading) if reading is not None and not stopped else ""

    def starting(self) -> None:
        """torchrun starts the workers now: where their pages belong, and how long to wait for those watched here."""
        os.environ.pop(ENV_PAGES, None)
        if self.pages.directory is not None:
            os.environ[ENV_PAGES] = str(self.pages.directory)
        self.pages.living()
        os.environ[ENV_GROUP_TIMEOUT] = str(self._group_timeout_s)
        os.environ[ENV_REACHED] = str(max(self._reached, self.pages.reached))
        self.pages.mode(Phase.STARTING)

    def tell_goodput(self) -> None:
        """At the end of a run: log how all ranks spent their time."""
        self.health.publish()
        counters = added_up(each.counters for each in self._told.told().values())
        share = goodput(counters)
        if share is None:
            return
        seconds = {str(phase): round(counters.get(f"seconds.{phase}", 0.0), 1) for phase in Phase}
        spent = {phase: each for phase, each in seconds.items() if each}
        logger().info("run.accounted", goodput=round(share, 4), rank_seconds=spent, samples=counters.get("samples", 0))

    def close(self) -> None:
        if self._preemption is not None:
            self._preemption.close()
        for each in self._progress:
            each.abandon()
        self.health.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self.pages.close()

    def died(self, deaths: Sequence[Death], number: int) -> int:
        """Workers of this node have ended by themselves; the round that they were in, ``number`` if nothing says."""
        self.health.look_at_kernel()  # why it killed them
        readings = {each.pid: reading for each in deaths if (reading := self.pages.last(each.pid)) is not None}
        number = max((each.pulse.round for each in readings.values()), default=0) or number or self._round_number()
        self.clues.died(deaths, readings, number)
        return number

    def left_behind(self, pid: int, reason: str, state: str) -> None:
        """The worker ``pid`` does not answer while others wait for it: they go on without it."""
        reading = self.pages.reading(pid)
        rank = reading.pulse.rank if reading is not None else -1
        self.clues.hung(reading, rank, reason, state, "")

    def _hung(self, pid: int, reason: str, state: str, stacks: str) -> None:
        reading = self.pages.reading(pid)
        rank = reading.pulse.rank if reading is not None else -1
        self.clues.hung(reading, rank, reason, state, stacks)

    def _preempted(self, reason: str) -> None:
        self.clues.told_to_leave(reason)
        leave_as_asked()

    def _round_number(self) -> int:
        current = self._member.observation().round
        return current.last_number if current is not None else 0

    def _end(self, number: int, reason: str) -> None:
        """End the run with round ``number``, as a verdict says."""
        logger().error("run.given_up", round=number, reason=reason)
        failure = RoundFailure(number, reason, worker_failed=True, cause=Cause.WORKER_LOST, final=True)
        try:
            self._member.break_round(failure, Deadline.after(_BREAK_S, self._clock))
        except ElasticTrainerError as error:
            logger().warning("round.not_broken", round=number, error=str(error))

    def _leave_workers(self) -> None:
        """The workers leave as after a SIGTERM, and torchrun starts others."""
        for reading in self.pages.living():
            self.pages.sent_off.add(reading.pid)
            with suppress(ProcessLookupError):
                os.kill(reading.pid, signal.SIGTERM)

    def _not_ready(self) -> str | None:
        """Why this node does not take part in a round; None if it does."""
        current = self._member.observation().round
        if current is not None and current.state is RoundState.CLOSED:
            return "the run has ended"
        mine = current.member(self._node) if current is not None else None
        return None if self._member.is_mine(mine) else "this node is in no round"

    def _see(self, document: RoundDocument) -> None:
        present = self._member.observation().nodes
        mine = document.member(self._node)
        takes_part = mine is not None and mine.create_revision == self._member.create_revision()
        self._incidents.see(document, self._clock.monotonic(), self._clock.wall(), present, takes_part=takes_part)

    def _give_up(self, number: int, reason: str) -> None:
        """All ranks of round ``number`` wait for each other."""
        logger().warning("round.stalled", round=number, reason=reason)
        failure = RoundFailure(number, reason, worker_failed=True, cause=Cause.STALLED)
        try:
            self._member.break_round(failure, Deadline.after(_BREAK_S, self._clock))
        except ElasticTrainerError as error:
            logger().warning("round.not_broken", round=number, error=str(error))


def _touched(path: Path | None) -> Path | None:
    """The file of ``alive_file``, which can be written."""
    try:
        if path is not None:
            path.touch()
    except OSError as error:
        hint = "a directory that this process can write to, such as /tmp"
        raise ConfigError(f"alive_file {str(path)!r} cannot be written: {error.strerror}", hint=hint) from error
    return path


def _endpoint(
    options: RendezvousOptions, collector: NodeCollector, not_ready: Callable[[], str | None]
) -> NodeEndpoint | None:
    """The endpoint. Where nobody asked for one in any way, a machine that has no room for it trains without."""
    try:
        return NodeEndpoint(
            options.metrics_address,
            options.metrics_port,
            collector,
            token_file=options.metrics_token_file,
            cert=options.metrics_cert,
            key=options.metrics_key,
            not_ready=not_ready,
        )
    except ConfigError as error:
        if any(name.startswith("metrics_") for name in options.model_fields_set):
            raise
        logger().warning("endpoint.unavailable", error=str(error))
        return None


def _reached_before(store: MeteredStore, keys: RunKeys) -> int:
    """The newest step that this run is known to have committed before this node came; 0 if unknown."""
    try:
        item = store.get(keys.progress, Deadline.after(2.0)).first
        return Progress.model_validate_json(cleaned(item.value)).step if item is not None else 0
    except (ElasticTrainerError, ValueError):
        return 0


# ---- where the node's output goes


def log_location(hostname: str, environ: Mapping[str, str] = os.environ, output: int = 1) -> str:
    """``file:PATH``, ``journal:UNIT``, ``job:JOB/INDEX`` or ``pod:NAME`` of Kubernetes; else empty."""
    try:
        found = os.fstat(output)
        target = os.readlink(f"/proc/self/fd/{output}")
    except OSError:
        return ""
    if stat.S_ISREG(found.st_mode):
        return f"file:{as_text(target)}"
    if environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}":
        return f"journal:{_unit(Path('/proc/self/cgroup'))}"
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return ""
    job, _, index = hostname.rpartition("-")
    return f"job:{job}/{index}" if environ.get("JOB_COMPLETION_INDEX") == index else f"pod:{hostname}"


def _unit(listed: Path) -> str:
    """The systemd unit of this process, by the name of its group."""
    try:
        paths = [Path(line.rpartition(":")[2]) for line in listed.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    units = (part for path in paths for part in reversed(path.parts) if part.endswith(".service"))
    return next(units, "")


# ---- preemption notices


EVERY_S: Final = 3.0
LIMIT_S: Final = 2.0
SILENT_TURNS: Final = 3
"""Turns without an answer after which the log says so: right after its start a machine's service may not be there."""
_LARGEST: Final = 1 << 16
METADATA: Final = "http://169.254.169.254"


class PreemptionWatch(PeriodicThread):
    """Asks the cloud's metadata service whether it will take this machine back soon, and then has the node leave.

    The node leaves as after a SIGTERM: by a planned change, with exit code 143, which Kubernetes and Slurm count as no
    failure. Notices come 30 s (GCE, Azure) to two minutes (EC2) before the end.

    ``source`` is a cloud's name, or ``name@http://HOST:PORT`` for a service elsewhere."""

    def __init__(
        self,
        node: str,
        source: str,
        clock: Clock = SYSTEM,
        leave: Callable[[str], None] = lambda reason: leave_as_asked(),
    ) -> None:
        super().__init__("preemption", self.turn, clock)
        name, _, base = source.partition("@")
        self._node, self._leave = node, leave
        self._notice = CLOUDS[name]
        self._ask = asking(base or METADATA)
        self._silent = 0

    def turn(self) -> float:
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
        self._leave(reason)
        return IDLE_S


@dataclass(frozen=True, slots=True)
class MetadataAnswer:
    """What the service said; ``text`` without white space at its ends."""

    status: int
    text: str


Ask = Callable[[str, str, Mapping[str, str]], MetadataAnswer]
"""``ask(method, path, headers)``. *Fails by* OSError and HTTPException."""


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


CLOUDS: Final[Mapping[str, Callable[[Ask], str | None]]] = {"ec2": ec2, "gce": gce, "azure": azure}
"""What to ask at :data:`METADATA`."""
