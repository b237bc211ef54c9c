"""The ``elastic-trainer`` command: finds the subcommand, loads only it, and turns errors into one sentence.

*Runs in* the process of the command. *Owns* nothing.
*Fails by* one line on stderr and the error's exit code; 78 for a wrong command line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn, Protocol, cast

from elastic_trainer import __version__
from elastic_trainer.errors import ConfigError, ElasticTrainerError

PROGRAM = "elastic-trainer"


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: the module of its name in this package offers :class:`Subcommand`."""

    name: str
    help: str


COMMANDS = (
    Command("init", "write a script or job to start from, or list by line what changes in yours"),
    Command("run", "start this node of a job: torchrun with good defaults"),
    Command("local", "run a job on several real nodes of this machine, and break some"),
    Command("drill", "break a small job in one of many ways, and check that it survives"),
    Command("plot", "draw the course of a job, with its rounds and faults"),
    Command("status", "show the status of a run, or of all: nodes, ranks, incidents"),
    Command("events", "what happened to a run, one line each"),
    Command("logs", "show the logs of a run's nodes, or where they are"),
    Command("monitor", "show all runs on a status page, and to Prometheus"),
    Command("admin", "who may do what in etcd: a user for each run, one for the monitor"),
    Command("k8s", "write the manifests of a run on Kubernetes, change its size there"),
    Command("forget", "remove what etcd holds of runs that are over"),
    Command("doctor", "check whether machine, network and etcd are fit to train"),
    Command("health", "ask the monitor or node of this container whether it works"),
    Command("checkpoints", "list, show, verify, compare, prune, export and import checkpoints"),
    Command("completion", "print a script that completes these commands in a shell"),
)
"""Modules are imported when their command is given, so that help stays fast."""


class Subcommand(Protocol):
    """What the module of a subcommand offers."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Describe its options."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; the exit code."""


class Parser(argparse.ArgumentParser):
    """argparse, with errors as ConfigError and without abbreviations, which break when options are added."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Called by argparse for a wrong command line."""
        raise ConfigError(message, hint=f"see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``argv`` (default: this process's arguments); the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return dispatch(arguments)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise needs_torch() from error
    except ElasticTrainerError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def needs_torch() -> ConfigError:
    """What a command says that cannot go on without torch."""
    return ConfigError("this command needs PyTorch, which is not installed here", hint="pip install torch")


def dispatch(arguments: Sequence[str]) -> int:
    """Parse and run; raises ElasticTrainerError."""
    parser, loaded = whole_parser([word for word in arguments if word in {command.name for command in COMMANDS}][:1])
    parsed = parser.parse_args(arguments)
    if parsed.log_format is not None:
        os.environ["ELASTIC_TRAINER_LOG_FORMAT"] = parsed.log_format  # for processes that the command starts, too
    if parsed.command is None:
        parser.print_help(sys.stderr)
        raise ConfigError("no command was given", hint=f"one of: {', '.join(command.name for command in COMMANDS)}")
    return loaded[parsed.command].run(parsed)


def whole_parser(wanted: Sequence[str]) -> tuple[Parser, dict[str, Subcommand]]:
    """The parser of all commands, of which only the ``wanted`` are loaded and have their options; and these."""
    parser = Parser(prog=PROGRAM, description="Fault-tolerant, elastic training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("--log-format", choices=("text", "json"), help="of log lines (default: text)")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    loaded: dict[str, Subcommand] = {}
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if command.name in wanted:
            loaded[command.name] = cast("Subcommand", import_module(f"elastic_trainer.cli.{command.name}"))
            loaded[command.name].configure(subparser)
    return parser, loaded


if __name__ == "__main__":
    sys.exit(main())
