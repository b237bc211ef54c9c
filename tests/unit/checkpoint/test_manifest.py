"""The manifest: any change of any bit is seen; bad values are named."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from elastic_trainer.checkpoint.layout import DamagedError, UnreadableError
from elastic_trainer.checkpoint.manifest import FORMAT, FileRecord, Manifest, checked_fields, checksum, seal, unseal
from elastic_trainer.errors import CheckpointError

NAME = "step-000000120-r7-0123456789ab"


def manifest(**changes: object) -> Manifest:
    """A small manifest."""
    values = {
        "name": NAME,
        "step": 120,
        "round": 7,
        "epoch": 2,
        "samples": 640,
        "world_size": 4,
        "created": 1.5e9,
        "metrics": {"loss": 0.25, "broken": math.nan, "far": -math.inf},
        "fields": {"seed": 7, "nested": [1, None, {"a": "ü"}]},
        "files": [FileRecord(name="a.bin", size=5, head_size=2, chunk_size=2, chunks=("0", "1", "2"))],
    }
    return Manifest.model_validate({**values, **changes})


def test_a_manifest_comes_back() -> None:
    """All values survive, metrics that are not finite among them."""
    back = unseal(seal(manifest()), NAME)
    assert math.isnan(back.metrics["broken"])
    assert back.metrics["far"] == -math.inf
    assert back.model_dump(exclude={"metrics"}) == manifest().model_dump(exclude={"metrics"})


def test_any_change_of_the_file_is_seen() -> None:
    """Each flipped bit of body, checksum, punctuation and white space; each truncation; anything appended."""
    whole = seal(manifest())
    number = int.from_bytes(whole)
    flipped = ((number ^ 1 << bit).to_bytes(len(whole)) for bit in range(8 * len(whole)))
    for content in (*flipped, *(whole[:length] for length in range(len(whole))), whole + b"\n", whole + whole):
        with pytest.raises(DamagedError):
            unseal(content, NAME)


def test_the_manifest_of_another_checkpoint_is_damage() -> None:
    """A manifest vouches only for the name that it was written for."""
    with pytest.raises(DamagedError, match="is that of"):
        unseal(seal(manifest()), NAME.replace("120", "121"))


def test_a_newer_format_is_not_damage() -> None:
    """What a later version wrote may be good: it is unreadable here, and the hint says upgrade."""
    with pytest.raises(UnreadableError, match="upgrade"):
        unseal(seal(manifest(format=FORMAT + 1)), NAME)


def test_a_sealed_manifest_with_bad_values_names_the_field() -> None:
    """Right checksum, wrong content: the report names the field."""
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
    """Names with path separators are refused."""
    with pytest.raises(ValidationError):
        FileRecord(name=name, size=0, head_size=0, chunk_size=1, chunks=())


@pytest.mark.parametrize("value", [math.nan, {1, 2}, object(), b"x"], ids=lambda value: type(value).__name__)
def test_fields_that_are_not_json_are_refused_by_name(value: object) -> None:
    """The error names the field."""
    with pytest.raises(CheckpointError, match="'bad'"):
        checked_fields({"good": 1, "bad": value})


def test_the_checksum_is_xxh3_128() -> None:
    """The algorithm is part of the format: the published digest of the empty input."""
    assert checksum(b"") == "99aa06d3014798d86001c324468d497f"
