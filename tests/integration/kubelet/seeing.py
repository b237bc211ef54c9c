"""Runs in a pod: prints what it sees there as one line of JSON. Imports nothing of this project."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path


def writable(path: str) -> bool:
    """Whether a file can be made there."""
    try:
        Path(path).write_text("here")
    except OSError:
        return False
    return True


def address(name: str) -> str:
    """Where a name leads, empty for nowhere."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def main(files: list[str], names: list[str]) -> None:
    """Look."""
    seen = {
        "environment": dict(os.environ),
        "words": sys.argv[1:],
        "user": [os.getuid(), os.getgid(), sorted(os.getgroups())],
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "directory": os.getcwd(),
        "writable": [path for path in files if writable(path)],
        "settings": {path.name: path.read_text() for path in Path("/etc/settings").iterdir()},
        "secrets": {path.name: path.read_text() for path in Path("/etc/secrets").iterdir()},
        "memory": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
        "addresses": {name: address(name) for name in names},
        "interfaces": sorted(os.listdir("/sys/class/net")) if Path("/sys/class/net").exists() else [],
    }
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2].split(","))
