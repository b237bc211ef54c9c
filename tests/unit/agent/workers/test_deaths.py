"""What people read of a worker's death, by what the kernel and the worker have left."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_trainer.agent.workers.deaths import (
    Deaths,
    by_rank,
    own_events,
    traceback_fault,
    write_termination_message,
)
from elastic_trainer.errors import last_line
from elastic_trainer.model import Place


def failure(exitcode: int, message: object = "<NONE>", pid: int = 7, at: int = 1) -> Any:
    return SimpleNamespace(exitcode=exitcode, pid=pid, local_rank=1, timestamp=at, error_file_data={"message": message})


@pytest.mark.parametrize(
    ("failures", "said", "told"),
    [
        ({}, {}, ""),
        ({3: failure(1)}, {}, "worker 1 (rank 3) ended with exit code 1"),
        ({3: failure(1)}, {7: "ValueError: bad"}, "worker 1 (rank 3) ended with exit code 1: ValueError: bad"),
        ({3: failure(1, {"message": "KeyError:\n 4"})}, {}, "worker 1 (rank 3) ended with exit code 1: KeyError: 4"),
        ({3: failure(-11)}, {}, "worker 1 (rank 3) was killed by SIGSEGV"),
        ({3: failure(-40)}, {}, "worker 1 (rank 3) was killed by signal 40"),
        ({3: failure(-15, at=2), 4: failure(2, at=1)}, {}, "worker 1 (rank 4) ended with exit code 2"),
    ],
)
def test_a_death_has_its_cause(failures: Any, said: dict[int, str], told: str, tmp_path: Path) -> None:
    found = Deaths(tmp_path / "memory.events").look(failures, said)
    assert (found[0].text if found else "") == told


def test_a_worker_with_a_log_of_its_own_has_said_why(tmp_path: Path) -> None:
    """Its last line, where it has no better words."""
    (tmp_path / "stderr.log").write_text("warming up\n\x1b[31mscript.py: error: no such option: --lr2\x1b[0m\n\n")
    found, errors = {0: failure(2)}, {1: tmp_path / "stderr.log"}
    subject = Deaths(tmp_path / "memory.events")
    assert subject.look(found, {}, errors)[0].text == (
        "worker 1 (rank 0) ended with exit code 2: script.py: error: no such option: --lr2"
    )
    assert subject.look(found, {7: "ValueError: x"}, errors)[0].text.endswith("exit code 2: ValueError: x")
    assert subject.look({0: failure(-9)}, {}, errors)[0].text.endswith("was killed by SIGKILL")


@pytest.mark.parametrize(
    ("wrote", "told"),
    [
        (
            "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
            ": std::bad_alloc",
        ),
        (
            "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: x\nframe #0\n",
            "CUDA error: x",
        ),
        ("step 7\ndouble free or corruption (out)\n", "SIGABRT: double free or corruption (out)"),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_an_abort_has_the_words_of_its_exception(tmp_path: Path, wrote: str, told: str, shared: bool) -> None:
    """From its own file, or from what came behind the last death in one that it shares with torchrun."""
    (files := tmp_path / "self" / "fd").mkdir(parents=True)
    log = tmp_path / "torchrun.log"
    log.write_text("terminate called after throwing an instance of 'Earlier'\n  what():  of a run before\n")
    (files / "2").symlink_to(log)
    deaths = Deaths(tmp_path / "memory.events", tmp_path)
    aborted, errors = {0: failure(-6)}, {} if shared else {1: tmp_path / "stderr.log"}
    with (log if shared else tmp_path / "stderr.log").open("a") as file:
        file.write(wrote)
    (found,) = deaths.look(aborted, {}, errors)
    assert found.text.endswith(told)
    if shared:
        assert deaths.look(aborted, {})[0].text.endswith("SIGABRT")
        with log.open("a") as file:
            file.write(wrote)
        both = deaths.look({**aborted, 1: failure(-6)}, {})
        assert [each.text.endswith("SIGABRT") for each in both] == [True, True], "nobody knows whose words they are"


PIPELINING = "torch.distributed.pipelining._utils.PipeliningMetadataError"
CLEANS = "raise ValueError('cannot clean up')"
TRIED = "try: {}['lr']\nexcept KeyError"
DIST = "import torch.distributed as d\nraise d.DistBackendError"


def raised(text: str) -> str:
    """The traceback of what ``text`` raises, a script in a directory of its own."""
    try:
        exec(compile(text, "/home/u/train.py", "exec"), {})
    except Exception:  # noqa: BLE001
        return traceback.format_exc()
    raise AssertionError(f"nothing was raised by {text!r}")


@pytest.mark.parametrize(
    ("text", "types", "because", "lost"),
    [
        ("raise ValueError('bad')", ["ValueError"], "", False),
        ("raise ValueError", ["ValueError"], "", False),
        (f"{TRIED} as e: raise ValueError('x\\ny') from e", ["ValueError", "KeyError"], "KeyError: 'lr'", False),
        (f"{TRIED}: raise ValueError('bad')", ["ValueError"], "", False),
        ("import torch\nraise torch.OutOfMemoryError('CUDA out of memory')", ["torch.OutOfMemoryError"], "", False),
        (f"{DIST}('NCCL: x')", ["torch.distributed.DistBackendError"], "", True),
        (f"{DIST}('uncorrectable ECC error')", ["torch.distributed.DistBackendError"], "", False),
        ("raise RuntimeError('[/pytorch/gloo/transport/tcp/pair.cc:535] closed')", ["RuntimeError"], "", True),
        ("raise RuntimeError('closed')", ["RuntimeError"], "", False),
        # torch's own, but of no collective
        (
            "import torch.distributed.pipelining._utils as u\nraise u.PipeliningMetadataError('x')",
            [PIPELINING],
            "",
            False,
        ),
        # whose handler failed itself
        (
            f"import torch.distributed as d\ntry: raise d.DistBackendError('x')\nexcept d.DistError: {CLEANS}",
            ["ValueError"],
            "",
            True,
        ),
        ("def f():\n  class Bad(Exception): pass\n  return Bad\nraise f()('bad\\nfoo')", ["f.<locals>.Bad"], "", False),
    ],
)
def test_a_traceback_says_what_a_session_would(text: str, types: list[str], because: str, lost: bool) -> None:
    found = traceback_fault(raised(text))
    assert (found["types"], found["because"], found["lost_peer"]) == (types, because, lost)
    assert found["place"] is Place.SCRIPT
    assert found["at"] == f"train.py:{1 if because else len(text.splitlines())} in <module>"


def test_a_traceback_tells_data_from_script_and_may_be_none() -> None:
    """By the files of the cause; of a syntax error by what Python shows of it."""
    loads = "from torch.utils.data import DataLoader\nclass Rows(list):\n  def __getitem__(self, index): {}['label']\n"
    found = traceback_fault(raised(f"{loads}next(iter(DataLoader(Rows([1]))))"))
    assert (found["place"], found["at"]) == (Place.DATA, "train.py:3 in __getitem__")
    wrong = '  File "/home/u/train.py", line 3\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n'
    assert traceback_fault(wrong)["at"] == "train.py:3"
    assert traceback_fault("") == traceback_fault("no luck") == {}
    assert traceback_fault(raised("raise ExceptionGroup('several', [ValueError('a'), KeyError('b')])")) == {}


def test_what_is_read_of_a_traceback_is_bounded() -> None:
    """It goes into the store."""
    body = "  try: raise ValueError('x' * 10_000) from error\n  except ValueError as e: error = e\n"
    found = traceback_fault(raised(f"error = None\nfor n in range(200):\n{body}raise error"))
    assert len(found["types"]) == 6
    assert len(str(found)) < 1000


def test_ranks_are_those_of_the_round() -> None:
    failures = {0: failure(1, pid=7), 1: failure(1, pid=8)}
    assert by_rank(failures, {7: 4, 9: 0}) == {4: failures[0], 1: failures[1]}


def test_a_kill_for_memory_is_told_from_others(tmp_path: Path) -> None:
    """By the count of the cgroup, which grows with each; a kill of somebody else's leaves it."""
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 1\noom_kill 1\n")
    deaths = Deaths(events)
    assert deaths.look({0: failure(-9)}, {})[0].text == "worker 1 (rank 0) was killed by SIGKILL"
    events.write_text("low 0\noom 2\noom_kill 2\n")
    (found,) = deaths.look({0: failure(-9)}, {})
    assert found.memory
    assert found.text.endswith("SIGKILL, because its cgroup was out of memory")
    assert deaths.look({0: failure(-9)}, {})[0].text == "worker 1 (rank 0) was killed by SIGKILL"


