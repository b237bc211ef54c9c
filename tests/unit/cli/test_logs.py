"""Where the output of nodes is, and which lines of it are new."""

from __future__ import annotations

import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from elastic_trainer.agent.health.service import log_location
from elastic_trainer.cli import logs
from elastic_trainer.cli.logs import NodeLog, age_s, choose, newer, of_run, show, span_s, whereabouts
from elastic_trainer.cli.main import main
from elastic_trainer.errors import ConfigError
from elastic_trainer.membership.documents import LogTail
from tests.support.monitored import health, run

NOW = datetime(2026, 11, 23, 3, 0, 0).timestamp()


def test_a_rank_is_found_on_its_node_of_the_newest_round() -> None:
    """Nodes of earlier rounds have no ranks, and are found by name."""
    told = {name: health(name, host="h", logs=f"file:/{name}.log") for name in ("n0", "n1", "old")}
    found = of_run(run(2, 2, health=told))
    assert [(each.node, each.ranks) for each in found] == [("n0", (0, 1)), ("n1", (2, 3)), ("old", ())]
    assert [each.node for each in choose(found, 3, None)] == ["n1"]
    assert [each.node for each in choose(found, None, "old")] == ["old"]
    with pytest.raises(ConfigError, match="no node with rank 9 is known") as caught:
        choose(found, 9, None)
    assert "node n0 (ranks 0-1), node n1 (ranks 2-3), node old" in str(caught.value)


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("journal:a@b.service", "node n0: on h, journalctl -u a@b.service --since=-10min"),
        ("pod:gpt-xyz", "node n0: kubectl logs gpt-xyz --since=10m"),
        (
            "job:gpt/3",
            "node n0: kubectl logs -l "
            "batch.kubernetes.io/job-name=gpt,batch.kubernetes.io/job-completion-index=3 --tail=-1 --since=10m",
        ),
        ("file:/var/log/n0", "node n0: /var/log/n0 on h"),
        ("pod:$(reboot)", "node n0: kubectl logs '$(reboot)' --since=10m"),
        ("", "node n0: on h, with whatever started it: its output goes to no file"),
    ],
)
def test_what_is_elsewhere_has_a_command(location: str, said: str) -> None:
    assert whereabouts(NodeLog("n0", "h", location), "10m") == said


def test_of_what_is_elsewhere_the_last_lines_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """As its node has told."""
    tail = LogTail(ranks=(0,), file="/var/log/n0", lines=("step 7", "Killed"))
    (found,) = of_run(run(1, health={"n0": health("n0", host="elsewhere", logs="file:/var/log/n0", tails=(tail,))}))
    show([found], None)
    assert capsys.readouterr().out == (
        "node n0 (ranks 0-1): /var/log/n0 on elsewhere\n  last lines of /var/log/n0:\n    step 7\n    Killed\n"
    )


def test_lines_are_new_by_their_time() -> None:
    """Of JSON or of text, not by the hour of another day; what follows without a date belongs to it."""
    at = datetime.fromtimestamp(NOW - 30, UTC).isoformat().replace("+00:00", "Z")
    lines = [
        "no time\n",
        "2026-11-16 02:59:00 old\n",
        "still old\n",
        "[default0]:2026-11-23 02:59:00 new\n",
        "Traceback\n",
        f'{{"timestamp": "{at}"}}\n',
    ]
    assert list(newer(lines, 600.0, NOW, NOW)) == lines[3:]
    assert age_s(lines[1], NOW) == pytest.approx(7 * 86400 + 60)
    undated = ["02:59:00 at some day's hour\n", "more\n"]
    assert list(newer(undated, 600.0, NOW, NOW - 5)) == undated
    assert list(newer(undated, 600.0, NOW, NOW - 7 * 86400)) == []
    assert age_s('{"timestamp": "soon"}', NOW) is None


def test_a_length_of_time_has_a_unit() -> None:
    assert [span_s(text) for text in ("90s", "10m", "2h", "1d")] == [90.0, 600.0, 7200.0, 86400.0]
    for wrong in ("", "m", "-1m", "10", "1.5h", "9" * 320 + "d"):
        with pytest.raises(ConfigError, match="not a length of time"):
            span_s(wrong)


def test_a_node_says_where_its_output_goes(tmp_path: Path) -> None:
    """A file, a journal, a pod of an indexed Job or another; of a pipe nothing is known."""
    with (tmp_path / "n0.log").open("w") as file:
        assert log_location("h", {}, file.fileno()) == f"file:{tmp_path / 'n0.log'}"
    with Path("/dev/null").open("w") as other:
        number = other.fileno()
        pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
        assert log_location("gpt-3", {}, number) == ""
        assert log_location("gpt-3", {**pod, "JOB_COMPLETION_INDEX": "3"}, number) == "job:gpt/3"
        assert log_location("gpt-3", pod, number) == "pod:gpt-3"
    # Bytes that are not UTF-8 are escaped, since the name goes into the node's document.
    with open(os.fsencode(tmp_path) + b"/caf\xc3\xa9-\xe9.log", "wb") as file:
        location = log_location("h", {}, file.fileno())
    assert location == f"file:{tmp_path}/café-\\xe9.log"


@pytest.mark.parametrize("foreign", ["a link", "for all", ""])
def test_in_the_temporary_directory_only_what_this_user_made_counts(
    foreign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may have made a directory of that name there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "elastic-trainer-r"
    made = tmp_path / "elsewhere" if foreign == "a link" else kept
    (made / "logs").mkdir(parents=True)
    if foreign == "a link":
        kept.symlink_to(made)
    (made / "logs").chmod(0o777 if foreign == "for all" else 0o700)
    (made / "ledger").mkdir()
    assert logs._directory("r", asks_etcd=False) == (None if foreign else kept)


def test_the_directory_of_a_local_run_needs_no_etcd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All nodes with a title each, or the one that is asked for as it is."""
    (tmp_path / "logs").mkdir()
    for name in ("n0", "n1"):
        (tmp_path / "logs" / f"{name}.log").write_text(f"from {name}\n")
    assert main(["logs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "".join(
        f"==> node {name}: {tmp_path}/logs/{name}.log\nfrom {name}\n" for name in ("n0", "n1")
    )
    assert main(["logs", str(tmp_path), "--node", "n1"]) == 0
    assert capsys.readouterr().out == "from n1\n"
    assert main(["logs", str(tmp_path), "--rank", "0"]) == 78
    assert "no node with rank 0 is known" in capsys.readouterr().err


def test_a_folder_of_a_name_hides_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a ledger it is no run; with one it is, unless the command says where etcd is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logs, "_of_store", lambda arguments: [NodeLog("there", "h", "")])
    (tmp_path / "mine" / "logs").mkdir(parents=True)
    (tmp_path / "mine" / "logs" / "n0.log").write_text("from here\n")
    for ledger, words, there in ((False, [], True), (True, [], False), (True, ["--endpoint", "etcd:2379"], True)):
        if ledger:
            (tmp_path / "mine" / "ledger").mkdir(exist_ok=True)
        assert main(["logs", "mine", *words]) == 0
        assert capsys.readouterr().out.startswith("node there: on h" if there else "from here")
