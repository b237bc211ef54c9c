"""Makes authenticated calls to etcd within a deadline, and translates failures.

*Runs in* agents and commands, any thread.
*Owns* the present :class:`~elastic_trainer.store.channel.Wire` and the auth token.
*Fails by* the errors of :func:`~elastic_trainer.store.failures.translate`, never with gRPC's.
*Invariant*: a call is sent at most once, and once more only if etcd rejected its token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import ConfigError, ElasticTrainerError, StoreUnavailableError
from elastic_trainer.settings import StoreSettings, secret
from elastic_trainer.store import channel, failures

RESOLVE_INTERVAL_S = 5.0
"""Minimum time between two DNS look-ups while etcd does not answer, in seconds."""

Metadata = tuple[tuple[str, str], ...]
Method = Callable[[channel.Wire], Any]


class StoreConnection:
    """One logical connection to etcd."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._token_lock = threading.Lock()
        self._token = ""
        self._was_let_in = False
        self._named = len(settings.endpoints) > 1 and not all(channel.is_address(e.host) for e in settings.endpoints)
        self._resolved_at = SYSTEM.monotonic()
        self._wire = channel.Wire(settings, channel.resolved(settings.endpoints))
        self.closed = threading.Event()
        self.where = ", ".join(str(endpoint) for endpoint in settings.endpoints)

    @property
    def wire(self) -> channel.Wire:
        """The present channel and its stubs."""
        return self._wire

    @property
    def rpc(self) -> Any:
        """etcd's message classes."""
        return self._wire.rpc

    def close(self) -> None:
        self.closed.set()
        with self._lock:
            self._wire.close()

    def call(
        self,
        method: Method,
        request: Any,
        deadline: Deadline,
        *,
        write: bool,
        started: Callable[[Any], None] = lambda _: None,
    ) -> Any:
        """The response to ``request``; ``started`` receives the call, which another thread may cancel."""
        token = self._token_for(deadline)
        try:
            return self._once(method, request, deadline, token, started)
        except grpc.RpcError as error:
            if not self._is_stale(error):
                raise self._translated(error, write=write) from error
        try:
            return self._once(method, request, deadline, self._renewed_token(token, deadline), started)
        except grpc.RpcError as error:
            if self._is_stale(error):  # a new token is already invalid: users are being changed, or etcd restarts again
                raise StoreUnavailableError(f"etcd at {self.where} rejects the token that it has issued") from error
            raise self._translated(error, write=write) from error

    def stream(self, method: Method, requests: Iterator[Any], deadline: Deadline) -> Any:
        """Open a stream. ``hasleader`` makes etcd end it when the quorum is lost, instead of staying silent."""
        metadata = (*_metadata(self._token_for(deadline)), ("hasleader", "true"))
        return self._guarded(lambda: method(self.wire)(requests, metadata=metadata))

    def responses(self, stream: Any) -> Iterator[Any]:
        """Iterate over ``stream`` with its errors translated."""
        try:
            yield from stream
        except grpc.RpcError as error:
            raise self._translated(error, write=False) from error

    def asks_who_it_is(self, deadline: Deadline) -> bool:
        """Whether etcd requires authentication and accepts this user. Raises ConfigError if it refuses the user."""
        return bool(self._token_for(deadline))

    def forget_token(self) -> None:
        """Authenticate again before the next call."""
        with self._token_lock:
            self._token = ""

    def _once(
        self, method: Method, request: Any, deadline: Deadline, token: str, started: Callable[[Any], None]
    ) -> Any:
        if deadline.expired:
            raise StoreUnavailableError(f"no time was left for a request to etcd at {self.where}")
        call = self._guarded(
            lambda: method(self.wire).future(request, timeout=deadline.remaining_s(), metadata=_metadata(token))
        )
        started(call)
        try:
            return call.result()
        except grpc.FutureCancelledError as error:
            raise StoreUnavailableError("the call was cancelled") from error

    def _guarded(self, invoke: Callable[[], Any]) -> Any:
        """Run ``invoke``; grpc raises ValueError if the channel is closed."""
        if self.closed.is_set():
            raise StoreUnavailableError("the connection to etcd is closed")
        try:
            return invoke()
        except ValueError as error:
            raise StoreUnavailableError("the connection to etcd is closed") from error

    def _translated(self, error: Any, *, write: bool) -> ElasticTrainerError:
        translated = failures.translate(error.code().name, error.details() or "", where=self.where, write=write)
        if isinstance(translated, StoreUnavailableError):
            self._follow_names()
        return translated

    def _follow_names(self) -> None:
        """Look up the host names again: after a restart members of a cluster may have new addresses."""
        with self._lock:
            now = SYSTEM.monotonic()
            if not self._named or self.closed.is_set() or now - self._resolved_at < RESOLVE_INTERVAL_S:
                return
            self._resolved_at = now
            try:
                addresses = channel.resolved(self._settings.endpoints)
            except StoreUnavailableError:
                return  # DNS is unavailable too; the old addresses are the best known
            if set(addresses) != set(self._wire.addresses):
                # The old channel ends with its last call; closing it would cancel calls that may still succeed.
                self._wire = channel.Wire(self._settings, addresses)

    def _is_stale(self, error: Any) -> bool:
        return self._settings.user is not None and failures.is_stale_token(error.code().name, error.details() or "")

    def _token_for(self, deadline: Deadline) -> str:
        if self._settings.user is None or self._token:
            return self._token
        return self._renewed_token("", deadline)

    def _renewed_token(self, stale: str, deadline: Deadline) -> str:
        """A token that is not ``stale``; one thread fetches it, the others wait for that one."""
        if not self._token_lock.acquire(timeout=deadline.remaining_s()):
            raise StoreUnavailableError(f"etcd at {self.where} did not authenticate in time")
        try:
            if self._token in (stale, ""):  # empty: a watch has also found it to be stale
                self._token = self._authenticate(deadline)
            return self._token
        finally:
            self._token_lock.release()

    def _authenticate(self, deadline: Deadline) -> str:
        """A new token. With a password file, a refusal counts as an outage once etcd has accepted this user.

        An administrator changes a password in etcd and in the file at different times; nodes that train meanwhile retry
        until both agree.
        """
        try:
            token = self._logged_in(deadline)
        except ConfigError as error:
            if self._was_let_in and self._settings.password_file is not None:
                raise StoreUnavailableError(error.message, hint=error.hint) from error
            raise
        self._was_let_in = True
        return token

    def _logged_in(self, deadline: Deadline) -> str:
        # etcd3 authenticates once, in its constructor, with call credentials that gRPC refuses without TLS.
        request = self.rpc.AuthenticateRequest(name=self._settings.user, password=self._password())
        try:
            return str(self._once(lambda wire: wire.auth.Authenticate, request, deadline, "", lambda _: None).token)
        except grpc.RpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                return ""
            raise self._translated(error, write=False) from error

    def _password(self) -> str:
        file = self._settings.password_file
        return secret(file, "password_file") if file is not None else self._settings.password or ""


def _metadata(token: str) -> Metadata:
    return (("token", token),) if token else ()
