"""Names: what is formatted parses back; nothing else is taken for ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.checkpoint.layout import (
    CheckpointName,
    Kind,
    WriterIdentity,
    host_label,
    kind_of,
    parse_checkpoint,
    parse_temporary,
    quarantine_name,
    quarantined,
    temporary_name,
    trash_name,
)
from elastic_trainer.errors import CheckpointError

NAME = "step-000000120-r7-0123456789ab"


def test_a_name_reads_as_designed() -> None:
    assert str(CheckpointName(round=7, step=120, nonce="0123456789ab")) == NAME


@given(st.integers(0, 10**17), st.integers(0, 10**17))
def test_every_name_parses_back(step: int, round_number: int) -> None:
    """Formatting and parsing are inverse, also beyond nine digits."""
    name = CheckpointName(round=round_number, step=step)
    assert parse_checkpoint(str(name)) == name


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


def test_negative_steps_are_refused() -> None:
    with pytest.raises(CheckpointError, match="step -1"):
        CheckpointName(round=0, step=-1)


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


def test_trash_and_quarantine_are_recognized() -> None:
    """Neither counts as committed; a quarantine name tells what it was."""
    assert kind_of(trash_name(NAME)) is Kind.TRASH
    assert kind_of(quarantine_name(NAME, 3)) is Kind.QUARANTINED
    assert quarantined(quarantine_name(NAME, 3)) == NAME


def test_of_two_saves_of_one_step_the_later_is_newer() -> None:
    """The first may have been on schedule, the second knows that it is the best."""
    saves = [CheckpointName(round=3, step=40) for _ in range(50)]
    assert saves == sorted(saves)
    assert len({save.nonce for save in saves}) == 50
