"""This node's health in one place: heartbeat pages, watchdog, incidents, metrics endpoint.

*Runs in* the agent: built in torchrun's main thread; the parts have threads of their own.
*Owns* those parts.
*Fails by* ConfigError for an endpoint that somebody asked for and that cannot be opened; else nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from elastic_trainer.agent.health.evictions import Evictions
from elastic_trainer.agent.health.health_store import HealthStore
from elastic_trainer.agent.health.incidents import Incidents
from elastic_trainer.agent.health.log_place import log_place
from elastic_trainer.agent.health.node_health import Health, HealthPorts, HealthSubject
from elastic_trainer.agent.health.pages import Pages
from elastic_trainer.agent.health.preemption import PreemptionWatch
from elastic_trainer.agent.health.save_requests import SaveRequests
from elastic_trainer.agent.health.stragglers import StragglerWatch
from elastic_trainer.agent.workers import hang_rules
from elastic_trainer.agent.workers.conductor_shell import records_of
from elastic_trainer.agent.workers.watchdog import HungWorkers, process_state
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.ipc.messages import Progress
from elastic_trainer.membership.documents import RoundDocument, RoundState
from elastic_trainer.membership.health import added_up, goodput
from elastic_trainer.membership.member import Member
from elastic_trainer.membership.round_write import RoundFailure
from elastic_trainer.model import Cause, Phase
from elastic_trainer.settings import RendezvousOptions
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.store.metered import MeteredStore
from elastic_trainer.store.untrusted import cleaned
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.variables import ENV_GROUP_TIMEOUT, ENV_PAGES, ENV_REACHED
from elastic_trainer.web.node import EndpointOptions, NodeEndpoint
from elastic_trainer.web.node_metrics import NodeCollector

_BREAK_S = 10.0


class HealthService:
    """See the module. ``address`` is the one that other nodes reach this one by."""

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
        self.hung = HungWorkers(partial(self.pages.count, "workers_killed"), self.pages.path_of)
        self._endpoint: NodeEndpoint | None = None
        if options.metrics_address:
            pages = self.pages
            collector = NodeCollector(keys.run_id, self._node, pages.look, pages.nonfinite, pages.counters, store)
            self._endpoint = _endpoint(options, collector, self._not_ready)
        self._told = HealthStore(store, keys, self._node)
        self._reached, self._group_timeout_s = _reached_before(store, keys), options.group_timeout_s
        self._incidents = Incidents(self._node, self._reached)
        self._told.fold(member.look().nodes)
        records = partial(records_of, store, keys)
        subject = HealthSubject(
            self._node,
            hang_rules.HangLimits(options.step_timeout, options.first_step_timeout, options.phase_timeout),
            host=socket.gethostname(),
            metrics=self._endpoint.url(address) if self._endpoint is not None else "",
            max_nodes=member.limits.max_nodes,
            alive=_touched(options.alive_file),
            logs=log_place(socket.gethostname()),
            evicts_mismatched=options.evict_mismatched,
            min_nodes=member.limits.min_nodes,
        )
        obeys = options.evict_stragglers or options.evict_mismatched
        evictions = Evictions(self._node, store, keys, member.create_revision, obeys=obeys)
        ports = HealthPorts(
            self.pages,
            self._told,
            self._incidents,
            evictions,
            StragglerWatch(self._node, evictions, records, evicts=options.evict_stragglers, clock=clock),
            SaveRequests(store, keys, self._node),
            self.hung,
            lambda: member.look().round,
            self._give_up,
        )
        self.health = Health(subject, ports, clock)
        self._preemption = PreemptionWatch(self._node, options.preemption, clock) if options.preemption else None
        member.on_round(self._see)
        if (current := member.look().round) is not None:
            self._see(current)  # the member has followed the run for a while: nobody else may know how this round ends
        self.health.start()
        if self._preemption is not None:
            self._preemption.start()

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
        self.pages.look()
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
        self.health.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self.pages.close()

    def _not_ready(self) -> str | None:
        """Why this node does not take part in a round; None if it does."""
        current = self._member.look().round
        if current is not None and current.state is RoundState.CLOSED:
            return "the run has ended"
        mine = current.member(self._node) if current is not None else None
        return None if self._member.is_mine(mine) else "this node is in no round"

    def _see(self, document: RoundDocument) -> None:
        present = self._member.look().nodes
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
            EndpointOptions(
                options.metrics_address,
                options.metrics_port,
                options.metrics_token_file,
                options.metrics_cert,
                options.metrics_key,
            ),
            collector,
            not_ready,
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
