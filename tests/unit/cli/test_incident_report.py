"""What is known of one round's end, for a post-mortem."""

from __future__ import annotations

import json

import pytest

from elastic_trainer.cli.events import report, report_json, report_markdown
from elastic_trainer.errors import ConfigError
from elastic_trainer.membership.documents import Incident, JournalEntry, RoundState
from tests.support.monitored import entry, incident

DIED = incident(7, kind="worker_died", cause=None, reason="worker 0 (rank 1) ended with exit code 1: ValueError: x | y")
HAPPENED: list[JournalEntry | Incident] = [
    entry(6),
    incident(6),
    entry(7),
    DIED,
    entry(7, RoundState.BROKEN),
    incident(7, world_before=4),
    entry(8),
]


def test_a_report_has_all_of_one_round_and_what_followed() -> None:
    """Both kinds of records, and the transitions of the round and of the next one, in both forms."""
    found = report("r", 7, HAPPENED)
    values = json.loads(report_json(found))
    assert (values["run"], values["round"]) == ("r", 7)
    assert [each["kind"] for each in values["incidents"]] == ["worker_died", "round"]
    assert [(each["round"], each["state"]) for each in values["transitions"]] == [
        (7, "active"),
        (7, "broken"),
        (8, "active"),
    ]
    page = report_markdown(found, ["first", "second"])
    assert page.startswith("# Run r, round 7\n\n## Worker died\n")
    assert "| reason | worker 0 (rank 1) ended with exit code 1: ValueError: x / y |" in page
    assert (
        "| outcome | No step was lost. Nobody knows since when training stood still; it took 50 ms to regroup" in page
    )
    assert "| next round | 8 |" in page
    assert "- first\n- second" in page


@pytest.mark.parametrize(
    ("is_open", "said"), [(True, "No round has followed yet."), (False, "The run did not continue after it.")]
)
def test_where_nothing_followed_the_report_says_so(is_open: bool, said: str) -> None:
    """And gives no figures of a recovery that never was."""
    end = incident(7).model_copy(update={"open": is_open, "next_round": None})
    page = report_markdown(report("r", 7, [end]), [])
    assert f"| outcome | {said} |" in page
    assert "next round" not in page


@pytest.mark.parametrize(
    ("happened", "hint"), [([entry(7), incident(3), incident(5)], "there are some of rounds 3,5"), ([], "none")]
)
def test_an_incident_that_is_not_there_is_one_sentence(happened: list[JournalEntry | Incident], hint: str) -> None:
    """With those that there are."""
    with pytest.raises(ConfigError, match="no incident of round 7 of run 'r' is known") as caught:
        report("r", 7, happened)
    assert hint in str(caught.value)
