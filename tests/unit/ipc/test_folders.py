"""Private folders: what a killed process leaves behind is swept, what belongs to anybody else stays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_trainer.ipc import folders
from elastic_trainer.ipc.channel import Listener
from elastic_trainer.ipc.folders import PrivateFolder, sweep

PREFIX = "elastic-trainer-test-"
AGENT = """
from elastic_trainer.ipc.channel import Listener
print(Listener(lambda connection: None).path, flush=True)
input()
"""


def test_what_a_killed_agent_leaves_is_swept_by_the_next(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of its channel, with all that workers put there; that of an agent that lives stays."""
    tmp_path = tmp_path_factory.mktemp("a")  # a socket's path may have 107 characters
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living = Listener(lambda connection: None)
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", AGENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as agent:
        assert agent.stdout is not None
        left = Path(agent.stdout.readline().decode().strip()).parent
        (left / "life-1").touch()
        assert set(tmp_path.iterdir()) == {left, living.path.parent}
        agent.kill()
    following = Listener(lambda connection: None)
    assert set(tmp_path.iterdir()) == {living.path.parent, following.path.parent}
    for listener in (living, following):
        listener.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_ready_yet_is_nobodys_leftover(tmp_path: Path) -> None:
    """Its owner has begun just now, and holds no lock that others see."""
    folder = tmp_path / f"{PREFIX}x"
    folder.mkdir()
    sweep(PREFIX, tmp_path)
    held = folders._hold(folder)
    sweep(PREFIX, tmp_path)
    assert [path.name for path in folder.iterdir()] == ["lock"]
    os.close(held)
    sweep(PREFIX, tmp_path)
    assert list(tmp_path.iterdir()) == []


def _others(path: Path) -> None:
    (path / "elastic-trainer-drill-1").mkdir()
    (path / "elastic-trainer-drill-1" / "lock").touch()


def _link(path: Path) -> None:
    """A link that somebody has put there, to let a folder be removed that he may not remove himself."""
    (path / "precious").mkdir()
    (path / "precious" / "lock").touch()
    (path / f"{PREFIX}link").symlink_to(path / "precious")


def _foreign(path: Path) -> None:
    """The folder of another user, who may be one of another container."""
    folder = path / f"{PREFIX}foreign"
    folder.mkdir()
    (folder / "lock").touch()
    try:
        os.chown(folder, 12345, 12345)
    except PermissionError:
        pytest.skip("only root can give a folder to another user")


@pytest.mark.parametrize("make", [_others, _link, _foreign])
def test_what_is_not_ours_stays(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    before = set(tmp_path.rglob("*"))
    sweep(PREFIX, tmp_path)
    assert set(tmp_path.rglob("*")) == before


def test_a_folder_that_is_closed_is_gone_and_can_be_closed_again(tmp_path: Path) -> None:
    folder = PrivateFolder(PREFIX, tmp_path)
    assert folder.path.stat().st_mode & 0o077 == 0
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="missing"):
        PrivateFolder(PREFIX, tmp_path / "missing")
