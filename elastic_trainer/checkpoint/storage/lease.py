"""Lets only one process at a time save below a prefix: a lease of numbered objects, of which the highest is valid.

A process takes it by creating the next number, which only one can do; no write ever depends on comparing times of two
machines. The holder rewrites its object periodically; a lease that was not rewritten for ``TAKEOVER_S``, by the store's
clock, may be taken over. The holder releases it by emptying the object, so that numbers only grow.

*Runs in* the saving process; a thread renews. *Owns* the thread and the object, until :meth:`PrefixLease.let_go`.
*Fails by* OSError while it is taken. *Invariant*: the holder counts its lease as valid for less time than others wait.
"""

from __future__ import annotations

import contextvars
import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elastic_trainer.checkpoint.storage.bucket import Bucket, Item
from elastic_trainer.checkpoint.storage.port import Holder
from elastic_trainer.clock import SYSTEM, Clock, pause
from elastic_trainer.telemetry.logs import logger

RENEW_S = 15.0
VALID_S = 60.0
"""Seconds that the holder treats the lease as valid after the start of a renewal."""
TAKEOVER_S = 90.0
"""Seconds without a renewal after which others may take it over."""
DIRECTORY = "owner/"
_LONGEST_WORDS = 4096
_TRIES = 5


@dataclass(frozen=True, slots=True)
class _Seen:
    """Another holder's object, how old it was by the store's clock, and when that was seen by this process's."""

    item: Item
    words: str
    age_s: float
    at: float


class PrefixLease:
    """See the module. ``age_s(item)`` measures by the store's clock."""

    def __init__(self, bucket: Bucket, age_s: Callable[[Item], float], clock: Clock = SYSTEM) -> None:
        self._bucket, self._age_s, self._clock = bucket, age_s, clock
        self._mine: str | None = None
        self._words, self._renewed_at, self._process = "", 0.0, 0
        self._seen: _Seen | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def lost(self) -> bool:
        """Whether it was held, and may belong to another process now."""
        return self._mine is not None and self._clock.monotonic() - self._renewed_at > VALID_S

    def hold(self, words: str, gives_way: Callable[[str], bool]) -> Holder | None:
        """Take or keep it; the holder if that is another process."""
        if self._mine is not None and not self.lost:
            return None
        for _ in range(_TRIES):
            top = self._top()
            if top is not None and top.key == self._mine:
                if self.regained():
                    return None
                continue
            holder = self._judged(top, gives_way) if top is not None else None
            if holder is not None:
                return holder
            if self._take(1 if top is None else int(_number(top)) + 1, words):
                return None
        return Holder("")

    def regained(self) -> bool:
        """Renew a lease that was lost because it was not renewed in time; whether it is still this process's."""
        self._renew()
        if not self.lost:
            self._keep_renewing()
        return not self.lost

    def let_go(self) -> None:
        if self._process != os.getpid():
            return  # a fork of the holder
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        mine, self._mine, self._thread = self._mine, None, None
        if mine is not None:
            with suppress(OSError):  # then it expires
                self._bucket.put(mine, b"")

    def _judged(self, top: Item, gives_way: Callable[[str], bool]) -> Holder | None:
        """The holder according to ``top``; None if it has released the lease, is dead, or gives way."""
        if top.size == 0:
            return None
        now = self._clock.monotonic()
        if self._seen is None or self._seen.item != top:
            words = self._bucket.read(top.key, 0, _LONGEST_WORDS).decode(errors="replace")
            if gives_way(words):
                return None
            self._seen = _Seen(top, words, self._age_s(top), now)
        expires_in_s = TAKEOVER_S - self._seen.age_s - (now - self._seen.at)
        return Holder(self._seen.words, expires_in_s, top.modified) if expires_in_s > 0 else None

    def _take(self, number: int, words: str) -> bool:
        key, begun = f"{DIRECTORY}{number:012d}.json", self._clock.monotonic()
        try:
            self._bucket.put(key, words.encode(), new=True)
        except FileExistsError:
            # Another's, or our own whose answer was lost.
            if self._bucket.read(key, 0, _LONGEST_WORDS) != words.encode():
                return False
        items = self._bucket.items(DIRECTORY)
        if max(items, key=_number).key != key:
            return False
        self._bucket.delete([each.key for each in items if each.key != key])
        self._mine, self._words, self._renewed_at, self._process = key, words, begun, os.getpid()
        self._keep_renewing()
        return True

    def _keep_renewing(self) -> None:
        if self._thread is None or self._stop.is_set():
            self._stop = threading.Event()
            context = contextvars.copy_context()
            self._thread = threading.Thread(
                target=context.run, args=(self._run, self._stop), name="checkpoint-lease", daemon=True
            )
            self._thread.start()

    def _run(self, stop: threading.Event) -> None:
        while not pause(RENEW_S, stop, self._clock):
            try:
                self._renew()
            except OSError as error:
                logger().warning("storage.not_renewed", reason=str(error.strerror or error), valid_s=VALID_S)

    def _renew(self) -> None:
        """Rewrite the object, unless another process has taken over."""
        mine, begun = self._mine, self._clock.monotonic()
        if mine is None:
            return
        top = self._top()
        if top is None or top.key != mine:
            logger().error("storage.taken_over", storage=self._bucket.location)
            self._renewed_at = -math.inf
            self._stop.set()
            return
        self._bucket.put(mine, self._words.encode())
        self._renewed_at = begun

    def _top(self) -> Item | None:
        return max(self._bucket.items(DIRECTORY), key=_number, default=None)


def _number(item: Item) -> str:
    return item.key.removeprefix(DIRECTORY).removesuffix(".json")
