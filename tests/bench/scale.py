"""Scale: what a run of 1,024 and of 10,000 nodes costs etcd, and how soon they agree, on virtual time.

The protocol's simulator (tests/simulation) with the product's own rules: each node has its key, lease and watches; a
message to etcd or back takes 0.5 to 5.5 ms, one in twenty up to 150 ms. All nodes join; then a worker crashes; a node
dies; one in a hundred dies at once; some are replaced one after another, by plan. A phase lasts until all members of
the next round have begun to form it: from the last node's offer when all join, else from the fault, or the request.
Counted are requests (without keep-alives), and the bytes that etcd sends. The nodes that decide take 5 us a turn for
each node that they follow. The simulator moves no bytes: the seconds that a link of 10 Gbit/s takes for them stand
beside, and are added. ``core_s`` is what all nodes and the simulator took of a core here.
"""

from __future__ import annotations

import bisect
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast
from unittest import mock

from elastic_trainer.membership import core
from elastic_trainer.membership.cluster_view import Limits
from elastic_trainer.membership.core import Answer, Core, Looked, TurnOutcome
from elastic_trainer.membership.documents import NodeRecord, RoundDocument, RoundMember, RoundState
from elastic_trainer.model import RecoveryMode
from elastic_trainer.store.api import WatchEvent
from elastic_trainer.worker import recovery
from elastic_trainer.worker.comm.control import Control
from elastic_trainer.worker.state.restore import Healed
from tests.bench.report import Report, at_most, emit, note, parse
from tests.simulation.agents import Agent
from tests.simulation.etcd import Etcd, Link, SimWatch
from tests.simulation.in_place import InPlace
from tests.simulation.invariants import Invariants
from tests.simulation.loop import sleep
from tests.simulation.node import KEYS, SimNode
from tests.simulation.world import World

SIZES, QUICK_SIZES = (1024, 10_000), (64,)
PER_NODE_S = 5e-6
"""A turn of the few nodes that follow all others, for each of these: 40 ms for 10,000 on this project's machines."""
PART = 100
"""One node of so many dies in the storm."""
AGREE_LIMIT_S, REQUESTS_LIMIT = 1.5, 10.0
LINK_BYTES_PER_S = 10e9 / 8
WAIT_S, SETTLE_S = 120.0, 3.0


