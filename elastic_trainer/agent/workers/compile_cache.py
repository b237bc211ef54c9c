"""What the compilers of this node's workers have made: kept in one directory, shared with the run's other nodes.

A compiled model costs minutes at its first step, and the compilers of torch keep what they make: Inductor and
AOTAutograd their graphs, their C++ and its libraries, Triton its kernels, autotuning its choices. Here a script's
workers find all of it in a directory of their own (``Home``), at the same path on each node. Once it is quiet, one node
packs it into a *bundle*, writes that to the run's directory and its digest to the store; a node that joins takes the
bundle from a neighbour's memory, or from that directory, before its workers start. A bundle is compressed by zlib::

    8 bytes           length of the list (little-endian)
    the list          JSON: [root, name, bytes] of each file, sorted; the root is "cache" or "headers"
    the files         one after the other

A bundle is code. So it counts only with the digest that the store holds under the keys of this run: who can write into
the directory, or answers in a neighbour's place, can make nobody run anything. A wrong key costs a compilation and
never a wrong result, since each compiler checks keys of its own.

*Runs in* torchrun's main thread (``claim``, ``fetch``), and a thread ``compile-cache`` of low priority.
*Owns* the script's directory, its entry in the run's directory, its key in the store, the bundle in memory.
*Fails by* nothing: without a bundle workers compile, and an event says why. A fetch ends in time.
*Invariant*: no byte is unpacked before the digest of all is right, no file replaced, none written elsewhere. The store
names a bundle once it is in the run's directory; of two nodes that publish one wins, and the other takes up its bundle.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import random
import re
import shutil
import stat
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from elastic_trainer import torch_internals
from elastic_trainer.agent.workers.periodic import IDLE_S, PeriodicThread
from elastic_trainer.agent.workers.rescue import NeighbourCopies
from elastic_trainer.checkpoint.manifest import PIECE
from elastic_trainer.checkpoint.memory import KEPT_FREE, MEMORY_NAME, available
from elastic_trainer.checkpoint.neighbours import MemoryAddress, RemoteMemory
from elastic_trainer.checkpoint.storage import Storage, open_storage
from elastic_trainer.clock import SYSTEM, Clock, Deadline
from elastic_trainer.errors import ElasticTrainerError, TransientError
from elastic_trainer.membership.cluster_view import NodeView
from elastic_trainer.membership.documents import CompileBundle, DocumentError
from elastic_trainer.store.api import Put, RunKeys, Store, unchanged
from elastic_trainer.telemetry.logs import logger
from elastic_trainer.warm.template import CACHES, COMPILERS

# ---- whose caches: the key, and the directory


KEPT_S: Final = 7 * 24 * 3600.0
"""How long the caches of a script that does not run here are kept."""


@dataclass(frozen=True, slots=True)
class Home:
    """The caches of one script on machines of one kind: their ``key``, the directory, and that of torch's headers."""

    key: str
    cache: Path
    headers: Path

    def roots(self) -> dict[str, Path]:
        return {"cache": self.cache, "headers": self.headers}


def key_of(script: str, facts: Sequence[str]) -> str:
    """The key of the caches of ``script``, a path or ``-m module``, on a machine of these ``facts``."""
    try:
        code = Path(script).read_bytes()
    except (OSError, ValueError):
        code = b""  # of a module: its name
    parts = [Path(script).name.encode(errors="surrogateescape"), code, *(fact.encode() for fact in facts)]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def machine_facts() -> list[str]:
    """What compiled code depends on: torch, Python, the processor's instructions, the GPUs; initializes no device."""
    cpu: set[str] = set()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((set(line.split()) for line in lines if line.lower().startswith(("flags", "features"))), set())
    gpus = []
    for each in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            gpus += [line for line in each.read_text().splitlines() if line.startswith("Model:")]
    versions = [torch.__version__, str(torch.version.git_version), platform.python_version(), platform.machine()]
    return [*versions, " ".join(sorted(cpu)), *gpus]


