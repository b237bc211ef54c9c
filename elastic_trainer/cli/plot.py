"""``elastic-trainer plot RUN_DIR``: options in, a picture out.

*Fails by* ConfigError and StorageError of the packages that do it.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = "example: elastic-trainer plot runs/mnist --output mnist.svg"
    parser.add_argument(
        "directory", type=Path, metavar="RUN_DIR", help="checkpoint.directory of a job, or --run-dir of a local run"
    )
    help_ = "file to write, .png, .svg or .pdf (default: curves.png, of a local run timeline.png, in RUN_DIR)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=help_)


def run(arguments: argparse.Namespace) -> int:
    """Draw the loss of a job over steps, or the nodes of a local run over time, with rounds and faults marked."""
    from elastic_trainer.local import timeline
    from elastic_trainer.training.curves import read_curves
    from elastic_trainer.training.drawing import check_drawable, draw

    directory: Path = arguments.directory
    local = timeline.has_timeline(directory)
    output = (
        arguments.output if arguments.output is not None else directory / f"{'timeline' if local else 'curves'}.png"
    )
    check_drawable(output)
    if local:
        timeline.draw(directory, output)
    else:
        draw(read_curves(directory), str(directory), output)
    print(output)
    return 0
