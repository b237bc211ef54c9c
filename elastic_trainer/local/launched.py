"""A process of :func:`elastic_trainer.launch`: calls the function that the directory ``argv[1]`` holds.

*Runs in* a worker of torchrun. *Owns* its output file, which keeps its output apart from torchrun's.
*Fails by* the function's exception: exit code 1, and the traceback in the output and in the directory.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import cloudpickle

from elastic_trainer.errors import EXIT_FAILURE
from elastic_trainer.variables import ENV_NODE

CALL = "call"
"""The file with the function and its arguments."""


def result_file(directory: Path, number: int) -> Path:
    """The file with the function's result in process ``number``."""
    return directory / f"result-{number}"


def error_file(directory: Path, number: int) -> Path:
    """The file with the traceback of the last failure of process ``number``."""
    return directory / f"error-{number}"


def output_file(directory: Path, number: int) -> Path:
    """The output file of process ``number``."""
    return directory / f"output-{number}"


def main(directory: Path) -> int:
    """Call the function; its result must be picklable."""
    node, local_rank = int(os.environ[ENV_NODE].removeprefix("n")), int(os.environ["LOCAL_RANK"])
    number = node * int(os.environ["LOCAL_WORLD_SIZE"]) + local_rank
    with output_file(directory, number).open("ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    try:
        fn, args = cloudpickle.loads((directory / CALL).read_bytes())
        found = cloudpickle.dumps(fn(*args))
    except Exception as error:  # noqa: BLE001 - the edge to the function: printed once, without this module's frame
        below = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(error.with_traceback(below)))
        error_file(directory, number).write_text(text)
        print(text, end="", file=sys.stderr, flush=True)
        return EXIT_FAILURE
    whole = result_file(directory, number).with_suffix(".part")
    whole.write_bytes(found)
    whole.replace(result_file(directory, number))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
