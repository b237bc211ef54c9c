"""Hosts of their own for nodes: what they do not share, how they are cut off, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_trainer.local import agents
from elastic_trainer.local.hosts import ClusterError, Host
from tests.support.networks import ABOVE, BELOW, IPV6, AnySegment, HostNetwork, OwnName, entering
from tests.support.requirements import needs_hosts
from tests.support.waiting import eventually

pytestmark = pytest.mark.root
SEND = "from socket import *; import sys; socket(AF_INET, SOCK_DGRAM).sendto(b'x', (sys.argv[1], int(sys.argv[2])))"
LOOK = """
import json, os, socket, sys
def resolved(name):
    try:
        return sorted({each[4][0] for each in socket.getaddrinfo(name, None)})
    except OSError:
        return []
print(json.dumps({
    "name": socket.gethostname(), "own": resolved(socket.gethostname()), "pid": os.getpid(),
    "all": sorted(int(each) for each in os.listdir("/proc") if each.isdigit()),
    "tmp": os.listdir("/tmp"), "shm": os.listdir("/dev/shm"), "here": os.getcwd(),
}))
open("/tmp/of-one-host", "w").close(), open("/dev/shm/of-one-host", "w").close()
"""


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[AnySegment]:
    needs_hosts()
    with AnySegment() as made:
        yield made


def ran(host: Host, log: Path) -> str:
    """What ``LOOK`` printed on ``host``, started as nodes are."""
    process = agents.spawn([sys.executable, "-c", LOOK], log, dict(os.environ), host.pid)
    assert process.wait(60) == 0, log.read_text()
    return log.read_text()


def test_hosts_share_no_name_process_or_temporary_file(segment: AnySegment, tmp_path: Path) -> None:
    """Process ids are equal on both, as on real hosts. The working directory is that of all."""
    told = []
    for name in ("a", "b"):
        host = segment.attach(name)
        told.append((host, json.loads(ran(host, tmp_path / name))))
    for host, found in told:
        assert (found["name"], found["own"], found["here"]) == (host.name, [host.address], os.getcwd())
        assert found["all"] == [1, found["pid"]]
        assert not {"of-one-host"} & {*found["tmp"], *found["shm"]}
    assert told[0][1]["pid"] == told[1][1]["pid"]
    assert not Path("/tmp/of-one-host").exists()


def test_what_contains_what_is_shared_is_shared_as_a_whole(segment: AnySegment, tmp_path: Path) -> None:
    """A project with its environment in it, a file, and a directory by the name of a link to it."""
    whole, part, file = tmp_path / "project", tmp_path / "project" / ".venv", tmp_path / "alone.py"
    part.mkdir(parents=True)
    for path in (whole / "train.py", part / "python", file):
        path.touch()
    (tmp_path / "link").symlink_to(whole)
    host = segment.attach("a", [part, whole, file, tmp_path / "link"])
    seen = [whole / "train.py", part / "python", file, tmp_path / "link" / "train.py"]
    assert subprocess.run([*entering(host), "ls", *seen], capture_output=True).returncode == 0


def test_only_shared_directories_below_tmp_are_seen(segment: AnySegment, tmp_path: Path) -> None:
    """A ledger shows the processes as the reader numbers them."""
    shared, other = tmp_path / "shared", tmp_path / "other"
    for each in (shared, other):
        each.mkdir()
        (each / "file").touch()
    host = segment.attach("a", [shared], shared)
    seen = subprocess.run([*entering(host), "ls", shared / "file"], capture_output=True)
    unseen = subprocess.run([*entering(host), "ls", other / "file"], capture_output=True)
    assert (seen.returncode, unseen.returncode) == (0, 2)
    look = "import os, sys; print(os.readlink(sys.argv[1]), os.getpid())"
    told = subprocess.check_output([*entering(host), sys.executable, "-c", look, shared / "proc" / "self"])
    outside, inside = map(int, told.split())
    assert outside > inside


def test_a_closed_host_ends_all_that_runs_on_it(segment: AnySegment) -> None:
    host = segment.attach("a")
    sleeper = subprocess.Popen([*entering(host), "setsid", "sleep", "600"])
    eventually(lambda: psutil.Process(sleeper.pid).children(), "it does not start")
    inside = psutil.Process(sleeper.pid).children()[0]
    host.close()
    assert sleeper.wait(30) == 128 + 9 or not inside.is_running()
    eventually(lambda: not segment.reaches("a"), "its network is still there")


def test_hosts_end_with_the_process_that_asked_for_them(tmp_path: Path) -> None:
    needs_hosts()
    script = "import sys, time; from elastic_trainer.local.hosts import Segment\nwith Segment() as it:\n"
    script += "    print(it.attach('a').pid, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        first = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    eventually(lambda: not first.is_running(), "the host's first process lives on")


@pytest.mark.parametrize(
    ("network", "own"),
    [
        (HostNetwork((BELOW,)), ["10.213.0.2"]),
        (HostNetwork((IPV6, ABOVE)), ["fd99::2"]),
        (HostNetwork((ABOVE,), OwnName.LOOPBACK, aside=True), ["127.0.1.1"]),
        (HostNetwork((ABOVE,), OwnName.NOTHING), []),
    ],
    ids=["below", "ipv6", "debian", "unnamed"],
)
def test_a_network_is_made_as_it_was_asked_for(
    segment: AnySegment, network: HostNetwork, own: list[str], tmp_path: Path
) -> None:
    """The hub reaches each host at each of its addresses."""
    with segment.using(network):
        host = segment.attach("a")
    assert json.loads(ran(host, tmp_path / "said"))["own"] == own
    assert len(host.addresses) == len(network.hubs)
    for address in host.addresses:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, 9), 10.0)


def test_a_host_that_cannot_be_made_says_why(segment: AnySegment) -> None:
    with pytest.raises(ClusterError, match=r"no host could be created: .*sethostname: Invalid argument"):
        segment.attach("a" * 65)


def test_nothing_of_a_cut_off_node_reaches_the_hub_and_the_others_stay_in_touch(segment: AnySegment) -> None:
    """Whichever node it is: a bridge without an address of its own would have that of one node's cable."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hub:
        hosts = {name: segment.attach(name) for name in ("a", "b", "c")}
        hub.bind(("0.0.0.0", 0))
        port = hub.getsockname()[1]

        def passes(name: str, limit_s: float) -> bool:
            """Whether a datagram of ``name`` arrives; its kernel knows the hub's hardware address already."""
            sender = [sys.executable, "-S", "-c", SEND, segment.hub, str(port)]
            subprocess.run([*entering(hosts[name]), *sender], check=True)
            hub.settimeout(limit_s)
            try:
                return hub.recv(1) == b"x"
            except TimeoutError:
                return False

        assert all(passes(name, 10.0) for name in hosts)
        for name in hosts:
            segment.cut(name)
            assert not passes(name, 0.2)
            assert all(passes(other, 0.5) for other in hosts if other != name)
            segment.restore(name)
            assert passes(name, 10.0)
