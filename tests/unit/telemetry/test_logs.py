"""How log lines reach a stream that several processes share."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from elastic_trainer.errors import ConfigError, ElasticTrainerError, StorageError, StoreUnavailableError
from elastic_trainer.telemetry import logs
from elastic_trainer.variables import ENV_LOG_FORMAT


class Writes(io.StringIO):
    """Remembers what each write was given."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


@pytest.fixture
def stream() -> Iterator[Writes]:
    writes = Writes()
    logs.configure(writes, json=True)
    yield writes
    logs.configure()


def test_a_line_and_its_end_are_one_write(stream: Writes) -> None:
    """The workers of a node share torchrun's stderr: a line in two writes was torn apart by another's."""
    logs.logger().info("round.entered", rank=0)
    logs.logger().info("round.entered", rank=1)
    assert [piece[-1] for piece in stream.pieces] == ["\n", "\n"]
    assert [json.loads(piece)["rank"] for piece in stream.pieces] == [0, 1]


class Terminal(Writes):
    """40 columns wide."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("bound", "line"),
    [
        ({"node": "local", "role": "worker", "rank": 0}, 'step.made loss=0.1235 why="too slow" m=a:1,b:0.5 on=n0,n1'),
        ({"node": "n0", "role": "worker", "rank": 2}, "[n0 rank 2] step.made "),
        ({"node": "n0", "role": "agent", "run": "r"}, "[n0] step.made loss"),
    ],
)
def test_text_says_where_and_what(bound: dict[str, object], line: str) -> None:
    """The time, node and rank unless the process is alone, the event, its values; what is None is left out."""
    stream = Writes()
    logs.configure(stream, json=False)
    with structlog.contextvars.bound_contextvars(**bound):
        values = {"loss": 0.12345678, "why": "too slow", "m": {"a": 1, "b": 0.5}, "on": ["n0", "n1"], "none": None}
        logs.logger().info("step.made", **values)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d " + re.escape(line) + r".*\n", stream.getvalue()), (
        stream.getvalue()
    )


def test_text_names_the_level_of_what_is_wrong() -> None:
    stream = Writes()
    logs.configure(stream, json=False)
    try:
        raise ValueError("no")
    except ValueError:
        logs.logger().error("save.failed", exc_info=True)
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith(" ERROR: save.failed")
    assert rest[-1] == "ValueError: no"


def test_text_is_broken_at_the_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between values; no line is longer, and all but the first are indented."""
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    logs.configure(stream, json=False)
    logs.logger().info("checkpoint.committed", checkpoint="step-1", step=1, bytes=1000, duration_s=0.5)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert all(len(line) < 40 for line in lines)
    assert all(line.startswith(" " * 9) for line in lines[1:])


@pytest.mark.parametrize(("value", "is_json"), [("json", True), ("text", False), (None, False)])
def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch, value: str | None, is_json: bool) -> None:
    """Text unless JSON is asked for, on a terminal or not."""
    monkeypatch.delenv(ENV_LOG_FORMAT)
    if value is not None:
        monkeypatch.setenv(ENV_LOG_FORMAT, value)
    for stream in (Writes(), Terminal()):
        logs.configure(stream)
        logs.logger().info("round.entered")
        assert stream.getvalue().startswith("{") == is_json


# ---- how a process ends with an error of this package


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which torchrun looks for the failure of its worker."""
    file = tmp_path / "0" / "error.json"
    file.parent.mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    return file


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a", hint="b"), 78), (StorageError("a", hint="b"), 73), (StoreUnavailableError("a", hint="b"), 69)],
)
def test_an_error_of_this_package_is_one_sentence_and_its_exit_code(
    error: ElasticTrainerError,
    code: int,
    reported: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Also where torch's hook collects what the hooks before it write; ``@record`` has written the traceback before."""
    monkeypatch.setattr(sys, "excepthook", None)
    logs.install_hook()
    reported.write_text(json.dumps({"message": {"message": "?", "extraInfo": {"py_callstack": "Traceback ..."}}}))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(type(error), error, None)
    assert ended.value.code == code
    assert capfd.readouterr().err == "error: a (b)\n"
    message = json.loads(reported.read_text())["message"]
    assert (message["message"], message["extraInfo"]["py_callstack"]) == (f"{type(error).__name__}: a (b)", "a (b)")


def test_other_errors_go_to_the_hook_before(monkeypatch: pytest.MonkeyPatch, reported: Path) -> None:
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(kind))
    for _ in range(2):
        logs.install_hook()
    sys.excepthook(ValueError, ValueError("x"), None)
    assert seen == [ValueError]
    assert not reported.exists()
