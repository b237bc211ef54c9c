"""torchrun's rendezvous handler for restart mode: assigns ranks for each start of the workers.

*Runs in* torchrun's main thread, and threads of the same process.
*Owns* the member, its port, the reserved store port, the supervisor; all end with :meth:`shutdown` or with the
process (then the lease expires).
*Fails by* SystemExit with one sentence: 0 for a node that joins after the run has succeeded, 78 for a wrong
configuration, that of UnfitError for a node that is refused.
*Invariant*: ``num_nodes_waiting`` does no I/O and never raises. A refused node never had a node key.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from elastic_trainer.agent.health.node_health import HealthStore
from elastic_trainer.agent.health.service import HealthService
from elastic_trainer.agent.health.verdicts import ensure_healthy, machine_name
from elastic_trainer.agent.rendezvous.launcher import (
    Await,
    RoundStore,
    at_once,
    error_outputs,
    exit_code_after,
    exit_reason_of,
    failures,
    ignore_sigterm,
    job,
    local_workers,
)
from elastic_trainer.agent.suspicion import AgentPort
from elastic_trainer.agent.workers.compile_cache import LOOK_S, CachePorts, CompileCache, Home
from elastic_trainer.agent.workers.deaths import (
    RESTARTED,
    Death,
    Deaths,
    StartupWatch,
    by_rank,
    write_termination_message,
)
from elastic_trainer.agent.workers.rescue import NeighbourCopies, Rescue
from elastic_trainer.agent.workers.watchdog import Supervisor
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import (
    EXIT_CONFIG,
    ConfigError,
    ElasticTrainerError,
    PermanentError,
    ReplacedError,
    RunClosedError,
    TransientError,
    UnfitError,
)
from elastic_trainer.ipc.address import default_node_id, own_address
from elastic_trainer.membership.admission import admit, confirm
from elastic_trainer.membership.cluster_view import Limits
from elastic_trainer.membership.documents import (
    Departure,
    Incident,
    NodeRecord,
    NodeState,
    RoundDocument,
    RoundState,
    RunResult,
    Spec,
    split_address,
)
from elastic_trainer.membership.member import Member, closed_error
from elastic_trainer.membership.writes import RoundFailure
from elastic_trainer.model import Cause, Phase, PreflightMode, RecoveryMode, checked_name
from elastic_trainer.preflight.comparison import STORE_S, PeerComparison, report_of, round_trip
from elastic_trainer.preflight.examination import Subject, examine
from elastic_trainer.preflight.judge import NODE_CHECKS_S, PEERS_WAIT_S, Finding, FitLimits, Status, bad, sentence
from elastic_trainer.settings import RendezvousOptions, parse_endpoints
from elastic_trainer.store import connect_patiently
from elastic_trainer.store.api import RunKeys
from elastic_trainer.store.metered import MeteredStore
from elastic_trainer.store.session import LeaseSession
from elastic_trainer.telemetry import logs
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.variables import (
    ENV_ADDRESS,
    ENV_COPIES_HERE,
    ENV_MEMORY,
    ENV_NODE,
    ENV_RECOVERY,
    ENV_ROUND,
    ENV_ROUND_REASON,
    ENV_SHARD_NODES,
)

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store as TorchStore
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from elastic_trainer.store.api import Store

BACKEND = "etcd3"
RESTART_REGROUP_S = 60.0
LAST_CALL_LIMIT_S = 60.0
"""The longest sum of last calls, if one alone is no longer."""
STALLED_ROUNDS = 10
"""Consecutive rounds without a committed step that end the run, if more failures at one step do not."""
_SHORTEST_WAIT_S, OTHERS_START_S = 5.0, 30.0
"""Bounds on the wait for other nodes whose workers may fail at startup too; between them, as long as these lived."""
_NO_NAME = "none"
"""torchrun's default for ``--rdzv-id``."""
KEEP_S = 7 * 24 * 3600.0
"""How long a report stays for comparison with newcomers; it outlives its node, for the node's successor."""
_WRONG = "that is a wrong configuration, so a retry cannot help"


