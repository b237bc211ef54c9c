"""etcd3's messages from a private pool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_trainer.errors import ConfigError
from elastic_trainer.store.etcd import PACKAGE, build, load_etcd3, serialized_descriptor, source_directory


def run_python(code: str) -> str:
    """What a fresh interpreter prints that treats warnings as errors."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def test_etcd3_loads_without_a_warning_and_works() -> None:
    """With warnings as errors etcd3 imports on the installed protobuf, and its messages survive the wire."""
    code = (
        "from elastic_trainer.store.etcd import load_etcd3\n"
        "rpc = load_etcd3().etcdrpc\n"
        "sent = rpc.PutRequest(key=b'k', value=b'v', lease=7)\n"
        "back = rpc.PutRequest.FromString(sent.SerializeToString())\n"
        "print(back.key, back.lease, rpc.RangeRequest.DESCEND, rpc.Compare.NOT_EQUAL)"
    )
    assert run_python(code) == "b'k' 7 2 3"


def test_loading_again_gives_the_same_package() -> None:
    """A second call changes nothing: classes stay the same."""
    first = load_etcd3()
    message = first.etcdrpc.RangeRequest
    assert load_etcd3() is first
    assert load_etcd3().etcdrpc.RangeRequest is message


def test_threads_that_load_at_once_get_one_package() -> None:
    """The first of several threads installs, the others wait for it."""
    code = (
        "import threading\n"
        "from elastic_trainer.store.etcd import load_etcd3\n"
        "found = []\n"
        "threads = [threading.Thread(target=lambda: found.append(load_etcd3().etcdrpc.TxnRequest)) for _ in range(8)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "print(len(found), len(set(found)))"
    )
    assert run_python(code) == "8 1"


def test_other_etcd_clients_are_left_alone() -> None:
    """Nothing is registered in the default pool, and a client that did so before keeps its own messages."""
    code = (
        "from google.protobuf import descriptor_pool\n"
        "from elastic_trainer.store import etcd as descriptors\n"
        "pool = descriptor_pool.Default()\n"
        "descriptors.load_etcd3()\n"
        "try:\n"
        "    pool.FindFileByName('rpc.proto')\n"
        "    print('disturbed')\n"
        "except KeyError:\n"
        "    pass\n"
        "for name in ('kv', 'auth', 'rpc'):\n"
        "    pool.AddSerializedFile(\n"
        "        descriptors.serialized_descriptor(descriptors.source_directory() / f'{name}_pb2.py'))\n"
        "print(pool.FindMessageTypeByName('etcdserverpb.PutRequest').full_name)"
    )
    assert run_python(code) == "etcdserverpb.PutRequest"


def test_importing_the_store_package_is_cheap() -> None:
    """``import elastic_trainer.store`` loads neither grpc nor etcd3 nor torch."""
    code = (
        "import sys, elastic_trainer.store\n"
        "print([name for name in ('grpc', 'etcd3', 'torch', 'google.protobuf') if name in sys.modules])"
    )
    assert run_python(code) == "[]"


def test_what_is_not_etcd3_is_named(tmp_path: Path) -> None:
    """Missing files, sources without a descriptor, and descriptors in an unknown form are each a clear error."""
    path = tmp_path / "kv_pb2.py"
    with pytest.raises(ConfigError, match=r"kv_pb2\.py cannot be read"):
        serialized_descriptor(path)
    path.write_text("print('hello')\n")
    with pytest.raises(ConfigError, match=r"kv_pb2\.py holds no descriptor"):
        serialized_descriptor(path)
    path.write_text("f(serialized_pb=data)\n")
    with pytest.raises(ConfigError, match="in an unknown form"):
        serialized_descriptor(path)
    path.write_text("f(serialized_pb=_b('\\u1234'))\n")
    with pytest.raises(ConfigError, match="in an unknown form"):
        serialized_descriptor(path)
    path.write_text("f(serialized_pb=b'\\x1')\n")
    with pytest.raises(ConfigError, match="in an unknown form"):
        serialized_descriptor(path)


def test_descriptors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """Damaged descriptors, and files that lack what the others import, are configuration errors."""
    (tmp_path / "kv_pb2.py").write_text("f(serialized_pb=b'\\xff\\xff')\n")
    with pytest.raises(ConfigError, match="unexpected descriptors"):
        build(tmp_path)
    for name in ("kv", "auth", "rpc"):
        source = (source_directory() / "rpc_pb2.py").read_text()
        (tmp_path / f"{name}_pb2.py").write_text(source)
    with pytest.raises(ConfigError, match="unexpected descriptors"):
        build(tmp_path)


def test_the_sources_are_parsed_and_not_run(tmp_path: Path) -> None:
    """Code in the generated modules has no effect."""
    marker = tmp_path / "ran"
    for name in ("kv", "auth", "rpc"):
        source = (source_directory() / f"{name}_pb2.py").read_text()
        (tmp_path / f"{name}_pb2.py").write_text(f"open({str(marker)!r}, 'w').close()\n{source}")
    modules = build(tmp_path)
    assert {PACKAGE, f"{PACKAGE}.rpc_pb2", f"{PACKAGE}.rpc_pb2_grpc"} <= set(modules)
    assert not marker.exists()
