"""Writes down what a process can see of itself, as JSON."""

import gc
import json
import os
import resource
import signal
import sys
import threading


class Mine:
    """A class of ``__main__``."""


def standing() -> list[str]:
    sig = ("SigPnd", "SigBlk", "SigIgn", "SigCgt")  # but for SigQ, which counts the signals queued for all of the user
    names = ("Name", *sig, "Shd", "Umask", "Cpus_allowed:", "Threads", "NoNewPrivs", "Cap")
    with open("/proc/self/status", encoding="utf-8") as status:
        return [line for line in status if line.startswith(names)]


def read(name: str) -> list[str]:
    with open(f"/proc/self/{name}", encoding="utf-8") as file:
        return file.read().split("\0")


if __name__ == "__main__":
    seen = {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
        "main": {name: type(value).__name__ for name, value in sorted(globals().items()) if name.startswith("__")},
        "file": __file__, "spec": str(__spec__ and __spec__.name), "own": sys.modules["__main__"].Mine is Mine,
        "directory": os.getcwd(),
        "signals": {str(each): str(signal.getsignal(each)) for each in sorted(signal.valid_signals())},
        "blocked": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()], "parent": os.getppid(),
        "limits": [resource.getrlimit(each) for each in range(16)], "environment": dict(os.environ),
        "shown": [read("environ"), read("cmdline")],
        "streams": [
            (each.name, each.fileno(), each.encoding, each.errors, each.line_buffering)
            for each in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "threads": threading.active_count(), "status": standing(), "hook": sys.excepthook is sys.__excepthook__,
        "warnings": sys.warnoptions, "thresholds": gc.get_threshold(),
    }  # fmt: skip
    print(json.dumps(seen, indent=1, sort_keys=True, default=str))