@dataclass(frozen=True, slots=True)
class ArrivedNode:
    """A node that the run has admitted, with all its parts, until it leaves."""

    member: Member
    port: AgentPort
    supervisor: Supervisor
    health: HealthService
    rescue: Rescue
    copies: NeighbourCopies
    cache: CompileCache | None = None

    def lend_memory(self, address: str) -> None:
        """Name the memory files to the workers that start next, and the ``address`` at which others reach this node."""
        os.environ[ENV_ADDRESS] = address
        os.environ[ENV_MEMORY] = self.rescue.paths
        os.environ[ENV_COPIES_HERE] = f"{address} {self.port.port} {self.copies.key}"

    def leave(self, departure: Departure | None = None) -> None:
        """Leave the run: delete this node's key. ``departure``: why, unless the run has ended."""
        try:
            self.health.close()
        except Exception:  # noqa: BLE001 - a failing health report must not keep the key that others wait for
            logger().exception("health.failed")
        last = self.member.observation().round
        if self.cache is not None:
            self.cache.abandon()
        self.member.leave(departure)
        self.copies.stop()
        self.rescue.close(last)
        if self.cache is not None:
            self.cache.close()
        self.copies.close()
        self.supervisor.close()
        self.port.close()


class Etcd3RendezvousHandler(RendezvousHandler):
    """One node's handler; see the module."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        options: RendezvousOptions,
        *,
        min_nodes: int,
        max_nodes: int,
        address: str,
        await_imports: Await = at_once,
        compiled: Home | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._await_imports, self._compiled = await_imports, compiled
        self._store = MeteredStore(store, clock)
        self._run_id, self._options, self._clock = run_id, options, clock
        self._address = address
        sizes = allowed_sizes(options, min_nodes, max_nodes)
        least, most = (sizes[0], sizes[-1]) if sizes else (min_nodes, max_nodes)
        self._spec = Spec(
            min_nodes=least, max_nodes=most, recovery=options.recovery, sizes=sizes, shard_nodes=options.shard_nodes
        )
        self._keys = RunKeys(options.prefix, run_id)
        node = options.node_id or default_node_id()
        self.node_id = checked_name(node, "node id")
        self._node: ArrivedNode | None = None
        """None before the first rendezvous, and after the end."""
        self._port: socket.socket | None = None
        """Reserved for the store of the present life's workers."""
        self._worked = False
        """The value of :attr:`_made_steps` when the node left the run."""
        self._current: RoundDocument | None = None
        self._life = 0
        self._finished = False
        self._died = ""
        """How its last worker died."""
        self._starts, self._deaths = StartupWatch(clock), Deaths()
        logs.bind(run=run_id, node=self.node_id, role="agent")

    @classmethod
    def from_parameters(
        cls, parameters: RendezvousParameters, options: RendezvousOptions, await_imports: Await, compiled: Home | None
    ) -> Self:
        """Validate torchrun's parameters and connect to the store. Raises ConfigError or StoreUnavailableError."""
        checked_name(parameters.run_id, "run id (--rdzv-id)")
        if parameters.run_id == _NO_NAME:
            raise ConfigError(
                f"the run has no name: without --rdzv-id torchrun calls every run {_NO_NAME!r}, and all would be one",
                hint="add --rdzv-id NAME, the same on all nodes of this job and on no others",
            )
        if not parameters.endpoint:
            raise ConfigError("no store address was given", hint="add --rdzv-endpoint host:2379")
        if parameters.min_nodes > parameters.max_nodes:
            raise ConfigError(
                f"--nnodes {parameters.min_nodes}:{parameters.max_nodes}: the minimum is above the maximum"
            )
        settings = options.store(parameters.endpoint)
        store = connect_patiently(settings, Deadline.after(options.connect_timeout), run=parameters.run_id)
        etcd = parse_endpoints(parameters.endpoint)[0]
        address = options.interface or parameters.local_addr
        address = address or own_address(etcd.host, etcd.port, alone=parameters.max_nodes == 1)
        return cls(
            store,
            parameters.run_id,
            options,
            min_nodes=parameters.min_nodes,
            max_nodes=parameters.max_nodes,
            address=address,
            await_imports=await_imports,
            compiled=compiled,
        )

    # ---- called by torchrun

    def get_backend(self) -> str:
        """The handler's name in torchrun."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """False: rank 0's worker hosts the workers' store, on its own port for each round.

        torchrun would otherwise name the workers' store prefix after its own restart count, which differs between
        nodes, and stale addresses of an earlier round would be read.
        """
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; blocks until it forms."""
        if any(each.exitcode == EXIT_CONFIG for each in failures().values()) and self._is_misconfigured():
            wrong = f"{self._describe_deaths(failures(), self._node)}; {_WRONG}"
            logger().error("node.given_up", reason=wrong)
            raise SystemExit(EXIT_CONFIG) from ConfigError(wrong)
        try:
            return self._join()
        except RunClosedError as error:
            logger().info("run.already_closed", succeeded=error.succeeded)
            if not error.succeeded:
                end(error)
            if failures() and self._has_passed():
                end(self._after_training())
            raise SystemExit(0) from error
        except ElasticTrainerError as error:
            end(error)

    def _has_passed(self) -> bool:
        """Whether a worker of this node has passed the end of the training; False for scripts without a Session."""
        return self._node is not None and self._node.health.pages.passed()

    def _after_training(self) -> PermanentError:
        """The error of a node whose worker has failed after the end of the training."""
        return PermanentError(
            f"{self._died or 'a worker failed'}, after the end of the training: the run has succeeded",
            hint="see the script's log; what it did after its Session is not repeated",
        )

    def _is_misconfigured(self) -> bool:
        """Whether a worker with the exit code of a wrong configuration would fail again each time.

        Not if workers of this node have made steps: then the configuration is right, and the data or its storage has
        failed since. A node that exited with that code would make a Kubernetes Job end all other nodes too.
        """
        return not self._made_steps

    @property
    def _made_steps(self) -> bool:
        """Whether workers of this node have made steps in any life; False for scripts without a Session."""
        return self._worked or (self._node is not None and self._node.health.made_steps)

    def is_closed(self) -> bool:
        current = self._node.member.observation().round if self._node is not None else None
        return current is not None and current.state is RoundState.CLOSED

    def set_closed(self) -> None:
        """torchrun never calls this for a plugin; the members close the run (DESIGN section 3, *End*)."""

    def num_nodes_waiting(self) -> int:
        """1 when the workers' round is over, so that torchrun restarts them; otherwise 0."""
        if self._node is None or self._current is None:
            return 0
        return 1 if round_is_over(self._current, self._node.member.observation().round) else 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Leave the run. Never raises: the exit code of what ends this process must not be lost to its farewell."""
        try:
            # The exception that torchrun handles now, or that the interpreter reported.
            return self._leave(sys.exc_info()[1] or getattr(sys, "last_value", None))
        except Exception as error:  # noqa: BLE001 - the edge of the process; the key ends with its lease
            logger().warning("departure.failed", error=f"{type(error).__name__}: {error}")
            return False

    def _leave(self, error: BaseException | None) -> bool:
        """Leave the run, and record in the store that ``error`` is why."""
        self._worked = self._made_steps  # first: whatever fails below, the exit code depends on it
        node, self._node = self._node, None
        if node is not None:
            departure = self._departure(error, node)
            if departure is not None and departure.planned:
                node.health.pages.count_event("left")  # its last report then says that the node left on request
            node.leave(departure)
        if self._port is not None:
            self._port.close()
            self._port = None
        self._starts.close()
        self._store.close()
        return True

    def _departure(self, error: BaseException | None, node: ArrivedNode) -> Departure | None:
        if error is None or self._finished:
            return None
        died = ""
        if isinstance(error, ChildFailedError):
            deaths = self._deaths_of(error.failures, node)
            node.health.died(deaths, self._current.number if self._current is not None else 0)
            died = deaths[0].text if deaths else ""
        parting = exit_reason_of(error, made_steps=self._worked, died=died)
        if parting is None:
            return None
        write_termination_message(parting.reason)
        step = node.health.pages.reached
        clues = node.health.clues.all()
        return Departure(wall=self._clock.wall(), node=self.node_id, step=step, clues=clues, **asdict(parting))

    def _at_exit(self) -> None:
        """The process exits, in whatever way: delete this node's key, and use the right exit code.

        torchrun would exit with 1 after a SIGTERM, which a job controller counts as a failure, and after a worker's
        wrong configuration, which the controller would retry.
        """
        self.shutdown()
        code = exit_code_after(getattr(sys, "last_value", None), made_steps=self._worked)
        if code is not None:
            logs.final_message()
            os._exit(code)

    # ---- joining

    def _join(self) -> RendezvousInfo:
        waiting = Deadline.after(self._options.join_timeout, self._clock)
        node = self._node if self._node is not None else self._arrive()
        workers = local_workers()
        node.health.pages.employ(workers.local_world_size)
        node.health.pages.mode(Phase.WAITING if self._current is None else Phase.RENDEZVOUS)
        seen = node.member.observation().round
        if self._current is None and seen is not None and seen.state is RoundState.ACTIVE:
            known = node.cache.modules if node.cache is not None else ()
            self._await_imports(waiting.remaining_s(), known)  # the others train on, and would stand still for it
        if self._current is not None:
            node.rescue.begin(self._current, in_place=False)
        planned, cause = self._leave_round(node, waiting)
        last = self._last_life(node, planned)
        self._life += 1
        if self._port is not None:
            self._port.close()
        self._port = reserve_port(self._address)
        port = self._port.getsockname()[1]
        record = self._record(node, port, workers, life=self._life, planned=planned, cause=cause, **last)
        check_spec = partial(self._confirm, waiting) if self._current is None else lambda: None
        document = join_round(node.member, record, waiting, self._options.join_timeout, check_spec)
        self._current = document
        node.supervisor.round_begun(document.number)
        node.health.starting()
        self._starts.begin(port if document.is_first(self.node_id) else None)
        node.lend_memory(self._address)
        return self._describe(document)

    def _arrive(self) -> ArrivedNode:
        """First call: pass admission, then start all that a member needs."""
        deadline, workers = Deadline.after(self._options.connect_timeout, self._clock), local_workers()
        self._spec = self._spec.model_copy(update=job())
        admit(
            self._store,
            self._keys,
            self._spec,
            reopen=self._options.reopen,
            deadline=deadline,
            allowed=self._options.may_differ,
            watched=sys.stderr is not None and sys.stderr.isatty(),
        )
        if self._options.preflight is not PreflightMode.OFF:
            limits = FitLimits(ratio=self._options.preflight_ratio)
            subject = Subject(self._address, self._options.preflight_dir, workers.local_world_size, limits=limits)
            least = self._spec.min_nodes
            ensure_fit(self._store, self._keys, self._options, subject, self.node_id, least, self._clock)
            deadline = Deadline.after(self._options.connect_timeout, self._clock)
        machine = machine_name(os.environ)
        ensure_healthy(self._store, self._keys, machine, self._options.sick_machines, self._clock)
        session = LeaseSession(self._store, self._options.ttl, deadline=deadline, clock=self._clock)
        member = Member(self._store, self._keys, self.node_id, session, self._limits(), self._replaced, self._clock)
        atexit.register(self._at_exit)
        with ExitStack() as undo:
            copies = NeighbourCopies(workers.local_world_size)
            undo.callback(copies.close)
            port = AgentPort(self._address, self._run_id, self.node_id, copies.serve, self._clock)
            undo.callback(port.close)
            supervisor = Supervisor(self._run_id, self._options.stop_grace, self._clock)
            undo.callback(supervisor.close)
            supervisor.start()
            member.on_round(self._watch_round)
            member.start(deadline)
            undo.callback(member.leave)
            health = HealthService(member, self._store, self._keys, self._options, self._address, self._clock)
            rescue = Rescue(self.node_id, member.nodes, workers.local_world_size, self._clock, lambda: copies.files)
            cache = self._share_compiled(member, copies)
            self._node = ArrivedNode(member, port, supervisor, health, rescue, copies, cache)
            undo.pop_all()
        return self._node

    def _share_compiled(self, member: Member, copies: NeighbourCopies) -> CompileCache | None:
        """Take up what the run's nodes have compiled, and share from now on what this one does."""
        if self._compiled is None:
            return None

        def members() -> list[str]:
            current = member.observation().round
            return [each.node for each in current.members] if current is not None else []

        options = self._options
        where = options.compile_cache_dir or options.preflight_dir or self._spec.checkpoint_dir
        ports = CachePorts(self._store, self._keys, members, member.nodes, copies, where)
        cache = CompileCache(self.node_id, self._compiled, options.compile_cache_mb, ports, self._clock)
        cache.fetch()
        cache.start(LOOK_S)
        return cache

    def _confirm(self, deadline: Deadline) -> None:
        """This node's key is there: nobody else's job was admitted before it."""
        confirm(self._store, self._keys, self._spec, self._options.may_differ, deadline)

    def _replaced(self, error: ReplacedError) -> None:
        """Does nothing: this node's round is over, and its next rendezvous ends with this error."""

    def _how_workers_died(self, node: ArrivedNode) -> str:
        """How this node's workers died, if torchrun calls for that reason, else ""; logs it and notes it for people.

        The note belongs to the round that they were in: here the next one may have been formed.
        """
        if not (found := failures()):
            return ""
        if node.health.pages.restarted([each.pid for each in found.values()]):
            logger().info("workers.restarted", node=self.node_id, reason=RESTARTED)
            return RESTARTED
        deaths = self._deaths_of(found, node)
        told = self._died = deaths[0].text
        logger().warning("worker.died", reason=told)
        number = node.health.died(deaths, self._current.number if self._current is not None else 0)
        node.health.health.add_note("worker_died", told, tuple(sorted(each.rank for each in deaths)), number)
        return told

    def _describe_deaths(self, found: Mapping[int, ProcessFailure], node: ArrivedNode | None) -> str:
        deaths = self._deaths_of(found, node)
        return deaths[0].text if deaths else ""

    def _deaths_of(self, found: Mapping[int, ProcessFailure], node: ArrivedNode | None) -> list[Death]:
        if node is None:
            return self._deaths.look(found, {}, error_outputs())
        pages = node.health.pages
        return self._deaths.look(by_rank(found, pages.ranks()), pages.said(), error_outputs())

    def _leave_round(self, node: ArrivedNode, deadline: Deadline) -> tuple[bool, str]:
        """Announce that this node left its round, if that was still in effect; whether by agreement, and why."""
        if self._current is None:
            return True, ""
        member, hung, died = node.member, node.health.hung.take_any(), self._how_workers_died(node)
        false_start = self._starts.end(failures(), stepped=self._made_steps)
        seen = member.observation().round
        if seen is None or round_is_over(self._current, seen):
            return True, ""
        if false_start is not None:  # the round may end before this node must break it
            member.announce(member.record().model_copy(update=false_start.fields), deadline)
            grace_s = min(OTHERS_START_S, max(_SHORTEST_WAIT_S, self._starts.lasted_s))
            member.await_over(self._current.number, deadline.at_most(grace_s))
            seen = member.observation().round
            if seen is not None and (seen.state is RoundState.CLOSED or round_is_over(self._current, seen)):
                return True, ""
        kind, cause = Cause.WORKER_LOST, f"its workers failed{f': {died}' if died else ''}"
        if hung is not None:
            kind, cause = Cause.WORKER_HUNG, f"a worker was killed: {hung}"
        elif died == RESTARTED:
            kind, cause = Cause.NODE_LEFT, died
        reason = f"node {self.node_id} left the round: {cause}"
        failure = RoundFailure(self._current.number, reason, worker_failed=kind is not Cause.NODE_LEFT, cause=kind)
        return (True, "") if has_ended_by_plan(member, failure, deadline) else (False, cause)

    def _last_life(self, node: ArrivedNode, planned: bool) -> dict[str, Any]:
        """The progress of the last life, and what ended it."""
        if self._current is None:
            return {}
        pages, failed = node.health.pages, failures()
        pids = [each.pid for each in failed.values()]
        own = bool(failed) and not pages.restarted(pids) and not pages.lost_peers(pids)
        kind = Cause.WORKER_LOST if own else None if planned else Cause.CONTACT_LOST
        return {"reached": pages.came_to(self._current.number), "ended_by": kind}

    def _record(self, node: ArrivedNode, store_port: int, workers: WorkerSpec, **more: Any) -> NodeRecord:
        shown = fields_behind(self._current)
        return NodeRecord(
            host=socket.gethostname(),
            address=self._address,
            local_world_size=workers.local_world_size,
            role=workers.role,
            store_port=store_port,
            probe_port=node.port.port,
            **(shown | more),
        )

    def _describe(self, document: RoundDocument) -> RendezvousInfo:
        rank = next(i for i, member in enumerate(document.members) if member.node == self.node_id)
        host, port = split_address(document.store)
        os.environ[ENV_NODE] = self.node_id
        os.environ[ENV_ROUND] = str(document.number)
        os.environ[ENV_ROUND_REASON] = document.reason
        os.environ[ENV_RECOVERY] = str(RecoveryMode.RESTART)
        os.environ[ENV_SHARD_NODES] = str(self._spec.shard_nodes)
        logs.bind(round=document.number)
        store = cast("TorchStore", RoundStore(document, self._finish))
        return RendezvousInfo(store, rank, len(document.members), RendezvousStoreInfo(host, port))

    def _limits(self) -> Limits:
        options = self._options
        in_place = options.recovery is RecoveryMode.IN_PLACE
        return Limits(
            min_nodes=self._spec.min_nodes,
            max_nodes=self._spec.max_nodes,
            recovery=options.recovery,
            last_call_s=options.last_call,
            last_call_limit_s=max(LAST_CALL_LIMIT_S, options.last_call),
            regroup_grace_s=options.regroup_grace if in_place else RESTART_REGROUP_S,
            failure_limit=options.failure_limit,
            stalled_rounds=max(STALLED_ROUNDS, options.failure_limit),
            join_interval_s=options.join_interval,
            sizes=self._spec.sizes,
            shard_nodes=self._spec.shard_nodes,
        )

    # ---- during and after a round

    def _watch_round(self, document: RoundDocument) -> None:
        """Called by the deciding thread: starts the grace period of a broken round's workers."""
        if self._current is None or self._node is None or self._finished:
            return
        if round_is_over(self._current, document) and document.state is not RoundState.DRAINING:
            self._node.supervisor.round_over(self._current.number)

    def _finish(self, outage_limit_s: float) -> None:
        """torchrun's exit barrier: announce that this node has finished, and wait until all members have."""
        if self._node is not None and self._current is not None:
            self._await_end(self._node, self._current.number, outage_limit_s)

    def _await_end(self, node: ArrivedNode, number: int, outage_limit_s: float) -> None:
        """Wait for the end of the run: this node has succeeded, unless the run is known to have failed."""
        self._finished = True
        limit = Deadline.after(outage_limit_s, self._clock)
        ended = finish(node.member, number, limit, outage_limit_s, passed=self._has_passed())
        if ended is None:
            return
        if ended.is_first(self.node_id):
            node.health.tell_goodput()
        logger().info("run.ended", result=ended.result, reason=ended.reason)
        if ended.result is RunResult.FAILED:
            end(closed_error(ended))
        ignore_sigterm()


