"""``elastic-trainer checkpoints ACTION``: look at checkpoints, compare, remove and exchange them, and ask for one.

``DIR`` is a directory, ``DIR/NAME`` one checkpoint of it; NAME may be cut short, and be ``newest`` or ``best``.

*Runs in* the process of the command; torch is imported only to write or read torch's own files.
*Fails by* one sentence and an exit code: 78 for a wrong command line or what is not there, 73 for a directory that
cannot be written, 1 for damage.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from elastic_trainer.checkpoint import (
    BestMode,
    CheckpointManager,
    Description,
    Event,
    Owner,
    Retention,
    Soundness,
    Transition,
    exchange,
)
from elastic_trainer.checkpoint.codec import TensorEntry
from elastic_trainer.checkpoint.comparison import Differences, TensorDifference, compare
from elastic_trainer.checkpoint.exchange import AVERAGE, SHARD, bring
from elastic_trainer.checkpoint.manager import Entry, Problem, committed, describe, entry, examine, listed, verified
from elastic_trainer.checkpoint.manifest import InUseError
from elastic_trainer.checkpoint.reading import CheckpointSource, WatchedFiles, read_headers, whole_tensors
from elastic_trainer.checkpoint.storage import Storage, open_storage
from elastic_trainer.cli import connection
from elastic_trainer.cli.main import (
    PROGRAM,
    at_least,
    console,
    output_options,
    progress,
    seconds,
    sub_commands,
    written,
)
from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_FAILURE,
    EXIT_UNAVAILABLE,
    CheckpointError,
    ConfigError,
    PermanentError,
    StorageError,
    TransientError,
)
from elastic_trainer.membership.documents import (
    Document,
    DocumentError,
    RoundDocument,
    RoundState,
    RunResult,
    SaveRequest,
)
from elastic_trainer.preflight.judge import size_text
from elastic_trainer.store.api import Delete, KeyValue, Put, Read, RunKeys, Store, prefix_end, unchanged
from elastic_trainer.store.untrusted import plain
from elastic_trainer.telemetry import logs
from elastic_trainer.wording import duration, moment, named

if TYPE_CHECKING:
    from rich.table import Table

NEWEST, BEST = "newest", "best"
CHECKPOINT = "a directory of checkpoints (its newest), or DIR/NAME; NAME may be cut short, and be newest or best"
_NAME = re.compile(rf"step-[0-9a-z-]*|{NEWEST}|{BEST}")


def directory(location: str) -> Storage:
    """The storage of a directory that is there."""
    storage = open_storage(location)
    if not listed(storage) and "://" not in location and not Path(location).is_dir():
        raise ConfigError(f"there is no directory {location!r}", hint="give the checkpoint.directory of a job")
    return storage


def checkpoint(location: str) -> tuple[Storage, Entry]:
    """The checkpoint that ``location`` names; its manifest is good."""
    parent, _, name = location.rstrip("/").rpartition("/")
    if not _NAME.fullmatch(name):
        return _newest(directory(location))
    storage = directory(parent or ("." if "/" not in location else "/"))
    if name == NEWEST:
        return _newest(storage)
    if name == BEST:
        for each in examine(storage, listed(storage), {}):
            if isinstance(each, Entry) and each.best:
                return storage, each
        hint = f"see {suggestion('list', storage.location)}"
        raise ConfigError(f"no checkpoint in {storage.location} was saved as best", hint=hint)
    found = [text for text in map(str, committed(listed(storage))) if text.startswith(name)]
    if len(found) != 1:
        what = "no checkpoint" if not found else f"{len(found)} checkpoints"
        hint = f"see {suggestion('list', storage.location)}" if not found else f"give more of {found[0]}"
        raise ConfigError(f"{what} of {storage.location} begin{'s' * (not found)} with {name}", hint=hint)
    return storage, entry(storage, found[0])


def _newest(storage: Storage) -> tuple[Storage, Entry]:
    for each in examine(storage, listed(storage), {}):
        if isinstance(each, Problem):
            raise each.error
        return storage, each
    raise ConfigError(f"there are no checkpoints in {storage.location}", hint="give the checkpoint.directory of a job")


def suggestion(action: str, *words: str) -> str:
    """A command line that can be copied."""
    return shlex.join([PROGRAM, "checkpoints", action, *words])


# ---- list

FACTS = ("run", "step", "round", "epoch", "samples", "world_size", "created", "metrics", "best", "size")
_BAD = {Soundness.DAMAGED, Soundness.UNREADABLE}


def run_list(arguments: argparse.Namespace) -> int:
    """By the manifests alone; 1 if one of them is damaged or unreadable."""
    storage = directory(arguments.directory)
    found = describe(storage.location, read_all=False)
    if arguments.output:
        _print_data(
            arguments.output,
            {"directory": arguments.directory, "checkpoints": [description_json(each) for each in found]},
        )
    elif not found:
        print(f"no checkpoints in {arguments.directory}")
    else:
        console(160).print(table(found, SYSTEM.wall()))
        _print_problems(found)
    return EXIT_FAILURE if any(each.status in _BAD for each in found) else 0


def description_json(each: Description) -> dict[str, Any]:
    """One entry as plain values; what its manifest says is left out where that cannot be read."""
    values: dict[str, Any] = {"name": each.name, "path": str(each.path), "status": str(each.status)}
    if each.problem:
        values["problem"] = each.problem
    if each.manifest is not None:
        values |= {key: getattr(each.manifest, key) for key in FACTS}
    return values


def table(found: Sequence[Description], now: float) -> Table:
    """The entries as a table; the name of each begins with step and round."""
    result = _table(
        ("checkpoint", ""), ("epoch", "right"), ("age", "right"), ("size", "right"), ("metrics", ""), ("status", "")
    )
    # A checkpoint says whether it was the best when it was written: the newest that does is the best now.
    best = next((each.name for each in found if each.manifest is not None and each.manifest.best), None)
    for each in found:
        _add(result, each.name, *_cells(each, now, best=each.name == best), str(each.status))
    return result


def _cells(each: Description, now: float, *, best: bool) -> tuple[str, ...]:
    if each.manifest is None:
        return ("-",) * 4
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in sorted(each.manifest.metrics.items()))
    age = duration(max(0.0, now - each.manifest.created))
    mark = " (best)" if best else ""
    return str(each.manifest.epoch), age, size_text(each.manifest.size), (metrics or "-") + mark


# ---- show


def run_show(arguments: argparse.Namespace) -> int:
    """By its manifest and the headers of its files, which are verified."""
    storage, entry = checkpoint(arguments.checkpoint)
    files = read_headers(storage, entry.manifest)
    tensors = whole_tensors(files, entry.manifest)
    if arguments.output:
        _print_data(
            arguments.output,
            {**_facts(storage, entry), "tensors": [_tensor(each) for each in tensors], "parts": _parts(tensors)},
        )
        return 0
    facts = _table(("", ""), ("", ""))
    for key, value in _flat(_facts(storage, entry)):
        _add(facts, key, value)
    kinds = _table(("tensor", ""), ("dtype", ""), ("shape", ""), ("size", "right"))
    for each in tensors:
        _add(kinds, each.name, each.dtype, str(list(each.shape)), size_text(each.size))
    totals = _table(("part", ""), ("tensors", "right"), ("size", "right"))
    for name, part in (*_parts(tensors).items(), ("all", _total(tensors))):
        _add(totals, name, str(part["tensors"]), size_text(part["bytes"]))
    for each_table in (facts, kinds, totals):
        console(160).print(each_table)
    return 0


def _facts(storage: Storage, entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    values = {"name": entry.name, "path": f"{storage.location}/{entry.name}", "format": manifest.format}
    files = {each.name: each.size for each in manifest.files}
    more = {"fields": manifest.fields, "versions": manifest.versions, "files": files}
    return {**values, **{key: getattr(manifest, key) for key in FACTS}, **more}


def _flat(facts: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """One line for each, those of groups by their own names."""
    for key, value in facts.items():
        if isinstance(value, dict):
            sizes = key == "files"
            inner = ((f"{key}.{name}", size_text(each) if sizes else json.dumps(each)) for name, each in value.items())
            yield from ((name, text.strip('"')) for name, text in inner)
        elif value is not None:
            yield key, moment(value) if key == "created" else size_text(value) if key == "size" else str(value)


def _tensor(each: TensorEntry) -> dict[str, Any]:
    return {"name": each.name, "dtype": each.dtype, "shape": each.shape, "bytes": each.size}


def _parts(tensors: Iterable[TensorEntry]) -> dict[str, dict[str, int]]:
    """By the first part of their names: model, optimizer and others."""
    groups: dict[str, list[TensorEntry]] = {}
    for each in tensors:
        groups.setdefault(each.name.partition("/")[0], []).append(each)
    return {name: _total(group) for name, group in groups.items()}


def _total(tensors: Sequence[TensorEntry]) -> dict[str, int]:
    return {"tensors": len(tensors), "bytes": sum(each.size for each in tensors)}


# ---- verify


def run_verify(arguments: argparse.Namespace) -> int:
    """1 if anything is damaged or cannot be read."""
    if arguments.all:
        storage = directory(arguments.checkpoint)
        found = describe(storage.location, read_all=False)
    else:
        storage, entry = checkpoint(arguments.checkpoint)
        found = [each for each in describe(storage.location, read_all=False) if each.name == entry.name]
    if not found:
        raise ConfigError(f"there are no checkpoints in {storage.location}", hint="nothing was verified")
    total = sum(each.manifest.size for each in found if each.manifest is not None)
    with progress("verify", total, in_bytes=True) as heard:
        results = [verified(WatchedFiles(storage, heard), each) for each in found]
    if arguments.output:
        _print_data(
            arguments.output,
            {"directory": storage.location, "checkpoints": [description_json(each) for each in results]},
        )
    else:
        for each in results:
            size = "" if each.manifest is None else f", {size_text(each.manifest.size)}"
            print(f"{each.name}: {each.status}{size}")
        _print_problems(results)
    return EXIT_FAILURE if any(each.status in _BAD for each in results) else 0


# ---- text


def _print_data(output: str, values: dict[str, Any]) -> None:
    print(written(values, output))


def _print_problems(found: Iterable[Description]) -> None:
    for each in found:
        if each.problem:
            print(plain(f"{each.name}: {each.problem}"))


def _table(*columns: tuple[str, str]) -> Table:
    from rich.table import Table

    result = Table(box=None, pad_edge=False, show_header=any(name for name, _ in columns))
    for number, (name, side) in enumerate(columns):
        right = side == "right"
        result.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right or number == 0)
    return result


def _add(table: Table, *cells: str) -> None:
    from rich.text import Text

    table.add_row(*(Text(plain(cell)) for cell in cells))


# ---- diff

EXIT_TROUBLE = 2
_MOST = 40
_LONGEST = 60


def run_diff(arguments: argparse.Namespace) -> int:
    """Say how they differ: 1 if they do, 2 if one cannot be compared, as diff(1)."""
    try:
        chosen = [checkpoint(each) for each in (arguments.left, arguments.right)]
        with progress("compare", sum(entry.manifest.size for _, entry in chosen), in_bytes=True) as heard:
            left, right = (CheckpointSource(WatchedFiles(storage, heard), entry.manifest) for storage, entry in chosen)
            found = compare(left, right)
    except CheckpointError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_TROUBLE
    if arguments.output:
        _print_data(arguments.output, differences_json(found, left.manifest.name, right.manifest.name))
    else:
        _show(found)
    return 1 if found else 0


def differences_json(found: Differences, left: str, right: str) -> dict[str, Any]:
    """All differences as plain values; those that are no finite numbers as strings."""
    tensors = [asdict(each) for each in found.tensors]
    for each in tensors:
        if each["largest"] is not None and not math.isfinite(each["largest"]):
            each["largest"] = str(each["largest"])
    groups = {"facts": found.facts, "values": found.values}
    values = {
        name: [{"path": each.path, "left": _as_json(each.left), "right": _as_json(each.right)} for each in group]
        for name, group in groups.items()
    }
    return {"left": left, "right": right, **values, "tensors": tensors, "equal_tensors": found.equal}


def _as_json(value: Any) -> Any:
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if finite and isinstance(value, str | int | float | bool | list | dict | None) else repr(value)


def _show(found: Differences) -> None:
    for title, group in (("known of them", found.facts), ("values", found.values)):
        lines = [f"  {each.path}: {_text(each.left)} -> {_text(each.right)}" for each in group]
        _block(title, lines)
    _block("tensors", [f"  {_line(each)}" for each in found.tensors])
    if not found:
        print("no differences")
    print(f"tensors: {found.equal} equal, {len(found.tensors)} different")


def _block(title: str, lines: list[str]) -> None:
    if lines:
        print(f"{title}:")
    for line in lines[:_MOST]:
        print(plain(line))
    if len(lines) > _MOST:
        print(f"  and {len(lines) - _MOST} more, which --json lists")


def _line(each: TensorDifference) -> str:
    if each.largest is None:
        return f"{each.path}: {each.left or 'missing'} -> {each.right or 'missing'}"
    share = f"{each.different} of {each.elements}"
    return f"{each.path} {each.left}: {share} differ, by up to {each.largest:.3g}"


def _text(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


# ---- prune


def run_prune(arguments: argparse.Namespace) -> int:
    """1 if one cannot be removed. Damaged ones stay: nobody knows what they are."""
    policy = _policy(arguments)
    storage = directory(arguments.directory)
    logs.configure(level="error")  # what happens is said below
    failed: list[Event] = []

    def heard(event: Event) -> None:
        if event.kind is Transition.REMOVAL_FAILED:
            failed.append(event)

    owner = None if arguments.force or arguments.dry_run else Owner(run=f"{PROGRAM} checkpoints prune")
    manager = CheckpointManager(storage.location, policy, heard, owner=owner, storage=storage)
    try:
        rulings = manager.prune(dry_run=arguments.dry_run)
    except InUseError as error:
        words = ("--keep-last", str(policy.keep_last), "--dry-run")
        hint = f"see what would go by {suggestion('prune', storage.location, *words)}; --force removes it all the same"
        raise InUseError(error.message, hint=hint) from error
    finally:
        manager.close()
    if arguments.output:
        problems = {event.name: event.reason for event in failed}
        values = [{**asdict(each), "problem": problems.get(each.name)} for each in rulings]
        _print_data(
            arguments.output, {"directory": storage.location, "dry_run": arguments.dry_run, "checkpoints": values}
        )
    else:
        verb = "would go" if arguments.dry_run else "removed"
        for each in rulings:
            print(f"{each.name}: {'stays' if each.keep else verb}, {each.reason}")
        for event in failed:
            print(f"{event.name} is still there: {event.reason}", file=sys.stderr)
    return EXIT_FAILURE if failed else 0


def _policy(arguments: argparse.Namespace) -> Retention:
    if (arguments.keep_best is None) != (arguments.metric is None):
        raise ConfigError("--keep-best and --metric need each other", hint="say --keep-best 2 --metric loss")
    return Retention(
        keep_last=arguments.keep_last,
        keep_every=arguments.keep_every,
        metric=arguments.metric,
        mode=BestMode(arguments.mode or BestMode.MIN),
        keep_best=arguments.keep_best or 1,
    )


# ---- export

SAFETENSORS, TORCH, HUGGINGFACE = "safetensors", "torch", "huggingface"
_CONFIG = "config.json"


def run_export(arguments: argparse.Namespace) -> int:
    """Write it; nothing is left behind if that fails."""
    goal, target, part = arguments.goal, arguments.to, arguments.part or "model"
    if arguments.all and (target == HUGGINGFACE or arguments.part is not None):
        other = "--part" if arguments.part is not None else "--to huggingface"
        raise ConfigError(f"--all and {other} exclude each other", hint="a Hugging Face folder holds weights alone")
    at_least(1, arguments.shard_size, "--shard-size")
    inner, entry = checkpoint(arguments.checkpoint)
    config = _config(arguments.config, entry.manifest.fields) if target == HUGGINGFACE else b""
    files = [goal.name]
    left_out: tuple[str, ...] = ()
    with progress("export", entry.manifest.size, in_bytes=True) as heard:
        source = CheckpointSource(WatchedFiles(inner, heard), entry.manifest)
        if target == TORCH:
            exchange.to_torch(source, None if arguments.all else part, goal, force=arguments.force)
        elif arguments.all:
            exchange.whole_to_safetensors(source, goal, force=arguments.force)
        else:
            found = exchange.weights(source, part)
            left_out = found.left_out
            if target == SAFETENSORS:
                exchange.to_safetensors(source, found, goal, force=arguments.force)
            else:
                size = arguments.shard_size
                files = exchange.to_huggingface(source, found, goal, config, force=arguments.force, shard=size)
    what = "state" if arguments.all else part
    if arguments.output:
        values: dict[str, Any] = {"checkpoint": entry.name, "part": what, "to": target, "path": str(goal)}
        _print_data(arguments.output, {**values, "files": files, "left_out": left_out})
        return 0
    print(f"{goal}: the {what} of {entry.name}, {size_text(_size(goal))}")
    if target == HUGGINGFACE:
        print(f"files: {', '.join(files)}" + ("" if config else f"; give a {_CONFIG} by --config if it needs one"))
    if left_out:
        print(f"left out, since they are no tensors: {named(left_out)}")
    return 0


def _config(file: Path | None, fields: Any) -> bytes:
    """The user's config.json, or the one that was saved with the checkpoint as its field ``config``."""
    if file is None:
        saved = fields.get("config")
        return f"{json.dumps(saved, indent=2)}\n".encode() if isinstance(saved, dict) else b""
    try:
        content = file.read_bytes()
        json.loads(content)
    except OSError as error:
        raise ConfigError(f"--config {file} cannot be read: {error.strerror}", hint="check the path") from error
    except ValueError as error:
        raise ConfigError(f"--config {file} is not JSON", hint="give the config.json of the model") from error
    return content


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.iterdir()) if path.is_dir() else path.stat().st_size


