"""The store port over etcd v3, through the etcd3 package's channel and stubs. Only this module imports etcd3 and grpc.

From bottom to top: etcd3, the port's values as etcd's messages, errors, a channel, authenticated calls, the store.

*Runs in* agents, the monitor and commands; safe from several threads.
*Owns* one connection, its auth token, the watches opened through it, and ``etcd3.etcdrpc`` in ``sys.modules``.
*Fails by* the errors that :mod:`elastic_trainer.store.api` names, never with gRPC's.
*Invariant*: a write is sent at most once unless etcd certainly did not accept it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import ipaddress
import json
import math
import re
import secrets
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc

from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import (
    AccessDeniedError,
    ConfigError,
    CredentialsError,
    ElasticTrainerError,
    LeaseLostError,
    OutcomeUnknownError,
    PermanentError,
    StoreUnavailableError,
)
from elastic_trainer.settings import Endpoint, StoreSettings, secret
from elastic_trainer.store.api import (
    Compare,
    Delete,
    EventKind,
    KeyValue,
    Lease,
    Operation,
    Order,
    Put,
    Read,
    Snapshot,
    TransactionResult,
    Watch,
    WatchEvent,
    WatchListener,
    prefix_end,
)
from elastic_trainer.store.retry import read_attempt, within
from elastic_trainer.store.watch import EventBatch, KeyHistory, WatchLoop, WatchReading

# ---- etcd3's messages and stubs, from a private descriptor pool, so that etcd3 works with any protobuf
#
# etcd3 0.12.0 ships code generated for protobuf 3, which protobuf 4 and later refuse to run. The descriptors in that
# code are valid, so they are read from its source without running it, and classes are built from them. The pool is
# private: other etcd clients in the process register the same message names in the default pool undisturbed.


PACKAGE = "etcd3.etcdrpc"
_FILES = ("kv", "auth", "rpc")  # in order of import: rpc.proto needs the other two
_ETCD3_HINT = "pip install 'etcd3>=0.12,<0.13'"
_LITERAL = re.compile(r"""(?:_b\()?(b?(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"))""")
_loading = threading.Lock()


def load_etcd3() -> Any:
    """The ``etcd3`` package, importable whatever protobuf is installed."""
    with _loading:
        if "etcd3" not in sys.modules:
            # Looks up the package's spec without importing it: its __init__ would fail with protobuf 4.
            directory = source_directory()
            if PACKAGE not in sys.modules:
                sys.modules.update(build(directory))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it has deprecated imports, which users cannot fix
                return importlib.import_module("etcd3")
        except ImportError as error:
            raise ConfigError(f"the etcd3 package does not import: {error}", hint=_ETCD3_HINT) from error


def source_directory() -> Path:
    """The folder of the installed etcd3's generated modules."""
    spec = importlib.util.find_spec("etcd3")
    if spec is None or spec.origin is None:
        raise ConfigError("the etcd3 package is not installed", hint=_ETCD3_HINT)
    return Path(spec.origin).parent / "etcdrpc"


def build(directory: Path) -> dict[str, ModuleType]:
    """The modules ``etcd3.etcdrpc``, its three ``*_pb2`` and ``rpc_pb2_grpc``, built from ``directory``'s sources."""
    from google.protobuf.descriptor_pool import DescriptorPool

    pool = DescriptorPool()
    modules: dict[str, ModuleType] = {}
    try:
        for name in _FILES:
            pool.AddSerializedFile(serialized_descriptor(directory / f"{name}_pb2.py"))
            module = _message_module(f"{PACKAGE}.{name}_pb2", pool.FindFileByName(f"{name}.proto"))
            modules[module.__name__] = module
        stubs = ModuleType(f"{PACKAGE}.rpc_pb2_grpc")
        for name, service in modules[f"{PACKAGE}.rpc_pb2"].DESCRIPTOR.services_by_name.items():
            setattr(stubs, f"{name}Stub", type(f"{name}Stub", (), {"__init__": _stub_initialiser(service)}))
    except (TypeError, KeyError) as error:  # what protobuf raises for malformed or incomplete descriptors
        raise ConfigError(f"etcd3 in {directory} has unexpected descriptors: {error}", hint=_ETCD3_HINT) from error
    modules[stubs.__name__] = stubs
    modules[PACKAGE] = _package(modules)
    return modules


def serialized_descriptor(path: Path) -> bytes:
    """The ``serialized_pb`` argument in generated module ``path``: ``_b('...')`` or a bytes literal. No code is run.

    Only that literal is parsed: the whole module would take 0.2 s, in each agent and command.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"etcd3's {path.name} cannot be read: {error}", hint=_ETCD3_HINT) from error
    _, found, rest = source.partition("serialized_pb=")
    if not found:
        raise ConfigError(f"etcd3's {path.name} holds no descriptor", hint=_ETCD3_HINT)
    try:
        if (literal := _LITERAL.match(rest)) is not None:
            value: str | bytes = ast.literal_eval(literal[1])
            return value.encode("latin1") if isinstance(value, str) else value
    except (SyntaxError, UnicodeEncodeError):
        pass
    raise ConfigError(f"etcd3's {path.name} holds its descriptor in an unknown form", hint=_ETCD3_HINT)


def _message_module(name: str, descriptor: Any) -> ModuleType:
    """A module with the message classes and enums of one ``.proto`` file, like protoc's."""
    from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
    from google.protobuf.message_factory import GetMessageClass

    module = ModuleType(name)
    content = vars(module)
    content["DESCRIPTOR"] = descriptor
    content.update({each: GetMessageClass(message) for each, message in descriptor.message_types_by_name.items()})
    for each, enum in descriptor.enum_types_by_name.items():
        content.update({each: EnumTypeWrapper(enum), **{value.name: value.number for value in enum.values}})
    return module


def _stub_initialiser(service: Any) -> Callable[[Any, Any], None]:
    """An ``__init__(self, channel)`` that gives the stub one callable for each method of ``service``."""
    from google.protobuf.message_factory import GetMessageClass

    def initialise(self: Any, channel: Any) -> None:
        for method in service.methods:
            request = "stream" if method.client_streaming else "unary"
            response = "stream" if method.server_streaming else "unary"
            call = getattr(channel, f"{request}_{response}")(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    return initialise


def _package(modules: dict[str, ModuleType]) -> ModuleType:
    """The package itself: like etcd3's own ``__init__`` it re-exports rpc_pb2 and rpc_pb2_grpc."""
    package = ModuleType(PACKAGE)
    package.__path__ = []
    for name, module in modules.items():
        setattr(package, name.rpartition(".")[2], module)
    for exporter in ("rpc_pb2", "rpc_pb2_grpc"):
        public = vars(modules[f"{PACKAGE}.{exporter}"]).items()
        vars(package).update({name: value for name, value in public if not name.startswith("_")})
    return package


# ---- values as messages; ``rpc`` is the module of etcd's message classes


def encoded(key: str) -> bytes:
    """A key in bytes; a key that was read is restored exactly, even if it is not valid text (see :func:`key_value`)."""
    return key.encode(errors="surrogateescape")


def bounds(key: str, range_end: str | None) -> dict[str, bytes]:
    """``key`` and ``range_end`` as request fields of the same names."""
    fields = {"key": encoded(key)}
    if range_end is not None:
        fields["range_end"] = encoded(range_end)
    return fields


def compare(rpc: Any, guard: Compare) -> Any:
    """A guard as etcd's Compare."""
    return rpc.Compare(
        result=getattr(rpc.Compare, guard.relation.name),
        target=getattr(rpc.Compare, guard.field.name.removesuffix("_REVISION")),
        **{guard.field.value: guard.operand},
        **bounds(guard.key, guard.range_end),
    )


def reading(rpc: Any, wanted: Read) -> Any:
    """A read as etcd's RangeRequest; without a sort target etcd answers in key order."""
    request = rpc.RangeRequest(limit=wanted.limit, keys_only=wanted.keys_only, **bounds(wanted.key, wanted.range_end))
    if wanted.order is Order.CREATE_REVISION:
        request.sort_target, request.sort_order = rpc.RangeRequest.CREATE, rpc.RangeRequest.ASCEND
    return request


def operation(rpc: Any, wanted: Operation) -> Any:
    """An operation as etcd's RequestOp."""
    if isinstance(wanted, Put):
        put = rpc.PutRequest(key=encoded(wanted.key), value=wanted.value, lease=wanted.lease)
        return rpc.RequestOp(request_put=put)
    if isinstance(wanted, Delete):
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(**bounds(wanted.key, wanted.range_end)))
    return rpc.RequestOp(request_range=reading(rpc, wanted))


def transaction(rpc: Any, guards: Sequence[Compare], success: Sequence[Operation], failure: Sequence[Operation]) -> Any:
    """etcd's TxnRequest."""
    return rpc.TxnRequest(
        compare=[compare(rpc, guard) for guard in guards],
        success=[operation(rpc, wanted) for wanted in success],
        failure=[operation(rpc, wanted) for wanted in failure],
    )


def key_value(message: Any) -> KeyValue:
    """etcd's KeyValue as the port's."""
    return KeyValue(
        key=message.key.decode(errors="surrogateescape"),  # an arbitrary key must not stop a watch
        value=message.value,
        create_revision=message.create_revision,
        mod_revision=message.mod_revision,
        lease=message.lease,
    )


def snapshot(messages: Iterable[Any], revision: int) -> Snapshot:
    """The result of a read."""
    return Snapshot(tuple(key_value(message) for message in messages), revision)


# ---- errors: the texts are etcd's own (api/v3rpc/rpctypes/error.go) and gRPC's

_NEVER_SENT = ("failed to connect to all addresses", "connections to all backends failing", "empty address list",
               "DNS resolution failed", "Channel closed", "Domain name not found")  # fmt: skip
"""gRPC gave up before the request left this process."""
_REJECTED = ("etcdserver: no leader", "etcdserver: not capable", "etcdserver: unhealthy cluster",
             "etcdserver: too many requests")  # fmt: skip
"""etcd rejected the request on arrival."""
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old", "user name is empty")
_BAD_CREDENTIALS = ("authentication failed", "user name not found", "password was given")
_DENIED_HINT = "elastic-trainer admin grant gives a user rights on one run, admin init those to read all"
_NO_SPACE = "database space exceeded"


def is_stale_token(code: str, text: str) -> bool:
    """Whether the server no longer knows our token (it restarted, or the token expired): authenticate again."""
    return code in ("UNAUTHENTICATED", "INVALID_ARGUMENT") and any(part in text for part in _STALE_TOKEN)


def translate(code: str, text: str, *, where: str, write: bool) -> ElasticTrainerError:
    """The error for a call to ``where`` that ended with gRPC status ``code`` and ``text``.

    For an unknown text the safer meaning counts: a ``write`` may have happened.
    """
    if code == "NOT_FOUND" and "lease not found" in text:
        return LeaseLostError("the lease has expired")
    if code == "PERMISSION_DENIED":
        return AccessDeniedError(f"etcd at {where} denies access", hint=_DENIED_HINT)
    if code == "UNAUTHENTICATED" or any(part in text for part in _BAD_CREDENTIALS):
        return CredentialsError(f"etcd at {where} refuses the credentials: {text}", hint="correct user and password")
    if "user name is empty" in text:
        return ConfigError(f"etcd at {where} requires a user", hint="set user and password")
    if code == "UNIMPLEMENTED":
        return ConfigError(f"the service at {where} is not etcd (v3)", hint="correct the endpoint")
    if code in ("INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION"):
        return PermanentError(f"etcd at {where} refuses the request: {text}")
    if code == "RESOURCE_EXHAUSTED" and _NO_SPACE in text:
        hint = "compact and defragment etcd, then disarm its NOSPACE alarm"
        return StoreUnavailableError(f"etcd at {where} has no space left", hint=hint)
    harmless = any(part in text for part in (*_NEVER_SENT, *_REJECTED))
    nothing_happened = code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED") and harmless
    if write and not nothing_happened:
        return OutcomeUnknownError(f"a write to etcd at {where} may or may not have happened: {reason(code, text)}")
    return StoreUnavailableError(f"etcd at {where} does not answer: {reason(code, text)}")


def reason(code: str, text: str) -> str:
    """A short cause for people, extracted from gRPC's long texts."""
    for phrase in ("Connection refused", "Socket closed", "Connection reset", "CERTIFICATE_VERIFY_FAILED",
                   "WRONG_VERSION_NUMBER", "Domain name not found", "No route to host"):  # fmt: skip
        if phrase in text:
            return phrase.lower()
    if code == "DEADLINE_EXCEEDED":
        return "timed out"
    return text.removeprefix("etcdserver: ")[:200] or code.lower()


# ---- a channel

KEEPALIVE_PATH = "/etcdserverpb.Lease/LeaseKeepAlive"


class Wire:
    """One channel and the stubs on it."""

    def __init__(self, settings: StoreSettings, addresses: tuple[str, ...]) -> None:
        etcd3 = load_etcd3()
        self.addresses = addresses
        self.rpc: Any = etcd3.etcdrpc
        self._client = _client(etcd3, settings, addresses)
        channel = self._client.channel
        self.kv = self._client.kvstub
        self.lease = self._client.leasestub
        self.maintenance = self._client.maintenancestub
        self.auth = self.rpc.AuthStub(channel)
        self.watch = self.rpc.WatchStub(channel)
        # The method is a stream, but etcd answers each request once and ends with the client: on the wire that equals
        # a unary call, which needs no thread to feed a stream of one request.
        self.keep_alive = channel.unary_unary(
            KEEPALIVE_PATH,
            request_serializer=self.rpc.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=self.rpc.LeaseKeepAliveResponse.FromString,
        )

    def close(self) -> None:
        """Close the channel; calls in flight end as cancelled."""
        self._client.close()


def is_address(host: str) -> bool:
    """Whether ``host`` is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def resolved(endpoints: Sequence[Endpoint]) -> tuple[str, ...]:
    """``address:port`` of all endpoints, names replaced by their addresses; names that do not resolve are skipped.

    gRPC takes several addresses in one target but only one name, and users have lists of names. A single endpoint is
    passed to gRPC as it is, which follows its DNS record.
    """
    if len(endpoints) == 1:
        return (str(endpoints[0]),)
    found = [address for endpoint in endpoints for address in _addresses(endpoint)]
    if not found:
        names = ", ".join(endpoint.host for endpoint in endpoints)
        raise StoreUnavailableError(f"none of the store's host names resolves: {names}", hint="check DNS")
    return tuple(dict.fromkeys(found))


def _addresses(endpoint: Endpoint) -> list[str]:
    if is_address(endpoint.host):
        return [str(endpoint)]
    try:
        records = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(Endpoint(host=str(record[4][0]), port=endpoint.port)) for record in records]


def target(addresses: Sequence[str]) -> str:
    """The gRPC target for ``addresses``: a single one as it is, several as a list (only IPv4 ones if there are any)."""
    if len(addresses) == 1:
        return addresses[0]
    v4 = [address for address in addresses if not address.startswith("[")]
    return f"ipv4:{','.join(v4)}" if v4 else f"ipv6:{','.join(addresses)}"


def options(endpoints: Sequence[Endpoint]) -> list[tuple[str, int | str]]:
    """gRPC channel options."""
    chosen: list[tuple[str, int | str]] = [
        ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
        ("grpc.keepalive_time_ms", 10_000),  # detects a frozen server; etcd answers 2 s with GOAWAY
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),  # newer gRPC uses this one, 60 s by default (measured with 1.85)
        ("grpc.http2.max_pings_without_data", 0),  # a quiet watch needs its pings: no limit
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.min_reconnect_backoff_ms", 2_000),  # despite its name, the time limit of one attempt to connect
        ("grpc.use_local_subchannel_pool", 1),  # otherwise a second store shares the first one's connection
        ("grpc.enable_http_proxy", 0),  # etcd is near; a proxy variable meant for downloads must not catch it
        ("grpc.max_receive_message_length", -1),  # a read of many nodes may exceed gRPC's 4 MiB
    ]
    if len(endpoints) > 1:
        # A list has no name of its own: certificates are checked against the first endpoint's.
        chosen.append(("grpc.default_authority", str(endpoints[0])))
        chosen.append(("grpc.ssl_target_name_override", endpoints[0].host))
    return chosen


def _client(etcd3: Any, settings: StoreSettings, addresses: tuple[str, ...]) -> Any:
    """etcd3's client, for its channel and stubs. It takes host and port separately only to join them again."""
    if settings.cert is not None and settings.ca_cert is None:
        raise ConfigError("a client certificate is set but no 'ca_cert'", hint="set ca_cert to the CA of etcd")
    for path in (settings.ca_cert, settings.cert, settings.key):
        if path is None:
            continue
        try:
            content = path.read_bytes()
        except OSError as error:
            text = f"TLS file {str(path)!r} cannot be read: {error.strerror}"
            raise ConfigError(text, hint="check its path") from error
        if b"-----BEGIN" not in content:
            raise ConfigError(f"TLS file {str(path)!r} is not in PEM form", hint="convert it with openssl")
    host, _, port = target(addresses).rpartition(":")
    return etcd3.Etcd3Client(
        host=host,
        port=port,
        ca_cert=settings.ca_cert,
        cert_cert=settings.cert,
        cert_key=settings.key,
        grpc_options=options(settings.endpoints),
    )


# ---- authenticated calls

RESOLVE_INTERVAL_S = 5.0
"""Minimum time between two DNS look-ups while etcd does not answer, in seconds."""
Metadata = tuple[tuple[str, str], ...]
Method = Callable[[Wire], Any]


class StoreConnection:
    """One logical connection to etcd."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._token_lock = threading.Lock()
        self._token = ""
        self._was_let_in = False
        self._named = len(settings.endpoints) > 1 and not all(is_address(e.host) for e in settings.endpoints)
        self._resolved_at = SYSTEM.monotonic()
        self.wire = Wire(settings, resolved(settings.endpoints))
        """The present channel and its stubs."""
        self.rpc: Any = self.wire.rpc
        """etcd's message classes."""
        self.closed = threading.Event()
        self.where = ", ".join(str(endpoint) for endpoint in settings.endpoints)

    def close(self) -> None:
        self.closed.set()
        with self._lock:
            self.wire.close()

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
        translated = translate(error.code().name, error.details() or "", where=self.where, write=write)
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
                addresses = resolved(self._settings.endpoints)
            except StoreUnavailableError:
                return  # DNS is unavailable too; the old addresses are the best known
            if set(addresses) != set(self.wire.addresses):
                # The old channel ends with its last call; closing it would cancel calls that may still succeed.
                self.wire = Wire(self._settings, addresses)

    def _is_stale(self, error: Any) -> bool:
        return self._settings.user is not None and is_stale_token(error.code().name, error.details() or "")

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
        file = self._settings.password_file
        password = secret(file, "password_file") if file is not None else self._settings.password or ""
        request = self.rpc.AuthenticateRequest(name=self._settings.user, password=password)
        try:
            return str(self._once(lambda wire: wire.auth.Authenticate, request, deadline, "", lambda _: None).token)
        except grpc.RpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                return ""
            raise self._translated(error, write=False) from error


def _metadata(token: str) -> Metadata:
    return (("token", token),) if token else ()


# ---- the store

WATCH_CALL_S = 5.0
"""Limit of one call by a watch, in seconds; a watch has no caller with a deadline, and retries for ever."""


class EtcdStore:
    """One connection to the etcd of ``settings``. Sends nothing before the first call."""

    def __init__(self, settings: StoreSettings) -> None:
        self._connection = StoreConnection(settings)
        self._lock = threading.Lock()
        self._watches: list[WatchLoop] = []

    def get(self, key: str, deadline: Deadline) -> Snapshot:
        return self._range(Read(key), deadline)

    def range(
        self, prefix: str, deadline: Deadline, *, limit: int = 0, order: Order = Order.KEY, keys_only: bool = False
    ) -> Snapshot:
        return self._range(Read(prefix, prefix_end(prefix), limit, order, keys_only), deadline)

    def transact(
        self,
        guards: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        *,
        deadline: Deadline,
    ) -> TransactionResult:
        request = transaction(self._connection.rpc, guards, success, failure)
        write = not all(isinstance(wanted, Read) for wanted in (*success, *failure))
        response = self._ask(lambda stubs: stubs.kv.Txn, request, deadline, write=write)
        revision = response.header.revision
        reads = (part.response_range for part in response.responses if part.HasField("response_range"))
        return TransactionResult(response.succeeded, tuple(snapshot(read.kvs, revision) for read in reads), revision)

    def grant(self, ttl_s: float, deadline: Deadline) -> Lease:
        # The client chooses the id, so that a repeated request cannot leave a second lease behind.
        lease_id = secrets.randbits(62) + 1
        request = self._connection.rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s), ID=lease_id)
        asked_before = False

        def attempt() -> Lease:
            nonlocal asked_before
            try:
                response = self._connection.call(lambda stubs: stubs.lease.LeaseGrant, request, deadline, write=True)
            except OutcomeUnknownError as error:
                asked_before = True
                raise StoreUnavailableError(error.message) from error
            except PermanentError as error:
                if asked_before and "lease already exists" in error.message:
                    return Lease(lease_id, float(request.TTL))
                raise
            return Lease(response.ID, float(response.TTL))

        return within(deadline, attempt, self._connection.closed)

    def keep_alive(self, lease_id: int, deadline: Deadline) -> float:
        request = self._connection.rpc.LeaseKeepAliveRequest(ID=lease_id)
        response = self._ask(lambda stubs: stubs.keep_alive, request, deadline)
        if response.TTL <= 0:  # etcd does not know the lease
            raise LeaseLostError("the lease has expired")
        return float(response.TTL)

    def revoke(self, lease_id: int, deadline: Deadline) -> None:
        request = self._connection.rpc.LeaseRevokeRequest(ID=lease_id)
        with suppress(LeaseLostError):
            self._ask(lambda stubs: stubs.lease.LeaseRevoke, request, deadline)  # idempotent, so retried like a read

    def watch(self, prefix: str, listener: WatchListener, *, exact: bool = False) -> Watch:
        fields = bounds(prefix, None if exact else prefix_end(prefix))
        opened = WatchLoop(lambda revision: _EtcdStream(self._connection, fields, revision), listener, prefix)
        with self._lock:
            self._watches = [each for each in self._watches if not each.closed.is_set()] + [opened]
        return opened

    def version(self, deadline: Deadline) -> str:
        request = self._connection.rpc.StatusRequest()
        return str(self._ask(lambda stubs: stubs.maintenance.Status, request, deadline).version)

    def close(self) -> None:
        with self._lock:
            watches = tuple(self._watches)
        for watch in watches:
            watch.close()
        self._connection.close()

    def _range(self, wanted: Read, deadline: Deadline) -> Snapshot:
        request = reading(self._connection.rpc, wanted)
        response = self._ask(lambda stubs: stubs.kv.Range, request, deadline)
        return snapshot(response.kvs, response.header.revision)

    def _ask(self, method: Method, request: Any, deadline: Deadline, *, write: bool = False) -> Any:
        def attempt() -> Any:
            return self._connection.call(method, request, deadline if write else read_attempt(deadline), write=write)

        return within(deadline, attempt, self._connection.closed)


