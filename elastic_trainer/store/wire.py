"""Translates between the port's values and etcd's messages. Pure; ``rpc`` is the module of etcd's message classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from elastic_trainer.store.api import (
    Compare,
    Delete,
    EventKind,
    Field,
    KeyValue,
    Operation,
    Order,
    Put,
    Read,
    Relation,
    Snapshot,
    WatchEvent,
    prefix_end,
)

_TARGET = {
    Field.VALUE: ("VALUE", "value"),
    Field.CREATE_REVISION: ("CREATE", "create_revision"),
    Field.MOD_REVISION: ("MOD", "mod_revision"),
    Field.LEASE: ("LEASE", "lease"),
}
_RESULT = {
    Relation.EQUAL: "EQUAL",
    Relation.NOT_EQUAL: "NOT_EQUAL",
    Relation.GREATER: "GREATER",
    Relation.LESS: "LESS",
}


def encoded(key: str) -> bytes:
    """A key in bytes; a key that was read is restored exactly, even if it is not valid text (see :func:`key_value`)."""
    return key.encode(errors="surrogateescape")


def bounds(key: str, range_end: str | None) -> dict[str, bytes]:
    """``key`` and ``range_end`` as request fields of the same names."""
    fields = {"key": encoded(key)}
    if range_end is not None:
        fields["range_end"] = encoded(range_end)
    return fields


def prefix_bounds(prefix: str, *, exact: bool = False) -> dict[str, bytes]:
    """The bounds of all keys that begin with ``prefix``, or of that one key."""
    return bounds(prefix, None if exact else prefix_end(prefix))


def compare(rpc: Any, guard: Compare) -> Any:
    """A guard as etcd's Compare."""
    target, operand = _TARGET[guard.field]
    return rpc.Compare(
        result=getattr(rpc.Compare, _RESULT[guard.relation]),
        target=getattr(rpc.Compare, target),
        **{operand: guard.operand},
        **bounds(guard.key, guard.range_end),
    )


def reading(rpc: Any, wanted: Read) -> Any:
    """A read as etcd's RangeRequest; without a sort target etcd answers in key order."""
    target = rpc.RangeRequest.CREATE if wanted.order is Order.CREATE_REVISION else rpc.RangeRequest.KEY
    return rpc.RangeRequest(
        limit=wanted.limit,
        sort_target=target,
        sort_order=rpc.RangeRequest.ASCEND if wanted.order is Order.CREATE_REVISION else rpc.RangeRequest.NONE,
        keys_only=wanted.keys_only,
        **bounds(wanted.key, wanted.range_end),
    )


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


def event(message: Any) -> WatchEvent:
    """etcd's Event as the port's; its ``type`` is 0 for a put and 1 for a deletion (kv.proto)."""
    return WatchEvent(EventKind.DELETE if message.type == 1 else EventKind.PUT, key_value(message.kv))
