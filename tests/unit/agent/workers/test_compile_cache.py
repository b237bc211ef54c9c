"""What the compilers made: whose it is, the bundle of it, which bundles are refused, and who publishes one."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from torch._inductor.runtime.cache_dir_utils import cache_dir

from elastic_trainer.agent.workers import compile_cache
from elastic_trainer.agent.workers.compile_cache import (
    KEPT_S,
    QUIET_S,
    BundleError,
    CachePorts,
    CompileCache,
    Home,
    chosen,
    claim,
    is_busy,
    key_of,
    look,
    pack,
    unpack,
)
from elastic_trainer.agent.workers.rescue import NeighbourCopies
from elastic_trainer.clock import Deadline
from elastic_trainer.membership.documents import CompileBundle
from elastic_trainer.store.api import RunKeys
from elastic_trainer.torch_internals import header_directory
from elastic_trainer.warm.template import CACHES
from tests.support.memory_store import ManualClock, MemoryBackend, MemoryStore

MEGABYTE = 1 << 20


def home(directory: Path) -> Home:
    made = Home("key", directory / "cache", directory / "headers")
    for each in made.roots().values():
        each.mkdir(parents=True)
    return made


def write(place: Path, content: bytes = b"x") -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
    return place


def library(size: int, whole: int) -> bytes:
    """An ELF file of ``size`` bytes whose table of sections would end at byte ``whole``."""
    head = bytearray(64)
    head[:5], head[40:48] = b"\x7fELF\x02", (whole - 64).to_bytes(8, "little")
    head[58:60], head[60:62] = (64).to_bytes(2, "little"), (1).to_bytes(2, "little")
    return bytes(head).ljust(size, b"\0")


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


# ---- whose


def test_a_key_follows_the_code_and_the_machine_but_not_the_place(tmp_path: Path) -> None:
    """The same script in another directory has the same caches; a changed one, or other instructions, has others."""
    one, other = write(tmp_path / "a" / "train.py", b"1"), write(tmp_path / "b" / "train.py", b"1")
    assert key_of(str(one), ["torch 1"]) == key_of(str(other), ["torch 1"])
    assert len({key_of(str(one), ["torch 1"]), key_of(str(one), ["torch 2"]), key_of("-m train", ["torch 1"])}) == 3
    before = key_of(str(one), [])
    write(one, b"2")
    assert key_of(str(one), []) != before


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in CACHES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return tmp_path


def test_workers_are_led_to_a_directory_that_is_this_users_alone(machine: Path) -> None:
    found = claim("train.py", 1)
    assert found is not None
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(found.cache)
    assert os.environ["TRITON_CACHE_DIR"] == f"{found.cache}/triton"
    assert found.cache.stat().st_mode & 0o077 == 0
    assert found.cache.is_relative_to(machine)
    for name in CACHES:
        os.environ[name] = ""
    assert claim("train.py", 1) == found


def test_what_torch_has_set_is_no_choice_of_the_users(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that imports torch._dynamo sets the default, and each torchrun that it starts inherits that."""
    cache_dir()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(machine / header_directory().parent.name)
    assert claim("train.py", 1) is not None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(machine / "mine"))
    with capture_logs() as logs:
        assert claim("train.py", 1) is None
    assert logs[0]["reason"] == "TORCHINDUCTOR_CACHE_DIR is set"


def test_directories_of_torch_are_closed_to_others_and_old_caches_removed(machine: Path) -> None:
    """Torch makes its own as the user's umask says. A cache of another script goes a week after its last run."""
    headers = header_directory()
    headers.mkdir(parents=True)
    headers.chmod(0o775)
    found = claim("train.py", 1)
    assert found is not None
    assert found.headers.stat().st_mode & 0o022 == 0
    for name, age_s in (("old", 2 * KEPT_S), ("recent", KEPT_S / 2)):
        write(found.cache.with_name(name) / "kernel")
        at = found.cache.stat().st_mtime - age_s
        os.utime(found.cache.with_name(name), (at, at))
    for name in CACHES:
        os.environ[name] = ""
    assert claim("train.py", 1) == found
    assert {each.name for each in found.cache.parent.iterdir()} == {found.key, "recent"}


def test_a_library_that_a_killed_node_left_unfinished_is_removed_when_it_starts_again(machine: Path) -> None:
    """Torch would load it at each start. Not while another agent's linker may be writing it."""
    found = claim("train.py", 1)
    assert found is not None
    torn, whole = (write(found.cache / "ab" / f"{size}.so", library(size, 200)) for size in (150, 200))
    write(lock := found.cache / "locks" / "150.lock")
    for busy in (True, False):
        for name in CACHES:
            os.environ[name] = ""
        with lock.open("rb") as held:
            if busy:
                flock(held, LOCK_EX)
            claim("train.py", 1)
        assert (torn.exists(), whole.exists()) == (busy, True)


