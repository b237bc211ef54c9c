"""``elastic-trainer data``: which samples the steps of a run used, and the proof of it. Needs no torch.

*Runs in* the process of the command. *Owns* nothing; files are only read.
*Fails by* ConfigError for a directory without a ledger and steps that are not in it; LedgerError for records that were
changed.
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from elastic_trainer.checkpoint import codec
from elastic_trainer.checkpoint.manager import committed, entry, listed
from elastic_trainer.checkpoint.reading import read_skeleton, read_tensors
from elastic_trainer.checkpoint.storage import Storage, is_url, open_storage
from elastic_trainer.cli.main import console, output_options, progress, written
from elastic_trainer.data.ledger import (
    FOLDER,
    PASSED_OVER,
    SKIPPED,
    Chain,
    History,
    LedgerError,
    StepRecord,
    spikes,
)
from elastic_trainer.errors import ConfigError, ElasticTrainerError
from elastic_trainer.store.untrusted import plain
from elastic_trainer.wording import counted, number, ranges

MOST_STEPS: Final = 1000
"""Steps that are shown at a time."""
_FEW: Final = 8
"""Samples of a step that a list shows."""
_SHARED: Final = 5


def configure_data(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add = parser.add_argument
    parser.epilog = "example: elastic-trainer data runs/gpt/checkpoints 48211"
    add_directory(parser)
    add("steps", nargs="?", metavar="STEP[-STEP]", help="the samples of these steps, and who computed them")
    add("--sample", metavar="N", help="the steps that used the sample with this number, or with this key")
    add("--spikes", action="store_true", help="the steps whose loss or gradient norm stands out, with their samples")
    add(
        "--verify",
        action="store_true",
        help="prove that each sample of each epoch was used once, or name the first record that does not fit",
    )
    output_options(parser)


def add_directory(parser: argparse.ArgumentParser) -> None:
    """The argument that :func:`opened` takes."""
    about = "the run's checkpoint directory, a path or URL, or the --run-dir of a local run"
    parser.add_argument("run", metavar="DIR", help=about)


def run_data(arguments: argparse.Namespace) -> int:
    """Show it."""
    chosen = [arguments.steps is not None, arguments.sample is not None, arguments.spikes, arguments.verify]
    if sum(chosen) > 1:
        raise ConfigError("steps, --sample, --spikes and --verify are different questions", hint="ask one at a time")
    storage, history = opened(arguments.run)
    if arguments.verify:
        _verify(history, arguments)
    elif arguments.spikes:
        _spikes(history, arguments)
    elif arguments.sample is not None:
        sample = _numbered(arguments.sample, history)
        with progress("looking", history.last) as advance:
            found = list(history.using(sample, advance))
        _show(history, iter(found), arguments, brief=True, none=f"no step used sample {arguments.sample}")
    elif arguments.steps is not None:
        first, last = steps_of(arguments.steps, history)
        _show(history, history.between(first, last), arguments, brief=False, none="nothing is known of these steps")
    else:
        _summary(storage, history, arguments)
    return 0


def opened(location: str) -> tuple[Storage, History]:
    """The ledger of the run whose checkpoints are at ``location``. ConfigError if there is none."""
    inner = Path(location) / "checkpoints"
    if not is_url(location) and (inner / FOLDER).is_dir():
        location = str(inner)
    if not is_url(location) and not Path(location).is_dir():
        raise ConfigError(f"there is no directory {location!r}", hint="give the checkpoint directory of a run")
    storage = open_storage(location)
    files = open_storage(f"{location.rstrip('/')}/{FOLDER}")
    try:
        history = History(files, chain_in(storage))
    except OSError as error:
        raise LedgerError(f"the ledger in {location} cannot be listed: {error.strerror or error}") from error
    if not history.stretches:
        raise ConfigError(
            f"there is no ledger in {location}",
            hint="give the checkpoint directory of a run with a Session; each checkpoint writes a part of it",
        )
    return storage, history


def chain_in(storage: Storage) -> Chain | None:
    """The chain of records in the newest checkpoint; None if there is none, or it is damaged."""
    names = committed(listed(storage))
    if not names:
        return None
    try:
        manifest = entry(storage, str(max(names))).manifest
        leaves = codec.outline(read_skeleton(storage, manifest), manifest.name)
        held = {path[1]: leaf for path, leaf in leaves.items() if path[:1] == ("ledger",) and len(path) > 1}
        if not held:
            return None
        name = held["rows"].tensor
        rows = codec.arrays(*read_tensors(storage, manifest, {name}))[name].tobytes() if name is not None else b""
    except ElasticTrainerError:
        return None
    chain = Chain()
    chain.load(json.loads(held["plain"].value), rows[: held["size"].value])
    return chain


def steps_of(text: str, history: History) -> tuple[int, int]:
    """``120`` or ``120-140``. ConfigError for what is no range, or has no records."""
    first, dash, last = text.partition("-")
    if not (first.isdigit() and (last.isdigit() or not dash)) or len(text) > 30:
        raise ConfigError(f"{text!r} is neither a step nor a range of steps", hint="write 120 or 120-140")
    low, high = int(first), int(last) if dash else int(first)
    known = history.stretches[0].name.first, history.last
    if not known[0] <= low <= high <= known[1]:
        raise ConfigError(f"steps {text} are not in the ledger", hint=f"it has steps {known[0]} to {known[1]}")
    if high - low >= MOST_STEPS:
        raise ConfigError(f"{high - low + 1} steps are too many at a time", hint=f"ask for {MOST_STEPS} or fewer")
    return low, high


# ---- steps


def as_values(record: StepRecord, keys: Sequence[str] | None = None) -> dict[str, Any]:
    """``record`` for programs."""
    samples = record.samples
    return {
        "step": record.step,
        "epoch": record.epoch,
        "position": record.start,
        "count": record.count,
        "samples": None if samples is None else samples.tolist(),
        "keys": None if samples is None or keys is None else {int(each): keys[each] for each in samples},
        "skipped": bool(record.flags & SKIPPED),
        "passed_over": bool(record.flags & PASSED_OVER),
        "loss": plainly(record.loss),
        "loss_of_all_ranks": record.whole,
        "lr": record.lr,
        "grad_norm": record.norm,
        "round": record.round.get("round"),
        "parts": record.parts(),
        "seed": record.plan.get("seed_all"),
        "order_seed": record.plan.get("seed"),
        "data": record.plan.get("data"),
    }


def plainly(value: float | None) -> float | str | None:
    """``value`` as JSON knows it."""
    return value if value is None or math.isfinite(value) else str(value)


def _numbered(text: str, history: History) -> int:
    """The number of the sample ``text``, which may be its key. ConfigError if nothing has that key."""
    if text.isdigit():
        return int(text)
    for data, length in history.data_sets():
        keys = history.sample_keys(data, length)
        if keys is not None and text in keys:
            return keys.index(text)
    hint = "give its number, or a key as the data set has it: by key(number), or the paths of its files"
    raise ConfigError(f"no sample is called {text!r}", hint=hint)


def _show(
    history: History, records: Iterator[StepRecord], arguments: argparse.Namespace, *, brief: bool, none: str
) -> None:
    found = [as_values(record, history.keys_of(record)) for record in records]
    if arguments.output is not None:
        print(written(found, arguments.output))
        return
    if not found:
        print(none)
    for each in found:
        print(_line(each))
        if not brief:
            for part in each["parts"]:
                _print_part(part, each["keys"])


def _line(each: dict[str, Any]) -> str:
    """One step, in words."""
    if each["samples"] is None:
        used = "samples not known: the script draws them in a way of its own"
    elif each["passed_over"]:
        used = f"{counted(each['count'], 'sample')} of epoch {each['epoch']} passed over"
    else:
        last = each["position"] + each["count"] - 1
        used = f"epoch {each['epoch']}, places {each['position']} to {last} of its order"
    shown = each["loss"] if isinstance(each["loss"], str) else number(each["loss"])
    told = [f"loss {shown}" + ("" if each["loss_of_all_ranks"] else " (of rank 0's samples)")]
    told = told if each["loss"] is not None else []
    told += [f"learning rate {number(each['lr'])}"] if each["lr"] is not None else []
    told += [f"gradient norm {number(each['grad_norm'])}"] if each["grad_norm"] is not None else []
    told += ["no update"] if each["skipped"] else []
    return "\n  ".join([f"step {each['step']}: {used}", *([", ".join(told)] if told else [])])


def _print_part(part: dict[str, Any], keys: dict[int, str] | None) -> None:
    """The samples of one rank, micro-batch by micro-batch."""
    where = f" on {', '.join(part['nodes'])}" if part["nodes"] else ""
    who = f"rank{'s' * (len(part['ranks']) > 1)} {ranges(part['ranks'])}{where}"
    for place, samples in enumerate(part["micro"] or [[]]):
        title = who + (f", micro-batch {place + 1} of {len(part['micro'])}" if len(part["micro"]) > 1 else "")
        shown = (f"{each} ({plain(keys[each])})" if keys else str(each) for each in samples)
        text = f"{title}: {(', ' if keys else ' ').join(shown) or 'none'}"
        print(textwrap.fill(text, max(60, console().width), initial_indent="  ", subsequent_indent="    "))


# ---- the whole run


def _summary(storage: Storage, history: History, arguments: argparse.Namespace) -> None:
    first, last = history.stretches[0].name.first, history.last
    values = {"first": first, "last": last, "segments": len(history.stretches), "undone": history.undone}
    if arguments.output is not None:
        print(written(values, arguments.output))
        return
    undone = f"; {counted(history.undone, 'later step')} undone by resumes" if history.undone else ""
    print(f"steps {first} to {last} in {counted(len(history.stretches), 'segment')}{undone}")
    print("ask for a STEP, --sample N, --spikes or --verify (see elastic-trainer data --help)")


def _spikes(history: History, arguments: argparse.Namespace) -> None:
    numbers, losses, norms = (np.concatenate(each) for each in zip(*history.columns("loss", "norm"), strict=True))
    found: dict[int, dict[str, Any]] = {}
    for name, values in (("loss", losses), ("grad_norm", norms)):
        seldom = np.isnan(values).mean() > 0.5  # then NaN is no news: it is not known
        known = ~np.isnan(values) if seldom or name == "grad_norm" else np.full(len(values), True)
        with progress(f"looking at each {name.replace('grad_', 'gradient ')}", history.last) as advance:
            standing = spikes(numbers[known], values[known], advance=advance)
        for step, value, far in standing:
            found.setdefault(step, {})[name] = {"value": value, "deviations": far if np.isfinite(far) else None}
    rows = []
    for step, why in found.items():
        record = next(history.between(step, step))
        rows.append({**as_values(record, history.keys_of(record)), "stands_out": why})
    uses = Counter(sample for row in rows for sample in row["samples"] or ())
    shared = [(sample, times) for sample, times in uses.most_common(_SHARED) if times > 1]
    if arguments.output is not None:
        print(written({"steps": rows, "shared": [list(each) for each in shared]}, arguments.output))
        return
    if not rows:
        print("no step stands out by its loss or its gradient norm")
        return
    for row in rows:
        how = [_standing(name.replace("grad_", "gradient "), told) for name, told in row["stands_out"].items()]
        print(f"step {row['step']}, epoch {row['epoch']}: {'; '.join(how)}")
        if row["samples"]:
            more = f" and {len(row['samples']) - _FEW} more" if len(row["samples"]) > _FEW else ""
            print(f"  samples {' '.join(map(str, row['samples'][:_FEW]))}{more}")
    known = {sample: key for row in rows for sample, key in (row["keys"] or {}).items()}
    for sample, times in shared:
        called = f" ({plain(known[sample])})" if sample in known else ""
        print(f"sample {sample}{called} is in {times} of these {len(rows)} steps")


def _standing(what: str, told: dict[str, Any]) -> str:
    far = told["deviations"]
    above = "" if far is None else f", {number(far)} deviations above the steps before"
    return f"{what} {number(told['value'])}{above}"


def _verify(history: History, arguments: argparse.Namespace) -> None:
    with progress("verifying", history.last) as advance:
        proof = history.verify(advance)
    if arguments.output is not None:
        print(written(asdict(proof), arguments.output))
        return
    parts = f"{counted(proof.segments, 'segment')}, {counted(proof.rounds, 'round')}"
    print(f"verified: steps {proof.first} to {proof.last}, {parts}; head {proof.head}")
    whole = [each["epoch"] for each in proof.epochs if each["whole"]]
    if whole:
        of = {each["of"] for each in proof.epochs if each["whole"]}
        each_of = f"each of {number(of.pop())} samples" if len(of) == 1 else "each sample"
        print(f"  epoch{'s' * (len(whole) > 1)} {ranges(whole)}: {each_of} once")
    for each in proof.epochs:
        if not each["whole"]:
            used = f"{counted(each['used'], 'sample')} of {each['of']}"
            why = "in an order that changed within it" if each.get("mixed") else "once, as far as these steps go"
            print(f"  epoch {each['epoch']}: {used} {why}")
    if proof.undone:
        print(f"  {counted(proof.undone, 'step')} that resumes have undone are not counted")
    if proof.passed_over:
        print(f"  {counted(proof.passed_over, 'sample')} passed over, since they could not be trained on")
    if proof.unknown:
        print(f"  the samples of {counted(proof.unknown, 'step')} are not known: the script draws them itself")
    for after, until in proof.gaps:
        print(f"  nothing is known of steps {after + 1} to {until}: the run went on from a state without a ledger")
