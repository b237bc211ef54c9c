"""``elastic-trainer init FILE``: a script or a job to start from, or the change that makes a script elastic, as a diff.

*Runs in* the process of the command. *Owns* the files that it writes: new ones, and with ``--write`` the script.
*Fails by* ConfigError where a file is in the way, or the script is not one that can be changed.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path

from elastic_trainer.cli.conversion import converted
from elastic_trainer.cli.main import PROGRAM
from elastic_trainer.errors import ConfigError, StorageError

_PACKAGE = Path(__file__).parents[1]
_SCRIPT = _PACKAGE / "tasks" / "scripts" / "ddp_script_elastic.py"
_TUTORIAL = _PACKAGE / "docs" / "tutorial.md"
_FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = (
        "examples: elastic-trainer init; elastic-trainer init job.yaml; elastic-trainer init mine.py --write"
    )
    what = "a new .py or .yaml to write, or a script with DistributedDataParallel (default: train.py)"
    parser.add_argument("file", type=Path, nargs="?", default=Path("train.py"), metavar="FILE", help=what)
    parser.add_argument("--write", action="store_true", help="change the script that is there, not only show how")


def run(arguments: argparse.Namespace) -> int:
    """Write, or show what would be changed."""
    file: Path = arguments.file
    if file.suffix not in (".py", ".yaml", ".yml"):
        raise ConfigError(f"{str(file)!r} is neither a script.py nor a job.yaml", hint="say for example train.py")
    if file.suffix == ".py" and file.exists():
        return _change(file, write=arguments.write)
    if arguments.write:
        raise ConfigError(f"there is no script {str(file)!r} to change", hint="leave --write out to write a new one")
    for path, text in _new(file).items():
        _write(path, text)
        _say(f"wrote {path}")
    way = f"python {file}" if file.suffix == ".py" else f"python -m elastic_trainer.training {file}"
    _say(f"try it: {way}")
    _say(f"and lose a node: {PROGRAM} local --nodes 1:2 --recovery in_place --kill-node-at 100 -- {file}")
    return 0


def _change(file: Path, *, write: bool) -> int:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error}", hint="name a script") from error
    changed = converted(text, f"runs/{file.stem}")
    before, after = text.splitlines(keepends=True), changed.splitlines(keepends=True)
    sys.stdout.writelines(difflib.unified_diff(before, after, str(file), str(file)))
    sys.stdout.flush()
    if write:
        _write(file, changed, new=False)
        _say(f"changed {file}; try it: python {file}")
    else:
        _say(f"nothing is written yet: {PROGRAM} init {file} --write")
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


def _write(path: Path, text: str, *, new: bool = True) -> None:
    try:
        with path.open("x" if new else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}", hint="check the directory") from error


def _say(sentence: str) -> None:
    """To standard error: standard output is for the diff, which `patch` takes."""
    print(f"{PROGRAM}: {sentence}", file=sys.stderr)
