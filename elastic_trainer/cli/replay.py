"""``elastic-trainer replay``: computes recorded steps again, from the newest checkpoint before them, and compares.

The script runs as it always does, but its Session works in a directory of its own that holds a copy of the checkpoint,
and stops behind the last step. With ``reduction="tree"`` the losses are equal to the last bit at any number of ranks,
otherwise to rounding, at the recorded number of ranks mostly to the last bit too.

*Runs in* the process of the command; the script in others. *Owns* a temporary directory.
*Fails by* ConfigError for steps without records or a checkpoint before them, and a script that fails.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elastic_trainer.checkpoint.manager import committed, entry, listed
from elastic_trainer.checkpoint.manifest import MANIFEST_FILE
from elastic_trainer.checkpoint.storage import PosixStorage, Storage, open_storage
from elastic_trainer.cli.data import add_directory, opened, plainly, steps_of
from elastic_trainer.cli.main import at_least, ensure_torch, output_options, written
from elastic_trainer.data.ledger import FOLDER, History, Kind, StepRecord
from elastic_trainer.errors import EXIT_LEFT, ConfigError
from elastic_trainer.variables import ENV_REPLAY
from elastic_trainer.wording import counted, number

ROUNDING: Final = 1e-4
"""By what part of itself a loss may differ that was added up in another order."""
_PIECE: Final = 1 << 24
_SHOWN: Final = 20
_LAST_LINES: Final = 15


def configure_replay(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add = parser.add_argument
    parser.epilog = "example: elastic-trainer replay runs/gpt/checkpoints 48211 -- train.py --lr 3e-4"
    add_directory(parser)
    add("steps", metavar="STEP[-STEP]", help="the steps to compute again")
    _add_options(parser)
    parser.set_defaults(parser=parser)
    add("what", nargs=argparse.REMAINDER, metavar="-- SCRIPT [ARGS]", help="the script, with the arguments of the run")


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nproc-per-node", type=int, default=1, metavar="P", help="processes to compute with (default: 1)")
    add(
        "--without",
        type=int,
        action="append",
        default=[],
        metavar="SAMPLE",
        help="leave this sample out, and show what that changes; may be repeated",
    )
    add("--keep", metavar="DIR", help="keep the directory of the replay, with its ledger and last state, as this one")
    output_options(parser)


@dataclass(frozen=True, slots=True)
class Step:
    """One step, as it was recorded and as it was computed again."""

    before: StepRecord
    now: StepRecord

    @property
    def comparable(self) -> bool:
        """Whether both losses are known, and of all ranks."""
        return None not in (self.before.loss, self.now.loss) and self.before.whole and self.now.whole

    @property
    def off(self) -> float:
        """By what part of itself the loss differs; 0: not by a bit."""
        before, now = self.before.loss, self.now.loss
        if before is None or now is None or before == now or (math.isnan(before) and math.isnan(now)):
            return 0.0
        far = abs(now - before) / max(abs(before), 1e-12)
        return far if math.isfinite(far) else math.inf

    @property
    def same_data(self) -> bool:
        """Whether both used the same samples."""
        return all(getattr(self.before, each) == getattr(self.now, each) for each in ("epoch", "start", "count"))


def run_replay(arguments: argparse.Namespace) -> int:
    """Compute the steps again; 1 if they differ by more than rounding, or a recorded digest is not met."""
    ensure_torch()
    behind, what = [], arguments.what
    if what[:1] and what[0].startswith("-"):  # argparse takes all that follows the steps for the script
        end = what.index("--") if "--" in what else len(what)
        behind, what = what[:end], what[end + 1 :]
    options = type(arguments.parser)(prog=arguments.parser.prog)
    _add_options(options)
    options.parse_args(behind, arguments)
    if not what:
        raise ConfigError("there is no script to compute with", hint="end with -- train.py and the run's arguments")
    at_least(1, arguments.nproc_per_node, "--nproc-per-node")
    storage, history = opened(arguments.run)
    first, last = steps_of(arguments.steps, history)
    source = newest_before(storage, first, history)
    with tempfile.TemporaryDirectory(prefix="elastic-trainer-replay-") as made:
        directory = Path(made) / "checkpoints"
        begun, threads = 0, None
        if source is not None:
            fetch(storage, source, directory)
            manifest = entry(storage, source).manifest
            arithmetic, begun = manifest.fields.get("arithmetic"), manifest.step
            threads = str(arithmetic["threads"]) if isinstance(arithmetic, dict) and "threads" in arithmetic else None
        begin = source if source is not None else "the beginning"
        say = f"from {begin}, on {counted(arguments.nproc_per_node, 'rank')}"
        print(f"replaying up to step {last} {say}", file=sys.stderr, flush=True)
        again = compute(what, arguments.nproc_per_node, directory, last, arguments.without, threads)
        if arguments.keep is not None:
            shutil.copytree(directory, arguments.keep, dirs_exist_ok=True)
        pairs = zip(history.between(begun + 1, last), again.between(begun + 1, last), strict=False)
        steps = [Step(*pair) for pair in pairs]
        digests = _digests(history, again, last)
    return _told(steps, digests, first, source, arguments)


def newest_before(storage: Storage, step: int, history: History) -> str | None:
    """The newest checkpoint from which ``step`` can be computed; None: from the beginning of the run.

    ConfigError if there is none, and the records do not begin with the run.
    """
    names = committed(listed(storage))
    found = [each for each in names if each.step < step]
    if found:
        return str(max(found))
    if history.stretches[0].name.first > 1:
        raise ConfigError(f"no checkpoint before step {step} is there", hint="ask for a later step")
    return None


def fetch(storage: Storage, name: str, directory: Path) -> None:
    """Copy the checkpoint ``name`` into ``directory``."""
    here, manifest = PosixStorage(directory), entry(storage, name).manifest
    here.prepare()
    temporary = f"copy-{name}"
    here.create(temporary, name)
    for file in [*(each.name for each in manifest.files), MANIFEST_FILE]:
        source, sink = storage.source(name, file), here.sink(temporary, file)
        try:
            for offset in range(0, source.size, _PIECE):
                piece = memoryview(bytearray(min(_PIECE, source.size - offset)))
                if not source.read_into(piece, offset):
                    raise ConfigError(f"{name}/{file} is cut off", hint="elastic-trainer checkpoints verify names more")
                sink.write(piece)
            sink.finish(durable=False)
        finally:
            sink.abandon()
            source.close()
    here.publish(temporary, name)


def compute(
    what: Sequence[str], ranks: int, directory: Path, last: int, without: Sequence[int], threads: str | None = None
) -> History:
    """Run the script up to step ``last``, with as many ``threads`` as in the run, if it was recorded how many.

    The ledger of what it did; ConfigError with its last lines if it fails.
    """
    from elastic_trainer.worker.steps.options import Replay

    asked = Replay(directory=str(directory), until=last, without=tuple(without))
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *what]
    command = program if ranks > 1 else [sys.executable, *what]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ELASTIC_TRAINER_")}
    ended = subprocess.run(
        command,
        env={**kept, **({"OMP_NUM_THREADS": threads} if threads else {}), ENV_REPLAY: asked.model_dump_json()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    history = History(open_storage(directory / FOLDER))
    if history.last < last:
        print(*ended.stdout.splitlines()[-_LAST_LINES:], sep="\n", file=sys.stderr)
        how = f"ended with exit code {ended.returncode}" if ended.returncode not in (0, EXIT_LEFT) else "ended"
        raise ConfigError(
            f"the script {how} before step {last}; its last lines are above", hint="give it the run's own arguments"
        )
    return history


def _digests(history: History, again: History, last: int) -> list[tuple[int, bool | None]]:
    """The steps whose state has a recorded digest, and whether it is met; None: it is of another kind of device."""
    mine = {about["step"]: about for _, about in again.noted(Kind.DIGEST)}
    found = []
    for _, about in history.noted(Kind.DIGEST):
        here = mine.get(about["step"])
        if here is not None and about["step"] <= last:
            alike = here["device"] == about["device"]
            found.append((int(about["step"]), here["digest"] == about["digest"] if alike else None))
    return found


def _told(
    steps: Sequence[Step],
    digests: Sequence[tuple[int, bool | None]],
    first: int,
    source: str | None,
    arguments: argparse.Namespace,
) -> int:
    comparable = [each for each in steps if each.comparable]
    other = next((each.before.step for each in steps if not each.same_data), None)
    differs = next((each for each in comparable if each.off), None)
    missed = [step for step, met in digests if met is False]
    worst = max((each.off for each in comparable), default=0.0)
    compared = bool(comparable) or any(met for _, met in digests)
    fits = compared and other is None and worst <= ROUNDING and not (missed and not differs)
    if arguments.output is not None:
        rows = [_values(each) for each in steps if each.before.step >= first]
        about: dict[str, Any] = {
            "from": source,
            "ranks": arguments.nproc_per_node,
            "without": arguments.without,
            "compared": len(comparable),
            "first_other_data": other,
            "first_other_loss": differs.before.step if differs is not None else None,
            "largest_difference": plainly(worst),
            "digests": {str(step): met for step, met in digests},
            "steps": rows,
        }
        print(written(about, arguments.output))
    else:
        _print_steps([each for each in steps if each.before.step >= first], without=bool(arguments.without))
        if not arguments.without:
            _print_verdict(comparable, other, differs, worst, digests)
    return 0 if arguments.without or fits else 1


def _values(each: Step) -> dict[str, Any]:
    return {"step": each.before.step, "recorded": plainly(each.before.loss), "replayed": plainly(each.now.loss)}


def _print_steps(steps: Sequence[Step], *, without: bool) -> None:
    title = "without" if without else "replayed"
    print(f"{'step':>10} {'recorded':>14} {title:>14}")
    for each in steps[:_SHOWN]:
        print(f"{each.before.step:>10} {_loss(each.before)} {_loss(each.now)}")
    if len(steps) > _SHOWN:
        print(f"{'':>10} and {len(steps) - _SHOWN} more (-o json has all)")


def _loss(record: StepRecord) -> str:
    if record.loss is None:
        return f"{'-':>14}"
    return f"{record.loss:>14.8g}" if math.isfinite(record.loss) else f"{record.loss!s:>14}"


def _print_verdict(
    comparable: Sequence[Step],
    other: int | None,
    differs: Step | None,
    worst: float,
    digests: Sequence[tuple[int, bool | None]],
) -> None:
    if other is not None:
        print(f"step {other} used other samples here: give the script the arguments of the run")
        return
    if not comparable:
        print("no loss was recorded for all ranks, so none is compared: step.loss or step.later_loss() records it")
    elif differs is None:
        print(f"the loss of {counted(len(comparable), 'step')} is equal to the last bit")
    else:
        how = "by rounding" if worst <= ROUNDING else "by more than rounding"
        print(f"the loss differs from step {differs.before.step} on, {how}: by {number(100 * worst)} % at most")
    met = [step for step, found in digests if found]
    missed = [step for step, found in digests if found is False]
    if met:
        print(f"the state has the recorded digest at step {', '.join(map(str, met))}")
    if missed:
        print(f"the state has another digest than recorded from step {missed[0]} on")
    if any(found is None for _, found in digests):
        print("digests of CUDA devices and of CPUs cannot be compared with each other")
