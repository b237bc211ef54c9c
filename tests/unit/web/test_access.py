"""Who may read the monitor."""

from __future__ import annotations

import base64

import pytest

from elastic_trainer.web.server import Access


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


NOT_TEXT = "Basic " + base64.b64encode(b"\xff:x").decode()


@pytest.mark.parametrize("given", ["Bearer s3cret", "bearer  s3cret ", basic("anybody:s3cret"), basic(":s3cret")])
def test_the_token_opens_as_a_bearer_and_as_a_password(given: str) -> None:
    """Programs send the one, browsers the other, whatever the name."""
    assert Access("s3cret").allows(given)


@pytest.mark.parametrize(
    "given",
    [
        *(None, "", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3cret2", "s3cret", "Digest s3cret", "Basic s3cret"),
        *(
            "Basic ///",
            basic("s3cret"),
            basic("s3cret:"),
            basic("a:wrong"),
            "Basic " + base64.b64encode(b"\xff:x").decode(),
        ),
        "Bearer s3crét",
    ],
)
def test_nothing_else_opens(given: str | None) -> None:
    assert not Access("s3cret").allows(given)


def test_a_password_may_hold_a_colon() -> None:
    assert Access("a:b").allows(basic("me:a:b"))


def test_without_a_token_everybody_may_read() -> None:
    assert Access(None).allows(None)


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


def test_the_token_does_not_show() -> None:
    assert "s3cret" not in repr(Access("s3cret"))
