"""The error tree says what to do."""

from __future__ import annotations

import pytest

from elastic_trainer import errors


def test_a_hint_follows_the_message() -> None:
    """One line for the operator; without a hint the message alone."""
    assert str(errors.ConfigError("'ttl' is wrong", hint="use 5")) == "'ttl' is wrong (use 5)"
    assert str(errors.ConfigError("'ttl' is wrong")) == "'ttl' is wrong"


@pytest.mark.parametrize(
    ("kind", "base", "code"),
    [
        (errors.StoreUnavailableError, errors.TransientError, 69),
        (errors.OutcomeUnknownError, errors.TransientError, 69),
        (errors.LeaseLostError, errors.FencedError, 1),
        (errors.RoundBrokenError, errors.RejoinError, 1),
        (errors.SpecMismatchError, errors.ConfigError, 78),
        (errors.DataError, errors.PermanentError, 78),
        (errors.StorageError, errors.CheckpointError, 73),
        (errors.JoinTimeoutError, errors.PermanentError, 1),
    ],
)
def test_kinds_and_exit_codes(
    kind: type[errors.ElasticTrainerError], base: type[errors.ElasticTrainerError], code: int
) -> None:
    """Each error belongs to what its receiver must do and ends a command with its code."""
    assert issubclass(kind, base)
    assert kind("x").exit_code == code


def test_an_unknown_outcome_is_not_mere_unavailability() -> None:
    """Else a retry of "unavailable" would repeat a write that may have happened."""
    assert not issubclass(errors.OutcomeUnknownError, errors.StoreUnavailableError)
