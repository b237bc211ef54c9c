"""The documents that nodes share: read back as written, refused when somebody else wrote them."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest

from elastic_trainer.errors import EXIT_FAILURE
from elastic_trainer.membership.documents import (
    PROTOCOL_VERSION,
    Document,
    DocumentError,
    JournalEntry,
    NodeRecord,
    RoundDocument,
    RoundMember,
    RoundState,
    Spec,
    join_address,
    split_address,
)
from elastic_trainer.model import RecoveryMode


def test_documents_are_of_the_protocol_that_refusals_name() -> None:
    assert Document.model_fields["version"].default == PROTOCOL_VERSION


@pytest.mark.parametrize("kind", [Spec, NodeRecord, RoundDocument, JournalEntry])
@pytest.mark.parametrize(
    "value", [b"", b"null", b"{}", b"[]", b"7", b"\xff\xfe", b'{"version": 1}', b"host=n1", b"\x80\x04}."]
)
def test_content_of_others_is_refused_with_the_name_of_its_key(kind: type[Document], value: bytes) -> None:
    """Whatever it is, it ends in one sentence that says where it stands and what may have happened."""
    with pytest.raises(DocumentError, match="'/elastic_trainer/run/round' holds no") as raised:
        kind.decode(value, "/elastic_trainer/run/round")
    assert raised.value.exit_code == EXIT_FAILURE
    assert raised.value.hint is not None


def large(nodes: int) -> RoundDocument:
    rows = tuple(RoundMember(f"gpu-{7919 * n % 10_000}", 10**6 + 31 * n, 1, 8 * n, 8) for n in range(nodes))
    return RoundDocument(number=1, nonce="x", state=RoundState.ACTIVE, members=rows)


def test_the_round_of_many_nodes_takes_a_quarter_of_its_bytes() -> None:
    few, many = large(100), large(10_000)
    assert json.loads(few.encode())["members"]
    assert RoundDocument.decode(many.encode(), "key") == many
    assert 4 * len(many.encode()) < len(many.model_dump_json())


def test_what_is_compressed_otherwise_is_no_document() -> None:
    """A stream that is cut off, or damaged, or of more bytes than a document may have."""
    whole = large(1000).encode()
    bomb = zlib.compress(b'{"version": 3, "number": 1, "nonce": "' + bytes(64 << 20))
    for value in (whole[:-1], whole[:40] + bytes(40) + whole[80:], bomb, b"x", b"x\x9c"):
        with pytest.raises(DocumentError):
            RoundDocument.decode(value, "key")


@pytest.mark.parametrize("version", [0, 1, "2", None])
def test_another_protocol_version_is_refused(version: Any) -> None:
    value = json.loads(Spec(min_nodes=1, max_nodes=2).encode()) | {"version": version}
    with pytest.raises(DocumentError, match=f"protocol version {PROTOCOL_VERSION}"):
        Spec.decode(json.dumps(value).encode(), "/spec")


@pytest.mark.parametrize(
    ("field", "value"),
    [("local_world_size", 0), ("store_port", 65536), ("state", "asleep"), ("life", -1), ("step_time_s", "NaN")],
)
def test_values_that_cannot_be_are_refused(field: str, value: Any) -> None:
    good = NodeRecord(host="h", address="a", local_world_size=1, store_port=1, probe_port=1)
    changed = json.loads(good.encode()) | {field: value}
    with pytest.raises(DocumentError):
        NodeRecord.decode(json.dumps(changed).encode(), "/nodes/a")


def test_fields_of_a_later_version_are_passed_over() -> None:
    value = json.loads(Spec(min_nodes=1, max_nodes=2).encode()) | {"colour": "green"}
    assert Spec.decode(json.dumps(value).encode(), "/spec") == Spec(min_nodes=1, max_nodes=2)


@pytest.mark.parametrize("host", ["127.0.0.1", "node-7.example.org", "::1", "fe80::1"])
def test_addresses_survive_the_way_through_one_string(host: str) -> None:
    assert split_address(join_address(host, 29500)) == (host, 29500)


def test_a_disagreement_is_reported_in_words() -> None:
    mine = Spec(min_nodes=2, max_nodes=4)
    assert mine.disagreement(mine) is None
    assert mine.disagreement(Spec(min_nodes=2, max_nodes=8)) == "max nodes 8 here, 4 in the run"
    assert mine.disagreement(Spec(min_nodes=1, max_nodes=8)) == "min nodes 1 here, 2 in the run"
    in_place = Spec(min_nodes=2, max_nodes=4, recovery=RecoveryMode.IN_PLACE)
    assert mine.disagreement(in_place) == "recovery in_place here, restart in the run"
    pairs = Spec(min_nodes=2, max_nodes=4, sizes=(2, 4))
    assert mine.disagreement(pairs) == "sizes 2, 4 here, all in the run"
    grouped = pairs.model_copy(update={"shard_nodes": 2})
    assert mine.disagreement(grouped) == "shard_nodes 2 here, 1 in the run"


def test_what_differs_of_a_job_is_named_unless_it_may_or_is_not_known() -> None:
    mine = Spec(min_nodes=1, max_nodes=2, user="ann", checkpoint_dir="/a", script="train.py", command="12ab")
    other = mine.model_copy(update={"user": "bob", "command": "34cd", "checkpoint_dir": ""})
    assert mine.changed(other) == {
        "user": "user 'bob' here, 'ann' in the run",
        "command": "other arguments of the script",
    }
    assert list(mine.changed(other, {"user"})) == ["command"]
    earlier = Spec(min_nodes=1, max_nodes=2)
    assert mine.changed(earlier) == earlier.changed(mine) == mine.changed(mine) == {}
    assert (earlier.knows_less(mine), mine.knows_less(earlier)) == (True, False)


def test_a_name_of_the_file_system_that_is_no_text_is_escaped() -> None:
    for raw, text in (("café \udce9", "café \\xe9"), ("\ud800", "\\ud800")):
        entry = JournalEntry(wall=0, by="n", round=1, state=RoundState.BROKEN, reason=raw, nodes=(raw,), world_size=1)
        read = JournalEntry.decode(entry.encode(), "k")
        assert (read.reason, read.nodes) == (text, (text,))
