"""A job played in steps of one scrape: nodes, ranks and monitors change as a scene says, and all samples are recorded.

Time begins at 0, as it does in promtool's tests. Names and labels are those of ``telemetry.families``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.telemetry import families
from elastic_trainer.telemetry.families import Family

TICK_S = 30.0
"""From one scrape to the next."""

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]
STALE = None
"""A sample of a series that has ended."""


@dataclass
class Rank:
    node: str
    phase: str = "training"
    last_step: float = 0.0
    step_s: float = 0.2
    """As shown: 0 before the process's first step."""
    compute_s: float = 0.15
    nonfinite: int = 0
    moves: bool = True
    """Whether it makes steps while it is in training."""


@dataclass
class Monitor:
    """One monitor and how it sees the store."""

    instance: str
    answers: bool = True
    reads: bool = True
    last_read: float = 0.0
    seen: dict[Key, float] = field(default_factory=dict)
    """What it last read: it goes on showing that."""


@dataclass
class EtcdMember:
    """One member of etcd as Prometheus sees it."""

    instance: str
    answers: bool = True
    leads: float = 1.0
    share: float = 0.1
    """Of its quota."""
    slow_syncs: float = 0.0
    """Each second, of a hundred."""
    synced: float = 0.0
    slow: float = 0.0

    def samples(self) -> dict[Key, float]:
        self.synced += 100 * TICK_S
        self.slow += self.slow_syncs * TICK_S
        place = (("instance", self.instance), ("job", "elastic-trainer-etcd"))
        shown: dict[Key, float] = {("up", place): float(self.answers)}
        if self.answers:
            bucket = "etcd_disk_wal_fsync_duration_seconds_bucket"
            shown |= {
                ("etcd_server_has_leader", place): self.leads,
                ("etcd_mvcc_db_total_size_in_bytes", place): self.share * 8e9,
                ("etcd_server_quota_backend_bytes", place): 8e9,
                (bucket, tuple(sorted((*place, ("le", "0.016"))))): self.synced - self.slow,
                (bucket, tuple(sorted((*place, ("le", "1.024"))))): self.synced,
                (bucket, tuple(sorted((*place, ("le", "+Inf"))))): self.synced,
            }
        return shown


