"""Fixtures that many tests share: a real etcd, and names that no other test uses."""

from __future__ import annotations

import gc
import itertools
import os
from collections import Counter
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

import hypothesis
import pytest
import structlog
import torch

from elastic_trainer.errors import ConfigError
from elastic_trainer.local import agents
from elastic_trainer.local.cluster import LocalCluster, Node
from elastic_trainer.local.etcd import EtcdServer, find_binary
from elastic_trainer.local.hosts import ClusterError, current, lacks
from elastic_trainer.settings import StoreSettings, parse_endpoints
from elastic_trainer.torch_internals import SHARDED
from elastic_trainer.variables import ENV_LOG_FORMAT
from elastic_trainer.warm.template import CACHES
from tests.support.networks import AnySegment
from tests.support.requirements import missing, needs_torch
from tests.support.s3server import BUCKET, S3Server, serving, use

# Its examples have 200 ms each by default, which a loaded machine can miss; whole tests have their own limit.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

os.environ.setdefault(ENV_LOG_FORMAT, "json")  # which tests read

UNSAFE = ("--unsafe-no-fsync",)
"""No test ends the machine, which is all that etcd's fsync is for; on a busy disk it would stand still for seconds."""

SHOWN = 12
"""Lines of each log that a failed test shows."""
FAULTS = ('"level": "warning"', '"level": "error"', '"level": "critical"', "Error", "Traceback", "Fatal")
WHERE = "nodes on"
"""The property of a test that tells where its nodes ran."""
UNMARKED_S = 20
"""What counts as the limit of a test that has none of its own: it takes a few seconds."""
_numbers = itertools.count(1)

# Nodes of local clusters are forked from one process that has imported torch once. Tests that start torchrun themselves
# (of mistakes, early endings, versions, lives, services) start it cold, as users do.
# Their templates differ by their environments: these variables are alike for all, or read by nothing that is preloaded.
os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
torch.set_num_threads(1)  # of this process too: it computes references, bit by bit
structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback  # rich takes 0.2 s for one
NETWORKS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
agents.preload(free=("PYTEST_CURRENT_TEST", *NETWORKS))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--beyond", type=Path, help="a list of paths and tests, as of @FILE, that are left out")


def pytest_configure(config: pytest.Config) -> None:
    """Move the process that runs tests to the hub of a network segment: each node that a test starts gets a host of its
    own. Without root all share one loopback, and the end of the run says so."""
    runs_tests = hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)
    if runs_tests and lacks() is None:
        segment = AnySegment()
        try:
            segment.__enter__()
        except ClusterError:  # a sandbox may forbid what the capabilities allow
            return
        config.add_cleanup(partial(segment.__exit__, None, None, None))


