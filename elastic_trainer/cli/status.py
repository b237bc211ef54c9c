"""``elastic-trainer status [RUN]``: shows one run or all of them, once or continuously.

*Runs in* the process of the command, its main thread. *Owns* the terminal while it watches.
*Fails by* ConfigError for a run that is not there, StoreUnavailableError when etcd does not answer at the start; while
watching, the run is waited for and an outage is shown.
"""

from __future__ import annotations

import argparse

from rich.console import Console, RenderableType
from rich.live import Live

from elastic_trainer.cli import connection, status_view
from elastic_trainer.cli.options import console
from elastic_trainer.clock import SYSTEM, pause
from elastic_trainer.errors import StoreUnavailableError
from elastic_trainer.monitor.model.snapshot import Listing, RunSnapshot, as_json, listing, snapshot, summary
from elastic_trainer.monitor.read.reading import Pacing, Reader, StoreReading
from elastic_trainer.store.api import RunKeys
from elastic_trainer.telemetry import logs

_EVERY_S = 1.0
_REPRINT_EVERY_S = 5.0
"""Where nothing can be redrawn in place, at most so often."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add = parser.add_argument
    add("run", nargs="?", help="the run's name (--rdzv-id); without it all runs are listed")
    add("--watch", action="store_true", help="refresh until the run is over or the command is interrupted")
    add("-o", "--output", choices=("wide",), help="wide: all columns, however narrow the terminal")
    add("--json", action="store_true", help="one JSON object a line, as the monitor's /api has it")
    connection.add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show it."""
    logs.configure()
    with connection.opened(arguments, arguments.run) as (store, settings):
        if arguments.run is not None:
            expect = connection.await_run if arguments.watch else connection.require_run
            expect(store, settings, RunKeys(settings.prefix, arguments.run))
        reader = Reader(store, settings.prefix, only=arguments.run)
        reading = reader.poll(connection.CONNECT_S)
        if not reading.store.connected:
            raise StoreUnavailableError(reading.problem)
        if arguments.run is not None and arguments.run not in reading.runs:
            raise connection.no_run(store, settings, arguments.run)
        show = _shower(arguments)
        try:
            _watch(reader, reading, show, arguments.run) if arguments.watch else show(reading, True)
        finally:
            show.close()
    return 0


class Show:
    """Where readings are shown."""

    def __call__(self, reading: StoreReading, last: bool) -> None:
        """Show this one; whether it is the last."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the terminal back."""


def _shower(arguments: argparse.Namespace) -> Show:
    if arguments.json:
        return JsonShow(arguments.run)
    out = console(140)
    live, wide = arguments.watch and out.is_terminal and not out.is_dumb_terminal, arguments.output == "wide"
    return LiveShow(out, arguments.run) if live and not wide else PlainShow(out, arguments.run, wide=wide)


def _watch(reader: Reader, reading: StoreReading, show: Show, name: str | None) -> None:
    """Show each reading until the run is over."""
    pacing = Pacing(_EVERY_S)
    while True:
        over = name is not None and (name not in reading.runs or reading.runs[name].documents.closed)
        show(reading, over)
        if over:
            return
        began = SYSTEM.monotonic()
        reading = reader.poll()
        pause(pacing.pause_s(SYSTEM.monotonic() - began, reading.store.connected))


def value_of(reading: StoreReading, name: str | None) -> RunSnapshot | Listing | None:
    """What is to be shown: the run, or the list of all; None if the run is gone."""
    if name is None:
        rows = [summary(each.documents, each.seen) for each in reading.runs.values()]
        return listing(rows, reading.store, reading.wall)
    found = reading.runs.get(name)
    return None if found is None else snapshot(found.documents, found.seen, reading.store)


def _mark(reading: StoreReading) -> tuple[object, ...]:
    """Differs when there is something new to show."""
    return (reading.store.connected, *((run, each.documents.serial) for run, each in reading.runs.items()))


class JsonShow(Show):
    """One line of JSON whenever something is new."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._shown: tuple[object, ...] | None = None

    def __call__(self, reading: StoreReading, last: bool) -> None:
        mark, value = _mark(reading), value_of(reading, self._name)
        if value is not None and (last or mark != self._shown):
            self._shown = mark
            print(as_json(value).decode(), flush=True)


class PlainShow(Show):
    """The whole view, again when something is new but not often."""

    def __init__(self, console: Console, name: str | None, *, wide: bool = False) -> None:
        self._console, self._name, self._wide = console, name, wide
        self._shown: tuple[object, ...] | None = None
        self._shown_at = 0.0

    def __call__(self, reading: StoreReading, last: bool) -> None:
        now, mark = SYSTEM.monotonic(), _mark(reading)
        due = self._shown is None or (mark != self._shown and now - self._shown_at >= _REPRINT_EVERY_S)
        if last or due:
            if self._shown is not None:
                self._console.print()
            self._shown, self._shown_at = mark, now
            self._console.print(view_of(reading, self._name, wide=self._wide), crop=not self._wide)


class LiveShow(Show):
    """Redrawn in place."""

    def __init__(self, console: Console, name: str | None) -> None:
        self._name = name
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def __call__(self, reading: StoreReading, last: bool) -> None:
        self._live.update(view_of(reading, self._name), refresh=True)

    def close(self) -> None:
        self._live.stop()


def view_of(reading: StoreReading, name: str | None, *, wide: bool = False) -> RenderableType:
    """The view of a reading for people."""
    value = value_of(reading, name)
    if value is None:
        return f"run {name} is gone"
    if isinstance(value, RunSnapshot):
        return status_view.run_view(value, wide=wide)
    return status_view.list_view(value, wide=wide)