def _by_others(machine: Path) -> None:
    (machine / f"elastic_trainer-{os.geteuid()}").mkdir()
    (machine / f"elastic_trainer-{os.geteuid()}").chmod(0o777)


def _elsewhere(machine: Path) -> None:
    (machine / f"elastic_trainer-{os.geteuid()}").symlink_to(machine)


@pytest.mark.parametrize(
    ("limit", "prepare", "reason"),
    [
        (0, lambda _: None, "compile_cache_mb=0"),
        (1, lambda _: os.environ.update(TRITON_CACHE_DIR="/mine"), "TRITON_CACHE_DIR is set"),
        (1, _by_others, "this user alone"),
        (1, _elsewhere, "this user alone"),
    ],
)
def test_caches_stay_where_they_are(machine: Path, limit: int, prepare: Any, reason: str) -> None:
    """By the user's wish, or since others could put code into the directory; one event says why."""
    prepare(machine)
    with capture_logs() as logs:
        assert claim("train.py", limit) is None
    assert [each["event"] for each in logs] == ["compile_cache.skipped"]
    assert reason in logs[0]["reason"]
    assert not os.environ.get("TORCHINDUCTOR_CACHE_DIR")


# ---- the bundle


def test_only_what_a_compiler_has_finished_is_seen(tmp_path: Path) -> None:
    """No locks, temporary files, links, or libraries that a killed linker left."""
    place = home(tmp_path)
    write(place.cache / "ab" / "cabc.main.cpp")
    write(place.cache / "ab" / "cabc.so", library(200, 200))
    write(place.headers / "h.h.gch")
    write(place.cache / "ab" / "torn.so", library(150, 200))
    write(place.cache / "ab" / "empty.so", b"")
    write(place.cache / "ab" / ".1.2.tmp")
    write(place.cache / "locks" / "cabc.lock")
    write(place.cache / "triton" / "tmp.pid_1_x" / "kernel.json")
    (place.cache / "link").symlink_to("/etc/passwd")
    assert set(look(place)) == {("cache", "ab/cabc.main.cpp"), ("cache", "ab/cabc.so"), ("headers", "h.h.gch")}
    assert not is_busy(place)
    with (place.cache / "locks" / "cabc.lock").open("rb") as lock:
        flock(lock, LOCK_EX)
        assert is_busy(place)


def test_of_the_headers_of_all_scripts_the_newest_have_room(tmp_path: Path) -> None:
    place = home(tmp_path)
    write(place.cache / "a", b"1" * 50)
    for number, size in enumerate((30, 30, 30)):
        os.utime(write(place.headers / f"{number}.gch", b"h" * size), (number, number))
    assert chosen(look(place), 115) == [("cache", "a"), ("headers", "1.gch"), ("headers", "2.gch")]


def test_a_bundle_gives_another_node_the_same_files_and_replaces_none(tmp_path: Path, memory: int) -> None:
    place, other = home(tmp_path / "one"), home(tmp_path / "other")
    contents = {"ab/k.so": library(300, 300), "triton/X/k.json": b"{}", "empty": b"", "big": os.urandom(3 * MEGABYTE)}
    for name, content in contents.items():
        write(place.cache / name, content)
    write(place.headers / "h.gch", b"header")
    write(other.cache / "triton" / "X" / "k.json", b"its own")
    files = chosen(look(place), 8 * MEGABYTE)
    digest = pack(place, look(place), files, memory)
    assert digest == hashlib.sha256(os.pread(memory, 1 << 30, 0)).hexdigest()
    assert unpack(memory, other, 8 * MEGABYTE) == files
    assert (other.headers / "h.gch").read_bytes() == b"header"
    assert {name: (other.cache / name).read_bytes() for name in contents} == contents | {"triton/X/k.json": b"its own"}
    assert [path.name for path in other.cache.rglob(".*")] == []
    again = os.memfd_create("again")
    assert pack(place, look(place), files, again) == digest, "one content has one digest"
    os.close(again)


def test_a_file_that_changes_while_it_is_packed_makes_no_bundle(tmp_path: Path, memory: int) -> None:
    place = home(tmp_path)
    write(place.cache / "a", b"123")
    found = look(place)
    write(place.cache / "a", b"1")
    assert pack(place, found, [("cache", "a")], memory) is None


