"""The ``elastic-trainer`` command: finds the subcommand, loads only it, and turns errors into one sentence.

Also what commands share (sub-commands, checks of numbers, ``key=value`` lists, a console for tables), and
``elastic-trainer completion``.

*Runs in* the process of the command. *Owns* nothing.
*Fails by* one line on stderr and the error's exit code; 78 for a wrong command line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from textwrap import fill
from typing import TYPE_CHECKING, NoReturn

from elastic_trainer import __version__
from elastic_trainer.errors import ConfigError, ElasticTrainerError

if TYPE_CHECKING:
    from rich.console import Console

PROGRAM = "elastic-trainer"


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: the module ``home`` of this package has ``configure_NAME``, which describes its options, and
    ``run_NAME``, which returns the exit code."""

    name: str
    home: str
    help: str
    about: str = ""


COMMANDS = (
    Command(
        "init",
        "init",
        "write a script or job to start from, or list by line what changes in yours",
        "Writes a script with a Session, or with a name in .yaml a job file and its task; both learn two "
        "spirals, to be replaced by your own. Of a script that is there it lists, by line, what a Session "
        "takes over, each with the lines that replace it. It changes nothing, and finds what is written out: "
        "what a script does through a library of its own it does not see.",
    ),
    Command(
        "run",
        "run",
        "start this node of a job: torchrun with good defaults",
        "Prints torchrun's command with the etcd rendezvous and defaults for long jobs, and becomes it. Give "
        "the same words on every node.",
    ),
    Command("local", "run", "run a job on several real nodes of this machine, and break some"),
    Command("drill", "run", "break a small job in one of many ways, and check that it survives"),
    Command("plot", "run", "draw the course of a job, with its rounds and faults"),
    Command(
        "status",
        "status",
        "show the status of a run, or of all: nodes, ranks, incidents",
        "State, round, step, rates, goodput, last checkpoint, nodes and ranks, the newest incidents. With "
        "more than 40 ranks a node is one row. Columns for which the terminal has no room are left out, and "
        "named below the table.",
    ),
    Command("stop", "operate", "end a run by plan: all nodes save and leave"),
    Command("drain", "operate", "have one node leave by plan; the others train on"),
    Command(
        "pause",
        "operate",
        "have all ranks wait between two steps, with their state",
        "They wait with their state in memory, until elastic-trainer resume, and checkpoints save works. When ranks "
        "change meanwhile they train for up to a second.",
    ),
    Command("resume", "operate", "let a paused run go on"),
    Command(
        "restart",
        "operate",
        "start the workers anew, with the script as it is now; no step is lost",
        "All ranks save at one step and end; torchrun starts them anew, and they resume there. It counts as "
        "one of --max-restarts. A script that fails at once then ends the run, with its checkpoints kept: try it alone "
        "first. With --no-wait it only waits for the save.",
    ),
    Command(
        "events",
        "events",
        "what happened to a run, one line each",
        "Transitions of rounds and incidents, by time. The end of a round says how many steps were lost and "
        "how long training stood still, from the last committed step before it to the first one after it.",
    ),
    Command(
        "why",
        "why",
        "what failed in a run, how sure that is, and what to do",
        "The verdict on the newest incident in one sentence, then its evidence, the records of the machines concerned, "
        "and the verdicts before it. It rests on exit codes, exceptions, signals, the kernel's log, stacks, and what "
        "the same batch or the same node has done before; no model guesses.",
    ),
    Command(
        "logs",
        "logs",
        "show the logs of a run's nodes, or where they are",
        "What the nodes of a run wrote, if it is on this machine; else a command for kubectl or journalctl, "
        "or a file on another machine. A node writes the lines of its agent and of all its workers; with "
        "torchrun's --log-dir and --redirects, look there.",
    ),
    Command(
        "monitor",
        "monitor",
        "show all runs on a status page, and to Prometheus",
        "It keeps nothing: several may run. SIGTERM ends it with 0.",
    ),
    Command(
        "admin",
        "admin",
        "who may do what in etcd: a user for each run, one for the monitor",
        "init once, then grant RUN for each run, as etcd's root: init creates root with the given password "
        "and a user that reads all runs, and enables authentication; grant gives user run-RUN the keys of RUN "
        "and nothing else. Both may be repeated, and give a new password each time. revoke removes the user, "
        "list shows who has one.",
    ),
    Command("k8s", "k8s", "write the manifests of a run on Kubernetes, change its size there"),
    Command(
        "forget",
        "forget",
        "remove what etcd holds of runs that are over",
        "Nothing else removes it. Checkpoints stay, and a run that has nodes is always kept.",
    ),
    Command(
        "doctor",
        "doctor",
        "check whether machine, network and etcd are fit to train",
        "Exit code 1 if anything is bad. Without options it looks at this machine alone.",
    ),
    Command(
        "health",
        "health",
        "ask the monitor or node of this container whether it works",
        "It asks /healthz, over HTTP or TLS, and ends with 0 if that is well: the health check of the image. "
        "Where nobody listens on 9470 or 9471 there is nothing to ask, and nothing wrong.",
    ),
    Command(
        "checkpoints",
        "checkpoints",
        "list, show, verify, compare, prune, export and import checkpoints",
        "Without torch, but for its own files. CHECKPOINT is a directory, which stands for its newest "
        "checkpoint, or DIR/NAME. NAME may be cut short, and be newest or best.",
    ),
    Command(
        "data",
        "data",
        "which samples the steps of a run used, and the proof of it",
        "Without torch and etcd, from the checkpoint directory. Without a question: which steps are known.",
    ),
    Command(
        "replay",
        "replay",
        "compute recorded steps again from a checkpoint, and compare",
        "The script runs as in the run, up to STEP, in a directory of its own. Exit code 1 if losses differ by more "
        "than rounding, or a recorded digest is not met.",
    ),
    Command("completion", "main", "print a script that completes these commands in a shell"),
)
"""Modules are imported when their command is given, so that help stays fast."""


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
    return loaded[parsed.command](parsed)


