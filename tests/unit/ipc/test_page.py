"""The heartbeat page: what a worker writes an agent reads, whole or not at all."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.clock import Deadline
from elastic_trainer.ipc import page as pages
from elastic_trainer.ipc.page import NUMBERS, PAGE_BYTES, PHASES, Heartbeat, PageReader, PageWriter, Reading, start_of
from elastic_trainer.model import Phase

READS = 20_000
NOTES = {"pid": 1, "start": 2}
counts = st.integers(-(2**63), 2**63 - 1)
times = st.floats(allow_nan=False)
BY_TYPE: dict[object, Any] = {
    "Phase": st.sampled_from(PHASES),
    "int": counts,
    "float": times,
    "list[float]": st.lists(times, min_size=len(PHASES), max_size=len(PHASES)),
}
pulses = st.builds(Heartbeat, **{each.name: BY_TYPE[each.type] for each in dataclasses.fields(Heartbeat)})


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[PageWriter]:
    writer = PageWriter.create(tmp_path / "0-1.page")
    yield writer
    assert not isinstance(writer.memory, bytearray)
    writer.memory.close()


def path_of(writer: PageWriter) -> Path:
    assert writer.path is not None
    return writer.path


def read(reader: PageReader) -> Reading:
    found = reader.read()
    assert found is not None
    return found


def test_every_field_comes_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each one has its own place: whatever the values, reading gives the very pulse and notes."""
    writer = PageWriter.create(tmp_path_factory.mktemp("page") / "0-1.page")
    reader = PageReader(path_of(writer))

    @given(pulses, st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=20), max_size=5))
    def round_trip(pulse: Heartbeat, notes: dict[str, Any]) -> None:
        writer.beat(pulse)
        writer.write_notes(notes)
        found = read(reader)
        assert found.pulse == pulse
        assert found.notes == notes

    round_trip()
    reader.close()


def test_a_page_is_made_once_and_none_until_pulse_and_notes_are_there(writer: PageWriter) -> None:
    """An agent may look while a worker makes its page. No process writes into another's, and only its owner may read
    it."""
    with pytest.raises(FileExistsError):
        PageWriter.create(path_of(writer))
    assert path_of(writer).stat().st_mode & 0o077 == 0
    reader = PageReader(path_of(writer))
    assert reader.read() is None
    writer.beat(Heartbeat())
    assert reader.read() is None
    writer.write_notes(NOTES)
    assert read(reader).notes == NOTES


def test_a_file_of_another_size_is_no_page(tmp_path: Path) -> None:
    """It has just been made, or is none: opening it fails at once."""
    path = tmp_path / "0-1.page"
    for size in (0, 100, PAGE_BYTES - 1):
        path.write_bytes(bytes(size))
        with pytest.raises(ValueError, match=r"mmap|empty"):
            PageReader(path)


@pytest.mark.parametrize("at", [pages._PULSE_AT, pages._PULSE_AT + 77, pages._PULSE_SUM_AT, pages._NOTES_AT + 20])
def test_a_damaged_record_is_none(writer: PageWriter, at: int) -> None:
    """One bit is enough, wherever it is; and the next whole record is read again."""
    writer.beat(Heartbeat(step=7))
    writer.write_notes(NOTES)
    writer.memory[at] ^= 1
    reader = PageReader(path_of(writer))
    assert reader.read() is None
    writer.beat(Heartbeat(step=8))
    writer.write_notes(NOTES)
    assert read(reader).pulse.step == 8
    for length in (0, pages._LONGEST_NOTES + 1, 2**64 - 1):
        struct.pack_into("<Q", writer.memory, pages._NOTES_AT, length)
        assert reader.read() is None, "the notes have an impossible length"


def test_notes_that_are_too_long_are_refused_and_leave_the_old_ones(writer: PageWriter) -> None:
    """The longest fit to the last byte; nothing is written behind the page."""
    reader = PageReader(path_of(writer))
    writer.beat(Heartbeat())
    longest = {"x": "y" * (pages._LONGEST_NOTES - len('{"x":""}'))}
    writer.write_notes(longest)
    assert read(reader).notes == longest
    with pytest.raises(ValueError, match="notes of a heartbeat page"):
        writer.write_notes({"x": longest["x"] + "y"})
    assert read(reader).notes == longest
    writer.write_notes({"x": "short"})
    assert read(reader).notes == {"x": "short"}


