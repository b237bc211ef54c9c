"""Names, manifests and checksums: any change of any bit is seen; which checkpoints stay, and why."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from elastic_trainer.checkpoint import Arena, CheckpointManager, DamagedError, SaveInfo, codec
from elastic_trainer.checkpoint.manifest import (
    CheckpointName,
    FileRecord,
    Image,
    Kind,
    Manifest,
    WriterIdentity,
    checked,
    checked_fields,
    host_label,
    kind_of,
    parse_checkpoint,
    parse_temporary,
    quarantine_name,
    quarantined,
    record,
    seal,
    temporary_name,
    trash_name,
    unseal,
)
from elastic_trainer.checkpoint.retention import BestMode, Candidate, Retention, by_metric, decide
from elastic_trainer.errors import CheckpointError, ConfigError, NonFiniteError
from tests.unit.checkpoint.states import records

NAME = "step-000000120-r7-0123456789ab"


def manifest(**changes: object) -> Manifest:
    values = {
        "name": NAME, "step": 120, "round": 7, "epoch": 2, "samples": 640, "world_size": 4, "created": 1.5e9,
        "metrics": {"loss": 0.25, "broken": math.nan, "far": -math.inf},
        "fields": {"seed": 7, "nested": [1, None, {"a": "ü"}]},
        "files": [FileRecord(name="a.bin", size=5, head_size=2, chunk_size=2, chunks=("0", "1", "2"))],
    }  # fmt: skip
    return Manifest.model_validate({**values, **changes})


def test_any_change_of_the_file_is_seen() -> None:
    """Each flipped bit of body, checksum, punctuation and white space; each truncation; anything appended."""
    whole = seal(manifest())
    number = int.from_bytes(whole)
    flipped = ((number ^ 1 << bit).to_bytes(len(whole)) for bit in range(8 * len(whole)))
    for content in (*flipped, *(whole[:length] for length in range(len(whole))), whole + b"\n", whole + whole):
        with pytest.raises(DamagedError):
            unseal(content, NAME)


def test_a_sealed_manifest_of_another_checkpoint_or_with_bad_values_is_damage() -> None:
    with pytest.raises(DamagedError, match="is that of"):
        unseal(seal(manifest()), NAME.replace("120", "121"))
    wrong = manifest().model_copy(update={"step": -1})
    with pytest.raises(DamagedError, match="'step'"):
        unseal(seal(wrong), NAME)


@pytest.mark.parametrize(("size", "head", "count"), [(5, 2, 2), (5, 2, 4), (0, 0, 1), (5, 6, 1), (5, 0, 2), (8, 8, 2)])
def test_sizes_and_checksums_must_fit_together(size: int, head: int, count: int) -> None:
    """A record with a chunk too few or too many would leave bytes unverified."""
    with pytest.raises(ValidationError, match="do not match"):
        FileRecord(name="a", size=size, head_size=head, chunk_size=2, chunks=("x",) * count)


@pytest.mark.parametrize("name", ["../state.json", "/etc/passwd", ".hidden", "", "a/b"])
def test_a_file_name_cannot_leave_the_checkpoint(name: str) -> None:
    with pytest.raises(ValidationError):
        FileRecord(name=name, size=0, head_size=0, chunk_size=1, chunks=())


@pytest.mark.parametrize("value", [math.nan, {1, 2}, object(), b"x"], ids=lambda value: type(value).__name__)
def test_fields_that_are_not_json_are_refused_by_name(value: object) -> None:
    with pytest.raises(CheckpointError, match="'bad'"):
        checked_fields({"good": 1, "bad": value})


TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def copy(state: dict[str, torch.Tensor], *watched: str) -> Image:
    return Arena().hold(codec.encode(state, {name: state[name] for name in watched})).image


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 599_999, 600_000 - 1 - 7])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, value: float, at: int) -> None:
    """In any piece, and named; what is not watched may be anything. (E4M3 has no infinity.)"""
    state = {"before": torch.ones(300_001), "w": torch.ones(600_000), "mask": torch.full((5,), float("-inf"))}
    state = {name: each.to(dtype) for name, each in state.items()}
    good = copy(state, "before", "w")
    assert checked(good).size == good.size
    state["w"][at] = float("nan") if dtype is torch.float8_e4m3fn else value
    with pytest.raises(NonFiniteError, match="'w'"):
        checked(copy(state, "before", "w"))


@pytest.mark.parametrize("dtype", TYPES)
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    """Though their sum is not."""
    limits = torch.finfo(dtype)
    numbers = [limits.max, limits.max, limits.min, limits.min, limits.max] * 9
    state = {"w": torch.tensor(numbers, dtype=torch.float64).to(dtype)}
    checked(copy(state, "w"))


def test_one_of_thousands_of_small_parameters_is_named() -> None:
    state = {f"w{number}": torch.ones(number % 7 + 1) for number in range(3000)}
    checked(copy(state, *state))
    state["w1234"][0] = float("nan")
    with pytest.raises(NonFiniteError, match="'w1234'"):
        checked(copy(state, *state))


def test_a_commit_takes_no_checksums_that_the_image_has(tmp_path: Path) -> None:
    """It publishes the same files; and bytes from elsewhere, which come without checksums, are compared."""
    manager = CheckpointManager(tmp_path)
    image = copy({"w": torch.randn(3_000_000)})
    known = checked(image)
    manifests = [manager.draft(SaveInfo(step)).with_files(records(image)) for step in (1, 2, 3)]
    entries = [manager.write(image, manifests[0]).entry, manager.write(known, manifests[1]).entry]
    first, second = ({path.name: path.read_bytes() for path in each.path.iterdir()} for each in entries)
    assert tuple(map(record, known.files)) == manifests[0].files
    assert {name for name in first if first[name] != second[name]} == {"manifest.json"}
    assert torch.equal(manager.load(entries[1]).state["w"], manager.load(entries[0]).state["w"])
    (body,) = image.files[0].body()
    body[5] ^= 1
    with pytest.raises(DamagedError, match="changed in memory"):
        manager.write(image, manifests[2])
    damaged = manager.write(known, manifests[2]).entry
    with pytest.raises(DamagedError, match="checksum"):
        manager.load(damaged)


def test_a_body_that_is_not_all_there_gets_no_checksums() -> None:
    image = copy({"w": torch.ones(9)})
    longer = replace(image.files[0], body_size=image.files[0].body_size + 1)
    with pytest.raises(RuntimeError, match=r"received \d+ of \d+ bytes"):
        checked(Image((longer,)))


# ---- names: what is formatted parses back; nothing else is taken for ours


@given(st.integers(0, 10**17), st.integers(0, 10**17))
def test_every_name_parses_back(step: int, round_number: int) -> None:
    """Formatting and parsing are inverse, also beyond nine digits."""
    name = CheckpointName(round=round_number, step=step)
    assert parse_checkpoint(str(name)) == name
    assert kind_of(trash_name(str(name))) is Kind.TRASH
    assert kind_of(quarantine_name(str(name), 3)) is Kind.QUARANTINED
    assert quarantined(quarantine_name(str(name), 3)) == str(name)
    with pytest.raises(CheckpointError, match=f"step {-1 - step}"):
        CheckpointName(round=0, step=-1 - step)


@pytest.mark.parametrize(
    "text",
    [
        "step-120-r7-0123456789ab", "step-0000000120-r7-0123456789ab", "step-000000120-r07-0123456789ab",
        "step-000000120-r7-0123456789AB", "step-000000120-r7-0123456789ab\n", "step-000000120-r7-0123456789ab.bak",
        "tmp-notes", "trash-", "corrupt-data", "corrupt-" + NAME, "latest",
    ],
)  # fmt: skip
def test_near_misses_are_foreign(text: str) -> None:
    """A name that is not exactly ours is never touched."""
    assert kind_of(text) is Kind.FOREIGN
    assert parse_checkpoint(text) is None


@given(st.text(max_size=100), st.integers(1, 2**31), st.integers(0, 2**60), st.integers(0, 2**40))
def test_a_temporary_name_carries_its_writer(host: str, pid: int, start: int, namespace: int) -> None:
    """The identity comes back from the name, whatever the host's name; names fit a file system, and never repeat."""
    writer = WriterIdentity(pid=pid, start=start, boot="ab" * 16, namespace=namespace, host=host_label(host))
    name = temporary_name(writer)
    assert parse_temporary(name) == writer
    assert temporary_name(writer) != name
    assert kind_of(name) is Kind.TEMPORARY
    assert len(name.encode()) < 255
    assert "/" not in name


