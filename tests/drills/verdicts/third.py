"""Faults that were written by somebody who had not seen the rules."""

from __future__ import annotations

from typing import Final

from elastic_trainer.model import Advice, Culprit
from tests.drills.verdicts.faults import BOTH, POISON, Labelled, poison, unsaved, unstartable

THIRD: Final[tuple[Labelled, ...]] = (
    # the script
    Labelled(
        "files are never closed",
        "descriptors",
        Culprit.SCRIPT,
        "# step\nimport resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "files = []\n"
        "while True: files.append(open('/dev/null'))",
    ),
    unsaved(
        "a schedule that cannot be pickled",
        "pickle",
        "import io, torch\ntorch.save({'schedule': lambda step: 0.99 ** step}, io.BytesIO())",
        Culprit.SCRIPT,
    ),
    Labelled(
        "a forgotten breakpoint, and nobody at the keyboard",
        "debugger",
        Culprit.SCRIPT,
        "# between\nimport pdb, sys\nsys.stdin = open('/dev/null')\npdb.set_trace()\nprint(session)",
        on="n0",
        nodes=("n0",),
    ),
    Labelled(
        "an extension divides by zero",
        "division",
        Culprit.SCRIPT,
        "# step\nimport ctypes\nctypes.CDLL(None).div(1, 0)",
        restart=True,
    ),
    Labelled(
        "a pool whose only thread waits for the pool",
        "pool",
        Culprit.SCRIPT,
        "# step\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1)\n"
        "pool.submit(lambda: pool.submit(sum, [1]).result()).result()",
        on="n0",
        nodes=("n0",),
        options="step_timeout=4",
    ),
    unstartable(
        "weights of another width",
        "start: weights",
        "torch.nn.Linear(16, 32).load_state_dict(torch.nn.Linear(16, 64).state_dict())",
        restart=True,
    ),
    # the data
    Labelled(
        "texts without padding",
        "ragged",
        Culprit.DATA,
        "# data\ntorch.utils.data.default_collate([torch.ones(512), torch.ones(498)])",
        restart=True,
    ),
    Labelled(
        "a cut line, met by a process of a DataLoader",
        "loader process raises",
        Culprit.DATA,
        "# between\nimport json\n"
        "class Lines(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 1\n"
        '    def __getitem__(self, index): return json.loads(\'{"text": "Once upon a ti\')\n'
        "next(iter(torch.utils.data.DataLoader(Lines(), num_workers=1, multiprocessing_context='fork')))",
        on="n0",
        nodes=("n0",),
    ),
    Labelled(
        "a pattern that backtracks without end",
        "pattern",
        Culprit.DATA,
        "# data\nimport re\nre.match(r'(\\w+\\s?)*$', 'a' * 80 + '!')",
        options="step_timeout=4",
    ),
    poison(
        "a flipped bit in a compressed sample",
        "poisoned sample",
        f"# data again\nimport gzip\nif index == {POISON}:\n"
        "    page = bytearray(gzip.compress(bytes(1000)))\n"
        "    page[-8] ^= 1\n"
        "    gzip.decompress(page)",
    ),
    # memory
    Labelled(
        "operator new fails",
        "bad_alloc",
        Culprit.MEMORY,
        "# step\nimport ctypes\nctypes.CDLL('libstdc++.so.6')._Znwm(ctypes.c_size_t(1 << 62))",
    ),
    Labelled(
        "no shared memory for a process of a DataLoader",
        "shared memory",
        Culprit.MEMORY,
        "# between\nimport mmap, tempfile\n"
        "class Clips(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, index):\n"
        "        with tempfile.TemporaryFile() as file:\n"
        "            file.truncate(4096)\n"
        "            page = mmap.mmap(file.fileno(), 4096)\n"
        "            file.truncate(0)\n"
        "            page[0] = 1\n"
        "next(iter(torch.utils.data.DataLoader(Clips(), num_workers=1, multiprocessing_context='fork')))",
        on="n0",
        nodes=("n0",),
    ),
    Labelled(
        "NCCL finds no memory left",
        "NCCL's buffers",
        Culprit.MEMORY,
        "# step\nraise torch.distributed.DistBackendError('NCCL error in:"
        " /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for"
        " details), NCCL version 2.27.5\\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\\n"
        "Last error:\\n"
        "Cuda failure 2 \\'out of memory\\'')",
        on="n0",
        nodes=("n0",),
        restart=True,
    ),
    # storage
    unsaved(
        "the object store asks to slow down",
        "object store",
        "class ClientError(Exception): pass\n"
        "ClientError.__module__ = 'botocore.exceptions'\n"
        "raise ClientError('An error occurred (SlowDown) when calling the UploadPart operation (reached max retries:"
        " 4): Please reduce your request rate.')",
    ),
    Labelled(
        "HDF5 cannot read its file",
        "HDF5",
        Culprit.STORAGE,
        "# data\nraise OSError(\"Can't synchronously read data (file read failed: time = Tue Nov  3 02:14:07 2026\\n,"
        " filename = '/mnt/nfs/train.h5', file descriptor = 41, errno = 5, error message = 'Input/output error', buf ="
        ' 0x7f3c5a2f0040, total read size = 65536, bytes this sub-read = 65536, offset = 1073745920)")',
        on="n0",
        nodes=("n0",),
        restart=True,
    ),
    Labelled(
        "a file server no longer answers",
        "disk sleep",
        Culprit.STORAGE,
        # A read of a dead NFS mount sleeps in state D; so does vfork(), until its child (x86-64: prctl, so that it ends
        # with its parent, then pause for ever) is gone.
        "# data\nimport ctypes, mmap\n"
        "page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        "page.write(bytes.fromhex('b83a0000000f0585c0751ab89d000000bf01000000be090000000f05b8220000000f05ebf7c3'))\n"
        "read = ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))\n"
        "read()",
        options="step_timeout=4",
    ),
    # the network
    Labelled(
        "two nodes lose each other for a while",
        "parted while they train",
        Culprit.NETWORK,
        act="part_for_a_while",
        nodes=BOTH,
    ),
    Labelled(
        "no name is resolved",
        "name resolution",
        Culprit.NETWORK,
        "# data\nimport socket, urllib.request\nfrom unittest.mock import patch\n"
        "error = socket.gaierror(-3, 'Temporary failure in name resolution')\n"
        "with patch('socket.getaddrinfo', side_effect=error):\n"
        "    urllib.request.urlopen('http://data.example.org/train/shard-00042.tar')",
        restart=True,
    ),
    # the compiler
    Labelled(
        "a compilation without end",
        "compiler hangs",
        Culprit.COMPILER,
        "# step\nimport threading\n"
        "def build(graph, inputs): threading.Event().wait()\n"
        "torch.compile(lambda x: x + 1, backend=build)(torch.ones(1))",
        options="step_timeout=4",
    ),
    # the machine
    Labelled(
        "a broken memory module", "memory failure", Culprit.MACHINE, act="dimm", advice=Advice.LEAVE_OUT, restart=True
    ),
    Labelled("a broken PCIe link", "PCIe", Culprit.MACHINE, act="pcie", advice=Advice.LEAVE_OUT),
    # the scheduler
    Labelled(
        "the cloud takes a node back", "preemption notice", Culprit.SCHEDULER, act="preempt", nodes=None, planned=True
    ),
    Labelled("an operator drains a node", "drain", Culprit.SCHEDULER, act="drain", planned=True),
    # somebody
    Labelled("somebody attaches a debugger", "traced", Culprit.OUTSIDE, act="trace_worker"),
)
