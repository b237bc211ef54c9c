"""Names inside a checkpoint directory: formatting, parsing, ordering. Pure.

====================================  =========================================================================
``step-000000120-r7-<nonce>``         a committed checkpoint: step 120, saved in round 7
``tmp-<nonce>-<pid>-<start>-...``     being written; the name carries the identity of the writing process
``trash-<checkpoint>-<nonce>``        being removed
``corrupt-<checkpoint>-<n>``          found damaged, kept for people to look at
``owner.json``                        locked by the process that saves here, and says who that is
====================================  =========================================================================

A name that fits none of these exactly is foreign: it is never read, moved or removed.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import socket
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from elastic_trainer.errors import CheckpointError, StorageError
from elastic_trainer.ipc.page import start_of


class DamagedError(CheckpointError):
    """The content is not what was committed: quarantine it and take the previous one."""


class GoneError(CheckpointError):
    """It was removed while it was read (by another process's retention): take the next one."""


class UnreadableError(CheckpointError):
    """It exists and may be good, but this process cannot read it now: keep it, report it, take the next one."""


class InUseError(StorageError):
    """Another job writes in this directory."""


MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
TENSORS_FILE = "tensors.safetensors"
"""Where one writer has written all tensors; see :func:`tensors_file` for several."""
OWNER_FILE = "owner.json"
OFFER_FILE = "offer.json"
"""In a temporary entry: what is written there, for those who help."""
RECORD_PREFIX = "record-"
"""In a temporary entry: the record of a file that is durable, by the place that wrote it."""

STEP_DIGITS = 9
_NONCE_BYTES = 6
_NONCE = r"[0-9a-f]{12}"
_CHECKPOINT = r"step-[0-9]{9,18}-r[0-9]{1,18}-" + _NONCE

_COMMITTED_NAME = re.compile(rf"step-([0-9]{{9,18}})-r([0-9]{{1,18}})-({_NONCE})")
_TEMPORARY_NAME = re.compile(
    rf"tmp-({_NONCE})-([0-9]{{1,10}})-([0-9]{{1,20}})-([0-9a-f]{{32}})-([0-9]{{1,20}})-([A-Za-z0-9.-]{{1,64}})"
)
_TRASH_NAME = re.compile(rf"trash-({_CHECKPOINT})-{_NONCE}")
_CORRUPT_NAME = re.compile(rf"corrupt-({_CHECKPOINT})-([0-9]{{1,6}})")
_TENSORS_PART = re.compile(r"tensors-([0-9]{5})-of-([0-9]{5})\.safetensors")
MOST_PARTS = 99_999
_SAVES = itertools.count(1)
_RESCUED = "0000"
_UNSAFE_IN_HOST = re.compile(r"[^A-Za-z0-9.-]")


class Kind(StrEnum):
    """What a directory entry is, judged by its name alone."""

    COMMITTED = "committed"
    TEMPORARY = "temporary"
    TRASH = "trash"
    QUARANTINED = "quarantined"
    FOREIGN = "foreign"


def new_nonce() -> str:
    """Twelve random hexadecimal digits: two writers of the same step never meet in one name."""
    return secrets.token_hex(_NONCE_BYTES)


def ordered_nonce() -> str:
    """Twelve hexadecimal digits that grow with each call in this process, random in the last eight.

    A process may save one step twice (on schedule, and as the best): the later one counts as newer.
    """
    return f"{next(_SAVES) & 0xFFFF or 1:04x}{secrets.token_hex(4)}"


def rescued_name(round: int, step: int, turn: int) -> str:
    """The name of a state that the agent of the ``turn``-th node commits without its workers.

    The same step may have other buffers on another node, so no two nodes write under one name. Of several the first
    node's counts as newest, and a checkpoint of the state by its own process as newer still.
    """
    return str(CheckpointName(round=round, step=step, nonce=f"{_RESCUED}{0xFFFF_FFFF - turn:08x}"))


def is_rescued(name: str) -> bool:
    """Whether it is a :func:`rescued_name`."""
    parsed = parse_checkpoint(name)
    return parsed is not None and parsed.nonce.startswith(_RESCUED)


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """The parsed name of a committed checkpoint. Ordered by round, step and nonce: the newest is the greatest."""

    round: int
    step: int
    nonce: str = field(default_factory=ordered_nonce)

    def __post_init__(self) -> None:
        if self.step < 0 or self.round < 0:
            raise CheckpointError(
                f"a checkpoint cannot have step {self.step} and round {self.round}: both count from 0"
            )

    def __str__(self) -> str:
        return f"step-{self.step:0{STEP_DIGITS}d}-r{self.round}-{self.nonce}"


@dataclass(frozen=True, slots=True)
class WriterIdentity:
    """Identity of a writing process: enough to find out, on its own machine, whether it still lives.

    ``start`` is its start time in clock ticks since boot (a reused pid has another one); ``boot`` the kernel's boot
    id; ``namespace`` the inode of its pid namespace (containers of one machine share the boot id, not the pids);
    ``host`` a :func:`host_label`.
    """

    pid: int
    start: int
    boot: str
    namespace: int
    host: str


def parse_checkpoint(text: str) -> CheckpointName | None:
    """The checkpoint that ``text`` names, or None if it is no such name."""
    match = _COMMITTED_NAME.fullmatch(text)
    if match is None:
        return None
    name = CheckpointName(round=int(match[2]), step=int(match[1]), nonce=match[3])
    return name if str(name) == text else None


def temporary_name(writer: WriterIdentity) -> str:
    """A fresh name for a directory that ``writer`` is about to fill."""
    return f"tmp-{new_nonce()}-{writer.pid}-{writer.start}-{writer.boot}-{writer.namespace}-{writer.host}"


def host_label(hostname: str) -> str:
    """``hostname`` as it may stand in a temporary name."""
    return _UNSAFE_IN_HOST.sub(".", hostname)[:64] or "unnamed"


def parse_temporary(text: str) -> WriterIdentity | None:
    """The writer that the temporary name ``text`` carries, or None if it is no such name."""
    match = _TEMPORARY_NAME.fullmatch(text)
    if match is None:
        return None
    return WriterIdentity(pid=int(match[2]), start=int(match[3]), boot=match[4], namespace=int(match[5]), host=match[6])


def tensors_file(part: int, parts: int) -> str:
    """The file of the tensors of the writer ``part``, from 0, of ``parts``."""
    if not 0 <= part < parts <= MOST_PARTS:
        raise ValueError(f"there is no part {part} of {parts}")
    return TENSORS_FILE if parts == 1 else f"tensors-{part + 1:05d}-of-{parts:05d}.safetensors"


def place_of(names: Collection[str]) -> tuple[int, int] | None:
    """Of the files of one place: its index, and how many places there are; None for the files of a whole checkpoint."""
    found = [part for part in map(tensor_part, names) if part is not None]
    return found[0] if len(found) == 1 else None


def tensor_part(name: str) -> tuple[int, int] | None:
    """Which of several files of tensors ``name`` is, from 0, and of how many; None if it is none."""
    match = _TENSORS_PART.fullmatch(name)
    return (int(match[1]) - 1, int(match[2])) if match else None


def tensor_files(names: Collection[str]) -> tuple[str, ...]:
    """The files of tensors among ``names``, in order; none where they are not exactly those of one checkpoint."""
    counts = {part[1] for part in map(tensor_part, names) if part is not None}
    parts = counts.pop() if len(counts) == 1 and TENSORS_FILE not in names else 1
    expected = tuple(tensors_file(part, parts) for part in range(parts))
    return () if counts or not set(expected) <= set(names) else expected


def trash_name(checkpoint: str) -> str:
    """A fresh name to move the checkpoint ``checkpoint`` to before it is removed."""
    return f"trash-{checkpoint}-{new_nonce()}"


def quarantine_name(checkpoint: str, number: int) -> str:
    """The ``number``-th name for the damaged checkpoint ``checkpoint``."""
    return f"corrupt-{checkpoint}-{number}"


def quarantined(text: str) -> str | None:
    """The checkpoint name inside the quarantine name ``text``, or None if it is no such name."""
    match = _CORRUPT_NAME.fullmatch(text)
    return match[1] if match else None


def trashed(text: str) -> str | None:
    """The checkpoint name inside the trash name ``text``, or None if it is no such name."""
    match = _TRASH_NAME.fullmatch(text)
    return match[1] if match else None


def kind_of(text: str) -> Kind:
    """What the directory entry ``text`` is."""
    if parse_checkpoint(text) is not None:
        return Kind.COMMITTED
    if parse_temporary(text) is not None:
        return Kind.TEMPORARY
    if _TRASH_NAME.fullmatch(text):
        return Kind.TRASH
    return Kind.QUARANTINED if quarantined(text) is not None else Kind.FOREIGN


_NO_BOOT_ID = "0" * 32


def this_process() -> WriterIdentity:
    """The identity of this process. Read anew each time, because it changes over a fork."""
    return WriterIdentity(
        pid=os.getpid(),
        start=start_of(os.getpid()) or 0,
        boot=_boot_id(),
        namespace=_pid_namespace(),
        host=host_label(socket.gethostname()),
    )


def alive(writer: WriterIdentity, me: WriterIdentity) -> bool | None:
    """Whether ``writer`` lives; None if this machine's kernel cannot know."""
    same_kernel = (writer.boot, writer.namespace) == (me.boot, me.namespace)
    if not same_kernel or writer.boot == _NO_BOOT_ID or writer.start == 0 or writer.namespace == 0:
        return None
    return start_of(writer.pid) == writer.start


def _boot_id() -> str:
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "").lower()
    except OSError:
        return _NO_BOOT_ID
    return text if re.fullmatch(r"[0-9a-f]{32}", text) else _NO_BOOT_ID


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