def test_of_two_saves_of_one_step_the_later_is_newer() -> None:
    """The first may have been on schedule, the second knows that it is the best."""
    saves = [CheckpointName(round=3, step=40) for _ in range(50)]
    assert saves == sorted(saves)
    assert len({save.nonce for save in saves}) == 50


# ---- retention: what stays, what goes, and the reasons


def story(*steps: int, **metrics: float) -> list[Candidate]:
    """Checkpoints at ``steps``, newest first; ``s7=0.5`` gives the one of step 7 that loss."""
    values = {name: {"loss": value} for name, value in metrics.items()}
    return [Candidate(f"s{step}", step, metrics=values.get(f"s{step}", {})) for step in steps]


def kept(candidates: list[Candidate], policy: Retention, *protected: str) -> list[str]:
    return [verdict.name for verdict in decide(candidates, policy, frozenset(protected)) if verdict.keep]


SCORED = story(5, 4, 3, 2, 1, s4=math.nan, s3=0.5, s2=0.1, s1=0.9)
FLAGGED = [Candidate("a", 4), Candidate("b", 3, best=True), Candidate("c", 2, best=True)]


@pytest.mark.parametrize(
    ("candidates", "policy", "protected", "staying"),
    [
        (story(5, 4, 9, 2), Retention(keep_last=2), (), ["s5", "s4"]),
        (story(25, 24, 20, 15, 10), Retention(keep_last=1, keep_every=10), (), ["s25", "s20", "s10"]),
        (SCORED, Retention(keep_last=1, metric="loss", mode=BestMode.MIN), (), ["s5", "s2"]),
        (SCORED, Retention(keep_last=1, metric="loss", mode=BestMode.MAX), (), ["s5", "s1"]),
        (FLAGGED, Retention(keep_last=1), (), ["a", "b"]),
        (story(9, 8, 7), Retention(keep_last=1), ("s7",), ["s9", "s7"]),
    ],
    ids=["newest", "milestones", "lowest", "highest", "flagged", "protected"],
)
def test_each_rule_keeps_its_checkpoints(
    candidates: list[Candidate], policy: Retention, protected: tuple[str, ...], staying: list[str]
) -> None:
    """The order counts, not step numbers; NaN and missing metrics are never best; only the newest flag counts."""
    assert kept(candidates, policy, *protected) == staying


