"""``elastic-trainer plot RUN_DIR``: options in, a picture out.

*Fails by* ConfigError and StorageError of the packages that do it.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = "example: elastic-trainer plot runs/mnist --output mnist.svg"
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="the checkpoint.directory of a job")
    help_ = "the file to write, .png, .svg or .pdf (default: curves.png in RUN_DIR)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=help_)


def run(arguments: argparse.Namespace) -> int:
    """Draw the loss over steps with rounds and faults marked."""
    from elastic_trainer.training.curves import read_curves
    from elastic_trainer.training.drawing import check_drawable, draw

    output = arguments.output if arguments.output is not None else arguments.directory / "curves.png"
    check_drawable(output)
    curves = read_curves(arguments.directory)
    draw(curves, str(arguments.directory), output)
    print(output)
    return 0