def crafted(memory: int, listed: object, content: bytes = b"") -> None:
    text = listed if isinstance(listed, bytes) else json.dumps(listed).encode()
    os.write(memory, zlib.compress(len(text).to_bytes(8, "little") + text + content))


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        ([["cache", "../evil.so", 1]], "no name of a file"),
        ([["cache", "/evil.so", 1]], "no name of a file"),
        ([["cache", "a/./evil.so", 1]], "no name of a file"),
        ([["cache", "a//evil.so", 1]], "no name of a file"),
        ([["cache", ".hidden", 1]], "no name of a file"),
        ([["cache", "a\nb", 1]], "no name of a file"),
        ([["home", "evil.so", 1]], "no name of a file"),
        ([["cache", "evil.so", -1]], "no name of a file"),
        ([["cache", "evil.so", 2 * MEGABYTE]], "more than compile_cache_mb"),
        ([["cache", "evil.so", 9]], "ends early"),
        ([["cache", "evil.so"]], "no list"),
        (b"no json", "no list"),
        (b" " * (2 * MEGABYTE), "too long"),
    ],
)
def test_a_bundle_that_reaches_elsewhere_or_is_none_is_refused(
    tmp_path: Path, memory: int, listed: object, reason: str
) -> None:
    """Also with the right digest: nothing of it is in any directory then."""
    place = home(tmp_path / "home")
    crafted(memory, listed, b"x")
    with pytest.raises(BundleError, match=reason):
        unpack(memory, place, MEGABYTE)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_bytes_that_are_no_bundle_are_refused(tmp_path: Path, memory: int) -> None:
    os.write(memory, b"no zlib at all")
    with pytest.raises(BundleError, match="damaged"):
        unpack(memory, home(tmp_path), MEGABYTE)


# ---- published once, taken up


class Run:
    """Nodes of one run on one store, with a directory that all reach."""

    def __init__(self, directory: Path, ends: ExitStack) -> None:
        self.directory, self._ends = directory, ends
        self.clock, self.backend = ManualClock(), MemoryBackend()
        self.keys = RunKeys("/test", "run")

    def node(self, name: str, limit_mb: int = 1, location: str | None = None) -> tuple[CompileCache, Home]:
        copies, place = NeighbourCopies(1), home(self.directory / name)
        self._ends.callback(copies.close)
        where = str(self.directory / "shared") if location is None else location
        store = MemoryStore(self.backend)
        ports = CachePorts(store, self.keys, lambda: ["a", "b"], lambda names, deadline: {}, copies, where)
        return CompileCache(name, place, limit_mb, ports, self.clock), place

    def stored(self) -> CompileBundle | None:
        key = self.keys.compiled("key")
        item = MemoryStore(self.backend).get(key, Deadline.after(60)).first
        return None if item is None else CompileBundle.decode(item.value, key)

    def bundles(self) -> list[Path]:
        return sorted(self.directory.glob("shared/compile-cache-*/bundle"))

    def quiet(self, *caches: CompileCache, times: int = 1) -> None:
        """Each looks, and again when nothing has come for long enough."""
        for _ in range(times):
            for each in caches:
                each.turn()
            self.clock.advance(100 * QUIET_S)
            for each in caches:
                each.turn()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with ExitStack() as ends:
        yield Run(tmp_path, ends)


def names(logs: Sequence[Any]) -> list[str]:
    return [each["event"] for each in logs if each["event"] != "compile_cache.not_published"]


def test_a_cache_is_published_when_it_is_quiet_and_taken_up_by_the_next_node(run: Run) -> None:
    """Not while files come or a compiler writes, and not again without new ones; what comes later replaces the bundle
    in the directory."""
    cache, place = run.node("a")
    with write(place.cache / "locks" / "k.lock").open("rb") as lock:
        flock(lock, LOCK_EX)
        write(place.cache / "one", b"")
        run.quiet(cache)
        assert run.stored() is None
    write(place.cache / "one", b"1")
    cache.turn()
    run.clock.advance(QUIET_S / 2)
    write(place.cache / "two", b"22")
    cache.turn()
    run.clock.advance(QUIET_S / 2)
    cache.turn()
    assert run.stored() is None
    with capture_logs() as logs:
        run.quiet(cache, times=3)
    assert names(logs) == ["compile_cache.published"]
    other, there = run.node("b")
    with capture_logs() as logs:
        assert other.fetch()
        run.quiet(other, times=2)
    assert [(each["event"], each.get("source")) for each in logs] == [
        ("compile_cache.fetched", str(run.directory / "shared"))
    ]
    assert set(look(there)) == set(look(place))
    write(there.cache / "three", b"333")
    run.quiet(other)
    assert run.stored() is not None
    assert len(run.bundles()) == 1
    newcomer, late = run.node("c")
    assert newcomer.fetch()
    assert {name for _, name in look(late)} == {"one", "two", "three"}