# ---- import


def run_import(arguments: argparse.Namespace) -> int:
    """Say what it became and how to use it."""
    logs.configure(level="error")  # what happens is said below
    storage = open_storage(arguments.into)
    done = bring(arguments.source, storage, arguments.part, force=arguments.force)
    if arguments.output:
        values = {"path": done.path, "checkpoint": done.checkpoint, "step": done.step, "tensors": done.tensors}
        more = {"bytes": done.size, "outranked": done.outranked, "left_out": done.left_out, "stripped": done.stripped}
        _print_data(arguments.output, {**values, **more})
        return 0
    contents = f"{done.tensors} tensor{'s' * (done.tensors != 1)}, {size_text(done.size)}"
    if done.checkpoint is not None:
        print(f"{done.path}: a checkpoint of step {done.step}, {contents}")
        if done.outranked is None:
            print(f"A job with checkpoint_dir={arguments.into!r} and the same model resumes from it.")
        else:
            print(f"{done.outranked} counts as newer: a job resumes from that one.")
            print(f"See {suggestion('list', arguments.into)}")
        return 0
    print(f"{done.path}: weights, {contents}")
    if done.stripped:
        print(f"removed from the names: {', '.join(done.stripped)}")
    if done.left_out:
        print(f"left out: {named(done.left_out)}")
    print("No job resumes from weights alone. To begin with them, before session.wrap(model, ...):")
    print(f"  safetensors.torch.load_model(model, {done.path!r})")
    return 0


