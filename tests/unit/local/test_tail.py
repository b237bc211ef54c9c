"""Following files that others write."""

from __future__ import annotations

from pathlib import Path

from elastic_trainer.local.ledger import FileTail, LedgerTail


def test_a_line_is_seen_once_and_only_when_it_is_complete(tmp_path: Path) -> None:
    """A line torn by a kill never appears; one that is completed later appears then."""
    path = tmp_path / "log"
    tail = FileTail(path)
    assert tail.read() == []
    path.write_text("one\ntwo")
    assert tail.read() == ["one"]
    assert tail.read() == []
    with path.open("a") as file:
        file.write(" more\nthree\n")
    assert tail.read() == ["two more", "three"]


def test_lines_of_all_processes_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    """New files are found, and what cannot be read hides no other line."""
    tail = LedgerTail(tmp_path)
    (tmp_path / "n0-0-1.jsonl").write_text('{"event": "step", "t": 2.0, "step": 2}\nnot json\n')
    (tmp_path / "n1-0-2.jsonl").write_text('{"event": "step", "t": 1.0, "step": 1}\n')
    assert [line.step for line in tail.read()] == [1, 2]
    (tmp_path / "n2-0-3.jsonl").write_text('{"event": "closed", "t": 3.0, "step": 2, "status": "done"}\n')
    assert [line.status for line in tail.read()] == ["done"]