def test_of_two_nodes_that_publish_at_once_one_wins_and_the_other_adds_what_it_lacks(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, here), (other, there) = run.node("a"), run.node("b")
    write(here.cache / "same", b"1")
    write(there.cache / "same", b"1")
    write(there.cache / "more", b"2")
    packed = compile_cache.pack

    def interrupted(*arguments: Any) -> Any:
        monkeypatch.setattr(compile_cache, "pack", packed)
        run.quiet(one)  # it is first, while the other packs
        return packed(*arguments)

    monkeypatch.setattr(compile_cache, "pack", interrupted)
    with capture_logs() as logs:
        run.quiet(other)
    assert names(logs) == ["compile_cache.published"]
    first = run.stored()
    assert first is not None
    assert first.node == "a"
    assert len(run.bundles()) == 1, "the loser leaves nothing behind"
    with capture_logs() as logs:
        run.quiet(other, one, times=3)
    assert names(logs) == ["compile_cache.fetched", "compile_cache.published"]
    last, late = run.node("c")
    assert last.fetch()
    assert {name for _, name in look(late)} == {"same", "more"}


def test_nodes_that_made_the_same_publish_it_once(run: Run) -> None:
    caches = []
    for name in "abc":
        cache, place = run.node(name)
        write(place.cache / "kernel", b"the same")
        caches.append(cache)
    with capture_logs() as logs:
        run.quiet(*caches, times=3)
    assert names(logs).count("compile_cache.published") == 1


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def other_code(path: Path) -> None:
    """A bundle as sound as the right one, put there by somebody who cannot write to the store."""
    memory = os.memfd_create("evil")
    crafted(memory, [["cache", "evil.so", 1]], b"x")
    path.write_bytes(os.pread(memory, 1 << 20, 0).ljust(path.stat().st_size, b"\0"))
    os.close(memory)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [damaged, other_code, cut])
def test_a_bundle_in_the_directory_that_is_not_the_stores_is_refused_and_replaced(run: Run, harm: Any) -> None:
    """Nothing of it is unpacked; the node compiles itself, and publishes that."""
    cache, place = run.node("a")
    write(place.cache / "kernel", b"sound" * 100)
    run.quiet(cache)
    (bundle,) = run.bundles()
    harm(bundle)
    other, there = run.node("b")
    with capture_logs() as logs:
        assert not other.fetch()
    assert [(each["event"], each["log_level"]) for each in logs] == [("compile_cache.refused", "warning")]
    assert look(there) == {}
    write(there.cache / "another", b"sound")
    run.quiet(other)
    late, last = run.node("c")
    assert late.fetch()
    assert {name for _, name in look(last)} == {"another"}


def test_a_cache_or_a_bundle_that_is_too_large_stays_away(run: Run) -> None:
    cache, place = run.node("a", limit_mb=3)
    write(place.cache / "kernel", os.urandom(2 * MEGABYTE))
    run.quiet(cache)
    assert run.stored() is not None
    small, there = run.node("b", limit_mb=1)
    with capture_logs() as logs:
        assert not small.fetch()
    assert names(logs) == ["compile_cache.refused"]
    write(there.cache / "large", b"1" * 2 * MEGABYTE)
    before = run.stored()
    with capture_logs() as logs:
        run.quiet(small, times=3)
    warned = [each for each in logs if each["event"] == "compile_cache.not_published"]
    assert [each["log_level"] for each in warned] == ["warning"], "said once"
    assert run.stored() == before


def test_without_a_directory_or_a_store_a_node_starts_all_the_same(run: Run) -> None:
    cache, place = run.node("a", location="")
    write(place.cache / "kernel")
    run.quiet(cache)
    stored = run.stored()
    assert stored is not None
    other, there = run.node("b", location="")
    assert not other.fetch(), "its publisher is gone"
    run.backend.outage(True)
    assert not other.fetch()
    write(there.cache / "kernel2")
    run.quiet(other)
    run.backend.outage(False)
    assert run.stored() == stored
    run.quiet(other)
    assert run.stored() == replace_node(run.stored(), "b")


def replace_node(bundle: CompileBundle | None, node: str) -> CompileBundle | None:
    return None if bundle is None else bundle.model_copy(update={"node": node})
