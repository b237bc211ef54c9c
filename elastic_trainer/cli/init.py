"""``elastic-trainer init FILE``: a script or a job to start from, or what in a script a Session takes over, by line.

*Runs in* the process of the command. *Owns* the new files that it writes; a file that is there is only read.
*Fails by* ConfigError where a file is in the way, or is not a script.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from elastic_trainer.cli.advice import advice
from elastic_trainer.cli.main import PROGRAM
from elastic_trainer.errors import ConfigError, StorageError

_PACKAGE = Path(__file__).parents[1]
_SCRIPT = _PACKAGE / "tasks" / "scripts" / "ddp_script_elastic.py"
_TUTORIAL = _PACKAGE / "docs" / "tutorial.md"
_FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = "examples: elastic-trainer init; elastic-trainer init job.yaml; elastic-trainer init mine.py"
    what = "a new .py or .yaml to write, or a script that is there, to see what in it changes (default: train.py)"
    parser.add_argument("file", type=Path, nargs="?", default=Path("train.py"), metavar="FILE", help=what)
    parser.add_argument("--write", action="store_true", help="refused: scripts are not rewritten any more")


def run(arguments: argparse.Namespace) -> int:
    """Write new files, or show what in a script a Session takes over."""
    file: Path = arguments.file
    if file.suffix not in (".py", ".yaml", ".yml"):
        raise ConfigError(f"{str(file)!r} is neither a script.py nor a job.yaml", hint="say for example train.py")
    if arguments.write:
        raise ConfigError(
            "init does not rewrite scripts: only their authors can tell whether a change keeps what they train",
            hint=f"leave --write out, and change by hand the lines that {PROGRAM} init {file} lists",
        )
    if file.suffix == ".py" and file.exists():
        return _show(file)
    for path, text in _new(file).items():
        _write(path, text)
        print(f"wrote {path}")
    way = f"python {file}" if file.suffix == ".py" else f"python -m elastic_trainer.training {file}"
    print(f"try it: {way}")
    print(f"and lose a node: {PROGRAM} local --nodes 1:2 --recovery in_place --kill-node-at 100 -- {file}")
    return 0


def _show(file: Path) -> int:
    try:
        source = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error.strerror}", hint="name a script") from error
    try:
        found = advice(source, f"runs/{file.stem}")
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}", hint=error.hint) from error
    if not found:
        print(f"{file} has nothing that a Session takes over; {PROGRAM} init new.py writes a script to start from")
        return 0
    width = len(str(max(line for each in found for line in each.found)))
    for each in found:
        print(f"{each.topic}")
        for line, text in sorted(each.found.items()):
            print(f"  {line:{width}}  {text}")
        print("  becomes")
        for text in each.instead:
            print(f"  {'':{width}}  {text}")
        print()
    print(f"Nothing was written. A whole script before and after: {_SCRIPT.with_name('ddp_script.py')}")
    print(f"and {_SCRIPT.name} beside it.")
    print(f"As it is, it runs in restart mode: {PROGRAM} run --nodes 2:4 --endpoint ETCD -- {file}")
    return 0


def _new(file: Path) -> dict[Path, str]:
    """What a new ``file`` needs, none of which may be there."""
    if file.suffix == ".py":
        texts = {file: _SCRIPT.read_text(encoding="utf-8").replace("runs/ddp", f"runs/{file.stem}")}
    else:
        shown = dict(_FILE.findall(_TUTORIAL.read_text(encoding="utf-8")))
        job = shown["spirals.yaml"].replace("runs/spirals", f"runs/{file.stem}")
        texts = {file: job, file.with_name("spirals.py"): shown["spirals.py"]}
    for path in texts:
        if path.exists():
            raise ConfigError(f"{str(path)!r} is there already", hint="give another name or directory")
    return texts


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}", hint="check the directory") from error
