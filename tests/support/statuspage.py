"""The monitor's server with runs that a test makes up, and that breaks off when it is asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from elastic_trainer.monitor.reading import RunReading, StoreReading
from elastic_trainer.monitor.serve import Board, MonitorSite
from elastic_trainer.monitor.snapshot import StoreStatus
from elastic_trainer.monitor.state import Observed, RunDocuments
from elastic_trainer.web.server import JSON, Access, Answer, Body, Request, Server, Stream, text
from tests.support.snapshots import Json

GARBLED = b'{"view": 7}'


class _Made(Board):
    """Shows snapshots instead of documents, and keeps nothing that was made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, Json] = {}
        self.list: Json = {"runs": []}

    def listing(self) -> Any:
        return self.list

    def of_run(self, run: str, make: Callable[[Any], Any]) -> Any:
        return make(self.runs[run]) if run in self.runs else None

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        return make()


class StatusServer:
    """Serves snapshots on a port of its own until it is closed."""

    def __init__(self) -> None:
        self.board = _Made()
        self.streams = True
        """Whether streams are answered; without, the page has to ask."""
        self.garbled = False
        """Whether updates are of a kind that no page understands."""
        self._site = MonitorSite(self.board, Access())
        self._server = Server("127.0.0.1", 0, self._answer)
        self.url = f"http://127.0.0.1:{self._server.port}"
        self._server.start()

    def show(self, snapshot: Json) -> str:
        """Let ``snapshot`` be the newest of its run, told to all streams; the address of its page."""
        board, serial = self.board, self.board.reading.serial + 1
        board.runs[snapshot["run"]] = snapshot
        readings = {run: RunReading(RunDocuments(run, serial=serial), Observed()) for run in board.runs}
        board.publish(StoreReading(readings, StoreStatus(True, 0.0), serial=serial))
        return f"{self.url}/runs/{snapshot['run']}"

    def fall_silent(self) -> None:
        """Cut all streams, and refuse every connection from now on."""
        self._server.close()

    def come_back(self) -> None:
        """Answer again."""
        self._server = Server("127.0.0.1", self._server.port, self._answer)
        self._server.start()

    def close(self) -> None:
        """Stop; streams end."""
        self.board.close()
        self._server.close()

    def _answer(self, request: Request) -> Answer | Stream:
        found = self._site.answer(request)
        if isinstance(found, Stream):
            stream = found  # which stays this one in the function below
            return Stream(found.name, lambda: self._pieces(stream)) if self.streams else text(404, "no streams")
        return (
            Answer(200, JSON, Body.compressed(GARBLED)) if self.garbled and request.path.endswith("/update") else found
        )

    def _pieces(self, stream: Stream) -> Iterator[bytes]:
        for piece in stream.pieces():
            yield b"data: " + GARBLED + b"\n\n" if self.garbled and piece.startswith(b"data: ") else piece
