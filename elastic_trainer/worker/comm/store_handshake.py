"""The ranks of a round agree on a store prefix that no earlier round used, whatever that store still holds.

All rounds of a job share torchrun's own store, and its restart count does not change when nodes join or leave, so new
ranks would read addresses of dead ones. Here each rank writes a hello with its own random token. Rank 0 offers a fresh
prefix together with all tokens; a rank accepts only an offer that has its token, and rank 0 proceeds when all have
accepted. Leftovers of earlier rounds never contain a token of this one.

*Runs in* the worker's main thread. *Fails by* TransientError that names the ranks that did not join in time.
"""

from __future__ import annotations

import json
import secrets

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import TransientError
from elastic_trainer.torch_internals import Store

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


def meet(store: Store, rank: int, world_size: int, deadline: Deadline) -> str:
    """The fresh prefix; the same on all ranks."""
    pauses = _Pauses(deadline)
    return _invite(store, world_size, pauses) if rank == 0 else _attend(store, rank, world_size, pauses)


class _Pauses:
    """Waits a little longer each time."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline, self._next_s = deadline, _FIRST_PAUSE_S

    def wait(self, missing: str) -> None:
        if self._deadline.expired:
            raise TransientError(f"the ranks did not rendezvous in time: {missing}", hint="see the other ranks' logs")
        pause(min(self._next_s, self._deadline.remaining_s()))
        self._next_s = min(2 * self._next_s, _LONGEST_PAUSE_S)


def _invite(store: Store, world_size: int, pauses: _Pauses) -> str:
    offered: dict[str, str] = {}
    nonce = ""
    while True:
        tokens = _hellos(store, world_size)
        if len(tokens) == world_size - 1 and (tokens != offered or not nonce):
            nonce, offered = secrets.token_hex(8), tokens
            store.set(f"meeting/offer/{nonce}", json.dumps({"world": world_size, "tokens": tokens}))
            store.set("meeting/offer", nonce)
        waiting = [rank for rank in range(1, world_size) if str(rank) not in tokens]
        if nonce and not waiting:
            waiting = [rank for rank in range(1, world_size) if not store.check([f"meeting/accept/{nonce}/{rank}"])]
            if not waiting:
                store.set(f"meeting/go/{nonce}", "1")
                return nonce
        pauses.wait(f"rank 0 waits for {_listed(waiting)}")


def _hellos(store: Store, world_size: int) -> dict[str, str]:
    keys = {str(rank): f"meeting/hello/{rank}" for rank in range(1, world_size)}
    return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}


def _attend(store: Store, rank: int, world_size: int, pauses: _Pauses) -> str:
    token = secrets.token_hex(8)
    store.set(f"meeting/hello/{rank}", token)
    seen = accepted = ""
    while True:
        if store.check(["meeting/offer"]):
            nonce = store.get("meeting/offer").decode()
            if nonce != seen:
                seen = nonce
                offer = json.loads(store.get(f"meeting/offer/{nonce}"))
                if offer["world"] == world_size and offer["tokens"].get(str(rank)) == token:
                    store.set(f"meeting/accept/{nonce}/{rank}", token)
                    accepted = nonce
        if accepted and store.check([f"meeting/go/{accepted}"]):
            return accepted
        pauses.wait(f"rank {rank} waits for rank 0")


def _listed(ranks: list[int]) -> str:
    return "ranks " + ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
