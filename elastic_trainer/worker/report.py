"""What a worker reports: its heartbeat page, the ledger of its steps, and metrics where no agent exports them.

The page has the worker's phase, the duration of its steps, and how it spends its time, at every step and change of
phase. The agent reads it; a worker without an agent writes it for the metrics of its own process. The ledger has one
JSON line for each action, for audits of a run.

*Runs in* the worker's main thread; the endpoint in its server's. *Owns* the page, the file for stacks (of a crash, or
that the agent requests), one ledger file per process, and the endpoint until the session closes it.
*Fails by* StorageError if the ledger cannot be created when training starts, ConfigError if the endpoint cannot listen.
Without a page nothing is reported; a ledger's lines wait in memory while the disk refuses them: a record is never worth
stopping the training.
*Invariant*: each second since the process started belongs to exactly one phase; a line is written right after the
action that it records, so a killed process leaves only true lines.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import elastic_trainer
from elastic_trainer.clock import SYSTEM, Clock
from elastic_trainer.errors import ConfigError, StorageError
from elastic_trainer.ipc.page import (
    CRASHES,
    NUMBERS,
    PHASES,
    SIGNAL,
    Heartbeat,
    PageReader,
    PageWriter,
    Reading,
    observed,
    signal_state,
    start_of,
)
from elastic_trainer.model import Cursor, Phase
from elastic_trainer.settings import WorkerEnvironment
from elastic_trainer.telemetry.families import SAVE_BUCKETS
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.web.node import NodeCollector, NodeEndpoint

if TYPE_CHECKING:
    import torch


_SMOOTHING: Final = 0.1
_START: Final = Cursor()
_WORK: Final = tuple(NUMBERS[each] for each in (Phase.TRAINING, Phase.REPEATED, Phase.DATA))
_TRAINING, _REPEATED, _DATA = _WORK
_CHECKPOINT: Final = NUMBERS[Phase.CHECKPOINT]
_SAMPLE_EVERY_S: Final = 1.0
LR_EVERY_S = 2.0
_AUDITS_SHOWN: Final = 8
"""The agent reads them every few seconds, and the page is small."""
_LONGEST_ERROR: Final = 150
_NUMBERS: Final = count(1)
"""Page numbers: a script may open several sessions one after the other."""


_PREVIOUS: Final[list[HeartbeatReporter]] = []
"""The last reporter opened in this process."""


_CRASHES_TO: Final[list[IO[bytes]]] = []
"""The file to which faulthandler writes the stacks of a fatal signal, if this module has told it to."""


class HeartbeatReporter:
    """Writes the page. ``age_s`` is the age of the process."""

    def __init__(self, page: PageWriter | None = None, clock: Clock = SYSTEM, *, age_s: float = 0.0) -> None:
        self.page = page if page is not None else PageWriter.private()
        self._clock = clock
        self._monotonic = clock.monotonic
        now = self._monotonic()
        self.pulse = Heartbeat(phase_at=now - age_s, moved_at=now)
        self.page.moment(NUMBERS[Phase.STARTING])
        self._phase = NUMBERS[Phase.STARTING]
        self._notes: dict[str, Any] = {}
        self._lr_shown_at = -math.inf
        self._counts: dict[str, float] = {}
        self._waits_at = 0.0
        self._waited_s = 0.0
        self._work_before = 0.0
        self._waited_before = 0.0
        self._peer_saves = False
        self._before_wait: int | None = None
        self._shown_s = 0.0
        """The training seconds that the page shows: those of committed steps."""
        self._sampled_at = 0.0
        self._device: torch.device | None = None
        self._knows_mean = False
        self._stacks: IO[bytes] | None = None
        self.closed_at = now
        self.reached = 0
        """The newest step that any rank had committed before: steps up to it are repeated work."""

    @classmethod
    def open(cls, environment: WorkerEnvironment, clock: Clock = SYSTEM) -> HeartbeatReporter:
        """The reporter of this process, on a page that its agent reads if there is one."""
        import torch  # the command reads ledgers without it

        page: PageWriter | None = None
        if environment.pages is not None:
            path = environment.pages / f"{environment.local_rank}-{os.getpid()}-{next(_NUMBERS)}.page"
            try:
                page = PageWriter.create(path)
            except OSError as error:
                logger().warning("page.unavailable", path=str(path), error=str(error))
        age_s = process_age_s()
        if _PREVIOUS:  # an earlier session has reported the time until now
            previous = _PREVIOUS.pop()
            age_s = clock.monotonic() - previous.closed_at
            previous.set_notes(closed=True)
        tracker = cls(page, clock, age_s=age_s)
        _PREVIOUS.append(tracker)
        tracker.reached = environment.reached
        if environment.launched and not environment.in_place:
            tracker.pulse.rank, tracker.pulse.world_size = environment.rank, environment.world_size
        tracker.beat()
        tracker.set_notes(
            pid=os.getpid(),
            start=start_of("self"),
            born_at=clock.monotonic() - age_s,
            started_wall=clock.wall(),
            local_rank=environment.local_rank,
            node=environment.node,
            torch=torch.__version__,
            version=elastic_trainer.__version__,
            device="cpu",
        )
        if page is not None and page.path is not None:
            try:  # the agent requests stacks by signal; a C handler writes them even while the interpreter is blocked
                tracker._stacks = page.path.with_suffix(".stacks").open("wb")
                faulthandler.register(SIGNAL, tracker._stacks, all_threads=True, chain=False)
                # The script, or a JVM in it, may handle them itself, and may begin to do so later: never undo it.
                if _CRASHES_TO or not signal_state(os.getpid())[0] & CRASHES:
                    faulthandler.enable(tracker._stacks)
                    _CRASHES_TO[:] = [tracker._stacks]
            except (OSError, ValueError, RuntimeError, AttributeError) as error:
                logger().info("stacks.unavailable", error=str(error))
        return tracker

    @property
    def is_newest(self) -> bool:
        """Whether no other reporter was opened in this process since."""
        return bool(_PREVIOUS) and _PREVIOUS[-1] is self

    def disown(self) -> None:
        """In a forked child: stop writing, since the page and the file for stacks are the parent's."""
        self.page = PageWriter.private()
        if self._stacks is not None:
            with suppress(OSError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stacks.fileno())
        _PREVIOUS.clear()

    def close(self) -> None:
        """Stop reporting: the session has ended. The agent still reads the page."""
        self.closed_at = self._monotonic()
        self.beat()
        if self._stacks is not None:
            faulthandler.unregister(SIGNAL)
            if self._stacks not in _CRASHES_TO:
                self._stacks.close()
            self._stacks = None

    # ---- identity of this worker

    def set_notes(self, **notes: Any) -> None:
        """Update the notes, which change rarely."""
        self._notes.update(notes)
        self._note()

    def show_lr(self, lr: Callable[[], float | None]) -> None:
        """Note the learning rate from time to time: it may change with each step, and be on a device."""
        now = self._monotonic()
        if now - self._lr_shown_at < LR_EVERY_S:
            return
        self._lr_shown_at, rate = now, lr()
        if rate is not None and math.isfinite(rate) and rate != self._notes.get("lr"):
            self.set_notes(lr=rate)

    def set_rank(self, rank: int, world_size: int, round_: int, device: torch.device) -> None:
        pulse = self.pulse
        pulse.rank, pulse.world_size, pulse.round, pulse.fresh, pulse.first_at = rank, world_size, round_, 0, 0.0
        self._device = device if device.type == "cuda" else None
        if self._notes.get("device") != str(device):
            self.set_notes(device=str(device))
        self.moved()

    def holds(self, step: int, cursor: Cursor = _START) -> None:
        """This rank holds the state after ``step``, which other ranks may have committed."""
        self.pulse.step, self.pulse.epoch, self.pulse.used = step, cursor.epoch, cursor.samples
        self.moved()

    # ---- activity

    def enter(self, phase: int) -> int:
        """Count time into this phase (by number) from now on; returns the previous one. The next beat writes it."""
        before, pulse, now = self._phase, self.pulse, self._monotonic()
        pulse.seconds[before] += now - pulse.phase_at
        pulse.phase_at, self._phase = now, phase
        self.page.moment(phase)
        return before

    def enter_now(self, phase: Phase) -> Phase:
        """As :meth:`enter`, but written at once: for phases that may last long."""
        before = self.enter(NUMBERS[phase])
        self.moved()
        return PHASES[before]

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        before = self.enter_now(phase)
        try:
            yield
        finally:
            self.enter_now(before)

    def draws(self) -> int:
        """A wait for samples begins; pass the result to :meth:`enter` afterwards."""
        return self.enter(_DATA) if self._phase in _WORK else self._phase

    def begin_wait(self) -> None:
        """A wait for other ranks begins."""
        if self._waits_at:
            return  # inside another wait
        self._waits_at = self._monotonic()
        self.page.set_waits(True)
        if not self._peer_saves:
            return
        if self._phase in _WORK:
            self._before_wait = self.enter(_CHECKPOINT)
        else:  # this is the wait for the checkpoint; the phase shown on the page must not change
            self._peer_saves = False

    def resumes(self) -> None:
        """The wait for other ranks is over."""
        if not self._waits_at:
            return
        if self._phase in _WORK:  # other waits are no part of a step's time
            self._waited_s += self._monotonic() - self._waits_at
        self._waits_at = 0.0
        self.page.set_waits(False)
        if self._before_wait is not None:
            self.enter(self._before_wait)
            self._before_wait = None

    @property
    def phase(self) -> Phase:
        """The present one."""
        return PHASES[self._phase]

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written, here or by the rank that this one waits for."""
        return self._phase == _CHECKPOINT or self._peer_saves

    def peer_saves(self) -> None:
        """Rank 0 saves now: the next step's wait counts as checkpoint."""
        self._peer_saves = True

    def gave_up(self) -> None:
        """The present step is lost and will be repeated."""
        self.page.set_in_call(False)
        self.resumes()
        self.enter(self._phase)
        seconds = self.pulse.seconds
        lost_s, seconds[_TRAINING] = seconds[_TRAINING] - self._shown_s, self._shown_s
        seconds[_REPEATED] += lost_s

    def moved(self) -> None:
        """Progress in a phase without steps."""
        self.pulse.moved_at = self._monotonic()
        self.beat()

    def step_begins(self, number: int) -> None:
        phase = _REPEATED if number <= self.reached else _TRAINING
        self.page.set_in_call(True)
        if self._phase not in _WORK:
            self.enter_now(PHASES[phase])
        elif phase != self._phase:
            self.enter(phase)

    def note_step(self, step: int, samples: int, cursor: Cursor = _START) -> None:
        """``step`` was committed with ``samples`` samples of this rank; the data goes on at ``cursor``."""
        pulse, now = self.pulse, self._monotonic()
        pulse.stepped_wall = self._clock.wall()
        self.page.set_in_call(False)
        pulse.seconds[self._phase] += now - pulse.phase_at
        pulse.phase_at = pulse.moved_at = pulse.stepped_at = now
        seconds = pulse.seconds
        work = seconds[_TRAINING] + seconds[_REPEATED] + seconds[_DATA]
        if pulse.fresh:  # the first one includes compilation and the forming of the round
            step_s = work - self._work_before
            compute_s = max(0.0, step_s - (self._waited_s - self._waited_before))
            if pulse.fresh == 1:
                pulse.step_s, pulse.compute_s = step_s, compute_s
            else:
                pulse.step_s += _SMOOTHING * (step_s - pulse.step_s)
                pulse.compute_s += _SMOOTHING * (compute_s - pulse.compute_s)
        else:
            pulse.first_at = now
        self._work_before, self._waited_before = work, self._waited_s
        self._peer_saves = False
        pulse.step, pulse.epoch, pulse.used = step, cursor.epoch, cursor.samples
        pulse.steps += 1
        pulse.fresh += 1
        pulse.samples += samples
        if step > self.reached:
            self.reached = step
        if now - self._sampled_at > _SAMPLE_EVERY_S:
            self._sample(now)
        self.beat()

    def _sample(self, now: float) -> None:
        """Figures that are too expensive for every step."""
        self._sampled_at = now
        with suppress(OSError):
            self.pulse.threads = len(os.listdir("/proc/self/task"))
        if self._device is None:
            return
        import torch  # the command reads ledgers without it

        self.pulse.allocated = torch.cuda.memory_allocated(self._device)
        self.pulse.reserved = torch.cuda.memory_reserved(self._device)

    def knows_loss(self, loss: float | None, *, own: bool = False) -> None:
        """Report the newest loss (None: unknown). This rank's ``own`` counts until the mean of all ranks is known."""
        if loss is not None and math.isfinite(loss) and not (own and self._knows_mean):
            self.pulse.loss = loss
            self._knows_mean = not own

    def count_nonfinite(self) -> None:
        self.pulse.nonfinite += 1
        self.beat()

    def differed(self) -> None:
        self.count_event("differences")
        self._note()

    def accused(self, step: int, ranks: Sequence[int], nodes: Sequence[str], reason: str) -> None:
        """An audit of ``step`` has found these ranks to compute wrongly."""
        self.count_event("audit_mismatches")
        number = int(self._counts["audit_mismatches"])
        found = {"number": number, "step": step, "ranks": [*ranks], "nodes": [*nodes], "reason": reason}
        self.set_notes(audits=[*self._notes.get("audits", []), found][-_AUDITS_SHOWN:])

    # ---- checkpoints

    def operated(self, what: str, duration_s: float, *, ok: bool, error: str = "") -> None:
        """Count a ``save`` or ``load`` and its duration. ``error``: why a save failed, in one line."""
        self.count_event(f"{what}.{'ok' if ok else 'failed'}")
        if what == "save":
            self._notes["saves_failing"] = 0 if ok else self._notes.get("saves_failing", 0) + 1
            if error:
                self._notes["save_error"] = error[:_LONGEST_ERROR]
        if ok:
            for name, amount in observed(f"{what}_s", duration_s, SAVE_BUCKETS).items():
                self.count_event(name, amount)
        self._note()

    def note_save(self, step: int, size: int, duration_s: float, free_bytes: int | None = None) -> None:
        saved = {"step": step, "wall": self._clock.wall(), "bytes": size, "duration_s": duration_s}
        self._notes["saved"] = saved | ({} if free_bytes is None else {"free_bytes": free_bytes})
        self.operated("save", duration_s, ok=True)

    def count_event(self, name: str, amount: float = 1.0) -> None:
        """Count a rare event; written with the next note."""
        self._counts[name] = self._counts.get(name, 0.0) + amount

    # ---- writing

    def beat(self) -> None:
        self.pulse.phase = PHASES[self._phase]
        self._shown_s = self.pulse.seconds[_TRAINING]
        self.page.beat(self.pulse, self._phase)

    def _note(self) -> None:
        self.page.write_notes({**self._notes, "counts": self._counts})