class PlayedJob:
    """See the module. Everything public may be changed between two ticks."""

    def __init__(
        self,
        run: str,
        nodes: int = 4,
        bounds: tuple[int, int] = (2, 4),
        step_s: float = 0.2,
        interval_s: float = TICK_S,
        namespace: str = "",
    ) -> None:
        self.place = {"namespace": namespace} if namespace else {}
        self.run, self.bounds, self.step_s = run, bounds, step_s
        self.now = 0.0
        self.state, self.round = "training", 1
        self.nodes = {f"n{number}": "ready" for number in range(nodes)}
        self.hidden: set[str] = set()
        """Nodes whose endpoint cannot be scraped."""
        self.cut_off: dict[str, float] = {}
        """When nodes that do not reach the store last did."""
        self.ranks = {number: Rank(f"n{number}", step_s=step_s, compute_s=0.75 * step_s) for number in range(nodes)}
        self.gathering_since = 0.0
        self.step = 1000.0
        self.saved_at, self.interval_s, self.saves = 0.0, interval_s, True
        self.due_at = 0.0
        """When the next save is due, if that is later than an interval after the last."""
        self.passive: set[int] = set()
        """Ranks that are shown and are not in the round: spare nodes."""
        self.sessions = True
        """Whether its script opens a Session: without, its ranks are not known."""
        self.counts: dict[Key, float] = {}
        self.monitors = [Monitor("monitor-0:9470")]
        self.lost = 0
        """Nodes that a fault took and that none has replaced."""
        self.free_bytes = 100e9
        self.etcd = [EtcdMember(f"{run}-etcd-{number}:2379") for number in range(3)]
        self.scrapes_etcd = False
        self.ended_at = 0.0
        """When it was closed."""
        self.exists = True
        """Whether anything of the run is left in the store."""
        self.samples: dict[Key, dict[int, float | None]] = {}
        self._ticks = 0

    # ---- what scenes do

    def count(self, family: Family, amount: float = 1.0, **labels: str) -> None:
        key = self._key(family, labels)
        self.counts[key] = self.counts.get(key, 0.0) + amount

    def find_nonfinite(self, rank: int, times: int = 1) -> None:
        self.ranks[rank].nonfinite += times
        self.count(families.NONFINITE_LOSSES, times)

    def become(self, **values: Any) -> None:
        """Change attributes of the job; values are copied, since they change in turn."""
        vars(self).update(copy.deepcopy(values))

    def all_in(self, phase: str) -> None:
        self.change(self.ranks.values(), phase=phase)

    def rank(self, *numbers: int, **values: Any) -> None:
        """Change these ranks, or all."""
        self.change([self.ranks[number] for number in numbers or self.ranks], **values)

    def monitor(self, number: int = 0, **values: Any) -> None:
        self.change([self.monitors[number]], **values)

    def member(self, *numbers: int, **values: Any) -> None:
        """Change these members of etcd, which Prometheus scrapes from now on."""
        self.scrapes_etcd = True
        self.change([self.etcd[number] for number in numbers], **values)

    @staticmethod
    def change(things: Iterable[object], **values: Any) -> None:
        for thing in things:
            for name, value in values.items():
                setattr(thing, name, value)

    def show_beside(self, nodes: Mapping[int, str], phase: str, **values: Any) -> None:
        """Ranks that are shown and not in the round: of nodes that wait, or that leave."""
        self.ranks |= {number: Rank(node, phase=phase, last_step=self.now, **values) for number, node in nodes.items()}
        self.passive = set(nodes)

    def drop(self, *numbers: int) -> None:
        self.ranks = {number: rank for number, rank in self.ranks.items() if number not in numbers}
        self.passive = set()

    def gather(self, *nodes: str) -> None:
        """The round is over, and only these nodes are there."""
        self.become(state="gathering", nodes=dict.fromkeys(nodes, "ready"), ranks={}, gathering_since=self.now)

    def regroup(self, *nodes: str, reason: str, fresh: bool = False) -> None:
        """The next round, of ``nodes`` in their order, or of the same; with new processes if ``fresh``."""
        if nodes:
            self.nodes = dict.fromkeys(nodes, "ready")
        old = {rank.node: rank for rank in self.ranks.values()}
        self.ranks = {}
        for number, node in enumerate(self.nodes):
            kept = None if fresh else old.get(node)
            new = Rank(node, last_step=self.now, step_s=0.0, compute_s=0.0)
            self.ranks[number] = kept if kept is not None else new
        self.round += 1
        self.count(families.RESTARTS, reason=reason)
        self.state, self.gathering_since = "training", 0.0
        self.all_in("training")

    def close(self, result: str) -> None:
        """The run is over: its nodes are gone, and only its end is shown."""
        self.state, self.nodes, self.ranks, self.ended_at = result, {}, {}, self.now
        self.count(families.RESTARTS, reason="finished")

    # ---- time

    def tick(self) -> None:
        self._train()
        self._record()
        self._ticks += 1
        self.now = self._ticks * TICK_S

    def _train(self) -> None:
        for rank in self.ranks.values():
            self.count(families.TIME, TICK_S, phase=rank.phase)
        members = [rank for number, rank in self.ranks.items() if number not in self.passive]
        moving = [rank for rank in members if rank.phase == "training" and rank.moves]
        if self.state not in ("training", "changing") or len(moving) < len(members) or not moving:
            return
        for rank in moving:
            rank.last_step = self.now - self.now % self.step_s if self.step_s > TICK_S else self.now
            rank.step_s = rank.step_s or self.step_s
            rank.compute_s = rank.compute_s or 0.75 * self.step_s
        self.step += TICK_S / self.step_s
        if self.interval_s and self.now >= max(self.due_at, self.saved_at + self.interval_s):
            self.count(families.CHECKPOINTS, op="save", result="ok" if self.saves else "failed")
            self.saved_at = self.now if self.saves else self.saved_at

    # ---- samples

    def _key(self, family: Family, labels: Mapping[str, str]) -> Key:
        return family.full_name, tuple(sorted({"run": self.run, **self.place, **labels}.items()))

    def _record(self) -> None:
        now: dict[Key, float] = {}
        for node in {rank.node for rank in self.ranks.values()} | set(self.nodes):
            if node not in self.hidden:
                now |= self._of_node(node)
        for monitor in self.monitors:
            now |= self._of_monitor(monitor)
        if self.scrapes_etcd:
            for member in self.etcd:
                now |= member.samples()
        for key in {*now, *self.samples}:
            series = self.samples.setdefault(key, {})
            if key in now or (series and series[max(series)] is not STALE):
                series[self._ticks] = now.get(key, STALE)

    def _of_node(self, node: str) -> dict[Key, float]:
        place = {"job": "elastic-trainer-nodes", "instance": f"{node}:9471", "node": node}
        shown = {self._key(families.STORE_SUCCESS, place): self.cut_off.get(node, self.now)}
        for number, rank in self.ranks.items():
            if rank.node != node or not self.sessions:
                continue
            me = {**place, "rank": str(number)}
            for family, value in (
                (families.LAST_STEP, rank.last_step),
                (families.STEP_DURATION, rank.step_s),
                (families.COMPUTE_DURATION, rank.compute_s),
                (families.NONFINITE, rank.nonfinite),
                (families.RANK_INFO, 1.0),
            ):
                more = {"device": "cpu", "local_rank": "0"} if family is families.RANK_INFO else {}
                shown[self._key(family, {**me, **more})] = float(value)
            for phase in families.PHASES:
                shown[self._key(families.PHASE, {**me, "phase": phase})] = float(phase == rank.phase)
        return shown

    def _of_monitor(self, monitor: Monitor) -> dict[Key, float]:
        named = {"instance": f"{self.run}-{monitor.instance}", "job": "elastic-trainer-monitor", **self.place}
        place = tuple(sorted(named.items()))
        up: dict[Key, float] = {("up", place): float(monitor.answers)}
        if not monitor.answers:
            return up
        if monitor.reads:
            monitor.last_read = self.now
            monitor.seen = self._of_run() if self.exists else {}
        shown = {(name, tuple(sorted({*labels, *place}))): value for (name, labels), value in monitor.seen.items()} | up
        shown[families.MONITOR_STORE.full_name, place] = monitor.last_read
        return shown

    def _of_run(self) -> dict[Key, float]:
        trains = self.state in ("training", "changing")
        shown = {
            self._key(families.WORLD_SIZE, {}): float(len(self.ranks) - len(self.passive) if trains else 0),
            self._key(families.ROUND, {}): float(self.round),
            self._key(families.RENDEZVOUS_START, {}): self.gathering_since,
            self._key(families.CHECKPOINT_SUCCESS, {}): self.saved_at,
            self._key(families.CHECKPOINT_INTERVAL, {}): self.interval_s,
            self._key(families.CHECKPOINT_BYTES, {}): 1e9,
            self._key(families.CHECKPOINT_FREE, {}): self.free_bytes,
            self._key(families.NODES_LOST, {}): float(self.lost),
            self._key(families.NODES_SPARE, {}): float(len(self.passive) if trains else 0),
        }
        for bound, limit in zip(families.BOUNDS, self.bounds, strict=True):
            shown[self._key(families.NODES_LIMIT, {"bound": bound})] = float(limit)
        if self.sessions:
            shown[self._key(families.PROGRESS, {})] = self.step // 1
        if self.state in families.OUTCOMES:
            shown[self._key(families.RUN_ENDED, {"outcome": self.state})] = self.ended_at
        for state in families.RUN_STATES:
            shown[self._key(families.RUN_STATE, {"state": state})] = float(state == self.state)
        for state in families.NODE_STATES:
            shown[self._key(families.NODES, {"state": state})] = float(list(self.nodes.values()).count(state))
        for family in (
            families.RESTARTS,
            families.TIME,
            families.CHECKPOINTS,
            families.NONFINITE_LOSSES,
            families.VERDICTS,
        ):
            shown |= dict.fromkeys(self._all_keys(family), 0.0)
        return shown | self.counts

    def _all_keys(self, family: Family) -> list[Key]:
        found: list[dict[str, str]] = [{}]
        for label, values in family.values.items():
            found = [{**each, label: value} for each in found for value in values]
        return [self._key(family, labels) for labels in found]


