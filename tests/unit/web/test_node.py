"""A node's endpoint: what it refuses before it listens."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.registry import CollectorRegistry

from elastic_trainer.errors import ConfigError
from elastic_trainer.web.node import EndpointOptions, NodeEndpoint


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"short\n", "fewer than 8 characters"),
        (b"a secret of words\n", "not one word of ASCII"),
        (b"first-line\nsecond-line\n", "not one word of ASCII"),
        ("geheimnisträger\n".encode(), "not one word of ASCII"),
        (b"\xff\xfe\xfd", "cannot be read"),
    ],
)
def test_a_token_that_no_reader_could_present_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """A header carries one word; otherwise each scrape would be refused, and nobody would know why."""
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        NodeEndpoint(EndpointOptions("127.0.0.1", 0, file, None, None), CollectorRegistry())
