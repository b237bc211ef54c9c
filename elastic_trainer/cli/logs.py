"""``elastic-trainer logs RUN``: what the nodes of a run wrote, if it is on this machine; else where it is.

Each node says in the store where its output goes. A directory of ``elastic-trainer local`` or ``launch`` needs no etcd.

*Runs in* the process of the command. *Owns* nothing; files are only read.
*Fails by* ConfigError for a run, rank or node that is not known, StoreUnavailableError when etcd does not answer.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from elastic_trainer.cli import connection
from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.errors import ConfigError
from elastic_trainer.local.ledger import LedgerTail
from elastic_trainer.membership.documents import GONE, LogTail
from elastic_trainer.monitor.reading import RunFeed
from elastic_trainer.monitor.state import RunDocuments
from elastic_trainer.store.api import RunKeys
from elastic_trainer.telemetry import logs
from elastic_trainer.wording import named, ranges

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# A line of JSON, or of text, in front of which torchrun may say whose it is.
_TIMES = re.compile(r'"timestamp": ?"([^"]+)"|^(?:\[\w+\]:)?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ')


@dataclass(frozen=True, slots=True)
class NodeLog:
    """Where a node's output goes (see agent/health/log_location)."""

    node: str
    host: str
    location: str
    ranks: tuple[int, ...] = ()
    """Those of the newest round that are known to be its."""
    tails: tuple[LogTail, ...] = ()
    """What its workers wrote last, as it has told."""