class Unchecked:
    """In the place of the invariants, whose checks of small runs take time by the square of the nodes."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *what: None


class Scale(World):
    """Nodes in place that train together; ``requests`` and ``sent`` count what etcd has to do."""

    def __init__(self, most: int) -> None:
        limits = Limits(
            min_nodes=1,
            max_nodes=most,
            recovery=RecoveryMode.IN_PLACE,
            last_call_s=20.0,
            last_call_limit_s=30.0,
            regroup_grace_s=0.5,
            join_batch_s=0.2,
            join_interval_s=1.0,
            failure_limit=1000,
            stalled_rounds=1000,
        )
        super().__init__(seed=1, limits=limits)
        self.invariants = cast("Invariants", Unchecked())
        self.evaluates_every = self.saves_every = sys.maxsize
        self.requests: dict[str, int] = {}
        self.sent, self.offered_at = 0, 0.0
        self._links: dict[int, str] = {}

    def add(self) -> str:
        name = f"gpu-{len(self.agents):05d}"
        node = SimNode(self.etcd, name, self.limits, self.chance, self._probe)
        self._links[id(node.link)] = name
        self.agents[name] = InPlace(node, self, 1)
        return name

    def requested(self, link: Link) -> None:
        name = self._links[id(link)]
        self.requests[name] = self.requests.get(name, 0) + 1

    @property
    def living(self) -> int:
        return sum(agent.alive for agent in self.agents.values())

    def formed_after(self, number: int) -> bool:
        """Whether a later round is in effect, and all its members have begun to form it."""
        current = self.round
        if current is None or current.state is not RoundState.ACTIVE or current.number <= number:
            return False
        assignments = [
            [each.groups.assignment for each in self.agents[member.node].at_work] for member in current.members
        ]
        return all(
            assignment and assignment[0] is not None and assignment[0].nonce == current.nonce
            for assignment in assignments
        )

    def whole(self) -> bool:
        current = self.round
        return current is not None and self.formed_after(0) and len(current.members) == self.living

    # ---- as for the invariants

    def _wrote(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            if KEYS.node_id(event.item.key) is not None:
                self.offered_at = self.loop.now
            elif event.item.key == KEYS.round:
                self.round = RoundDocument.decode(event.item.value, event.item.key)

    def one_state(self, *what: object) -> None:
        pass

    def committed(self, *what: object) -> None:
        pass

    def _tick(self) -> None:
        pass


def healed(control: Control, mine: object, generation: int, collect: Any, *what: object) -> Healed:
    """All ranks come to one state: to find it takes each rank the time of all rows, which a real one has."""
    position = collect.__self__.position
    position.step = max(control.gather([position.step]))[0]
    return Healed(0, (), generation, {}, (0,) * control.world_size)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("scale", __doc__, argv, repeats=1)
    sizes = QUICK_SIZES if options.quick else SIZES
    figures = {str(size): measured(size) for size in sizes}
    largest = figures[str(max(sizes))]
    musts = [
        at_most(f"{max(sizes)} nodes, {what}: {name}", found[key], limit)
        for what, found in largest.items()
        for name, key, limit in (
            ("seconds to agree and to send", "in_all_s", AGREE_LIMIT_S),
            ("requests of a node (mean)", "requests_per_node", REQUESTS_LIMIT),
        )
    ]
    return emit(Report(options, figures, musts))


def measured(size: int) -> dict[str, dict[str, float]]:
    world = Scale(size)
    names = [world.add() for _ in range(size)]
    struck = [world.agents[name] for name in names]
    part = struck[1::PART] if size > PART else struck[1:3]

    def die(agents: Sequence[Agent]) -> None:
        for agent in agents:
            agent.die()

    found: dict[str, dict[str, float]] = {}
    with counted(world):
        found["all join"] = _phase(world, "all join", lambda: None)
        found["a worker crashes"] = _phase(world, "a worker crashes", lambda: struck[size // 2].workers[0].end(1))
        found["a node dies"] = _phase(world, "a node dies", lambda: die(struck[size // 3 :][:1]))
        found["one in a hundred dies"] = _phase(world, "one in a hundred dies", lambda: die(part))
        while world.living < size:
            world.add()
        _settle(world)
        turns = [_phase(world, "one is replaced", lambda each=each: _replace(world, each)) for each in struck[-3:]]  # type: ignore[misc]
        found["one is replaced"] = {key: max(turn[key] for turn in turns) for key in turns[0]}
    return found


def _replace(world: Scale, leaving: Agent) -> None:
    world.add()
    leaving.evict()


def _phase(world: Scale, what: str, strike: Callable[[], object]) -> dict[str, float]:
    """What it takes from ``strike`` until the next round forms."""
    note(f"{world.living} nodes: {what}")
    before, core_s = world.round.number if world.round is not None else 0, time.process_time()
    world.requests.clear()
    world.sent, began = 0, world.loop.now
    strike()
    _run_until(world, lambda: world.formed_after(before), what)
    agree_s = world.loop.now - (began if before else world.offered_at)
    result = {
        "agree_s": round(agree_s, 3),
        "send_s": round(world.sent / LINK_BYTES_PER_S, 3),
        "requests_per_node": sum(world.requests.values()) / world.living,
        "requests_most": float(max(world.requests.values(), default=0)),
        "sent_mb": world.sent / 1e6,
        "core_s": time.process_time() - core_s,
    }
    note(f"  agreed in {agree_s:.2f} s, {result['sent_mb']:,.0f} MB sent, {result['core_s']:.0f} s of a core here")
    _settle(world)
    return result | {"in_all_s": result["agree_s"] + result["send_s"]}


def _settle(world: Scale) -> None:
    """All are there and train, for longer than changes are apart."""
    _run_until(world, world.whole, "settling")
    world.run_for(SETTLE_S)


def _run_until(world: Scale, condition: Callable[[], bool], what: str) -> None:
    end = world.loop.now + WAIT_S
    while not condition():
        if world.loop.now > end:
            raise RuntimeError(f"{what}: not done within {WAIT_S:g} s")
        world.run_for(0.01)


class Indexed:
    """What each node looks up in a document of the round, in the time of one: real nodes have a core each."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[RoundDocument, list[int], dict[str, RoundMember]]] = {}

    def _of(self, document: RoundDocument) -> tuple[RoundDocument, list[int], dict[str, RoundMember]]:
        if id(document) not in self._known:
            rows = document.members
            revisions = sorted(row.create_revision for row in rows)
            self._known[id(document)] = document, revisions, {row.node: row for row in rows}
        return self._known[id(document)]

    def elders(self, document: RoundDocument | None, create_revision: int) -> int:
        return bisect.bisect_left(self._of(document)[1], create_revision) if document is not None else 0

    def member(self, document: RoundDocument, node: str) -> RoundMember | None:
        return self._of(document)[2].get(node)


@contextmanager
def counted(world: Scale) -> Iterator[None]:
    """Count requests and bytes; decode and index a document once."""
    indexed = Indexed()
    step, request, push, attach = Core.step, Etcd.request, SimWatch.push, SimWatch._attach

    def requesting(self: Etcd, link: Link, call: Callable[[], Any], limit_s: float, *, write: bool) -> Any:
        if not getattr(call, "func", None):  # keep-alives are partials
            world.requested(link)
        return request(self, link, call, limit_s, write=write)

    def pushing(self: SimWatch, events: Sequence[WatchEvent]) -> None:
        world.sent += sum(len(each.item.key) + len(each.item.value) for each in events if self._meant(each.item.key))
        push(self, events)

    def attaching(self: SimWatch) -> None:
        world.sent += sum(len(each.key) + len(each.value) for each in world.etcd.read(self._key, self._end))
        attach(self)

    def stepping(self: Core, answers: Iterable[Answer], look: Looked, now: float) -> TurnOutcome:
        outcome = step(self, answers, look, now)
        if look.seen.follows_nodes:
            sleep(PER_NODE_S * len(look.seen.nodes))
        return outcome

    with (
        mock.patch.object(Core, "step", stepping),
        mock.patch.object(Etcd, "request", requesting),
        mock.patch.object(SimWatch, "push", pushing),
        mock.patch.object(SimWatch, "_attach", attaching),
        mock.patch.object(recovery, "heal", healed),
        mock.patch.object(core, "elders", indexed.elders),
        mock.patch.object(RoundDocument, "member", lambda document, node: indexed.member(document, node)),
        mock.patch.object(RoundDocument, "decode", lru_cache(8)(RoundDocument.decode)),
        mock.patch.object(NodeRecord, "decode", lru_cache(1 << 18)(NodeRecord.decode)),
    ):
        yield


if __name__ == "__main__":
    sys.exit(main())
