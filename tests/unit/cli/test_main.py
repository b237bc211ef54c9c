"""The command as a whole: help is light, errors are one sentence with an exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_trainer import __version__
from elastic_trainer.cli.main import COMMANDS, main


def test_help_loads_neither_torch_nor_grpc_nor_any_subcommand() -> None:
    """Nor what a subcommand needs: all of that comes when the subcommand is given."""
    code = (
        "import sys\nfrom elastic_trainer.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'grpc', 'etcd3', 'rich', 'pydantic', 'psutil', 'structlog'} & set(sys.modules)\n"
        "mine = {m for m in sys.modules if m.startswith('elastic_trainer.cli.') and not m.endswith('.main')}\n"
        "assert not heavy and not mine, (heavy, mine)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert command.name in done.stdout


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The module that the list names exists and describes its options."""
    for words, said in (([command, "--help"], f"elastic-trainer {command}"), (["--version"], __version__)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        assert said in capsys.readouterr().out


LOCAL = ["local", "--nodes", "2:3"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["run"], "nothing to run was given"),
        (["run", "--nodes", "3:2", "--", "x.py"], "--nodes '3:2' is not MIN:MAX"),
        (["run", "--", "none.py"], "script 'none.py' does not exist"),
        (["run", "--endpoint", "http://x", "--", "mnist"], "store endpoint 'http://x' is not host:port"),
        (["run", "--rdzv-conf", "ttl=x", "--", "mnist"], "'ttl' is 'x'"),
        (["run", "--nproc-per-node", "0", "--", "mnist"], "--nproc-per-node 0 is below 1"),
        (["completion", "fish"], "invalid choice: 'fish'"),
        (["dance"], "invalid choice: 'dance'"),
        (["--wrong"], "unrecognized arguments: --wrong"),
        (["local", "--", "mnist"], "--nodes"),
        (["local", "--nodes", "3:2", "--", "mnist"], "--nodes '3:2' is not MIN:MAX"),
        (["local", "--nodes", "x", "--", "mnist"], "--nodes 'x' is not MIN:MAX"),
        (["local", "--nodes", "0:1", "--", "mnist"], "--nodes '0:1' is not MIN:MAX"),
        ([*LOCAL, "--start", "4", "--", "mnist"], "--start 4 is not between 2 and 3"),
        ([*LOCAL, "--start", "many", "--", "mnist"], "argument --start: invalid int value: 'many'"),
        ([*LOCAL, "--nproc-per-node", "0", "--", "mnist"], "--nproc-per-node 0 is below 1"),
        ([*LOCAL, "--max-restarts", "-1", "--", "mnist"], "--max-restarts -1 is below 0"),
        ([*LOCAL, "--timeout", "nan", "--", "mnist"], "--timeout nan is not a number of seconds above 0"),
        ([*LOCAL, "--kill-node-at", "soon", "--", "mnist"], "--kill-node-at 'soon' is not STEP[:NODE]"),
        ([*LOCAL, "--start", "2", "--kill-node-at", "5", "--", "mnist"], "leaves 1 of at least 2 nodes"),
        ([*LOCAL, "--recovery", "magic", "--", "mnist"], "invalid choice: 'magic'"),
        ([*LOCAL, "--rdzv-conf", "ttl", "--", "mnist"], "--rdzv-conf: 'ttl' is not key=value"),
        ([*LOCAL, "--rdzv-conf", "tl=3", "--", "mnist"], "--rdzv-conf: unknown key 'tl'"),
        ([*LOCAL, "--rdzv-conf", "node_id=x", "--", "mnist"], "'node_id' cannot be given"),
        ([*LOCAL, "--", "train.py"], "script 'train.py' does not exist"),
        ([*LOCAL, "--", "job.yaml"], "job.yaml: there is no such file"),
        ([*LOCAL, "--", "mnits"], "there is no ready-made task 'mnits'"),
        ([*LOCAL], "nothing to run was given"),
        (["checkpoints", "list", "gone"], "there is no directory 'gone'"),
        (["checkpoints", "list"], "the following arguments are required: DIR"),
        (["checkpoints", "save"], "the following arguments are required: RUN"),
        (["checkpoints", "save", "r", "--timeout", "0"], "--timeout 0.0 is not a number of seconds above 0"),
        (["monitor", "--listen", "9470"], "--listen '9470' is not HOST:PORT"),
        (["monitor", "--cert", "x"], "--cert and --key go together"),
        (["monitor", "--token-file", "/nowhere"], "--token-file '/nowhere' cannot be read"),
        (["monitor", "--user", "me"], "user and password go together"),
        (["monitor", "--endpoint", "http://x"], "is not host:port"),
        (["monitor", "--forget", "-1"], "--forget -1.0 is not a number of seconds"),
        (["monitor", "--ca-cert", "/nowhere"], "TLS file '/nowhere' cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_78(
    argv: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names what is wrong and what to do; nothing is started and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert main(argv) == 78
    error = capsys.readouterr().err
    assert error.startswith("elastic-trainer: ")
    assert error.count("\n") == 1
    assert sentence in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_without_a_command_help_is_shown_and_the_exit_code_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A script that forgot its command does not succeed."""
    assert main([]) == 78
    assert "elastic-trainer: no command was given" in capsys.readouterr().err


def test_a_run_directory_in_use_is_refused_and_one_that_cannot_be_made_is_exit_code_73(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs in one ledger would make both summaries wrong."""
    (tmp_path / "ledger").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "train.py").write_text("print('hello')")
    for name, code, sentence in ((".", 78, "holds an earlier run"), ("file/run", 73, "cannot create")):
        assert main([*LOCAL, "--run-dir", str(tmp_path / name), "--", str(tmp_path / "train.py")]) == code
        assert sentence in capsys.readouterr().err