# ---- before it joins: sizes of the run, and the optional check of the machine


def allowed_sizes(options: RendezvousOptions, low: int, high: int) -> tuple[int, ...]:
    """Counts from ``low`` to ``high`` that ``sizes``, ``multiple_of``, ``shard_nodes`` allow, ascending; empty: all."""
    named = {int(size) for size in options.sizes.split(":")} if options.sizes else None
    group = options.shard_nodes
    for given, counts in ((f"--nnodes {low}:{high}", {low, high}), (f"sizes={options.sizes}", named or ())):
        if any(count % group for count in counts):
            raise ConfigError(
                f"{given} does not divide into shard groups of {group} nodes (--rdzv-conf shard_nodes={group})",
                hint=f"these numbers count nodes, not groups: use multiples of {group}",
            )
    if named is None and options.multiple_of == group == 1:
        return ()
    step = math.lcm(options.multiple_of, group)
    allowed = tuple(size for size in sorted(named or range(low, high + 1)) if low <= size <= high and size % step == 0)
    if not allowed:
        given = f"sizes={options.sizes}" if options.sizes else f"multiple_of={options.multiple_of}"
        raise ConfigError(
            f"--rdzv-conf {given} allows no node count within --nnodes {low}:{high}", hint="change one of them"
        )
    return allowed