def test_the_moment_is_written_beside_the_pulse(writer: PageWriter) -> None:
    """It is known without another pulse; a phase of another version is replaced by the pulse's."""
    writer.beat(Heartbeat(phase=Phase.TRAINING))
    writer.write_notes(NOTES)
    reader = PageReader(path_of(writer))
    for phase in PHASES:
        for waits in (True, False):
            writer.moment(NUMBERS[phase])
            writer.set_waits(waits)
            found = read(reader)
            assert (found.phase, found.waits, found.pulse.phase) == (phase, waits, Phase.TRAINING)
    writer.moment(255)
    assert read(reader).phase is Phase.TRAINING


def _hammer(path: Path, going: Event) -> None:
    """Write records whose fields follow from each other, as fast as possible, until killed."""
    writer, number = PageWriter.create(path), 0
    while True:
        number += 1
        phase = PHASES[number % len(PHASES)]
        seconds = [float(number + i) for i in range(len(PHASES))]
        writer.beat(Heartbeat(phase=phase, step=number, samples=3 * number, first_at=number / 2, seconds=seconds))
        writer.write_notes({"step": number, "long": "x" * (number % 500), "twice": 2 * number})
        if number == 10:
            going.set()


def test_a_reader_never_sees_a_torn_record(tmp_path: Path) -> None:
    """Another process writes all the time: in 20,000 looks each record belongs together, and the steps only grow."""
    context = multiprocessing.get_context("spawn")
    path, going = tmp_path / "0-1.page", context.Event()
    process = context.Process(target=_hammer, args=(path, going), daemon=True)
    process.start()
    try:
        assert going.wait(60.0)
        reader, last, different, reads, deadline = PageReader(path), 0, 0, 0, Deadline.after(60.0)
        while reads < READS or different < 100:  # on a busy machine the writer has to get its turns, too
            assert not deadline.expired
            reads += 1
            found = reader.read()
            if found is None:
                continue  # torn each time, and known to be so
            pulse, notes = found.pulse, found.notes
            number = pulse.step
            assert pulse.samples == 3 * number
            assert pulse.first_at == number / 2
            assert pulse.phase is PHASES[number % len(PHASES)]
            assert pulse.seconds == [float(number + i) for i in range(len(PHASES))]
            assert notes["twice"] == 2 * notes["step"]
            assert len(notes["long"]) == notes["step"] % 500
            assert number >= last
            different += number > last
            last = number
        reader.close()
    finally:
        process.kill()
        process.join(60.0)


def test_the_life_of_a_process_is_that_of_its_start(writer: PageWriter) -> None:
    """A process that has the number of a dead one is another. A zombie is dead, and only its parent does not know."""
    writer.beat(Heartbeat())
    reader = PageReader(path_of(writer))
    writer.write_notes({"pid": os.getpid(), "start": start_of("self")})
    assert read(reader).is_alive
    writer.write_notes({"pid": os.getpid(), "start": 1})
    assert not read(reader).is_alive
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert start_of(process.pid) is not None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert start_of(process.pid) is None
    assert start_of(process.pid) is None


def test_seconds_of_steps_are_those_of_committed_ones() -> None:
    """The time of a step may still turn out to be lost; other phases count while they last."""
    spent = [float(number) for number in range(len(PHASES))]
    for phase in PHASES:
        reading = Reading(Path("x"), Heartbeat(phase=phase, phase_at=10.0, seconds=list(spent)), phase, False, {})
        told = dict(zip(PHASES, spent, strict=True))
        grown = reading.seconds(12.5)
        if phase in pages.WORK:
            assert grown == told
            assert reading.last_seconds(12.5) == told | {Phase.REPEATED: told[Phase.REPEATED] + 2.5}
        else:
            assert grown == reading.last_seconds(12.5) == told | {phase: told[phase] + 2.5}
        assert reading.seconds(9.0) == told


def test_a_page_without_room_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory may be full (64 MB in a container): else the first write into the page would end the worker by
    SIGBUS. Nothing is left of the file."""

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no space"):
        PageWriter.create(tmp_path / "0-1.page")
    assert list(tmp_path.iterdir()) == []
