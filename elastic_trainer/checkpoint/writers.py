"""The identity of this process, and whether another one lives, according to this machine's kernel."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from elastic_trainer.checkpoint.layout import WriterIdentity, host_label
from elastic_trainer.ipc.page import start_of

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
