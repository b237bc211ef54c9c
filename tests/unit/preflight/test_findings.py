"""Findings of what is read without asking the machine: driver's output, times, limits; and findings as JSON."""

from __future__ import annotations

import json
from typing import NoReturn

import pytest

from elastic_trainer.clock import Deadline
from elastic_trainer.errors import StoreUnavailableError
from elastic_trainer.preflight import comparison as coordination
from elastic_trainer.preflight.comparison import judged_round_trip
from elastic_trainer.preflight.examination import understood
from elastic_trainer.preflight.judge import Finding, FitLimits, Status, amount, bad, counted, sentence, size_text
from elastic_trainer.settings import Endpoint, StoreSettings
from tests.support.memory_backend import ManualClock


def test_a_finding_survives_json() -> None:
    """Checks in other processes tell theirs so."""
    finding = Finding("disk.write", Status.WARN, "3 MB/s", 3.0, "MB/s", 50.0, "use another")
    assert Finding.from_json(json.loads(json.dumps(finding.as_json()))) == finding


def test_only_what_is_bad_speaks_against_a_node() -> None:
    findings = [Finding(str(status), status, f"text {status}") for status in Status]
    assert [finding.name for finding in bad(findings)] == ["bad"]
    assert sentence(findings[1:3]) == "warn: text warn; bad: text bad"


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(20.0, 4.0), (150.0, 15.0)])
def test_an_endpoint_gets_a_tenth_of_the_time(
    timeout_s: float, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no less than four seconds; the rest of the time is for what comes after it."""

    def silent(_: StoreSettings, deadline: Deadline, **__: object) -> NoReturn:
        assert deadline.remaining_s() == pytest.approx(limit_s, abs=1e-6)
        raise StoreUnavailableError("no answer")

    monkeypatch.setattr(coordination, "connect_checked", silent)
    settings, clock = StoreSettings(endpoints=(Endpoint(host="h", port=1),)), ManualClock()
    found = coordination.endpoints(settings, None, FitLimits(), Deadline.after(timeout_s, clock))
    assert [(each.status, each.text) for each in found] == [(Status.BAD, "no answer")]


@pytest.mark.parametrize(
    ("line", "status", "text"),
    [
        ("0, NVIDIA H100 80GB HBM3, 570.1, 0, 0x0000000000000000", Status.OK, "NVIDIA H100 80GB HBM3"),
        ("0, NVIDIA H100, 570.1, 0, 0x0000000000000005", Status.OK, "NVIDIA H100"),  # idle, at its power cap
        ("0, NVIDIA H100, 570.1, 3, 0x0", Status.BAD, "NVIDIA H100: 3 uncorrected memory errors"),
        (
            "0, NVIDIA H100, 570.1, 0, 0x0000000000000048",
            Status.WARN,
            "NVIDIA H100 is throttled: hardware slowdown, too hot (hardware)",
        ),
        ("0, T4, 550.2, [N/A], [N/A]", Status.OK, "T4, memory errors are not counted"),
    ],
)
def test_what_the_driver_says(line: str, status: Status, text: str) -> None:
    """Errors of memory are bad, heat is a warning, an idle device is well."""
    versions: dict[str, str] = {}
    (found,) = understood([line], versions)
    assert (found.name, found.status, found.text) == ("gpu0", status, text)
    assert versions["driver"] == line.split(", ")[2]


def test_an_unknown_answer_of_the_driver_is_skipped() -> None:
    """It proves nothing."""
    assert [finding.status for finding in understood(["No devices were found"], {})] == [Status.SKIPPED]


def test_a_slow_store_is_a_warning() -> None:
    assert judged_round_trip([0.001, 0.002, 3.0], FitLimits()).status is Status.OK
    slow = judged_round_trip([0.3, 0.2, 0.4], FitLimits())
    assert (slow.status, slow.unit) == (Status.WARN, "ms")
    assert slow.value == pytest.approx(300.0)


def test_numbers_are_short() -> None:
    """Three digits, no exponents, a plural where it belongs."""
    assert [amount(value) for value in (0.123456, 1.5, 99.95, 1234567.8)] == ["0.123", "1.5", "100", "1234568"]
    assert [size_text(size) for size in (0, 1023, 1536, 5 << 50)] == ["0 B", "1023 B", "1.5 KiB", "5120 TiB"]
    assert [counted(number, "node") for number in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]
