"""Brings a request for a save to rank 0's worker, and its answer back: ``elastic-trainer checkpoints save``.

*Runs in* the agent of rank 0's node: the watch's thread hears of requests, the health thread passes them on, the
health writer opens and closes the watch and writes the answer.
*Owns* the watch, and the file beside the page of rank 0's worker that holds the request's id.
*Fails by* ElasticTrainerError from :meth:`SaveRequests.turn`: it is called again.
*Invariant*: a request is answered once. One whose worker died before it answered goes to the next rank 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from elastic_trainer.clock import Deadline
from elastic_trainer.ipc.page import SAVE_SUFFIX, Reading
from elastic_trainer.membership.documents import DocumentError, RoundDocument, RoundState
from elastic_trainer.membership.save_request import SaveRequest
from elastic_trainer.store.api import EventKind, KeyValue, Put, Snapshot, Store, Watch, WatchEvent, unchanged
from elastic_trainer.store.keys import RunKeys
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry.logs import logger

_LIMIT_S: Final = 3.0


class SaveRequests:
    """See the module. A listener of its own watch."""

    def __init__(self, store: Store, keys: RunKeys, node: str) -> None:
        self._store, self._keys, self._node = store, keys, node
        self._watch: Watch | None = None
        self._open: tuple[SaveRequest, int] | None = None
        """The request without an answer, and the revision of its key."""
        self._passed_on: tuple[Path, str] | None = None
        self._answer: SaveRequest | None = None

    # ---- the watch's thread

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self._open = None
        for item in snapshot.items:
            self._take(item)

    def on_events(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            self._open = None
            if event.kind is EventKind.PUT:
                self._take(event.item)

    def on_connected(self, connected: bool) -> None:
        """An outage is waited out."""

    def _take(self, item: KeyValue) -> None:
        try:
            request = SaveRequest.decode(item.value, item.key)
        except DocumentError as error:
            logger().error("document.refused", key=plain(item.key), error=str(error))
            return
        if not request.answered:
            self._open = (request, item.mod_revision)

    # ---- the health thread

    def look(self, readings: Sequence[Reading]) -> bool:
        """Pass on what is asked; whether there is an answer to be written."""
        asked, head = self._open, next((each for each in readings if each.pulse.rank == 0), None)
        if asked is None or head is None or self._watch is None:
            return False
        request = asked[0]
        said = head.notes.get("on_demand") or {}
        if said.get("id") == request.id:
            found = {name: said[name] for name in ("name", "problem", "code") if name in said}
            before, self._answer = self._answer, request.model_copy(update=found)
            return self._answer != before  # else its writing waits for the store
        if self._passed_on != (head.path, request.id):
            with contextlib.suppress(OSError):  # the worker has just ended: the next one gets it
                fresh = head.path.with_suffix(f"{SAVE_SUFFIX}.new")
                fresh.write_text(request.id, encoding="ascii", errors="replace")
                fresh.rename(head.path.with_suffix(SAVE_SUFFIX))
                self._passed_on = (head.path, request.id)
                logger().info("save.requested", request=request.id, pid=head.pid)
        return False

    # ---- the health writer

    def turn(self, current: RoundDocument | None) -> None:
        """Follow the requests while this node has rank 0, and write the answer."""
        over = current is None or current.state is RoundState.CLOSED
        leads = not over and current is not None and current.is_first(self._node)
        if leads and self._watch is None:
            self._watch = self._store.watch(self._keys.save, self, exact=True)
        elif not leads and self._watch is not None:
            self.close()
        asked, answer = self._open, self._answer
        if asked is None or answer is None or answer.id != asked[0].id:
            return
        put, guard = Put(self._keys.save, answer.encode()), unchanged(self._keys.save, asked[1])
        self._store.transact([guard], [put], deadline=Deadline.after(_LIMIT_S))
        if self._open is asked:
            self._open = None

    def close(self) -> None:
        """Follow no requests any more."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        self._open = None