def test_of_equally_good_ones_the_newest_is_best() -> None:
    """Ties do not depend on chance."""
    policy = Retention(metric="loss")
    assert [each.name for each in by_metric(story(3, 2, 1, s3=1.0, s2=0.5, s1=0.5), policy)] == ["s2", "s1", "s3"]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"keep_last": 0}, "keep_last"),
        ({"keep_every": 0}, "keep_every"),
        ({"keep_best": 0}, "keep_best"),
        ({"metric": "loss", "mode": "minimum"}, "minimum"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(values: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Retention(**values)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.floats()), unique_by=lambda each: each[0], max_size=12),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 7)),
)
def test_invariants(values: list[tuple[int, bool, float]], keep_last: int, keep_every: int | None) -> None:
    """Every checkpoint gets one verdict with a reason; the newest stays; deciding again removes nothing more."""
    candidates = [Candidate(str(step), step, best, {"loss": loss}) for step, best, loss in values]
    policy = Retention(keep_last=keep_last, keep_every=keep_every, metric="loss")
    verdicts = decide(candidates, policy, frozenset())
    assert [verdict.name for verdict in verdicts] == [each.name for each in candidates]
    assert all(verdict.reason for verdict in verdicts)
    assert all(verdict.keep for verdict in verdicts[:keep_last])
    staying = [each for each, verdict in zip(candidates, verdicts, strict=True) if verdict.keep]
    assert kept(staying, policy) == [each.name for each in staying]
