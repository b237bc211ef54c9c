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
RESULT, ERROR, OUTPUT = "result-{}", "error-{}", "output-{}"
"""The files of a process, by its number: the function's result, the traceback of its last failure, its output."""


def main(directory: Path) -> int:
    """Call the function; its result must be picklable."""
    node, local_rank = int(os.environ[ENV_NODE].removeprefix("n")), int(os.environ["LOCAL_RANK"])
    number = node * int(os.environ["LOCAL_WORLD_SIZE"]) + local_rank
    with (directory / OUTPUT.format(number)).open("ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    try:
        fn, args = cloudpickle.loads((directory / CALL).read_bytes())
        found = cloudpickle.dumps(fn(*args))
    except Exception as error:  # noqa: BLE001 - the edge to the function: printed once, without this module's frame
        below = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = "".join(traceback.format_exception(error.with_traceback(below)))
        (directory / ERROR.format(number)).write_text(text)
        print(text, end="", file=sys.stderr, flush=True)
        return EXIT_FAILURE
    part = directory / f"part-{number}"
    part.write_bytes(found)
    part.replace(directory / RESULT.format(number))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