def home_of(script: str) -> Home:
    """Where the caches of ``script`` are on this machine."""
    key = key_of(script, machine_facts())
    top = Path(tempfile.gettempdir(), f"elastic_trainer-{os.geteuid()}")
    return Home(key, top / "compiled" / key, torch_internals.header_directory())


def claim(script: str, limit_mb: int) -> Home | None:
    """Let the workers that start from now on keep their caches in a directory for ``script``.

    None where the user has chosen another, wants none, or the directory could be written by others. (Torch sets its own
    variable to its default once a process imports torch._dynamo; a child of such a process inherits that.)
    """
    reason, default = "", torch_internals.header_directory().parent
    defaults = (default, default / "triton")
    if limit_mb == 0:
        reason = "compile_cache_mb=0"
    elif given := [name for name in CACHES if (value := os.environ.get(name)) and Path(value) not in defaults]:
        reason = f"{given[0]} is set"
    if not reason:
        try:
            home = home_of(script)
            for each in (*reversed(home.cache.parents[:2]), home.cache):
                _make_private(each)
            for each in (home.headers.parent, home.headers):
                _make_private(each, torchs=True)
            _remove_old(home.cache)
            if not is_busy(home):
                _remove_torn(home.cache)
        except OSError as error:
            reason = str(error)
    if reason:
        logger().info("compile_cache.skipped", reason=reason)
        return None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(home.cache)
    os.environ["TRITON_CACHE_DIR"] = str(home.cache / "triton")
    return home


def _make_private(directory: Path, *, torchs: bool = False) -> None:
    """Create it for this user alone; PermissionError if others could put code there.

    One of ``torchs`` own, which are as the user's umask makes them, is closed to others.
    """
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if torchs and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        directory.chmod(stat.S_IMODE(found.st_mode) & ~0o022)
    elif not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{directory} is not a directory that this user alone can write")


def _remove_old(cache: Path) -> None:
    """Remove the directories of scripts that have not run here for KEPT_S."""
    os.utime(cache)
    now = cache.stat().st_mtime
    for each in cache.parent.iterdir():
        with suppress(OSError):
            if now - each.stat().st_mtime > KEPT_S:
                shutil.rmtree(each)


def _remove_torn(cache: Path) -> None:
    """Remove libraries that a linker had begun when this node was killed: torch would load them at each start."""
    for each in cache.rglob("*.so"):
        with suppress(OSError):
            if not _is_whole(each, each.stat().st_size):
                each.unlink()


# ---- what is there, and the bundle made of it


Found = Mapping[tuple[str, str], tuple[int, int]]
"""Files by root and name: their sizes and times."""
_PART: Final = re.compile(r"[A-Za-z0-9_=+@,-][A-Za-z0-9_.=+@,-]{0,254}")
_PASSING: Final = ("locks", "tmp", "__pycache__")
"""What the names of directories begin with that hold nothing to keep."""
_LENGTH: Final = 8
_LONGEST_LIST: Final = 64 << 20


class BundleError(ElasticTrainerError):
    """These bytes are no bundle, or not one that may be unpacked here."""


def look(home: Home, before: Found | None = None) -> Found:
    """The files that the compilers have finished, without their locks and temporary ones; ``before``: as last seen."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for root, directory in home.roots().items():
        for parent, below, files in os.walk(directory):
            below[:] = sorted(each for each in below if _PART.fullmatch(each) and not each.startswith(_PASSING))
            for file in files:
                path = Path(parent, file)
                if not _PART.fullmatch(file) or file.endswith((".lock", ".tmp")):
                    continue
                with suppress(OSError):
                    status, name = path.lstat(), (root, str(path.relative_to(directory)))
                    seen = status.st_size, status.st_mtime_ns
                    known = before is not None and before.get(name) == seen
                    whole = known or path.suffix != ".so" or _is_whole(path, status.st_size)
                    if stat.S_ISREG(status.st_mode) and whole:
                        found[name] = seen
    return found


def _is_whole(path: Path, size: int) -> bool:
    """Whether a linker has finished this library: the table of sections, which it writes last, is in the file."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":
        return False
    offset = int.from_bytes(head[40:48], sys.byteorder)
    length, count = (int.from_bytes(head[at : at + 2], sys.byteorder) for at in (58, 60))
    return offset > 0 and size >= offset + length * count


