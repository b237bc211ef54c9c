"""torchrun's method is replaced where it is the one we know, and used where a fork does not fit."""

from __future__ import annotations

import sys
from subprocess import Popen
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from elastic_trainer.agent.workers import warm_starts
from elastic_trainer.warm.starting import ColdStart, Starter, StartRequest


class Handler:
    """What torch's method sees of its object."""

    _stdout = None
    _stderr = sys.__stderr__
    local_rank_id = 1


class Reluctant(Starter):
    """Has no template."""

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

    handler = Handler()
    with capture_logs() as logs:
        assert warm_starts.warm(starter, cold)(handler, ("python", "-u", "x.py"), {"RANK": "1"}) is began
    assert calls == [(handler, ("python", "-u", "x.py"), {"RANK": "1"})]
    (request,) = starter.wishes
    assert (request.words, request.stdin, request.stdout) == (["python", "-u", "x.py"], 0, 1)
    assert logs == [
        {"event": "worker.started", "log_level": "info", "warm": False, "local_rank": 1, "reason": "it is Monday"}
    ]


def test_a_torch_that_starts_workers_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:

    def other(self: Any, command: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(SubprocessHandler, "_popen", other)
    with capture_logs() as logs:
        warm_starts.install("auto")
    assert SubprocessHandler.__dict__["_popen"] is other
    assert [each["event"] for each in logs] == ["template.refused"]


def test_a_machine_that_starts_no_template_starts_workers_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/dev/null")

    before = SubprocessHandler.__dict__["_popen"]
    monkeypatch.setattr(warm_starts, "Starter", refuse)
    with capture_logs() as logs:
        warm_starts.install("auto")
    assert SubprocessHandler.__dict__["_popen"] is before
    assert [each["event"] for each in logs] == ["template.refused"]
    assert "/dev/null" in logs[0]["reason"]


def test_off_leaves_torch_alone() -> None:
    before = SubprocessHandler.__dict__["_popen"]
    warm_starts.install("off")
    assert SubprocessHandler.__dict__["_popen"] is before
