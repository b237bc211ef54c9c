"""Why a process failed, from what it printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_trainer.local.ledger import end_of, last_error

TRACEBACK = """\
started
Traceback (most recent call last):
  File "train.py", line 1, in <module>
    import nosuchthing

ModuleNotFoundError: No module named 'nosuchthing'
E1124 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)
"""
SYNTAX = """\
  File "train.py", line 1
    x y
      ^
SyntaxError: invalid syntax
"""
TORCHRUN = """\
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1032, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
====
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ""),
        ("epoch 1: Error rate 5 %\n", ""),
        (TRACEBACK, "ModuleNotFoundError: No module named 'nosuchthing'"),
        (TRACEBACK + SYNTAX, "SyntaxError: invalid syntax"),
        (TRACEBACK + TORCHRUN, "ModuleNotFoundError: No module named 'nosuchthing'"),
        ("error: no such key (did you mean 'lr'?)\n" + TORCHRUN, "no such key (did you mean 'lr'?)"),
        (TORCHRUN, ""),
        (TORCHRUN.replace("errors.ChildFailedError:", "api.SignalException: Process 7 got signal: 15"), ""),
        (
            "".join(f"[rank3]: {line}\n" for line in TRACEBACK.splitlines()),
            "ModuleNotFoundError: No module named 'nosuchthing'",
        ),
        ("elastic-trainer: the run is full\n", "the run is full"),
    ],
)
def test_the_last_error_is_the_scripts_own(text: str, error: str) -> None:
    """Of a traceback, a syntax error or a sentence of this package; what torchrun adds is passed over."""
    assert last_error(text.splitlines()) == error


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    """64 KiB of it; a log that is not there has no lines."""
    log = tmp_path / "n0.log"
    log.write_text("first\n" + "x" * (64 << 10) + "\nlast\n")
    assert end_of(log)[-1] == "last"
    assert "first" not in end_of(log)
    assert end_of(tmp_path / "none") == []