def whole_parser(wanted: Sequence[str]) -> tuple[Parser, dict[str, Callable[[argparse.Namespace], int]]]:
    """The parser of all commands, of which only the ``wanted`` are loaded and have their options; and these."""
    parser = Parser(prog=PROGRAM, description="Fault-tolerant, elastic training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("--log-format", choices=("text", "json"), help="of log lines (default: text)")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    loaded: dict[str, Callable[[argparse.Namespace], int]] = {}
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name, help=command.help, description=fill(f"{command.help}. {command.about}".rstrip(". "), 80)
        )
        if command.name in wanted:
            home = import_module(f"elastic_trainer.cli.{command.home}")
            getattr(home, f"configure_{command.name}")(subparser)
            loaded[command.name] = getattr(home, f"run_{command.name}")
    return parser, loaded


# ---- what commands share


def output_options(parser: argparse.ArgumentParser, *more: str) -> None:
    """``-o``, for programs json and yaml, and --json for the former; ``more``: what else a command can write."""
    about = {"wide": "wide shows all columns, however narrow the terminal", "name": "name the names alone"}
    said = "; ".join(["json and yaml are for programs", *(about[each] for each in more)])
    parser.add_argument("-o", "--output", choices=(*more, "json", "yaml"), help=said)
    parser.add_argument("--json", action="store_const", const="json", dest="output", help="the same as -o json")


def written(value: object, output: str) -> str:
    """``value``, of what JSON knows, in the way that ``-o`` asks for."""
    if output == "json":
        return json.dumps(value, indent=2)
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True)).rstrip("\n")


def ensure_torch() -> None:
    """ConfigError unless torch is installed, without loading it: for commands whose processes use it."""
    if find_spec("torch") is None:
        raise needs_torch()


def console(width: int = 80) -> Console:
    """A console on standard output; a file gets tables of ``width`` characters, or of as many as COLUMNS says if
    that is more."""
    from rich.console import Console

    made = Console()
    if not made.is_terminal:
        made.width = max(width, made.width)
    return made


@contextmanager
def progress(what: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error for ``total`` steps or bytes; what is yielded counts them."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    done = DownloadColumn(binary_units=True) if in_bytes else TaskProgressColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def sub_commands(
    parser: argparse.ArgumentParser,
) -> Callable[..., argparse.ArgumentParser]:
    """What adds a sub-command, by its name, what runs it (``act``), its help, and what more is to be said of it."""
    made = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))

    def add(name: str, act: Callable[[argparse.Namespace], int], text: str, about: str = "") -> argparse.ArgumentParser:
        description = fill(f"{text}. {about}", 80) if about else text
        added: argparse.ArgumentParser = made.add_parser(name, help=text, description=description)
        added.set_defaults(act=act)
        return added

    return add


def seconds(value: float, option: str, *, above_zero: bool = False) -> float:
    """``value``, if it is finite and not negative (or above zero)."""
    if not (math.isfinite(value) and value >= 0) or (above_zero and value == 0):
        what = " above 0" if above_zero else ""
        raise ConfigError(f"{option} {value} is not a number of seconds{what}", hint="give for example 60")
    return value


def at_least(least: int, value: int, option: str) -> int:
    """``value``, if it is not below ``least``."""
    if value < least:
        raise ConfigError(f"{option} {value} is below {least}", hint=f"give {least} or more")
    return value


def key_values(text: str) -> dict[str, str]:
    """Read ``key=value,...`` of ``--rdzv-conf``."""
    options: dict[str, str] = {}
    for part in (piece.strip() for piece in text.split(",") if piece.strip()):
        name, separator, value = part.partition("=")
        if not separator or not name:
            raise ConfigError(f"--rdzv-conf: {part!r} is not key=value", hint="write --rdzv-conf ttl=5,last_call=1")
        options[name.strip()] = value.strip()
    return options


# ---- completion

SHELLS = ("bash", "zsh", "tcsh")
_NAMES = f"$(timeout 3 {PROGRAM} status -o name 2>/dev/null)"
_RUNS = {
    "bash": f'_elastic_trainer_runs() {{ compgen -W "{_NAMES}" -- "$1"; }}',
    "zsh": f'_elastic_trainer_runs() {{ compadd -- ${{(f)"{_NAMES}"}} }}',
}
"""Functions of the shells that offer the names of the runs in the etcd that the environment names."""
RUN_NAMES = dict.fromkeys(_RUNS, "_elastic_trainer_runs")


def configure_completion(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = 'example: eval "$(elastic-trainer completion bash)" in ~/.bashrc'
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the script for the shell."""
    try:
        from shtab import complete
    except ImportError as error:
        raise ConfigError("completion needs shtab", hint="pip install 'elastic-trainer[completion]'") from error
    parser, _ = whole_parser([command.name for command in COMMANDS])
    print(complete(parser, arguments.shell, preamble=_RUNS.get(arguments.shell, "")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