def process_age_s(uptime: Path = Path("/proc/uptime")) -> float:
    """Seconds since this process started; 0 if the kernel does not provide it."""
    started = start_of("self")
    try:
        return max(0.0, float(uptime.read_text().split()[0]) - (started or 0) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


PROC: Final = "proc"
"""Where the ledger's directory shows the processes of its reader's host, if that is another one."""
MOST_WAITING: Final = 16 << 20
"""Upper bound on bytes that wait for the disk; further lines are dropped."""


def process_id(directory: Path | None) -> int:
    """This process's id, as the reader of the ledger in ``directory`` sees it.

    Both may be on different hosts, each with process ids of its own (see local/hosts.py).
    """
    try:
        return int(os.readlink(directory / PROC / "self")) if directory is not None else os.getpid()
    except (OSError, ValueError):
        return os.getpid()


class Ledger:
    """Writes the ledger; does nothing when the environment names no directory."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        self._identity: dict[str, Any] = {"run": environment.run_id, "node": environment.node}
        self._directory = environment.ledger_dir
        self.enabled = environment.ledger_dir is not None
        """Whether lines are written at all."""
        self._path: Path | None = None
        self._descriptor: int | None = None
        self._waiting = bytearray()
        self._refused = ""
        """Why the disk refuses lines; empty while it accepts them."""
        if environment.ledger_dir is None:
            return
        self._path = environment.ledger_dir / f"{environment.node}-{environment.local_rank}-{os.getpid()}.jsonl"
        self._write_out()
        if self._refused and not environment.midway:
            where = environment.ledger_dir
            raise StorageError(f"the ledger cannot be written in {where}: {self._refused}", hint="check the path")

    def identify(self, *, rank: int, local_rank: int, world: int, round: int) -> None:
        """Set the identity of the writer that every later line carries."""
        pid = process_id(self._directory)
        self._identity |= {"rank": rank, "local_rank": local_rank, "world": world, "round": round, "pid": pid}

    def write(self, event: str, **values: Any) -> None:
        if self._path is None:
            return
        moment = {"event": event, "t": SYSTEM.monotonic(), "wall": SYSTEM.wall()}
        line = json.dumps({**moment, **self._identity, **values}) + "\n"
        if len(self._waiting) + len(line) <= MOST_WAITING:
            self._waiting += line.encode()
        self._write_out()

    def close(self) -> None:
        self._path = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write_out(self) -> None:
        """Write the waiting lines, starting at the first byte that the disk has not accepted."""
        try:
            if self._descriptor is None and self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            while self._waiting and self._descriptor is not None:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        except OSError as error:
            before, self._refused = self._refused, error.strerror or str(error)
            if not before:
                logger().warning("ledger.not_written", path=str(self._path), error=self._refused)
            return
        self._refused = ""


def open_endpoint(environment: WorkerEnvironment, tracker: HeartbeatReporter) -> NodeEndpoint | None:
    """This process's own endpoint, if requested and if no agent reads its page."""
    if environment.pages is not None or not environment.metrics_base_port:
        return None
    if (environment.metrics_cert is None) != (environment.metrics_key is None):
        raise ConfigError(
            "environment: ELASTIC_TRAINER_METRICS_CERT and ELASTIC_TRAINER_METRICS_KEY need each other",
            hint="set both or neither",
        )
    reader = PageReader.of(tracker.page.memory)

    def look() -> list[Reading]:
        reading = reader.read()
        return [reading] if reading is not None else []

    collector = NodeCollector(
        environment.run_id, environment.node, look, lambda reading: reading.pulse.nonfinite, dict, None
    )
    endpoint = NodeEndpoint(
        environment.metrics_address,
        environment.metrics_base_port + environment.local_rank,
        collector,
        token_file=environment.metrics_token_file,
        cert=environment.metrics_cert,
        key=environment.metrics_key,
    )
    logger().info("endpoint.opened", url=endpoint.url(environment.metrics_address))
    return endpoint