def reserve_port(address: str) -> socket.socket:
    """Binds a free port, which the kernel assigns to no other process while a worker of this node may need it.

    The socket stays bound without listening until it is closed. Both sides set SO_REUSEADDR: then Linux lets a second
    socket bind and listen, but skips the port in its automatic choice.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def ensure_fit(
    store: Store, keys: RunKeys, options: RendezvousOptions, subject: Subject, node: str, least: int, clock: Clock
) -> None:
    """Check this node, which wants to join a job of at least ``least`` nodes, before it writes its key.

    Bad findings become an incident, and refuse the node if the options say so (UnfitError). A store that does not
    answer never makes a node unfit.
    """
    begun = clock.monotonic()
    logger().info("preflight.started", limit_s=NODE_CHECKS_S)
    findings = _examined(store, keys, subject, node, least, clock)
    for finding in findings:
        if finding.status is Status.WARN:
            logger().warning("preflight.warned", check=finding.name, text=finding.text, hint=finding.hint)
    unfit = bad(findings)
    took_s = round(clock.monotonic() - begun, 3)
    logger().info("preflight.finished", fit=not unfit, checks=len(findings), duration_s=took_s)
    if not unfit:
        return
    for finding in unfit:
        logger().warning("node.unfit", check=finding.name, text=finding.text, hint=finding.hint)
    text, refused = f"node {node} is not fit: {sentence(unfit)}", options.preflight is PreflightMode.REFUSE
    reason = f"{text} ({'it does not join' if refused else 'it joins anyway'})"
    incident = Incident(wall=clock.wall(), by=node, kind="node_unfit", reason=reason, nodes=(node,))
    try:
        HealthStore(store, keys, node).write_incident(incident)
    except ElasticTrainerError as error:
        logger().warning("incident.not_written", error=str(error))
    if refused:
        raise UnfitError(text, hint=unfit[0].hint or "run the job on another machine")


def _examined(store: Store, keys: RunKeys, subject: Subject, node: str, least: int, clock: Clock) -> list[Finding]:
    """Run the checks of this node, then compare it with the others."""
    limits, comparison = subject.limits, PeerComparison(store, keys, node, subject.limits, clock)
    own = examine(subject, Deadline.after(NODE_CHECKS_S, clock))
    report = report_of(node, subject.address, own.findings, own.versions, clock.wall())
    found = [*own.findings]
    try:
        found.append(round_trip(store, keys.round, limits, Deadline.after(STORE_S, clock), clock))
        comparison.publish(report, KEEP_S)
        # A job cannot start without its minimum of nodes, so waiting for their results costs little.
        others = least - 1 if least > limits.peers else 0
        found += comparison.findings(others=others, wait_s=PEERS_WAIT_S, keep_s=KEEP_S)
    except TransientError as error:
        found.append(Finding("peers", Status.SKIPPED, f"the other nodes' results are unknown: {error}"))
    return found


# ---- a round, from the record that asks for it to its end


def fields_behind(mine: RoundDocument | None) -> dict[str, Any]:
    """Of the record of a node that is ready for the round behind ``mine``; None: for its first one."""
    free_for = mine.number + 1 if mine is not None else 0
    return {"state": NodeState.READY, "acknowledged": free_for, "reported": free_for}


def join_round(
    member: Member, record: NodeRecord, limit: Deadline, join_timeout_s: float, announced: Callable[[], None]
) -> RoundDocument:
    """Announce the life of ``record`` until ``limit``, and wait for its round, whose workers start at once.

    Raises RunClosedError or JoinTimeoutError.
    """
    member.announce(record, limit)
    announced()
    document = member.await_round(join_timeout_s)
    member.work_begins()
    return document


def has_ended_by_plan(member: Member, failure: RoundFailure, deadline: Deadline) -> bool:
    """Break the round whose workers have ended here; True if it was no failure: it had ended by agreement, which this
    node had not seen when its workers ended."""
    member.break_round(failure, deadline)
    seen = member.observation().round
    return seen is not None and seen.number == failure.number and seen.state is RoundState.DRAINING


def finish(
    member: Member, number: int, limit: Deadline, outage_limit_s: float, *, passed: bool
) -> RoundDocument | None:
    """Announce that this node has succeeded in round ``number``; wait until that is over or the run is closed.

    None if the store was unreachable for ``outage_limit_s``.
    """
    done: dict[str, Any] = {"state": NodeState.DONE, "planned": True, "passed": passed}
    member.announce(member.record().model_copy(update=done), limit)
    return member.await_end(number, outage_limit_s)


def round_is_over(mine: RoundDocument, seen: RoundDocument | None) -> bool:
    """Whether ``seen`` proves that the round ``mine`` is over (an absent document proves nothing)."""
    if seen is None:
        return False
    return seen.number > mine.number or (
        seen.number == mine.number and seen.state in (RoundState.BROKEN, RoundState.DRAINING)
    )


def end(error: ElasticTrainerError) -> NoReturn:
    """Print ``error`` in one line and exit with its exit code."""
    logs.final_message(f"elastic-trainer: {error}")
    raise SystemExit(error.exit_code)
