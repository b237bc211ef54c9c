"""Where this package meets torchrun's agent: signals, what it starts, the store it gets, how its process exits."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, Worker, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.utils.store import barrier
from torch.distributed.launcher.api import LaunchConfig

from elastic_trainer.agent.rendezvous import launcher
from elastic_trainer.agent.rendezvous.launcher import (
    ExitReason,
    RoundStore,
    error_outputs,
    exit_code_after,
    exit_reason_of,
    job_of,
    launched_script,
    local_workers,
    unless_leaving,
)
from elastic_trainer.errors import EXIT_CONFIG, EXIT_LEFT, ConfigError, JoinTimeoutError
from elastic_trainer.membership.documents import RoundDocument, RoundMember, RoundState
from elastic_trainer.warm.starting import ColdStart, Starter, StartRequest

# ---- signals; tests/integration/agent/test_signals.py plays them in processes


@unless_leaving
def handler(number: int, frame: FrameType | None) -> None:
    raise SignalException("", signal.Signals(number))


@pytest.mark.parametrize("first", [SignalException("", signal.SIGTERM), SystemExit(EXIT_LEFT)])
def test_a_second_signal_does_not_disturb_the_end_of_the_workers(first: BaseException) -> None:
    try:
        raise first
    except (SignalException, SystemExit):
        handler(signal.SIGTERM, None)
        try:
            raise TimeoutError
        except TimeoutError:
            handler(signal.SIGINT, None)


@pytest.mark.parametrize("other", [SystemExit(1), TimeoutError()])
def test_a_signal_raises_while_another_error_is_handled(other: BaseException) -> None:
    try:
        raise other
    except (SystemExit, TimeoutError):
        for _ in range(2):
            with pytest.raises(SignalException):
                handler(signal.SIGTERM, None)


# ---- what it starts


def typed(*words: str) -> dict[str, str]:
    return job_of("/usr/bin/python3", ("-u", *words))


@pytest.mark.parametrize(
    ("words", "script"), [(("train.py", "--lr", "1"), "train.py"), (("-m", "my.train", "--lr", "1"), "-m my.train")]
)
def test_script_and_arguments_are_those_that_the_user_typed(words: tuple[str, ...], script: str) -> None:
    """Nodes may have different Pythons; a program without Python is its own script."""
    found = typed(*words)
    assert found["script"] == script
    assert job_of("/opt/other/python", ("-u", *words)) == found
    assert typed(*words[:-1], "2")["command"] != found["command"]
    assert job_of("./train", ("--lr", "1")) == {**found, "script": "./train"}


def test_the_script_is_known_before_torchrun_has_an_agent() -> None:
    """From the function that makes the rendezvous, and then the agent; a function that is launched has its name."""

    def launches(config: LaunchConfig, entrypoint: Any, args: list[Any]) -> str:
        return launched_script()

    config = LaunchConfig(1, 1, 1)
    assert launches(config, "/usr/bin/python3", ["-u", "dir/train.py", "--lr", "1"]) == "dir/train.py"
    assert launches(config, "/usr/bin/python3", ["-u", "-m", "my.train"]) == "-m my.train"
    assert launches(config, barrier, []) == "barrier"
    assert launched_script() == ""


@pytest.mark.parametrize("name", ["--node-rank", "--node_rank", "--machine-rank", "--hostname", "--node-id"])
def test_what_names_the_node_is_no_part_of_the_command(name: str) -> None:
    assert typed("train.py", name, "1") == typed("train.py", f"{name}=2") == typed("train.py")


@pytest.mark.parametrize("words", [("--checkpoint-dir", "/a"), ("--checkpoint_dir=/a",), ("checkpoint.directory=/a",)])
def test_the_checkpoint_directory_is_a_field_of_its_own(words: tuple[str, ...]) -> None:
    assert typed("train.py", *words) == typed("train.py") | {"checkpoint_dir": "/a"}
    assert typed("train.py", "checkpoint.directory=/b", *words)["checkpoint_dir"] == "/a"


class Launcher(LocalElasticAgent):
    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec, DefaultLogsSpecs())

    def called(self) -> tuple[WorkerSpec, dict[int, Path]]:
        return local_workers(), error_outputs()


def test_the_launcher_is_found_up_the_stack(tmp_path: Path) -> None:
    nobody: Any = None
    spec = WorkerSpec(role="trainer", local_world_size=4, rdzv_handler=nobody, entrypoint="none", max_restarts=7)
    launcher = Launcher(spec)
    assert launcher.called() == (spec, {})
    for redirects in (Std.ERR, Std.OUT):
        logs = DefaultLogsSpecs(str(tmp_path), redirects)
        names = {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": "0"}
        launcher._pcontext = SubprocessContext("trainer", "true", {0: ()}, {0: names}, logs)
        files = launcher.called()[1]
        assert [each.name for each in files.values()] == (["stderr.log"] if redirects is Std.ERR else [])
    assert error_outputs() == {}
    with pytest.raises(ConfigError, match="start the job with torchrun"):
        local_workers()


# ---- the store it gets: torchrun's own code reads the same ranks from it as from a shared store

Node = tuple[str, int]
"""Role and number of workers."""


def document_of(nodes: list[Node]) -> RoundDocument:
    members, first = [], 0
    for index, (role, size) in enumerate(nodes):
        members.append(RoundMember(f"n{index}", index + 1, 1, first, size, role))
        first += size
    return RoundDocument(number=1, nonce="n", state=RoundState.ACTIVE, members=tuple(members))


def never(_: float) -> None:
    raise AssertionError("the run has not ended")


def ranks(store: Any, index: int, nodes: list[Node]) -> list[tuple[int, ...]]:
    """What torchrun makes of ``store`` for the workers of one node."""
    role, size = nodes[index]
    spec = WorkerSpec(role=role, local_world_size=size, rdzv_handler=None, entrypoint="none")  # type: ignore[arg-type]
    assign: Any = SimpleElasticAgent._assign_worker_ranks
    workers: list[Worker] = assign(None, store, index, len(nodes), spec)
    return [(w.local_rank, w.global_rank, w.world_size, w.role_rank, w.role_world_size) for w in workers]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["default", "reader"]), st.integers(1, 8)), min_size=1, max_size=6))
def test_torchrun_reads_the_ranks_of_the_round_document(nodes: list[Node]) -> None:
    """Mixed roles, unequal nodes, nobody asked: each worker has its place in the world, and among those of its role."""
    document = document_of(nodes)
    roles = [role for role, size in nodes for _ in range(size)]
    for index, member in enumerate(document.members):
        first, role = member.first_rank, member.role
        before, alike = roles[:first].count(role), roles.count(role)
        expected = [(i, first + i, len(roles), before + i, alike) for i in range(member.local_world_size)]
        assert ranks(RoundStore(document, never), index, nodes) == expected


@pytest.mark.parametrize("size", [1, 7])
def test_the_exit_barrier_waits_for_the_end_of_the_run(size: int) -> None:
    """torchrun's barrier calls ``finish`` once, with its own limit, whatever the number of nodes."""
    waited: list[float] = []
    store: Any = RoundStore(document_of([("default", 1)] * size), waited.append)
    barrier(store, world_size=size, key_prefix="torchelastic/agent/terminal_state", barrier_timeout=123)
    assert waited == [123.0]
    assert store.timeout == timedelta(seconds=300)