# ---- save

DocumentT = TypeVar("DocumentT", bound=Document)
LIMIT_S = 600.0
_LOOK_S = 0.2
_SAY_EVERY_S = 10.0


class NotTrainingError(PermanentError):
    """The run does not train, so nobody can save its state."""


def run_save(arguments: argparse.Namespace) -> int:
    """Ask the run for a checkpoint and print its name; 0 once it is durable."""
    name: str = arguments.run
    deadline = Deadline.after(seconds(arguments.timeout, "--timeout", above_zero=True))
    with connection.opened(arguments, name) as (store, settings):
        keys = RunKeys(settings.prefix, name)
        connection.require_run(store, settings, keys)
        require_training(store, keys)
        asked = _ask(store, keys)
        if arguments.no_wait:
            _print_answer(arguments, name, None, f"asked run {plain(name)} for a checkpoint")
            return 0
        answer = _wait(store, keys, asked, deadline)
    if answer is None:
        print(
            f"elastic-trainer: run {plain(name)} has not saved within {arguments.timeout:g} s. Only a job with a"
            f" Session can be asked; `elastic-trainer status {plain(name)}` shows what its ranks do",
            file=sys.stderr,
        )
        return EXIT_UNAVAILABLE
    if answer.problem:
        print(f"elastic-trainer: run {plain(name)} cannot save: {plain(answer.problem)}", file=sys.stderr)
        return answer.code or EXIT_FAILURE
    _print_answer(arguments, name, answer.name, plain(answer.name))
    return 0


