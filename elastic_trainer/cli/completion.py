"""``elastic-trainer completion SHELL``: a script that completes the command's words, made by shtab.

*Fails by* ConfigError if shtab is not installed.
"""

from __future__ import annotations

import argparse

from elastic_trainer.errors import ConfigError

SHELLS = ("bash", "zsh", "tcsh")


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = 'example: eval "$(elastic-trainer completion bash)" in ~/.bashrc'
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(arguments: argparse.Namespace) -> int:
    """Print the script for the shell."""
    try:
        from shtab import complete
    except ImportError as error:
        raise ConfigError("completion needs shtab", hint="pip install 'elastic-trainer[completion]'") from error
    from elastic_trainer.cli.main import COMMANDS, whole_parser

    parser, _ = whole_parser([command.name for command in COMMANDS])
    print(complete(parser, arguments.shell))
    return 0