def is_busy(home: Home) -> bool:
    """Whether a compiler holds one of the locks under which it writes."""
    for lock in (*(home.cache / "locks").glob("*.lock"), *(home.headers / "locks").glob("*.lock")):
        with suppress(OSError), lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def names_digest(names: Collection[tuple[str, str]]) -> str:
    """A digest of names of files: compilers name them by their content."""
    return hashlib.sha256(json.dumps(sorted(names)).encode()).hexdigest()


def chosen(found: Found, limit: int) -> list[tuple[str, str]]:
    """What a bundle holds: all of the cache, and of the headers of all scripts the newest for which there is room."""
    files = sorted(name for name in found if name[0] == "cache")
    left = limit - sum(found[name][0] for name in files)
    for name in sorted((name for name in found if name[0] == "headers"), key=lambda name: -found[name][1]):
        left -= found[name][0]
        if left >= 0:
            files.append(name)
    return sorted(files)


def pack(home: Home, found: Found, files: Sequence[tuple[str, str]], into: int) -> str | None:
    """Write a bundle of these ``files`` to the descriptor ``into``; its digest, or None if one of them has changed."""
    roots, press, digest = home.roots(), zlib.compressobj(1), hashlib.sha256()

    def write(data: bytes) -> None:
        digest.update(data)
        while data:
            data = data[os.write(into, data) :]

    contents = json.dumps([[*name, found[name][0]] for name in files]).encode()
    write(press.compress(len(contents).to_bytes(_LENGTH, "little") + contents))
    for root, name in files:
        left = found[root, name][0]
        try:
            with (roots[root] / name).open("rb") as file:
                while left and (piece := file.read(min(left, PIECE))):
                    left -= len(piece)
                    write(press.compress(piece))
        except OSError:
            return None
        if left:
            return None
    write(press.flush())
    return digest.hexdigest()


def checked_digest(descriptor: int, size: int) -> str:
    """The digest of the first ``size`` bytes."""
    digest = hashlib.sha256()
    for begin in range(0, size, PIECE):
        digest.update(os.pread(descriptor, min(PIECE, size - begin), begin))
    return digest.hexdigest()