def require_save(store: Store, keys: RunKeys, deadline: Deadline) -> None:
    """Have the run save now. TransientError if it does not answer, StorageError or PermanentError if it cannot."""
    answer = _wait(store, keys, _ask(store, keys), deadline)
    if answer is None:
        raise TransientError(f"run {keys.run_id!r} has not saved in time", hint="only a job with a Session can")
    if answer.problem:
        kind = StorageError if answer.code == EXIT_CANNOT_WRITE else PermanentError
        raise kind(f"run {keys.run_id!r} cannot save: {plain(answer.problem)}")


def _print_answer(arguments: argparse.Namespace, run: str, checkpoint: str | None, text: str) -> None:
    values = {"run": run, "checkpoint": checkpoint}
    print(written(values, arguments.output) if arguments.output else text)


def require_training(store: Store, keys: RunKeys) -> None:
    """NotTrainingError unless the run has a round, and a node."""
    reads = [Read(keys.round), Read(keys.nodes, prefix_end(keys.nodes), limit=1, keys_only=True)]
    round_, nodes = store.transact([], reads, deadline=Deadline.after(connection.CONNECT_S)).reads
    run, current = keys.run_id, _decoded(RoundDocument, round_.first)
    if current is not None and current.state is RoundState.CLOSED:
        how = "finished" if current.result is RunResult.SUCCEEDED else "failed"
        raise NotTrainingError(
            f"run {run!r} does not train: it has {how}", hint="its last state is among its checkpoints"
        )
    if not nodes.items:
        raise NotTrainingError(f"run {run!r} does not train: no node is in it", hint="start its nodes again")
    if current is None:
        raise NotTrainingError(f"run {run!r} does not train yet: its nodes are gathering", hint="ask it later")