def configure_logs(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add = parser.add_argument
    add(
        "run",
        help=(
            "the run's name, --rdzv-id, or the directory of a local run. A folder of that name with "
            "logs and ledger in it goes before etcd, unless --endpoint is given"
        ),
    )
    add("--rank", type=int, metavar="N", help="only the node with this rank of the newest round")
    add("--node", metavar="NAME", help="only this node")
    add(
        "--since",
        metavar="TIME",
        help=(
            "only what was written in the last 90s, 10m, 2h or 1d, by the date of each line; a "
            "line without one belongs to the one before"
        ),
    )
    connection.add_options(parser)


def run_logs(arguments: argparse.Namespace) -> int:
    """Show them, or say where they are."""
    if arguments.since is not None:
        span_s(arguments.since)  # a wrong one is told before anything else is done
    logs.configure()
    directory = _directory(arguments.run, asks_etcd=arguments.endpoint is not None)
    found = of_directory(directory) if directory is not None else _of_store(arguments)
    show(choose(found, arguments.rank, arguments.node), arguments.since)
    return 0


def show(chosen: list[NodeLog], since: str | None) -> None:
    """The files that are here; of others where they are, and the last lines that their nodes have told."""
    since_s = span_s(since) if since is not None else None
    for each in chosen:
        file = _here(each)
        if file is None:
            print(whereabouts(each, since))
            for tail in each.tails:
                print(f"  last lines of {tail.file}:", *(f"    {line}" for line in tail.lines), sep="\n")
            continue
        if len(chosen) > 1:
            print(f"==> {_title(each)}: {file}")
        with file.open(encoding="utf-8", errors="replace") as lines:
            written = os.fstat(lines.fileno()).st_mtime
            sys.stdout.writelines(lines if since_s is None else newer(lines, since_s, SYSTEM.wall(), written))


def span_s(text: str) -> float:
    """``10m`` in seconds. Raises ConfigError."""
    number, unit = text[:-1], text[-1:]
    if not (number.isascii() and number.isdigit() and len(number) < 10 and unit in _UNITS_S):
        raise ConfigError(f"--since {text!r} is not a length of time", hint="write 90s, 10m, 2h or 1d")
    return int(number) * _UNITS_S[unit]


def choose(found: list[NodeLog], rank: int | None, node: str | None) -> list[NodeLog]:
    """Those that were asked for. Raises ConfigError if there is none."""
    chosen = [each for each in found if (node is None or each.node == node) and (rank is None or rank in each.ranks)]
    if not chosen:
        what = ("" if rank is None else f" with rank {rank}") + ("" if node is None else f" called {node!r}")
        known = named((_title(each) for each in found), 20) or "no node"
        raise ConfigError(f"no node{what} is known", hint=f"there is {known}")
    return chosen


def newer(lines: Iterable[str], since_s: float, now: float, written: float) -> Iterator[str]:
    """Lines written in the last ``since_s`` seconds, of a file that was ``written`` last then.

    One without a date belongs to the one before. Where no line has one, all that is known is the file's own time.
    """
    if now - written > since_s:
        return
    show, undated = False, list[str]()
    dated = False
    for line in lines:
        if (age := age_s(line, now)) is not None:
            show, dated = age <= since_s, True
        if show:
            yield line
        elif not dated:
            undated.append(line)
    if not dated:
        yield from undated


def age_s(line: str, now: float) -> float | None:
    """How long ago a line was written; None for a line without a date."""
    found = _TIMES.search(line)
    if found is None:
        return None
    try:
        return now - datetime.fromisoformat(found[1] or found[2]).timestamp()
    except ValueError:
        return None


def whereabouts(each: NodeLog, since: str | None) -> str:
    """Where to look, in one line: a command, where there is one."""
    kind, _, name = each.location.partition(":")
    if kind == "journal" and name:
        ago = [f"--since=-{since.replace('m', 'min')}"] if since else []
        command = shlex.join(["journalctl", "-u", name, *ago])
        return f"{_title(each)}: on {each.host}, {command}"
    if kind in ("job", "pod") and name:
        job, _, index = name.partition("/")
        labels = f"batch.kubernetes.io/job-name={job},batch.kubernetes.io/job-completion-index={index}"
        of = ["-l", labels, "--tail=-1"] if kind == "job" else [name]
        return f"{_title(each)}: {shlex.join(['kubectl', 'logs', *of, *([f'--since={since}'] if since else [])])}"
    if kind == "file":
        return f"{_title(each)}: {name} on {each.host}"
    return f"{_title(each)}: on {each.host or 'its machine'}, with whatever started it: its output goes to no file"


def of_directory(directory: Path) -> list[NodeLog]:
    """The nodes of a local run, with the ranks that its workers noted last."""
    ranks: dict[int, str] = {}
    for line in LedgerTail(directory / "ledger").read():
        ranks[line.rank] = line.node
    files = sorted((directory / "logs").glob("*.log"))
    of = {file: tuple(sorted(rank for rank, node in ranks.items() if node == file.stem)) for file in files}
    return [NodeLog(file.stem, socket.gethostname(), f"file:{file}", mine) for file, mine in of.items()]


def of_run(documents: RunDocuments) -> list[NodeLog]:
    """All nodes that ever published anything, those of the newest round first."""
    members = {member.node: member for member in (documents.round.members if documents.round is not None else ())}
    found = []
    for name in sorted(documents.health.keys() - {GONE}, key=lambda name: (name not in members, name)):
        health, member = documents.health[name], members.get(name)
        mine = range(member.first_rank, member.first_rank + member.local_world_size) if member is not None else ()
        found.append(NodeLog(name, health.host, health.logs, tuple(mine), health.tails))
    return found


def _of_store(arguments: argparse.Namespace) -> list[NodeLog]:
    with connection.opened(arguments, arguments.run) as (store, settings):
        keys = RunKeys(settings.prefix, arguments.run)
        connection.require_run(store, settings, keys)
        return of_run(RunFeed(store, keys).read(Deadline.after(connection.CONNECT_S)))


def _directory(run: str, *, asks_etcd: bool) -> Path | None:
    """Where ``elastic-trainer local`` keeps the run, if it is one of this machine.

    A name may be that of any folder with logs, so that a folder for a name must have a run's ledger, too; who says
    where etcd is means a run there. No name of a run has a slash. In the system's temporary directory anybody may have
    made a directory of that name: only one's own counts.
    """
    if "/" in run:
        return Path(run) if (Path(run) / "logs").is_dir() else None
    shared = Path(tempfile.gettempdir()) / f"elastic-trainer-{run}"
    own = (shared,) if _is_own(shared) and _is_own(shared / "logs") else ()
    candidates = (Path(run), Path("runs") / run, *own)
    found = (each for each in candidates if (each / "logs").is_dir() and (each / "ledger").is_dir())
    return None if asks_etcd else next(found, None)


def _is_own(path: Path) -> bool:
    """Whether ``path`` is a directory of this user, no link to one, that not everybody can write."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWOTH


def _here(each: NodeLog) -> Path | None:
    """The node's file, if it is on this machine."""
    kind, _, name = each.location.partition(":")
    file = Path(name)
    return file if kind == "file" and each.host == socket.gethostname() and file.is_file() else None


def _title(each: NodeLog) -> str:
    return f"node {each.node}" + (f" (ranks {ranges(each.ranks)})" if each.ranks else "")
