"""The error tree, ordered by what the caller must do.

transient -> retry within the deadline; fenced -> stop acting; rejoin -> leave and rendezvous again;
permanent -> report, with an exit code and a hint for the operator.
"""

from __future__ import annotations

import errno
from typing import ClassVar

LONGEST_LINE = 300
"""Of what an error says of itself to others."""
EXIT_FAILURE = 1
"""Failed; or `elastic-trainer checkpoints` found damage, or a difference."""
EXIT_UNAVAILABLE = 69
"""A service that the job needs, etcd, did not answer in time (`EX_UNAVAILABLE` of sysexits.h)."""
EXIT_UNFIT = 71
"""This machine is not fit to train (`--rdzv-conf preflight=refuse`); another may be (`EX_OSERR`)."""
EXIT_CANNOT_WRITE = 73
"""An output directory cannot be written or is full (`EX_CANTCREAT`)."""
EXIT_RESTARTED = 75
"""Of workers that an operator has restarted (`EX_TEMPFAIL`): torchrun starts others in their place."""
EXIT_CONFIG = 78
"""Configuration, data or command line are wrong: trying again cannot help (`EX_CONFIG`)."""
EXIT_LEFT = 143
"""Left on request, with a checkpoint (128 + SIGTERM; SIGHUP too, unless it was ignored at the start, as under `nohup`);
never 0, which would complete a Kubernetes Job."""


class ElasticTrainerError(Exception):
    """Base of all errors of this package.

    ``hint`` says in one sentence what the operator can do; ``exit_code`` is what a command that fails with
    this error exits with.
    """

    exit_code: ClassVar[int] = EXIT_FAILURE

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class TransientError(ElasticTrainerError):
    """Retry within the deadline."""

    exit_code = EXIT_UNAVAILABLE


class StoreUnavailableError(TransientError):
    """The store did not answer; nothing is known to have happened."""


class OutcomeUnknownError(TransientError):
    """A write timed out: it may have happened, or may yet, even after later writes that its guards allow.

    Read again before deciding.
    """


class FencedError(ElasticTrainerError):
    """Another incarnation or a later round has taken over: stop acting."""


class LeaseLostError(FencedError):
    """The lease has expired; all keys under it are gone."""


class ReplacedError(FencedError):
    """This node had lost its lease, and another live node has its name now.

    No ConfigError: with that exit code a Kubernetes Job would end the other one too.
    """


class RejoinError(ElasticTrainerError):
    """Leave the present round and rendezvous again."""


class RoundBrokenError(RejoinError):
    """The round that this process works in has been broken."""


class StepGivenUpError(RoundBrokenError):
    """This process breaks its round: it has too little memory for the step, or an audit found a wrong result in it."""


class PermanentError(ElasticTrainerError):
    """Report it and end; trying the same again cannot help."""


class ConfigError(PermanentError):
    """Something the user wrote (option, file, address) is wrong."""

    exit_code = EXIT_CONFIG


class AccessDeniedError(ConfigError):
    """The store knows the user, who lacks the right."""


class CredentialsError(ConfigError):
    """The store rejects the login: a password or certificate is wrong, or is being replaced just now."""


class SpecMismatchError(ConfigError):
    """A node disagrees with the run about protocol version, node limits, recovery mode, or what the job is."""


class RunClosedError(PermanentError):
    """The run has ended; ``succeeded`` says how."""

    def __init__(self, message: str, *, succeeded: bool, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.succeeded = succeeded


class UnfitError(PermanentError):
    """The checks before joining found something bad on this machine: the job belongs on another one."""

    exit_code = EXIT_UNFIT


class JoinTimeoutError(PermanentError):
    """Too few nodes came within ``join_timeout``."""


class SessionTimeoutError(PermanentError):
    """No worker opened a Session within ``session_timeout``: a script without one, or a download that hangs."""


class CheckpointError(PermanentError):
    """A checkpoint cannot be read or does not fit this job."""


class StorageError(CheckpointError):
    """The checkpoint directory cannot be written or is full."""

    exit_code = EXIT_CANNOT_WRITE


class DataError(ConfigError):
    """Training data is missing or unreadable."""


class DataWorkerError(DataError):
    """A process that reads data has ended, say for want of memory: the next life of the job may not meet that."""

    exit_code = EXIT_FAILURE


class NonFiniteError(PermanentError):
    """The loss or the parameters are no longer finite numbers."""


class DifferError(PermanentError):
    """Ranks that train together hold different parameters."""


class SampleError(PermanentError):
    """One sample cannot be read. Unlike a DataError, only the process that needs the sample finds and reports it."""

    exit_code = EXIT_CONFIG


class StorageReadError(SampleError):
    """The storage did not give a sample, which another try or another node may get: not a mistake in the data."""

    exit_code = EXIT_FAILURE


def last_line(error: BaseException) -> str:
    """Type and message of ``error`` in one line; a full disk is called so."""
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:LONGEST_LINE] + (" (the disk is full)" if full else "")
