"""The ledger as a rank's steps make it: what it takes from them, what ranks compare, what rank 0 writes and when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_trainer.cli import data
from elastic_trainer.cli.main import main
from elastic_trainer.data.ledger import Chain, History, Kind, StepRecord
from elastic_trainer.data.plan import EpochPlan
from elastic_trainer.model import Cursor
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.worker.model.replica import DataPart
from elastic_trainer.worker.steps import records
from elastic_trainer.worker.steps.records import StepRecords

PLAN = EpochPlan(length=64, global_batch=8, seed=3)


@dataclass
class Ranks:
    """Collectives of several ranks, of which this one is ``rank``; the others say what ``others`` give."""

    rank: int = 0
    others: list[dict[str, Any]] = field(default_factory=list)
    given: bytes = b""

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        rows = [json.dumps(each).encode() for each in self.others]
        return [*rows[: self.rank], mine, *rows[self.rank :]]

    def broadcast_bytes(self, mine: bytes, source: int) -> bytes:
        return mine if source == self.rank else self.given


@dataclass
class Rank:
    """One rank that trains, without a model."""

    directory: Path | None
    feed: Any = field(default_factory=lambda: SimpleNamespace(cut=(PLAN, 0), kind="Rows", key_of=None, lr_factor=1.0))
    cursor: Cursor = field(default_factory=Cursor)
    step: int = 0

    def __post_init__(self) -> None:
        self.records = StepRecords(self.directory, WorkerEnvironment(), self.feed, 5)

    def begin(self, ranks: Ranks | None = None, generation: int = 1, world: int = 2) -> None:
        control: Any = ranks if ranks is not None else Ranks()
        self.records.begin_round(control, DataPart(control.rank, world), self.step, generation)

    def commit(self, terms: list[tuple[torch.Tensor, float]] | None = None, **more: Any) -> None:
        self.step += 1
        whole = PLAN.global_batch_at(self.cursor)
        batch = SimpleNamespace(following=whole.following, covers=len(whole.ids))
        values = {"batch": batch, "skipped": False, "world_size": 2, "norm": None, "known_mean": None, **more}
        step: Any = SimpleNamespace(number=self.step, loss_terms=lambda: terms or [], **values)
        self.records.add(step, self.cursor, 0.1)
        self.cursor = whole.following
        if PLAN.is_over(self.cursor):
            self.cursor = Cursor(self.cursor.epoch + 1, 0)

    def written(self) -> History:
        """What it has written, once that is done."""
        self.records.close()
        assert self.directory is not None
        _, history = data.opened(str(self.directory))
        return history

    def held(self) -> list[StepRecord]:
        """What it has not."""
        chain, state = Chain(), self.records.state()
        chain.load(json.loads(state["plain"]), state["rows"].numpy().tobytes()[: state["size"]])
        empty: Any = SimpleNamespace(names=tuple)
        return list(History(empty, chain).between(1, self.step))


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    made.begin()
    yield made
    made.records.close()


def test_a_loss_is_that_of_all_ranks_where_it_is_known(rank: Rank) -> None:
    """Else that of this rank's samples, by their weights; or it is not known; a step alone is all ranks."""
    rank.commit([(torch.tensor(1.0), 0.25), (torch.tensor(3.0), 0.75)], norm=torch.tensor(2.0))
    rank.commit(known_mean=7.0)
    rank.commit()
    rank.commit([(torch.tensor(4.0), 1.0)], world_size=1)
    rank.commit([(torch.tensor(float("nan")), 1.0)])
    rank.records.know_loss(3, 9.0)
    found = [(each.loss, each.whole, each.norm) for each in rank.held()]
    assert found[:4] == [(2.5, False, 2.0), (7.0, True, None), (9.0, True, None), (4.0, True, None)]
    assert found[4][0] != found[4][0]  # NaN is known, and not the same as nothing