def test_what_torchrun_does_not_ask_for_today_is_an_error_with_the_key() -> None:
    """A torch that asks for something new fails by name, not by waiting for ever. What it wrote it can read."""
    store = RoundStore(document_of([("default", 1)]), never)
    store.multi_set(["a", "b"], ["text", b"bytes"])
    assert store.multi_get(["a", "b"]) == [b"text", b"bytes"]
    assert (store.add("count", 2), store.add("count", 3)) == (2, 5)
    store.wait(["a"])
    with pytest.raises(KeyError, match="torchelastic/something_new"):
        store.get("torchelastic/something_new")


# ---- how its process exits


def exiting(code: int, cause: BaseException | None = None) -> SystemExit:
    error = SystemExit(code)
    error.__cause__ = cause
    return error


def failed(*codes: int) -> ChildFailedError:
    """What torchrun ends with when its workers ended with these codes."""
    failures = {rank: ProcessFailure(rank, 100 + rank, code, "/nowhere") for rank, code in enumerate(codes)}
    return ChildFailedError("job", failures)


TERMINATED = SignalException("", signal.SIGTERM)
GIVEN_UP = "worker 0 died, and no --max-restarts is left"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, None),
        (exiting(0), None),
        (TERMINATED, ExitReason(True, "SIGTERM", EXIT_LEFT)),
        (SignalException("", signal.SIGHUP), ExitReason(True, "SIGHUP", EXIT_LEFT)),
        (SignalException("", signal.SIGINT), ExitReason(True, "SIGINT", 1)),
        (KeyboardInterrupt(), ExitReason(True, "SIGINT", 1)),
        (exiting(EXIT_LEFT), ExitReason(True, "SIGTERM", EXIT_LEFT)),
        (exiting(EXIT_LEFT, SignalException("", signal.SIGHUP)), ExitReason(True, "SIGHUP", EXIT_LEFT)),
        (exiting(1, JoinTimeoutError("fewer than 2 nodes")), ExitReason(False, "fewer than 2 nodes", 1)),
        (JoinTimeoutError("fewer than 2 nodes", hint="start more"), ExitReason(False, "fewer than 2 nodes", 1)),
        (RuntimeError("a\nb"), ExitReason(False, "RuntimeError: a b", 1)),
        (failed(-9), ExitReason(False, GIVEN_UP, 1)),
        (failed(EXIT_CONFIG), ExitReason(False, GIVEN_UP, EXIT_CONFIG)),
    ],
)
def test_who_was_asked_to_go_did_not_give_up(error: BaseException | None, reason: ExitReason | None) -> None:
    """A signal is a request, a clean exit is neither, and all else is given up for a reason."""
    assert exit_reason_of(error, made_steps=False, died="worker 0 died") == reason


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (TERMINATED, EXIT_LEFT, EXIT_LEFT),
        (SignalException("", signal.SIGHUP), EXIT_LEFT, EXIT_LEFT),
        (SignalException("", signal.SIGINT), None, None),
        (failed(-15, EXIT_CONFIG), EXIT_CONFIG, None),
        (failed(1, -9), None, None),
        (RuntimeError("crashed"), None, None),
        (SystemExit(3), None, None),
        (None, None, None),
    ],
)
def test_exit_codes_say_what_torchruns_own_would_not(
    error: BaseException | None, before: int | None, after: int | None
) -> None:
    """143 for an eviction; 78 for a wrong configuration, unless workers have made steps: other nodes may go on then."""
    assert [exit_code_after(error, made_steps=made) for made in (False, True)] == [before, after]


