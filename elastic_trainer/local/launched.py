"""A process of :func:`elastic_trainer.launch`: calls the function that the directory ``argv[1]`` holds.

*Runs in* a worker of torchrun. *Fails by* what the function raises, whose traceback it leaves in the directory.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import cloudpickle

from elastic_trainer.settings import ENV_NODE

CALL = "call"
"""The file with the function and its arguments."""


def result_file(directory: Path, number: int) -> Path:
    """Where process ``number`` leaves what the function returned."""
    return directory / f"result-{number}"


def error_file(directory: Path, number: int) -> Path:
    """Where process ``number`` leaves the traceback of its last failure."""
    return directory / f"error-{number}"


def main(directory: Path) -> None:
    """Call the function; its result must be something that can be pickled."""
    node, local_rank = int(os.environ[ENV_NODE].removeprefix("n")), int(os.environ["LOCAL_RANK"])
    number = node * int(os.environ["LOCAL_WORLD_SIZE"]) + local_rank
    try:
        fn, args = cloudpickle.loads((directory / CALL).read_bytes())
        found = cloudpickle.dumps(fn(*args))
    except Exception:
        error_file(directory, number).write_text(traceback.format_exc())
        raise
    whole = result_file(directory, number).with_suffix(".part")
    whole.write_bytes(found)
    whole.replace(result_file(directory, number))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