def unpack(descriptor: int, home: Home, limit: int) -> list[tuple[str, str]]:
    """Write the files of a verified bundle that are not there yet; all its names. BundleError, OSError."""
    content = _Unpressed(descriptor)
    length = int.from_bytes(content.read(_LENGTH), "little")
    if length > min(limit, _LONGEST_LIST):
        raise BundleError("its list of files is too long")
    roots, listed = home.roots(), _listed(content.read(length))
    if (total := sum(size for _, _, size in listed)) > limit:
        raise BundleError(f"its files are {total / 1e6:,.0f} MB, more than compile_cache_mb allows")
    for root, name, size in listed:
        path = roots[root] / name
        if path.exists():
            content.skip(size)
            continue
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh, temporary = tempfile.mkstemp(".tmp", ".", path.parent)
        try:
            with open(fresh, "wb") as file:
                for piece in content.pieces(size):
                    file.write(piece)
            os.rename(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    return [(root, name) for root, name, _ in listed]


def _listed(text: bytes) -> list[tuple[str, str, int]]:
    try:
        listed = [(str(root), str(name), int(size)) for root, name, size in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise BundleError("it has no list of files") from error
    for root, name, size in listed:
        if root not in ("cache", "headers") or size < 0 or not all(map(_PART.fullmatch, name.split("/"))):
            raise BundleError(f"it holds {name!r}, which is no name of a file in a cache")
    return listed


class _Unpressed:
    """Reads what a bundle holds. BundleError if it is damaged or ends early."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._at = descriptor, 0
        self._press = zlib.decompressobj()

    def pieces(self, size: int) -> Iterator[bytes]:
        while size:
            source = self._press.unconsumed_tail
            if not source:
                source = os.pread(self._descriptor, PIECE, self._at)
                self._at += len(source)
            try:
                piece = self._press.decompress(source, min(size, PIECE))
            except zlib.error as error:
                raise BundleError(f"it is damaged: {error}") from error
            if not source and not piece:
                raise BundleError("it ends early")
            size -= len(piece)
            yield piece

    def read(self, size: int) -> bytes:
        return b"".join(self.pieces(size))

    def skip(self, size: int) -> None:
        for _ in self.pieces(size):
            pass


# ---- fetched, kept, published


LOOK_S: Final = 1.0
LONG_S: Final = 30.0
"""Seconds between two looks once nothing has come for as long."""
QUIET_S: Final = 3.0
"""Seconds without a new file until a cache is published; after each time twice as many, at most LONGEST_QUIET_S."""
LONGEST_QUIET_S: Final = 600.0
FETCH_S: Final = 30.0
STORE_S: Final = 5.0
_ASKED: Final = 3
"""Neighbours that are asked for a bundle whose publisher is gone."""
_HOLDERS: Final = 16
"""Besides the publisher, about this many nodes of a run keep a bundle in memory."""
_NICE: Final = 10


@dataclass(frozen=True, slots=True)
class CachePorts:
    """``members()`` are the names of the nodes that train; ``nodes`` reads their keys; ``copies`` serves the bundle;
    ``location`` is the run's directory, empty if none is known."""

    store: Store
    keys: RunKeys
    members: Callable[[], Sequence[str]]
    nodes: Callable[[Sequence[str], Deadline], Mapping[str, NodeView]]
    copies: NeighbourCopies
    location: str = ""


class CompileCache(PeriodicThread):
    """See the module. ``limit_mb``: how large the files of a bundle may be."""

    def __init__(self, node: str, home: Home, limit_mb: int, ports: CachePorts, clock: Clock = SYSTEM) -> None:
        super().__init__("compile-cache", self.turn, clock)
        self._node, self._home, self._limit, self._ports = node, home, limit_mb << 20, ports
        self._known: set[tuple[str, str]] = set()
        """What a bundle holds that this node has seen, or what is not published."""
        self._held = ""
        """The digest of the bundle in memory."""
        self._seen: Found = {}
        self._since = clock.monotonic()
        self._quiet_s = QUIET_S

    @property
    def modules(self) -> tuple[str, ...]:
        """What workers will import, as is known from what others of this run have compiled."""
        return COMPILERS if self._held else ()

    def fetch(self) -> bool:
        """At the start of a node: take up what the run has compiled, within FETCH_S. Whether there was something."""
        try:
            stored, _ = self._stored(Deadline.after(STORE_S, self._clock))
        except ElasticTrainerError as error:
            logger().info("compile_cache.not_fetched", reason=str(error))
            return False
        return stored is not None and self._take(stored, Deadline.after(FETCH_S, self._clock))

    def turn(self) -> float:
        """Publish what is new, once it is quiet; the seconds until the next look."""
        now, found = self._clock.monotonic(), look(self._home, self._seen)
        if found != self._seen:
            self._seen, self._since = found, now
        files = chosen(found, self._limit)
        fresh = {name for name in files if name[0] == "cache"} - self._known
        if not fresh and now - self._since > LONG_S:
            with suppress(OSError):
                os.utime(self._home.cache)  # it is in use
            return LONG_S
        if not fresh or now - self._since < self._quiet_s or is_busy(self._home):
            return LOOK_S
        self._quiet_s = min(2 * self._quiet_s, LONGEST_QUIET_S)
        try:
            stored, revision = self._stored(Deadline.after(STORE_S, self._clock))
        except DocumentError as error:
            logger().warning("compile_cache.refused", reason=str(error))
            return IDLE_S
        except TransientError as error:
            logger().debug("compile_cache.not_published", reason=str(error))
            return LOOK_S
        if stored is not None and stored.sha256 != self._held:
            if stored.names == names_digest(files) and random.random() > _HOLDERS / max(1, len(self._ports.members())):
                self._known.update(files)
                return LOOK_S
            self._take(stored, Deadline.after(FETCH_S, self._clock))
            if not fresh - self._known:
                return LOOK_S
            files = chosen(found := look(self._home), self._limit)
        if sum(found[name][0] for name in files) > self._limit:
            logger().warning("compile_cache.not_published", reason="it is larger than compile_cache_mb allows")
        else:
            self._publish(found, files, stored, revision)
            return LOOK_S
        self._known.update(files)
        return LOOK_S

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread alone, on Linux
        super()._run()

    def close(self) -> None:
        super().close()
        self._ports.copies.lend_bundle("", -1)

    # ---- reading

    def _stored(self, deadline: Deadline) -> tuple[CompileBundle | None, int]:
        """What the store names, and the revision at which."""
        key = self._ports.keys.compiled(self._home.key)
        item = self._ports.store.get(key, deadline).first
        return (CompileBundle.decode(item.value, key), item.mod_revision) if item is not None else (None, 0)

    def _take(self, stored: CompileBundle, deadline: Deadline) -> bool:
        """Take up the bundle that the store names, from wherever it is to be had."""
        if stored.size > self._limit:
            logger().warning("compile_cache.refused", reason="it is larger than compile_cache_mb allows")
            return False
        if available() < stored.size + KEPT_FREE:
            logger().warning("compile_cache.not_fetched", reason="there is too little memory for it")
            return False
        begun = self._clock.monotonic()
        for name, source in self._sources(stored, deadline):
            memory = os.memfd_create(f"{MEMORY_NAME}bundle")
            try:
                source(memory)
                if checked_digest(memory, stored.size) != stored.sha256:
                    raise BundleError("its digest is not the one that the store names")
                files = unpack(memory, self._home, self._limit)
            except (OSError, ElasticTrainerError) as error:
                os.close(memory)
                if isinstance(error, BundleError):
                    logger().warning("compile_cache.refused", source=name, reason=str(error))
                else:
                    logger().info("compile_cache.not_fetched", source=name, reason=str(error))
                continue
            self._known.update(files)
            self._hold(stored.sha256, memory)
            took_s = round(self._clock.monotonic() - begun, 3)
            logger().info(
                "compile_cache.fetched",
                source=name,
                files=len(files),
                bytes=stored.size,
                key=self._home.key,
                took_s=took_s,
            )
            return True
        return False

    def _sources(self, stored: CompileBundle, deadline: Deadline) -> Iterator[tuple[str, Callable[[int], None]]]:
        """Where the bundle may be: with the node that published it, in the run's directory, with some others."""
        yield from self._neighbours([stored.node] if stored.node != self._node else [], stored, deadline)
        if self._ports.location:
            yield self._ports.location, partial(self._from_directory, stored, deadline)
        others = [name for name in self._ports.members() if name not in (self._node, stored.node)]
        yield from self._neighbours(random.sample(others, min(_ASKED, len(others))), stored, deadline)

    def _neighbours(
        self, names: Sequence[str], stored: CompileBundle, deadline: Deadline
    ) -> Iterator[tuple[str, Callable[[int], None]]]:
        nodes: Mapping[str, NodeView] = {}
        with suppress(ElasticTrainerError):
            nodes = self._ports.nodes(names, deadline.at_most(STORE_S)) if names else {}
        for name, node in nodes.items():
            address = MemoryAddress(node.record.address, node.record.probe_port, stored.sha256)
            yield name, partial(_from_neighbour, address, stored.size, deadline)

    def _from_directory(self, stored: CompileBundle, deadline: Deadline, memory: int) -> None:
        source = self._storage().source(_entry(stored), "bundle")
        try:
            if source.size != stored.size:
                raise BundleError(f"it has {source.size} bytes, not {stored.size}")
            _copy(source.read_into, stored.size, memory, deadline)
        finally:
            source.close()

    # ---- writing

    def _publish(self, found: Found, files: Sequence[tuple[str, str]], stored: CompileBundle | None, at: int) -> None:
        memory = os.memfd_create(f"{MEMORY_NAME}bundle")
        try:
            digest = pack(self._home, found, files, memory)
            if digest is None:
                os.close(memory)
                return
            size, node = os.fstat(memory).st_size, self._node
            bundle = CompileBundle(node=node, sha256=digest, size=size, names=names_digest(files))
            kept = self._keep(bundle, memory)
            key, limit = self._ports.keys.compiled(self._home.key), Deadline.after(STORE_S, self._clock)
            won = self._ports.store.transact(
                [unchanged(key, at)], [Put(key, bundle.encode())], deadline=limit
            ).succeeded
        except (OSError, ElasticTrainerError) as error:
            os.close(memory)
            logger().warning("compile_cache.not_published", reason=str(error))
            return
        if not won:  # another node was first; what it has not, the next turn adds
            os.close(memory)
            self._remove(bundle)
            logger().debug("compile_cache.not_published", reason="another node was first")
            return
        self._known.update(files)
        self._hold(digest, memory)
        self._remove(stored)
        where = self._ports.location if kept else ""
        logger().info("compile_cache.published", files=len(files), bytes=size, key=self._home.key, directory=where)

    def _keep(self, bundle: CompileBundle, memory: int) -> bool:
        """Write the bundle to the run's directory, if one is known; a bundle in memory alone is still one."""
        if not self._ports.location:
            return False
        entry = _entry(bundle)
        try:
            storage = self._storage()
            storage.prepare()
            storage.remove(entry)  # an earlier life of this node may have left the same
            storage.create(entry)
            sink = storage.sink(entry, "bundle")
            try:
                for begin in range(0, bundle.size, PIECE):
                    sink.write(memoryview(os.pread(memory, min(PIECE, bundle.size - begin), begin)))
                sink.finish()
            finally:
                sink.abandon()
        except (OSError, ElasticTrainerError) as error:
            logger().warning("compile_cache.not_stored", reason=str(error))
            return False
        return True

    def _remove(self, bundle: CompileBundle | None) -> None:
        """A bundle that the store does not name any more leaves the run's directory."""
        if bundle is not None and self._ports.location:
            with suppress(OSError, ElasticTrainerError):
                self._storage().remove(_entry(bundle))

    def _storage(self) -> Storage:
        return open_storage(self._ports.location)

    def _hold(self, digest: str, memory: int) -> None:
        self._held = digest
        self._ports.copies.lend_bundle(digest, memory)


def _entry(bundle: CompileBundle) -> str:
    """Its name in the run's directory."""
    return f"compile-cache-{bundle.sha256[:16]}-{bundle.node}"


def _from_neighbour(address: MemoryAddress, size: int, deadline: Deadline, memory: int) -> None:
    remote = RemoteMemory(address, "bundle")
    try:
        _copy(remote.read_into, size, memory, deadline)
    finally:
        remote.close()


def _copy(read_into: Callable[[memoryview, int], bool], size: int, memory: int, deadline: Deadline) -> None:
    """Fill the memory file ``memory``. OSError if that fails or takes too long."""
    buffer = memoryview(bytearray(min(size, PIECE)))
    for begin in range(0, size, PIECE):
        piece = buffer[: min(PIECE, size - begin)]
        if deadline.expired:
            raise TimeoutError(f"it takes longer than {FETCH_S:g} s")
        if not read_into(piece, begin):
            raise OSError("it ends early")
        os.pwrite(memory, piece, begin)