# ---- how it starts workers warm: torch's method is replaced where it is the one we know


class WorkerHandler:
    """What torch's method sees of its object."""

    _stdout = None
    _stderr = sys.__stderr__
    local_rank_id = 1


class Reluctant(Starter):
    def __init__(self) -> None:
        self.wishes: list[StartRequest] = []

    def start(self, request: StartRequest) -> Any:
        self.wishes.append(request)
        raise ColdStart("it is Monday")


def test_a_worker_that_does_not_fit_is_started_by_torch_and_the_reason_is_logged() -> None:
    starter, began = Reluctant(), cast("Popen[bytes]", object())
    calls: list[tuple[Any, ...]] = []

    def cold(*arguments: Any) -> Popen[bytes]:
        calls.append(arguments)
        return began

    handler = WorkerHandler()
    with capture_logs() as logs:
        assert launcher.warm_start(starter, cold)(handler, ("python", "-u", "x.py"), {"RANK": "1"}) is began
    assert calls == [(handler, ("python", "-u", "x.py"), {"RANK": "1"})]
    (request,) = starter.wishes
    assert (request.words, request.stdin, request.stdout) == (["python", "-u", "x.py"], 0, 1)
    assert logs == [
        {"event": "worker.started", "log_level": "info", "warm": False, "local_rank": 1, "reason": "it is Monday"}
    ]


@pytest.mark.parametrize("why", ["off", "another torch", "no template"])
def test_torch_is_left_alone_where_warm_starts_are_off_or_impossible(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start all the same, and the log says why they start cold."""

    def other(self: Any, command: Any) -> None:
        raise AssertionError

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/dev/null")

    if why == "another torch":
        monkeypatch.setattr(SubprocessHandler, "_popen", other)
    elif why == "no template":
        monkeypatch.setattr(launcher, "Starter", refuse)
    before = SubprocessHandler.__dict__["_popen"]
    with capture_logs() as logs:
        launcher.start_workers_warm("off" if why == "off" else "auto")
    assert SubprocessHandler.__dict__["_popen"] is before
    assert [each["event"] for each in logs] == ([] if why == "off" else ["template.refused"])
    assert ("/dev/null" in str(logs)) is (why == "no template")
