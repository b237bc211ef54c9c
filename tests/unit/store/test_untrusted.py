"""Whatever stands in the store: it is read as what it is, refused, or made harmless."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.membership.documents import (
    Document,
    DocumentError,
    Incident,
    JournalEntry,
    NodeHealth,
    NodeRecord,
    RoundDocument,
    RoundMember,
    RoundState,
    Spec,
)
from elastic_trainer.model import RecoveryMode
from elastic_trainer.preflight.judge import NodeReport
from elastic_trainer.store.untrusted import LONGEST_TEXT, cleaned, plain

KINDS: tuple[type[Document], ...] = (Spec, NodeRecord, RoundDocument, JournalEntry, NodeHealth, Incident, NodeReport)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def texts(found: Any) -> list[str]:
    """All texts in a JSON value, names included."""
    if isinstance(found, str):
        return [found]
    if isinstance(found, dict):
        return [*found, *(text for each in found.values() for text in texts(each))]
    return [text for each in found for text in texts(each)] if isinstance(found, list) else []


def numbers(found: Any) -> list[float]:
    """All numbers in a JSON value."""
    if isinstance(found, dict | list):
        return [number for each in (found.values() if isinstance(found, dict) else found) for number in numbers(each)]
    return [found] if isinstance(found, int | float) and not isinstance(found, bool) else []


MEMBER = RoundMember(node="n0", create_revision=3, life=0, first_rank=0, local_world_size=1, role="default")
GOOD: tuple[Document, ...] = (
    Spec(min_nodes=1, max_nodes=2, recovery=RecoveryMode.IN_PLACE),
    NodeRecord(host="h", address="127.0.0.1", local_world_size=1, store_port=1, probe_port=2),
    RoundDocument(number=1, nonce="a", state=RoundState.ACTIVE, members=(MEMBER,)),
    JournalEntry(wall=1.0, by="n0", round=1, state=RoundState.ACTIVE, reason="", nodes=("n0",), world_size=1),
    Incident(wall=1.0, by="n0", kind="node_lost", reason="gone", nodes=("n0",)),
)
MUTATIONS = [(good, name) for good in GOOD for name in json.loads(good.encode())]


@given(st.sampled_from(KINDS), st.binary() | values.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_document_is_refused(kind: type[Document], value: bytes) -> None:
    """By DocumentError alone: neither by another error, nor by one that ends the process."""
    with pytest.raises(DocumentError):
        kind.decode(value, "/key")


@given(st.sampled_from(MUTATIONS), values)
def test_a_document_with_one_wrong_field_is_read_or_refused(mutated: tuple[Document, str], value: Any) -> None:
    """Each field of each kind, in a document that is right otherwise; what is read can be written and read again."""
    good, name = mutated
    kind = type(good)
    assert kind.decode(good.encode(), "/key") == good
    with suppress(DocumentError):
        read = kind.decode(json.dumps(json.loads(good.encode()) | {name: value}).encode(), "/key")
        assert kind.decode(read.encode(), "/key") == read


@given(values)
def test_texts_are_harmless_and_numbers_are_numbers(value: Any) -> None:
    """What comes out has no control characters, nothing without an end, and means the same otherwise."""
    try:
        found = json.loads(cleaned(json.dumps(value).encode()))
    except ValueError:
        assert any(not math.isfinite(each) or abs(each) > 2**63 - 1 for each in numbers(value))
        return
    for text in texts(found):
        assert text.isprintable() or plain(text) == text
        assert not {character for character in text if ord(character) < 32 or 127 <= ord(character) < 160}
    if json.dumps(value) == json.dumps(value, ensure_ascii=False) and all(map(str.isprintable, texts(value))):
        assert found == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[2Jcleared", "\\x1b[2Jcleared"), ("one\nround 7 closed: forged", "one round 7 closed: forged"),
        ("\x9b31m", "\\x9b31m"), ("abc\u202edef", "abc\\u202edef"), ("\ud800", "\\ud800"),
        ("x" * 5000, "x" * LONGEST_TEXT + "..."), ("größe 12 µs and “fine” 漢字", "größe 12 µs and “fine” 漢字"),
    ],
)  # fmt: skip
def test_what_a_terminal_would_obey_is_shown(text: str, expected: str) -> None:
    """Escapes, lines of one's own, writing from right to left; other languages stay."""
    assert plain(text) == expected
    assert json.loads(cleaned(json.dumps([text]).encode())) == [expected]
    if "\ud800" not in text:
        assert json.loads(cleaned(json.dumps([text], ensure_ascii=False).encode())) == [expected]


@pytest.mark.parametrize(
    "value",
    [
        b'{"n": NaN}', b'{"n": -Infinity}', b'{"n": 1e999}', b'{"n": ' + b"9" * 5000 + b"}",
        b'{"n": -9223372036854775809000}', b'["\\u0007"' + b"[" * 100_000,
        b"[" * 100_000 + b'"\\u0007"' + b"]" * 100_000, b'"' + b"x" * (9 << 20) + b'"',
    ],
    ids=["NaN", "-Infinity", "1e999", "5000 digits", "65 bits", "cut off", "deep", "9 MiB"],
)  # fmt: skip
def test_what_cannot_be_a_number_or_is_too_much_is_refused(value: bytes) -> None:
    """Before it reaches arithmetic, or the depths of a parser."""
    with pytest.raises(ValueError, match=r"."):
        cleaned(value)


def test_ordinary_documents_are_not_touched() -> None:
    """Not even copied: most of what is read has nothing to be found."""
    ordinary = NodeHealth(node="n0", wall=1763785612.123456, counters={"seconds.training": 0.1234567890123456}).encode()
    assert cleaned(ordinary) is ordinary


def test_deep_nesting_is_refused_without_control_characters_too() -> None:
    """By the parser that reads the document then."""
    with pytest.raises(DocumentError):
        RoundDocument.decode(b'{"version": 3, "next": ' * 5000 + b"{}" + b"}" * 5000, "/key")