class _EtcdStream:
    """One watch stream. The request side stays open until cancelled: a proxy would end the watch with it."""

    def __init__(self, connection: StoreConnection, fields: dict[str, bytes], revision: int) -> None:
        self._connection = connection
        self._fields = fields
        self._cancelled = threading.Event()
        self._reading: Any = None
        deadline = Deadline.after(WATCH_CALL_S)
        self._call = connection.stream(lambda stubs: stubs.watch.Watch, self._requests(revision), deadline)

    def batches(self) -> Iterator[EventBatch]:
        for response in self._connection.responses(self._call):
            if response.canceled and not response.compact_revision:
                # etcd also answers this for an expired token, as a denied permission.
                self._connection.forget_token()
            yield _batch(response)

    def read(self) -> WatchReading:
        response = self._connection.call(
            lambda stubs: stubs.kv.Range,
            self._connection.rpc.RangeRequest(**self._fields),
            Deadline.after(WATCH_CALL_S),
            write=False,
            started=self._read_started,
        )
        return WatchReading(snapshot(response.kvs, response.header.revision), _history(response.header))

    def cancel(self) -> None:
        self._cancelled.set()
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()

    def _read_started(self, call: Any) -> None:
        self._reading = call
        if self._cancelled.is_set():
            call.cancel()

    def _requests(self, revision: int) -> Iterator[Any]:
        rpc = self._connection.rpc
        create = rpc.WatchCreateRequest(start_revision=revision, progress_notify=True, **self._fields)
        yield rpc.WatchRequest(create_request=create)
        self._cancelled.wait()


def _history(header: Any) -> KeyHistory:
    return KeyHistory(header.cluster_id, header.raft_term, header.revision)


def _batch(response: Any) -> EventBatch:
    compacted = bool(response.compact_revision)
    return EventBatch(
        now=_history(response.header),
        events=tuple(
            WatchEvent(EventKind.DELETE if each.type == 1 else EventKind.PUT, key_value(each.kv))  # as in kv.proto
            for each in response.events
        ),
        created=response.created,
        compacted=compacted,
        refused=(response.cancel_reason or "no reason given") if response.canceled and not compacted else None,
    )
