"""A network segment whose nodes are cut off: nothing passes, and nobody else notices."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from elastic_trainer.local.namespaces import PROGRAMS, Segment
from tests.support.requirements import needs, needs_root

pytestmark = pytest.mark.root
SEND = "from socket import *; import sys; socket(AF_INET, SOCK_DGRAM).sendto(b'x', (sys.argv[1], int(sys.argv[2])))"


def test_nothing_of_a_cut_off_node_reaches_the_hub_and_the_others_stay_in_touch() -> None:
    """Whichever node it is: a bridge without an address of its own would have that of one node's cable."""
    needs_root("makes network namespaces")
    for program in PROGRAMS:
        needs(program, "makes network namespaces")
    with Segment() as segment, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hub:
        enters = {name: segment.attach(name)[0] for name in ("a", "b", "c")}
        hub.bind(("0.0.0.0", 0))
        port = hub.getsockname()[1]

        def passes(name: str, limit_s: float) -> bool:
            """Whether a datagram of ``name`` arrives; its kernel knows the hub's hardware address already."""
            subprocess.run([*enters[name], sys.executable, "-S", "-c", SEND, "10.213.7.1", str(port)], check=True)
            hub.settimeout(limit_s)
            try:
                return hub.recv(1) == b"x"
            except TimeoutError:
                return False

        assert all(passes(name, 10.0) for name in enters)
        for name in enters:
            segment.cut(name)
            assert not passes(name, 0.2)
            assert all(passes(other, 0.5) for other in enters if other != name)
            segment.restore(name)
            assert passes(name, 10.0)
