"""What comes through the socket between agent and worker: a message, or refused."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.ipc.channel import MessageError, read_from_agent, read_from_worker

KINDS = ("hello", "ready", "failed", "progress", "evicted", "pong", "leaving", "welcome", "formation", "over", "exit")
FIELDS = ("version", "pid", "local_rank", "number", "state", "step", "status", "reason", "round", "next", "code", "run")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=8,
)
messages = st.fixed_dictionaries({"kind": st.sampled_from(KINDS)}, optional=dict.fromkeys(FIELDS, values))


@given(
    st.binary() | values.map(lambda value: json.dumps(value).encode()) | messages.map(lambda m: json.dumps(m).encode())
)
def test_a_line_is_a_message_or_refused(line: bytes) -> None:
    """In both directions, and with no other error: the other end may be a library that prints to a wrong descriptor."""
    for read in (read_from_worker, read_from_agent):
        with suppress(MessageError):
            read(line)


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "mystery"}',
        b'{"kind":' * 10_000,
        b"[" * 10_000,
        b'{"kind": "ready", "number": ' + b"9" * 5000 + b"}",
    ],
)
def test_lines_that_are_unknown_or_go_too_deep_or_far_are_refused(line: bytes) -> None:
    """With the version of the channel; not by an error of recursion, nor of a conversion."""
    for read in (read_from_worker, read_from_agent):
        with pytest.raises(MessageError, match="channel version"):
            read(line)
