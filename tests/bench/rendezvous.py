"""Rendezvous: how soon up to 1,024 nodes agree, and how many requests each sends to etcd.

All nodes are simulated on this machine: real members (admission, lease, key, rules, watches) with a connection each,
in a few processes, on one local etcd; the workers are missing, and the store's calls go through grpc.aio, as a
thousand synchronous clients are too much for one machine (the smallest size runs over both, the product's own store
first). So all nodes share this machine's cores, with etcd, where real ones have their own: the times are upper
bounds. The phases follow each other in one run: all join at once; one node leaves; one joins; many leave; one falls
silent (its lease runs out); the most senior ones, who decide, leave together (and a worker elsewhere fails for it, as
none is left to see them go). A change is agreed on when every node takes part in the same next round and has read the
same ranks.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic_trainer.clock import SYSTEM
from elastic_trainer.local.etcd import EtcdServer
from tests.bench.rendezvous_nodes import LOCAL_WORLD_SIZE
from tests.bench.report import Options, Report, at_most, at_most_time, emit, median, note, parse

ROOT = Path(__file__).parents[2]
SIZES, QUICK_SIZES = (64, 256, 1024), (12,)
NODES_PER_PROCESS = 128
MANY = 16
LAST_CALL_S = 120.0
"""The first round is that of all nodes, however long this machine takes to start them."""
UNCOUNTED = ("connect", "keep_alive")
METHODS = {"Range", "Txn", "Put", "DeleteRange", "LeaseGrant", "LeaseRevoke", "Watch", "Status"}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    options = parse("rendezvous", __doc__, argv, repeats=3)
    sizes, ttl_s = (QUICK_SIZES, 6.0) if options.quick else (SIZES, 30.0)
    variants = [(min(sizes), "product"), *((size, "aio") for size in sizes)]
    runs = {each: [measure(*each, ttl_s, turn + 1, options) for turn in range(options.repeats)] for each in variants}
    largest = runs[max(sizes), "aio"]
    agreement = median([run["join"]["last_join_to_agreement_s"] for run in largest])
    requests = median([run["join"]["requests_per_node"]["median"] for run in largest])
    figures = {
        "nodes": {f"{size} over {transport}": _summary(each) for (size, transport), each in runs.items()},
        "lease_ttl_s": ttl_s,
    }
    musts = [
        at_most_time(f"{max(sizes)} nodes join: last join to agreement, s", agreement, 2.0),
        at_most(f"{max(sizes)} nodes join: requests of a node beside keep-alives (median)", requests, 6.0),
    ]
    return emit(Report(options, figures, musts))


def _summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All runs, and the medians of their times by phase."""
    times = {
        phase: {
            name: median([run[phase][name] for run in runs]) for name in runs[0][phase] if name.endswith("_agreement_s")
        }
        for phase in runs[0]
    }
    return {"median_s": times, "runs": list(runs)}


class Hosts:
    """The processes with the nodes in them."""

    def __init__(self, count: int, job: Mapping[str, Any]) -> None:
        command = [sys.executable, "-m", "tests.bench.rendezvous_nodes"]
        pipe = subprocess.PIPE
        self._processes = [
            subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(count)
        ]
        for process in self._processes:
            self._send(process, job)

    def ask(self, do: str, nodes: Sequence[str] = (), **more: Any) -> list[dict[str, Any]]:
        """Give a command to all processes, each with its share of ``nodes``; their answers."""
        for index, process in enumerate(self._processes):
            mine = [name for name in nodes if int(name[1:]) % len(self._processes) == index]
            self._send(process, {"do": do, "nodes": mine, **more})
        return [self._answer(process) for process in self._processes]

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()

    @staticmethod
    def _send(process: subprocess.Popen[str], message: Mapping[str, Any]) -> None:
        if process.stdin is None:
            raise RuntimeError("the process has no input")
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"a process of simulated nodes ended with {process.wait()}")
        return dict(json.loads(line))


@contextmanager
def _hosts(count: int, job: Mapping[str, Any]) -> Iterator[Hosts]:
    hosts = Hosts(count, job)
    try:
        yield hosts
    finally:
        hosts.close()