def _decoded(kind: type[DocumentT], item: KeyValue | None) -> DocumentT | None:
    try:
        return kind.decode(item.value, item.key) if item is not None else None
    except DocumentError:
        return None


def _ask(store: Store, keys: RunKeys) -> SaveRequest:
    """The request that stands now: a new one, or one without an answer that somebody else waits for."""
    new = SaveRequest(id=uuid.uuid4().hex, wall=SYSTEM.wall())
    while True:
        there = store.get(keys.save, Deadline.after(connection.CONNECT_S)).first
        known = _decoded(SaveRequest, there)
        if known is not None and not known.answered:
            return known
        mine = new if known is None else new.model_copy(update={"before": known.model_copy(update={"before": None})})
        guard = unchanged(keys.save, there.mod_revision if there is not None else 0)
        write = [Put(keys.save, mine.encode())]
        if store.transact([guard], write, deadline=Deadline.after(connection.CONNECT_S)).succeeded:
            return mine


def _wait(store: Store, keys: RunKeys, asked: SaveRequest, deadline: Deadline) -> SaveRequest | None:
    """The answer; None if there was none by ``deadline``. A request that will have no answer is withdrawn."""
    said_at = SYSTEM.monotonic()
    while (request := _standing(store, keys, asked)) and not request.answered:
        try:
            require_training(store, keys)
        except NotTrainingError:
            if (request := _standing(store, keys, asked)).answered:
                return request
            _withdraw(store, keys, asked)
            raise
        if deadline.expired:
            _withdraw(store, keys, asked)
            return None
        if SYSTEM.monotonic() - said_at > _SAY_EVERY_S:
            said_at = SYSTEM.monotonic()
            print(f"waiting: run {plain(keys.run_id)} has not answered yet", file=sys.stderr, flush=True)
        pause(min(_LOOK_S, max(0.01, deadline.remaining_s())))
    return request


