"""The store that torchrun's agent gets for one round: it answers from the round document, without a network.

torchrun uses it for two things: the ranks of its workers (a role exchange), and a barrier when its workers have
finished. Neither needs other nodes here, so no node can block or fail on a dying one.

*Runs in* torchrun's main thread.
*Fails by* KeyError for keys that torchrun 2.13 does not use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta

from elastic_trainer.membership.documents import RoundDocument, RoundMember

ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
BARRIER_COUNT = "/num_members"
BARRIER_END = "/last_member"


class RoundStore:
    """A torch ``Store`` for torchrun's agent (duck-typed: workers never get it).

    ``finish(timeout_s)`` is called when this node's workers have succeeded; it returns when all other nodes have ended.
    """

    def __init__(self, document: RoundDocument, finish: Callable[[float], None]) -> None:
        self._document, self._finish = document, finish
        self._values: dict[str, bytes] = {}
        self._timeout = timedelta(seconds=300)

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Keep ``value``; torchrun writes its own role information."""
        self._values[key] = value.encode() if isinstance(value, str) else value

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of ``key``: written before, or known from the round."""
        if key.startswith(ASSIGNED_RANKS):
            return self._assigned(int(key.removeprefix(ASSIGNED_RANKS)))
        if key in self._values:
            return self._values[key]
        if key.startswith(ROLE_INFO):
            return self._role_info(int(key.removeprefix(ROLE_INFO)))
        raise KeyError(f"torchrun requested {key!r}, which this backend does not know")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Count up; the barrier's counter never reaches the number of nodes, so that ``wait`` decides."""
        count = int(self._values.get(key, b"0")) + amount
        self.set(key, str(count))
        return 0 if key.endswith(BARRIER_COUNT) else count

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for the end of the run (the barrier), or return at once for keys that are known."""
        if any(key.endswith(BARRIER_END) for key in keys):
            self._finish((timeout or self._timeout).total_seconds())

    def _member(self, index: int) -> RoundMember:
        return self._document.members[index]

    def _assigned(self, index: int) -> bytes:
        member = self._member(index)
        alike = [other for other in self._document.members if other.role == member.role]
        role_rank = sum(other.local_world_size for other in alike if other.first_rank < member.first_rank)
        role_size = sum(other.local_world_size for other in alike)
        return json.dumps([member.first_rank, self._document.world_size, role_rank, role_size]).encode()

    def _role_info(self, index: int) -> bytes:
        member = self._member(index)
        return json.dumps({"role": member.role, "rank": index, "local_world_size": member.local_world_size}).encode()
