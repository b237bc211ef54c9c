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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_trainer.errors import ConfigError
from elastic_trainer.settings import worker_environment

_TEMPORARY = ".saving-"
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

    ``pattern`` is a glob within ``directory``. The newest has the greatest number in its name, then the latest time.
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
    return [path for path in sorted(paths, key=_age, reverse=True) if is_whole(path, marker)]


def _age(path: Path) -> tuple[int, int]:
    numbers = re.findall(r"\d+", path.stem)
    return int(numbers[-1]) if numbers else -1, path.stat().st_mtime_ns


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
    return (
        8
        + length
        + max((each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"), default=0)
    )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