def _standing(store: Store, keys: RunKeys, asked: SaveRequest) -> SaveRequest:
    """The request ``asked`` as it is now, or as it was answered if the next one has replaced it."""
    request = _decoded(SaveRequest, store.get(keys.save, Deadline.after(connection.CONNECT_S)).first)
    if request is not None and request.before is not None and request.before.id == asked.id:
        return request.before
    if request is None or request.id != asked.id:
        raise NotTrainingError(f"the request to run {keys.run_id!r} was removed", hint="ask it again")
    return request


def _withdraw(store: Store, keys: RunKeys, asked: SaveRequest) -> None:
    there = store.get(keys.save, Deadline.after(connection.CONNECT_S)).first
    if there is not None and _decoded(SaveRequest, there) == asked:
        guard = unchanged(keys.save, there.mod_revision)
        store.transact([guard], [Delete(keys.save)], deadline=Deadline.after(connection.CONNECT_S))


# ---- all actions


def configure_checkpoints(parser: argparse.ArgumentParser) -> None:
    """Describe the actions and their options."""
    action = sub_commands(parser)

    def describe(
        name: str, act: Callable[[argparse.Namespace], int], text: str, about: str
    ) -> Callable[..., argparse.Action]:
        made = action(name, act, text, about)
        output_options(made)
        return made.add_argument

    about = "By their manifests alone: `unverified` means that no other byte was read. Exit code 1 if one is damaged."
    add = describe("list", run_list, "the checkpoints of a directory, newest first", about)
    add("directory", metavar="DIR", help="a directory of checkpoints")
    add = describe("show", run_show, "show what one checkpoint holds", "Each tensor with its type, shape and size.")
    add("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    about = "Exit code 1 if anything is damaged or cannot be read."
    add = describe("verify", run_verify, "read every byte and compare it with its checksum", about)
    add("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    add("--all", action="store_true", help="all checkpoints of the directory")
    about = (
        "Which tensors (in how many elements, and by how much at most), other values of the state, and facts: step,"
        " metrics, fields, versions. Exit code 0 if nothing differs, 1 if something does, 2 if one cannot be read."
    )
    add = describe("diff", run_diff, "show how two checkpoints differ", about)
    add("left", metavar="A", help=CHECKPOINT)
    add("right", metavar="B", help="the other one")
    about = (
        "The newest that was saved as best stays, and so does what is damaged. Exit code 73 while a job saves in the"
        " directory."
    )
    add = describe("prune", run_prune, "remove those that no rule keeps", about)
    add("directory", metavar="DIR", help="a directory of checkpoints")
    add("--keep-last", type=int, required=True, metavar="N", help="keep the N newest")
    add("--keep-every", type=int, metavar="N", help="keep those whose step is a multiple of N")
    add("--keep-best", type=int, metavar="N", help="keep the N best by --metric; the one saved as best stays anyway")
    add("--metric", metavar="NAME", help="the metric of --keep-best")
    add("--mode", choices=tuple(map(str, BestMode)), metavar="MODE", help="of --metric: min, the default, or max")
    add("--dry-run", action="store_true", help="say what would go, and remove nothing")
    add("--force", action="store_true", help="also while a job saves there")
    about = (
        "Every byte is verified, and what is written appears whole or not at all. A tensor with several names is in"
        " safetensors files once; the other names are in the metadata."
    )
    add = describe("export", run_export, "write one for other programs", about)
    add("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    add("goal", metavar="DEST", type=Path, help="the file to write, or the folder for huggingface")
    targets = (SAFETENSORS, TORCH, HUGGINGFACE)
    add("--to", choices=targets, required=True, metavar="TARGET", help=f"{', '.join(targets)}")
    part = f"the part of the state to write; model by default, {AVERAGE} for the average, or a path: user/teacher"
    add("--part", metavar="PART", help=part)
    add("--all", action="store_true", help="the whole state, which import makes a checkpoint again")
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help=("huggingface: the config.json; without it the field config of the checkpoint, if there is one"),
    )
    add("--shard-size", type=int, default=SHARD, metavar="BYTES", help="huggingface: largest file (default: 5 GB)")
    add("--force", action="store_true", help="replace DEST if it exists")
    about = (
        "Of `export --all` a checkpoint, from which the job resumes at that step; of others the weights, in a"
        " .safetensors file, with the call that loads it. What DistributedDataParallel, torch.compile and FSDP put into"
        " names is removed. A file that needs pickle is refused."
    )
    add = describe("import", run_import, "import a file of another program", about)
    what = "a .pt, .pth, .bin, .ckpt or .safetensors file, a Hugging Face folder, or a directory of torch's DCP"
    add("source", metavar="SOURCE", type=Path, help=f"{what}; nothing in it is executed")
    add("--into", required=True, metavar="DIR", help="the directory of checkpoints")
    add(
        "--part",
        metavar="PART",
        help=("where the weights are in a file that holds more; looked for are model, state_dict and the like"),
    )
    add("--force", action="store_true", help="replace an earlier import of weights")
    about = (
        "Who asks at the same time gets the same one. Exit code 1 if the run does not train or its state cannot be"
        " saved, 69 without an answer in time (the request is withdrawn), 73 if the directory refuses, 78 without"
        " such a run or a checkpoint directory."
    )
    save = action("save", run_save, "ask a run that trains for a checkpoint now", about)
    connection.add_run(save, "; it saves now")
    save.add_argument("--no-wait", action="store_true", help="ask, and do not wait for the checkpoint")
    limit = f"seconds to wait (default: {LIMIT_S:g})"
    save.add_argument("--timeout", type=float, default=LIMIT_S, metavar="S", help=limit)
    output_options(save)
    connection.add_options(save)


def run_checkpoints(arguments: argparse.Namespace) -> int:
    """Do it; the exit code."""
    return int(arguments.act(arguments))