@pytest.mark.parametrize(
    ("listed", "there", "counted"),
    [
        ("0::/pods/a\n", (), "pods/a/memory.events"),
        ("4:cpu,memory:/pods/a\n0::/\n", ("memory/pods/a",), "memory/pods/a/memory.oom_control"),
        ("4:memory:/host/a\n0::/\n", ("memory",), "memory/memory.oom_control"),
        ("", (), "memory.events"),
    ],
)
def test_kills_are_counted_by_either_version(listed: str, there: tuple[str, ...], counted: str, tmp_path: Path) -> None:
    """A machine may have the controller of memory in version 1 beside groups of version 2."""
    (tmp_path / "cgroup").write_text(listed)
    for folder in there:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "memory.oom_control").write_text("oom_kill 0\n")
    assert own_events(tmp_path / "cgroup", tmp_path) == tmp_path / counted


def test_a_full_disk_is_called_so() -> None:
    assert last_line(OSError(errno.ENOSPC, "No space left on device")).endswith("(the disk is full)")
    assert last_line(ValueError("a\nb")) == "ValueError: a b"
    assert len(last_line(ValueError("x" * 10_000))) <= 300


def test_the_last_words_go_where_kubernetes_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "termination-log"
    write_termination_message("it died", file)
    assert not file.exists()
    file.write_text("an older and longer word")
    write_termination_message("it died", file)
    assert file.read_text() == "it died"