def measure(size: int, transport: str, ttl_s: float, turn: int, options: Options) -> dict[str, Any]:
    """All phases with ``size`` nodes on an etcd of their own."""
    note(f"{size} nodes over {transport}, {turn} of {options.repeats}")
    with EtcdServer() as server:
        job = {
            "endpoint": server.endpoint,
            "run": f"bench-{size}-{turn}",
            "min_nodes": max(1, size // 4),
            "max_nodes": size,
            "ttl_s": ttl_s,
            "last_call_s": LAST_CALL_S,
            "transport": transport,
        }
        with _hosts(max(2, size // NODES_PER_PROCESS), job) as hosts:
            return Story(server, hosts, size, turn).play()


class Story:
    """One run of the job, phase by phase."""

    def __init__(self, server: EtcdServer, hosts: Hosts, size: int, turn: int) -> None:
        self._server, self._hosts, self._size = server, hosts, size
        self._random = random.Random(turn)
        self._alive: list[str] = []
        self._round = 0
        self._before: dict[str, dict[str, Any]] = {}

    def play(self) -> dict[str, Any]:
        """The figures of each phase."""
        everyone = [f"n{number:04d}" for number in range(self._size)]
        self._hosts.ask("connect", everyone)
        many = min(MANY, self._size // 4)
        phases = {"join": self._phase("join", arriving=everyone)}
        juniors = self._by_seniority()[self._size // 2 :]
        phases["one_leaves"] = self._phase("leave", leaving=juniors[:1])
        newcomer = [f"n{self._size:04d}"]
        self._hosts.ask("connect", newcomer)
        phases["one_joins"] = self._phase("join", arriving=newcomer)
        phases["many_leave"] = self._phase("leave", leaving=self._random.sample(juniors[1:], many))
        phases["one_falls_silent"] = self._phase("kill", leaving=self._by_seniority()[-1:])
        seniors = self._by_seniority()[:many]
        phases["seniors_leave"] = self._phase("leave", leaving=seniors, failing=self._by_seniority()[-1:])
        return phases

    def _by_seniority(self) -> list[str]:
        """Nodes alive, in the order of their ranks: that in which they came."""
        ranks = {name: told["first_rank"] for name, told in self._before.items() if name in self._alive}
        return sorted(ranks, key=lambda name: int(ranks[name]))

    def _phase(
        self, what: str, arriving: Sequence[str] = (), leaving: Sequence[str] = (), failing: Sequence[str] = ()
    ) -> dict[str, Any]:
        """One change: nodes arrive or leave, upon which the workers of the ``failing`` ones notice it."""
        note(f"{self._size} nodes: {what} of {len(arriving) or len(leaving)}")
        counted = etcd_counters(self._server.endpoint)
        spent = self._sent()
        done = self._hosts.ask("begin" if arriving else what, [*arriving, *leaving])
        self._hosts.ask("fail", failing)
        self._alive = [name for name in (*self._alive, *arriving) if name not in leaving]
        told = self._hosts.ask("await", size=len(self._alive), after=self._round)
        counted = difference(etcd_counters(self._server.endpoint), counted)
        nodes = {each["name"]: each for answer in told for each in answer["nodes"]}
        everybody = nodes | {each["name"]: each for answer in told for each in answer["gone"]}
        check_agreement(nodes, self._alive)
        first = self._round
        self._round = max(each["round"] for each in nodes.values())
        figures: dict[str, Any] = dict(self._times(nodes, arriving, done, told, first))
        figures["rounds"] = self._round - first
        figures["requests_per_node"] = self._requests(nodes)
        figures["etcd"] = counted
        self._before = everybody
        figures["client_requests"] = difference(self._sent(), spent)
        figures["nodes_that_follow_nodes"] = sum(each["follows_nodes"] for each in nodes.values())
        return figures

    def _sent(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for told in self._before.values():
            total.update({kind: count for kind, count in told["sent"].items() if kind not in UNCOUNTED})
        return dict(total)

    def _times(
        self,
        nodes: Mapping[str, Mapping[str, Any]],
        arriving: Sequence[str],
        done: Sequence[Mapping[str, Any]],
        told: Sequence[Mapping[str, Any]],
        before: int,
    ) -> dict[str, float]:
        agreed = max(each["agreed_at"] for each in nodes.values())
        figures = {"begin_to_agreement_s": agreed - min(answer["began"] for answer in done)}
        if arriving:
            figures["last_join_to_agreement_s"] = agreed - max(nodes[name]["joined_at"] for name in arriving)
        else:
            figures["last_leave_to_agreement_s"] = agreed - max(answer["ended"] for answer in done)
        over = [f"{before} {state}" for state in ("broken", "draining")]
        ends = [answer["first_seen"][key] for answer in told for key in over if key in answer["first_seen"]]
        if ends:
            figures["round_over_to_agreement_s"] = agreed - min(ends)
        return figures

    def _requests(self, nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """What the nodes sent in this phase beside keep-alives and the test of their connection, and were sent."""
        sent, events = [], []
        for name, told in nodes.items():
            before = self._before.get(name, {"sent": {}, "events": 0})
            new = difference(told["sent"], before["sent"])
            sent.append(sum(count for kind, count in new.items() if kind not in UNCOUNTED))
            events.append(told["events"] - before["events"])
        return {
            "mean": sum(sent) / len(sent),
            "median": median(sent),
            "most": max(sent),
            "events_median": median(events),
            "events_most": max(events),
        }


def check_agreement(nodes: Mapping[str, Mapping[str, Any]], expected: Sequence[str]) -> None:
    """Raise RuntimeError unless all take part in one round, with ranks that follow each other."""
    errors = [each["error"] for each in nodes.values() if each["error"]]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(nodes)} nodes gave up: {errors[0]}")
    rounds = {(each["round"], each["nonce"], each["store"], each["nodes"]) for each in nodes.values()}
    sizes = {size for _, _, _, size in rounds}
    if set(nodes) != set(expected) or len(rounds) != 1 or sizes != {len(expected)}:
        raise RuntimeError(f"{len(expected)} nodes did not agree in time: {len(rounds)} rounds, of {sizes} nodes")
    ranks = sorted(int(each["first_rank"]) for each in nodes.values())
    if ranks != [LOCAL_WORLD_SIZE * place for place in range(len(expected))]:
        raise RuntimeError("the ranks of the nodes do not follow each other")


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """What was added since ``before``."""
    return {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}


def etcd_counters(endpoint: str) -> dict[str, float]:
    """etcd's own count of the requests that it received (keep-alives apart), and its CPU seconds."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    requests, cpu_s = 0.0, math.nan
    for line in lines:
        if line.startswith("grpc_server_msg_received_total{"):
            labels = line[: line.index("}")]
            if any(f'grpc_method="{method}"' in labels for method in METHODS):
                requests += float(line.rpartition(" ")[2])
        elif line.startswith("process_cpu_seconds_total "):
            cpu_s = float(line.rpartition(" ")[2])
    return {"requests": requests, "cpu_s": cpu_s, "at_s": SYSTEM.monotonic()}


if __name__ == "__main__":
    sys.exit(main())
