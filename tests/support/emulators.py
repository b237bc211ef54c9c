"""Google's and Azure's object stores on loopback, where their emulators are installed; none is needed by CI.

``pip install gcsfs gcp-storage-emulator``; ``pip install adlfs`` and ``npm install --global azurite``.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

import pytest
from fsspec import filesystem

from elastic_trainer.local.hosts import HOST, free_ports
from tests.support.s3server import BUCKET
from tests.support.waiting import eventually

_GOOGLE = (
    "from gcp_storage_emulator.server import create_server; create_server({host!r}, {port}, True, {bucket!r}).run()"
)
_ACCOUNT, _KEY = "account", "a2V5"


@contextmanager
def google() -> Iterator[None]:
    """The bucket is there, and this process finds it."""
    if not (find_spec("gcsfs") and find_spec("gcp_storage_emulator")):
        pytest.skip("gs:// needs gcsfs and gcp-storage-emulator")
    (port,) = free_ports(1)
    command = [sys.executable, "-c", _GOOGLE.format(host=HOST, port=port, bucket=BUCKET)]
    with _serving(command, port), _set("STORAGE_EMULATOR_HOST", f"http://{HOST}:{port}"):
        yield


@contextmanager
def azure() -> Iterator[None]:
    """The container is there, and this process finds it."""
    azurite = shutil.which("azurite-blob")
    if azurite is None or not find_spec("adlfs"):
        pytest.skip("az:// needs adlfs and azurite-blob")
    (port,) = free_ports(1)
    command = [azurite, "--silent", "--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck"]
    where = f"BlobEndpoint=http://{HOST}:{port}/{_ACCOUNT}"
    known = f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};{where};"
    account = _set("AZURITE_ACCOUNTS", f"{_ACCOUNT}:{_KEY}")
    with account, _serving(command, port), _set("AZURE_STORAGE_CONNECTION_STRING", known):
        filesystem("az", skip_instance_cache=True).mkdir(BUCKET)
        yield


@contextmanager
def _serving(command: list[str], port: int) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            eventually(lambda: _listens(port), f"{command[0]} does not listen")
            yield
        finally:
            server.kill()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1.0):
        return True
    return False


@contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