def test_losses_of_a_device_are_read_together_and_later(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 at a time, or when the state is asked for: a step does not wait for them."""
    monkeypatch.setattr(records, "on_device", lambda value: True)
    read: list[int] = []
    stack = torch.stack

    def counted(values: list[torch.Tensor]) -> torch.Tensor:
        read.append(len(values))
        return stack(values)

    monkeypatch.setattr(torch, "stack", counted)
    for number in range(70):
        rank.commit([(torch.tensor(float(number)), 0.5), (torch.tensor(2.0), 0.5)], norm=torch.tensor(3.0))
    assert read == [3 * 64]
    rank.records.know_loss(69, 77.0)
    rank.commit(known_mean=5.0, norm=torch.tensor(4.0))
    found = rank.held()
    assert read == [3 * 64, 3 * 6 - 2 + 1]
    assert [(each.loss, each.norm) for each in found][:2] == [(1.0, 3.0), (1.5, 3.0)]
    assert [(each.loss, each.whole, each.norm) for each in found][68:] == [
        (77.0, True, 3.0),
        (35.5, False, 3.0),
        (5.0, True, 4.0),
    ]


def test_a_segment_is_written_behind_a_checkpoint(rank: Rank) -> None:
    """Up to its step; the rest with the next one, without what is written already."""
    for _ in range(6):
        rank.commit()
    rank.records.seal(4)
    rank.records.close()
    again = Rank(rank.directory)
    again.records.load(rank.records.state())
    again.step, again.cursor = rank.step, rank.cursor
    again.begin(generation=2)
    again.commit()
    again.records.seal(7)
    history = again.written()
    assert [(each.name.first, each.name.last, each.name.round) for each in history.stretches] == [(1, 4, 1), (5, 7, 2)]
    assert history.verify().last == 7


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    other = Rank(tmp_path)
    other.begin(Ranks(1, [{"node": "a", "part": 0, "reached": 0, "head": "00" * 16, "sealed": 0}]))
    other.commit()
    other.records.seal(1)
    other.records.close()
    assert not (tmp_path / "ledger").exists()


def test_what_rank_0_has_written_other_ranks_need_not_keep(tmp_path: Path) -> None:
    """From the next round on; one that becomes rank 0 writes what follows."""
    first, other = Rank(tmp_path), Rank(tmp_path)
    for each in (first, other):
        each.begin()
        for _ in range(6):
            each.commit(known_mean=1.0)
    first.records.seal(4)
    first.records.close()
    row = {"node": "local", "part": 0, "reached": 6, "head": first.records._chain.head.hex(), "sealed": 4}
    other.begin(Ranks(1, [row]), generation=2)
    assert other.records._chain.base == 4
    other.begin(generation=3)
    other.commit(known_mean=2.0)
    other.records.seal(7)
    history = other.written()
    assert [(each.name.first, each.name.last) for each in history.stretches] == [(1, 4), (5, 7)]
    assert history.verify().steps == 7


def test_a_rank_that_has_other_records_takes_those_of_rank_0(tmp_path: Path) -> None:
    """At the beginning of a round, and where marks differ within it."""
    first, other = Rank(tmp_path / "a"), Rank(tmp_path / "b")
    for each in (first, other):
        each.begin(Ranks())
        each.commit(known_mean=1.0)
    first.commit(known_mean=2.0)
    other.commit(known_mean=3.0, skipped=True)
    assert first.records.mark() != other.records.mark()
    plain, rows = first.records._chain.state()
    told = iter([json.dumps(plain).encode(), rows])
    head = first.records._chain.head
    other.records._rank0 = False
    control: Any = SimpleNamespace(
        gather_bytes=lambda mine: [head, mine], broadcast_bytes=lambda mine, source: next(told)
    )
    other.records.compare(control)
    assert other.records.mark() == first.records.mark()
    assert [each.loss for each in other.held()] == [1.0, 2.0]


def test_what_was_noted_behind_the_last_step_of_a_round_is_left_out(rank: Rank) -> None:
    """Not all ranks may have noted it before the round ended."""
    rank.commit()
    before = rank.records.mark()
    rank.records.add_digest(1, 77, on_device=False)
    assert rank.records.mark() != before
    rank.begin(generation=2)
    (noted,) = [text for text in rank.records._chain._texts if '"round":2' in text]
    assert '"from":1' in noted
    assert not any("digest" in text for text in rank.records._chain._texts)


def test_a_directory_that_refuses_costs_nothing_but_a_line(tmp_path: Path) -> None:
    """The records stay, and are written when it takes them again."""
    (tmp_path / "ledger").write_text("no directory")
    rank = Rank(tmp_path)
    rank.begin()
    rank.commit()
    rank.records.seal(1)
    rank.records._sealer._waiting.put(None)  # type: ignore[union-attr]
    rank.records._sealer._thread.join()  # type: ignore[union-attr]
    rank.records._sealer._thread = None  # type: ignore[union-attr]
    assert len(rank.held()) == 1
    (tmp_path / "ledger").unlink()
    rank.commit()
    rank.records.seal(2)
    assert rank.written().verify().last == 2


def test_a_state_without_a_ledger_begins_one(rank: Rank) -> None:
    rank.commit()
    rank.records.load(None)
    rank.step, rank.cursor = 500, Cursor(4, 8)
    rank.begin(generation=3)
    rank.commit()
    rank.records.seal(501)
    proof = rank.written().verify()
    assert (proof.last, proof.gaps) == (501, [(0, 500)])


def test_samples_are_shown_by_their_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank = Rank(tmp_path)
    rank.feed.key_of = "image-{}.png".format
    rank.begin()
    rank.commit(known_mean=1.5)
    rank.records.seal(1)
    history = rank.written()
    assert history.sample_keys("Rows", 64) == [f"image-{number}.png" for number in range(64)]
    first = int(PLAN.order(0)[0])
    assert main(["data", str(tmp_path), "1"]) == 0
    assert f"rank 0 on local: {first} (image-{first}.png), " in capsys.readouterr().out
    assert main(["data", str(tmp_path), "--sample", f"image-{first}.png", "-o", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["step"], found["keys"][str(first)]) == (1, f"image-{first}.png")
    assert main(["data", str(tmp_path), "--sample", "nobody"]) == 78
    assert "no sample is called 'nobody'" in capsys.readouterr().err
    assert main(["data", str(tmp_path)]) == 0
    assert "steps 1 to 1 in 1 segment" in capsys.readouterr().out


def test_a_plan_that_changes_is_noted_once(rank: Rank) -> None:
    rank.commit()
    rank.feed.cut = EpochPlan(length=64, global_batch=8, seed=3), 0
    rank.commit()
    rank.feed.cut = EpochPlan(length=64, global_batch=4, seed=3), 1
    rank.commit()
    rank.records.seal(3)
    plans = [about for _, about in rank.written().noted(Kind.PLAN)]
    assert [(each["global_batch"], each["halvings"], each["seed_all"]) for each in plans] == [(8, 0, 5), (4, 1, 5)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["1", "--verify"], "different questions"),
        (["9"], "steps 9 are not in the ledger (it has steps 1 to 1)"),
        (["x"], "neither a step nor a range of steps"),
        (["1-x"], "neither a step nor a range of steps"),
    ],
)
def test_a_wrong_question_is_one_sentence(
    words: list[str], said: str, rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.commit()
    rank.records.seal(1)
    rank.written()
    assert main(["data", str(rank.directory), *words]) == 78
    assert said in capsys.readouterr().err


def test_a_directory_without_a_ledger_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(tmp_path)]) == 78
    assert "there is no ledger in" in capsys.readouterr().err
    assert main(["data", str(tmp_path / "nowhere")]) == 78
    assert "there is no directory" in capsys.readouterr().err