@pytest.fixture(scope="session", autouse=True)
def shared_disk(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Directories of tests are below /tmp, of which each host has its own."""
    segment = current()
    if isinstance(segment, AnySegment):
        segment.share(tmp_path_factory.getbasetemp())


@pytest.fixture
def sharded_torch() -> None:
    """For tests of sharded models and pipeline stages."""
    needs_torch(SHARDED)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports leave next to no garbage, and what they have made stays: looking for garbage in all of torch took a third
    of the unit tests' time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files whose tests have the longest limits come first, so that no long file runs alone at the end."""
    beyond: Path | None = config.getoption("--beyond")
    if beyond is not None:
        names = beyond.read_text(encoding="utf-8").split()
        within = tuple(f"{name}{end}" for name in names for end in "/:[")
        done = {item for item in items if item.nodeid in names or item.nodeid.startswith(within)}
        config.hook.pytest_deselected(items=list(done))
        items[:] = [item for item in items if item not in done]
    limits_s: Counter[Path] = Counter()
    for item in items:
        limit = item.get_closest_marker("timeout")
        limits_s[item.path] += limit.args[0] if limit is not None else UNMARKED_S
    items.sort(key=lambda item: -limits_s[item.path])


def pytest_runtest_setup(item: pytest.Item) -> None:
    _nodes.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what its nodes logged."""
    if call.when == "call" and len(_nodes) > 1:
        item.user_properties.append((WHERE, "hosts" if all(_nodes) else "loopback"))
    report = yield
    directory = getattr(item, "funcargs", {}).get("tmp_path")
    if report.when == "call" and report.failed and directory is not None:
        report.sections += [(f"log {name}", text) for name, text in said(directory)]
    return report


def said(directory: Path) -> Iterator[tuple[str, str]]:
    """The newest logs of nodes below ``directory``: the last lines that speak of a fault, and the very last ones."""
    for path in sorted(directory.rglob("logs/*.log"), key=lambda path: path.stat().st_mtime)[-8:]:
        lines = path.read_text(errors="replace").splitlines()
        faults = [line for line in lines[: -SHOWN // 2] if any(each in line for each in FAULTS)]
        shown = faults[-SHOWN // 2 :] + lines[-SHOWN // 2 :]
        yield str(path.relative_to(directory)), "\n".join(line[:400] for line in shown)


def _add(cluster: LocalCluster) -> Node:
    """Note of each node that a test starts whether it has a host of its own."""
    node = _add_unnoted(cluster)
    _nodes.append(node.name in cluster.hosts)
    return node


_add_unnoted, _nodes = LocalCluster.add, list[bool]()
LocalCluster.add = _add  # type: ignore[method-assign, assignment]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests had their nodes on hosts of their own."""
    reports = [each for found in terminalreporter.stats.values() for each in found]
    calls = [each for each in reports if isinstance(each, pytest.TestReport) and each.when == "call"]
    count = Counter(where for each in calls for name, where in each.user_properties if name == WHERE)
    if count:
        why = f" (hosts need {lacks()})" if lacks() is not None else ""
        terminalreporter.write_line(
            f"Tests that started two nodes or more: {count['hosts']} on hosts of their own,"
            f" {count['loopback']} on one loopback{why}"
        )


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Commands set the level and the target of all logs of their process, which others read after them."""
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.contextvars.clear_contextvars()  # of a test before, whose rank or node would be in each line
    yield
    if before is None:
        structlog.reset_defaults()
    else:
        structlog.configure(**before)


@pytest.fixture(autouse=True)
def caches_as_before() -> Iterator[None]:
    """An agent sets variables of its process for its workers; tests that are an agent leave none to others."""
    before = {name: os.environ.get(name) for name in CACHES}
    yield
    for name in CACHES:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in before.items() if value is not None})


@pytest.fixture(scope="session")
def etcd_binary() -> str:
    """The etcd executable; without one the test is skipped, or fails in CI."""
    try:
        return find_binary()
    except ConfigError as error:
        missing(str(error))


@pytest.fixture(scope="session")
def etcd(etcd_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A real etcd for the whole session. Tests share it, so none may stop it: those start their own."""
    with EtcdServer(tmp_path_factory.mktemp("etcd"), binary=etcd_binary, arguments=UNSAFE) as server:
        yield server


@pytest.fixture
def etcd_endpoint(etcd: EtcdServer) -> str:
    """The shared etcd's ``host:port``."""
    return etcd.endpoint


@pytest.fixture
def own_etcd(etcd_binary: str, tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of this test alone, to be killed, frozen and wiped."""
    with EtcdServer(tmp_path / "etcd", binary=etcd_binary, arguments=UNSAFE) as server:
        yield server


@pytest.fixture
def run_id() -> str:
    """A run id that no other test of this session has."""
    return f"run-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def etcd_settings(etcd_endpoint: str, run_id: str) -> StoreSettings:
    """Settings for the shared etcd with a prefix of this test's own."""
    return StoreSettings(endpoints=parse_endpoints(etcd_endpoint), prefix=f"/{run_id}")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """S3's interface on loopback, for the whole session."""
    with serving() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server, without faults, and this process as its client."""
    use(s3_server, monkeypatch)
    s3_server.inject()
    s3_server.log()
    yield s3_server
    s3_server.inject()


@pytest.fixture
def s3_url(s3: S3Server) -> str:
    """A prefix of no other test's."""
    return f"s3://{BUCKET}/test-{os.getpid()}-{next(_numbers)}/checkpoints"
