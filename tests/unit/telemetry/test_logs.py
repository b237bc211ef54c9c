"""How a process ends with an error of this package."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from elastic_trainer.errors import ConfigError, ElasticTrainerError, StorageError, StoreUnavailableError
from elastic_trainer.telemetry import logs


@pytest.fixture(autouse=True)
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
