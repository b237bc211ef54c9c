"""A job that needs more and more memory once a file asks for it: ``hoarding.py FILE mnist key=value ...``."""

import sys
import threading
from pathlib import Path

from elastic_trainer.clock import pause
from elastic_trainer.jobs.main import main


def collect(asked: Path) -> None:
    hoard: list[bytearray] = []
    while not asked.exists():
        pause(0.1)
    while True:
        hoard.append(bytearray(b"x") * (32 << 20))
        pause(0.1)


if __name__ == "__main__":
    file = Path(sys.argv.pop(1))
    file.unlink(missing_ok=True)  # it asked the process before this one
    threading.Thread(target=collect, args=(file,), daemon=True).start()
    sys.exit(main())
