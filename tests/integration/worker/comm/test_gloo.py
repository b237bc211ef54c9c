"""The addresses that gloo groups use, between two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from elastic_trainer.ipc import gloo

LIMIT = timedelta(seconds=60)
SCRIPT = '''
import json, sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from elastic_trainer.ipc import gloo
from elastic_trainer.ipc.gloo import listening

rank, port, first, second = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
limit = timedelta(seconds=60)
store = dist.TCPStore("127.0.0.1", port, None, False, timeout=limit, wait_for_workers=False)
seen = set()

def used():
    """Where gloo listens since the last call."""
    new = set(listening(None)) - seen
    seen.update(new)
    return sorted({address for address, _ in new})

gloo.lead([first])
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
dist.all_reduce(torch.ones(2))
said = {"backend": dist.get_backend(), "default": used()}
gloo.lead([second])
own = dist.new_group([0, 1])
dist.all_reduce(torch.ones(2), group=own)
said["new_group"] = used()
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))  # the outer one is the default group
said["mesh"] = used()
mine = gloo.group(dist.PrefixStore("mine", store), rank, 2, limit, [first])
mine.allreduce([torch.ones(2)]).wait()
said["explicit"] = used()
print(json.dumps(said), flush=True)
dist.barrier()
dist.destroy_process_group()
'''


def pair(**environment: str) -> list[dict[str, Any]]:
    """What two ranks use, of which rank N is told the addresses 127.1.0.N and 127.2.0.N."""
    server = TCPStore("127.0.0.1", 0, None, True, timeout=LIMIT, wait_for_workers=False)
    said = []
    words = [[str(rank), str(server.port), f"127.1.0.{rank + 1}", f"127.2.0.{rank + 1}"] for rank in range(2)]
    variables = {**os.environ, **environment}
    running = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, *each], stdout=subprocess.PIPE, text=True, env=variables)
        for each in words
    ]
    try:
        for process in running:
            said.append(json.loads(process.communicate(timeout=240)[0]))
            assert process.returncode == 0
    finally:
        for process in running:
            process.kill()
    return said


def test_each_group_has_its_own_address_also_those_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default group, ``new_group`` and the groups of a mesh use the round's, in spite of this host's name; a
    group that names its addresses uses those."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for rank, said in enumerate(pair()):
        first, second = [f"127.1.0.{rank + 1}"], [f"127.2.0.{rank + 1}"]
        expected = {"backend": "gloo", "default": first, "new_group": second, "mesh": second, "explicit": first}
        assert said == expected


def test_the_users_interface_wins() -> None:
    for said in pair(GLOO_SOCKET_IFNAME="lo"):
        assert said["default"] == said["explicit"] == ["127.0.0.1"]


@pytest.mark.parametrize("lacks", ["create_device", "_Options"])
def test_a_torch_without_devices_forms_groups_as_it_does(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The private parts may go away: then training does not end, and torch's own choice applies."""
    monkeypatch.delattr(dist.ProcessGroupGloo, lacks)
    group = gloo.group(HashStore(), 0, 1, LIMIT, gloo.ONE_HOST)
    assert group.size() == 1


def test_an_address_of_another_machine_is_not_used() -> None:
    assert gloo.group(HashStore(), 0, 1, LIMIT, ["192.0.2.77"]).size() == 1
    second: Any = gloo.group(HashStore(), 0, 1, LIMIT, ["192.0.2.77", "127.0.0.1"])
    assert len(second.options._devices) == 1
