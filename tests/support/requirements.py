"""What a test needs of its machine: skipped with the reason on a laptop, a failure in CI."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from packaging.version import Version

from elastic_trainer.local.hosts import current, lacks
from elastic_trainer.torch_internals import TorchPart
from tests.support.networks import AnySegment

TORCH_CANNOT = "this torch cannot: "
"""How the reason of a skip begins that another machine would not change."""


def in_ci() -> bool:
    """Whether this run must have everything (``CI`` is set, and not to ``0`` or ``false``)."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def missing(reason: str) -> NoReturn:
    """End the running test because its machine lacks something: skip it, or fail it in CI."""
    if in_ci():
        pytest.fail(f"missing in CI: {reason}", pytrace=False)
    pytest.skip(reason)


def find(binary: str) -> str | None:
    """The path of ``binary``: from PATH, else from the system directories that users' PATHs leave out, else from
    this virtual environment (which brings an etcd of its own)."""
    places = [os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin", str(Path(sys.executable).parent)]
    return shutil.which(binary, path=os.pathsep.join(places))


def needs(binary: str, reason: str) -> str:
    """The path of ``binary``; without it the test ends as :func:`missing` says, ``reason`` telling what it is for."""
    path = find(binary)
    if path is None:
        missing(f"{binary} is not installed: {reason}")
    return path


def needs_root(reason: str) -> None:
    """End the running test, as :func:`missing` says, unless it runs as root."""
    if os.geteuid() != 0:
        missing(f"not root: {reason}")


def needs_hosts() -> None:
    """End the running test, as :func:`missing` says, unless nodes can have hosts of their own."""
    if (lacking := lacks()) is not None:
        missing(f"hosts of their own need {lacking}")


def needs_torch(part: TorchPart) -> None:
    """Skip the running test, in CI too, if only a newer torch has ``part``. One that should have it is tested."""
    if part.since and Version(torch.__version__) < Version(part.since):
        pytest.skip(f"{TORCH_CANNOT}{part.capability} need torch {part.since}")


def here() -> AnySegment:
    """The segment that tests run on; without one the test ends as :func:`missing` says."""
    needs_hosts()
    found = current()
    return found if isinstance(found, AnySegment) else missing("this process could not enter a segment")


def outside() -> AbstractContextManager[None]:
    """In the body this thread, and programs that it starts, reach the networks that the machine reaches."""
    segment = current()
    return segment.left() if isinstance(segment, AnySegment) else nullcontext()