@dataclass(frozen=True)
class Fires:
    """One alert that fires. Without ``of_run`` it is about monitors or etcd and has no label ``run``."""

    alert: str
    severity: str
    of_run: bool = True


Happens = tuple[Any, *tuple[Callable[[PlayedJob], object], ...]]
"""The minute, or a container of minutes, before whose scrape something happens to the job; and what."""


@dataclass(frozen=True)
class Scene:
    name: str
    """Also the name of the run."""
    says: str
    """The behaviour that it proves."""
    minutes: float
    course: Sequence[Happens] = ()
    fires: tuple[Fires, ...] = ()
    """All alerts that fire at any time."""
    not_before: float = 0.0
    """Until this minute none fires."""
    alone: bool = False
    """Whether no other run may be in the same Prometheus: its monitor would answer in the place of this one's."""
    lasts: tuple[float, ...] = ()
    """From which minute to which the first alert fires without a gap; it then ends, and does not fire again."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of PlayedJob."""

    def play(self) -> PlayedJob:
        job = PlayedJob(self.name, **self.job)
        for number in range(int(self.minutes * 60 / TICK_S) + 1):
            minute = number * TICK_S / 60
            for when, *acts in self.course:
                if minute in (when if isinstance(when, Container) else (when,)):
                    for act in acts:
                        act(job)
            job.tick()
        return job
