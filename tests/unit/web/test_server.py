"""Who may read, and HTTP as bytes."""

from __future__ import annotations

import base64
import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.web.server import (
    HEAD_LIMIT,
    Access,
    Answer,
    Body,
    CompleteRequest,
    Request,
    parse_request,
    rendered,
    text,
)


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


NOT_TEXT = "Basic " + base64.b64encode(b"\xff:x").decode()


def test_only_the_token_opens_as_a_bearer_and_as_a_password() -> None:
    """Programs send the one, browsers the other, whatever the name."""
    for right in ("Bearer s3cret", "bearer  s3cret ", basic("anybody:s3cret"), basic(":s3cret")):
        assert Access("s3cret").allows(right), right
    for wrong in (
        *(None, "", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3cret2", "s3cret", "Digest s3cret", "Basic s3cret"),
        *("Basic ///", basic("s3cret"), basic("s3cret:"), basic("a:wrong"), NOT_TEXT, "Bearer s3crét"),
    ):
        assert not Access("s3cret").allows(wrong), wrong
    assert Access("a:b").allows(basic("me:a:b"))
    assert Access(None).allows(None)
    assert "s3cret" not in repr(Access("s3cret"))


@pytest.mark.parametrize(
    ("host", "known"),
    [
        *((name, True) for name in ("127.0.0.1:9470", "localhost", "LOCALHOST:1", "[::1]:9470", "10.0.0.7", None, "")),
        *((name, False) for name in ("evil.example:9470", "127.0.0.1.evil.example", "localhost.evil.example", "[x]:1")),
    ],
)
def test_a_loopback_port_without_a_token_answers_to_no_foreign_names(host: str | None, known: bool) -> None:
    """A web page whose name is made to point at this machine would read it otherwise. With a token it cannot."""
    assert Access(None, loopback=True).knows_host(host) is known
    assert Access(None, loopback=False).knows_host(host)
    assert Access("token", loopback=True).knows_host(host)


PIECES = st.sampled_from(
    [b"GET", b" ", b"/", b"http://[", b"HTTP/1.1", b"\r\n", b"\n", b":", b"Host", b"\x00", b"\xff", b"["]
)


@given(st.lists(PIECES | st.binary(max_size=4)).map(b"".join))
def test_whatever_is_sent_raises_nothing_and_what_is_asked_can_be_answered(sent: bytes) -> None:
    """A request that got so far has a path, which whoever answers reads."""
    found = parse_request(sent)
    if isinstance(found, Answer):
        assert found.status in (400, 431, 505)
    elif found is not None:
        assert found.request.path
        assert 0 < found.size <= len(sent)


def test_a_request_is_complete_with_its_last_byte() -> None:
    """Not one sooner; what follows is the next one's."""
    sent = b"HEAD /a%20b?c HTTP/1.1\r\nHost: h\r\nX:  1\t\r\nx: 2\r\n\r\n"
    assert all(parse_request(sent[:size]) is None for size in range(len(sent)))
    request = Request("HEAD", "/a%20b?c", {"host": "h", "x": "1, 2"})
    assert parse_request(sent + b"GET /") == CompleteRequest(request, len(sent), lasts=True)
    assert request.path == "/a b"


@pytest.mark.parametrize(
    "line", ["Connection: Close", "Content-Length: 5", "Transfer-Encoding: chunked", "Content-Length: x"]
)
def test_nothing_follows_on_a_request_with_a_body_or_one_that_says_so(line: str) -> None:
    found = parse_request(f"POST / HTTP/1.1\r\n{line}\r\n\r\n".encode())
    assert isinstance(found, CompleteRequest)
    assert not found.lasts


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET http://[ HTTP/1.1\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: a\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"G" * (HEAD_LIMIT + 1), 431),
    ],
)
def test_what_is_no_request_gets_its_status(sent: bytes, status: int) -> None:
    found = parse_request(sent)
    assert isinstance(found, Answer)
    assert found.status == status


def test_an_answer_has_its_length_and_only_who_takes_it_gets_it_compressed() -> None:
    answer = Answer(200, "text/plain", Body.compressed(b"x" * 2000))
    zipped = rendered(answer, Request("GET", "/", {"accept-encoding": "gzip"}), lasts=True)
    assert (b"Content-Encoding: gzip\r\n" in zipped, b"Connection: close" in zipped) == (True, False)
    assert gzip.decompress(zipped.partition(b"\r\n\r\n")[2]) == b"x" * 2000
    for accepted in ("br, gzip;q=0.5", "*", "br", "gzip;q=0", ""):
        found = rendered(answer, Request("GET", "/", {"accept-encoding": accepted}), lasts=True)
        assert (b"Content-Encoding: gzip" in found) == (accepted in ("br, gzip;q=0.5", "*"))
        assert b"Vary: Accept-Encoding" in found
    whole = rendered(answer, Request("GET", "/"), lasts=False)
    assert whole.endswith(b"\r\n\r\n" + b"x" * 2000)
    assert b"Content-Length: 2000\r\n" in whole
    assert b"Connection: close\r\n" in whole
    assert rendered(text(200, "ok"), Request("HEAD", "/"), lasts=True).endswith(b"\r\n\r\n")
