"""For scripts with checkpoints of their own: save them whole, and find the newest that all ranks have.

``torch.save`` over the only checkpoint leaves half a file when the process is killed, and after a restart two nodes may
see different files as the newest. Scripts with a ``Session`` need none of this.

*Runs in* the training process; :func:`latest` in all ranks at once. *Owns* the temporary beside a file being saved.
*Fails by* ConfigError, and OSError of the file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import worker_environment
from elastic_trainer.telemetry import logs

_TEMPORARY = ".saving-"
_COUNT = re.compile(
    r"(?<![a-z])(epoch|ep|step|iteration|iter|update|checkpoint|ckpt|model|state)s?[-_=]?(\d+)(?![\d]|\.\d)",
    re.IGNORECASE,
)
"""What counts in a name, and whole numbers only: "loss_0.91" is neither."""
_BARE = re.compile(r"(\d+)(\.[a-z]\w*)*", re.IGNORECASE)
_ZIP_START = b"PK\x03\x04"
"""What ``torch.save`` writes since 1.6 is a zip archive, whose directory comes last."""


@contextmanager
def saving(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield where to write; at the end of the block it takes the place of ``path``, file or directory, at once.

    On one rank: ``with saving("out/ckpt.pt") as temporary: torch.save(state, temporary)``. If the block raises or the
    process is killed, what was at ``path`` stays.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{_TEMPORARY}{target.name}"
    _remove(temporary)  # of one that was killed
    try:
        yield temporary
        for file in (each for each in (temporary, *temporary.rglob("*")) if each.is_file()):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        if target.is_dir():  # a directory cannot be replaced at once: for a moment there is none
            former = temporary.with_name(f"{_TEMPORARY}former-{target.name}")
            _remove(former)
            target.rename(former)
            temporary.rename(target)
            _remove(former)
        else:
            temporary.replace(target)
    except BaseException:
        _remove(temporary)
        raise


def latest(directory: str | os.PathLike[str], pattern: str = "*", *, marker: str | None = None) -> Path | None:
    """The newest whole checkpoint, file or directory, that all ranks see; None if there is none. On all ranks.

    ``pattern`` is a glob within ``directory``. The newest has the greatest epoch and step in its name, if all names
    with such numbers count the same ("epoch=3-step=900", "checkpoint-500", "ckpt_12", "12"), else it is the last
    written. Names without them count where there are no others. Rank 0 logs a choice that may be wrong:
    ``checkpoint.guessed``.
    Files that ``torch.save`` or safetensors have not completed, and directories with such files, are passed over; and
    directories without the file ``marker``, which is written last. With several ranks call it after
    ``init_process_group``: they exchange names, and each returns its own path of the one chosen.

    Raises ConfigError if there are several ranks and no process group.
    """
    found = _whole(Path(directory), pattern, marker)
    names = _seen_by_all([path.name for path in found])
    return Path(directory) / names[0] if names else None


def _whole(directory: Path, pattern: str, marker: str | None) -> list[Path]:
    paths = [path for path in directory.glob(pattern) if not path.name.startswith(".")]
    whole = {path.name: path.stat().st_mtime_ns for path in paths if is_whole(path, marker)}
    names, doubt = in_order(whole)
    if doubt and worker_environment().rank == 0:
        hint = "name them by epoch or step, such as step-500.pt, or give resume.latest() a narrower pattern"
        if not structlog.is_configured():
            logs.configure()
        logs.logger().warning("checkpoint.guessed", directory=str(directory), reason=doubt, hint=hint)
    return [directory / name for name in names]


def in_order(written: Mapping[str, int]) -> tuple[list[str], str]:
    """The names of what was ``written``, each at its time, the newest first, and why that may be wrong. Pure."""
    counts = {name: _counts(name) for name in written}
    both, kinds = ("epoch", "step"), {frozenset(each) for each in counts.values() if each}
    shared = [kind for kind in both if all(kind in each for each in kinds)]
    numbered = {name for name in written if counts[name] or not kinds}

    def age(name: str) -> tuple[Any, ...]:
        return name in numbered, [counts[name].get(kind, -1) for kind in shared if kinds], written[name]

    names = sorted(written, key=age, reverse=True)
    if len(numbered) < 2:
        return names, ""
    last = max(numbered, key=written.__getitem__)
    if not kinds or not shared:
        return names, f"{names[0]} was written last; the names do not all have an epoch, or all a step"
    if age(last)[1] != age(names[0])[1]:
        return names, f"{names[0]} has the greatest {' and '.join(shared)}; {last} was written after it"
    return names, ""


def _counts(name: str) -> dict[str, int]:
    """The epoch and the step that ``name`` has; a bare number is a step."""
    found = {"epoch" if word[0] in "eE" else "step": int(number) for word, number in _COUNT.findall(name)}
    bare = _BARE.fullmatch(name)
    return {"step": int(bare[1])} if bare else found


def _seen_by_all(names: list[str]) -> list[str]:
    """Those of rank 0, in its order, that every rank has."""
    if worker_environment().world_size == 1:
        return names
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ConfigError(
            "resume.latest was called before init_process_group: ranks may choose different checkpoints",
            hint="call it after, or after whatever creates the group (Accelerator(), TrainingArguments.device)",
        )
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.tensor(list(json.dumps(names).encode()), dtype=torch.uint8, device=device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(mine)], device=device))
    longest = max(int(length) for length in lengths)
    texts = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in lengths]
    dist.all_gather(texts, torch.nn.functional.pad(mine, (0, longest - len(mine))))
    lists = [json.loads(bytes(text[: int(length)].tolist())) for text, length in zip(texts, lengths, strict=True)]
    return [name for name in lists[0] if all(name in each for each in lists)]


def is_whole(path: Path, marker: str | None = None) -> bool:
    """Whether ``path`` is complete as far as its structure tells; contents are not compared with checksums."""
    if path.is_dir():
        files = [each for each in path.rglob("*") if each.is_file()]
        return bool(files) and (marker is None or (path / marker).is_file()) and all(map(_is_whole_file, files))
    return path.is_file() and _is_whole_file(path)


def _is_whole_file(path: Path) -> bool:
    try:
        if path.suffix == ".safetensors":
            return _safetensors_size(path) == path.stat().st_size
        if path.suffix == ".json":
            json.loads(path.read_bytes())
            return True
        with path.open("rb") as file:
            start = file.read(len(_ZIP_START))
        if start == _ZIP_START:
            zipfile.ZipFile(path).close()
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return False
    return bool(start) or path.suffix not in (".pt", ".pth", ".bin", ".ckpt")


def _safetensors_size(path: Path) -> int:
    """How long the file should be, by its header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, path.stat().st_size)))
    ends = (each["data_offsets"][1] for name, each in header.items() if name != "__metadata__")
    return 8 + length + max(ends, default=0)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
