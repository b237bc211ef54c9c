"""Faults that the rules were not written against."""

from __future__ import annotations

from typing import Final

from elastic_trainer.model import Advice, Culprit
from tests.drills.verdicts.faults import POISON, Labelled, poison, unsaved, unstartable

OTHER: Final[tuple[Labelled, ...]] = (
    # the script
    Labelled(
        "a recursion without end",
        "recursion",
        Culprit.SCRIPT,
        "# step\ndef flatten(tree): return flatten([tree])\nflatten(batch.x)",
        on="n0",
        nodes=("n0",),
    ),
    Labelled(
        "an assertion on the loss",
        "assertion",
        Culprit.SCRIPT,
        "# loss\nassert loss.item() < 0, f'loss diverged: {loss.item():.3f}'",
    ),
    Labelled(
        "freed twice",
        "heap",
        Culprit.SCRIPT,
        "# between\nimport ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "block = ctypes.c_void_p(libc.malloc(64))\n"
        "libc.free(block)\n"
        "libc.free(block)",
    ),
    Labelled(
        "a lock on a file that it holds itself",
        "file lock",
        Culprit.SCRIPT,
        "# step\nimport fcntl, os, tempfile\n"
        "number, name = tempfile.mkstemp()\n"
        "fcntl.flock(number, fcntl.LOCK_EX)\n"
        "fcntl.flock(os.open(name, os.O_RDWR), fcntl.LOCK_EX)",
        options="step_timeout=4",
    ),
    unstartable(
        "no access to the model",
        "start: token",
        "raise OSError('You are trying to access a gated repo.\\n"
        "Make sure to have access to it at https://huggingface.co/meta-llama/Llama-2-7b-hf.\\n"
        "401 Client Error. (Request ID: Root=1-65f1c0a2-3d9e)\\n\\n"
        "Cannot access gated repo for url"
        " https://huggingface.co/meta-llama/Llama-2-7b-hf/resolve/main/config.json.\\n"
        "Access to model meta-llama/Llama-2-7b-hf is restricted. You must be authenticated to access it.')",
    ),
    # the data
    Labelled(
        "half an image",
        "corrupt sample",
        Culprit.DATA,
        "# data\nimport io\nfrom PIL import Image\n"
        "file = io.BytesIO()\n"
        "Image.effect_noise((64, 64), 9).save(file, 'JPEG')\n"
        "Image.open(io.BytesIO(file.getvalue()[:900])).load()",
        restart=True,
    ),
    Labelled(
        "a tokenizer panics",
        "panic",
        Culprit.DATA,
        "# data\nclass PanicException(BaseException): pass\n"
        "PanicException.__module__ = 'pyo3_runtime'\n"
        "raise PanicException('byte index 3 is not a char boundary; it is inside \\'\\xe9\\' (bytes 2..4)')",
        on="n0",
        nodes=("n0",),
    ),
    Labelled(
        "a decoder never ends",
        "subprocess",
        Culprit.DATA,
        "# data\nimport subprocess\nsubprocess.Popen(['cat'], stdin=subprocess.PIPE).wait()",
        options="step_timeout=4",
    ),
    poison(
        "a token beyond the vocabulary",
        "poison",
        f"# step again\nif {POISON} in ids:\n"
        "    torch.nn.functional.embedding(torch.tensor([32000]), torch.zeros(32000, 1))",
    ),
    Labelled(
        "a NaN in a row",
        "sample with NaN",
        Culprit.DATA,
        "# step\nbatch.x[0, 3] = float('nan')",
        nodes=None,
        incident="nonfinite_loss",
    ),
    # memory
    Labelled(
        "beyond ulimit -v",
        "address space",
        Culprit.MEMORY,
        "# step\nimport resource\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (256 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))\n"
        "rows = [bytearray(32 << 20) for _ in range(64)]",
        restart=True,
    ),
    Labelled(
        "a shard cannot be mapped",
        "mmap",
        Culprit.MEMORY,
        "# data\nimport mmap\nmmap.mmap(-1, 1 << 46)",
        on="n0",
        nodes=("n0",),
    ),
    # the compiler
    Labelled(
        "too many recompilations",
        "recompilation",
        Culprit.COMPILER,
        "# step\nimport torch._dynamo\n"
        "torch._dynamo.config.recompile_limit = 1\n"
        "compiled = torch.compile(lambda x: x + 1, backend='eager', fullgraph=True, dynamic=False)\n"
        "for size in range(2, 6): compiled(torch.ones(size))",
    ),
    Labelled(
        "ptxas fails",
        "code generation",
        Culprit.COMPILER,
        "# step\nimport subprocess\n"
        "class PTXASError(Exception): pass\n"
        "def build(graph, inputs):\n"
        "    try: subprocess.run(['false'], check=True)\n"
        "    except subprocess.CalledProcessError as error:\n"
        "        raise PTXASError('PTXAS error: Internal Triton PTX codegen error\\n`ptxas` stderr:\\n"
        "ptxas fatal   : (C7907) Internal compiler error\\n') from error\n"
        "torch.compile(lambda x: x * 2, backend=build)(torch.ones(1))",
        on="n0",
        nodes=("n0",),
        restart=True,
    ),
    # storage
    Labelled(
        "a FUSE mount is gone",
        "mount",
        Culprit.STORAGE,
        "# data\nraise OSError(107, 'Transport endpoint is not connected', '/mnt/bucket/train/shard-00137.tar')",
        on="n0",
        nodes=("n0",),
        restart=True,
    ),
    unsaved(
        "torch.save on a full disk",
        "save fails",
        "import torch\ntorch.save(torch.ones(1 << 20), '/dev/full')",
    ),
    # the network
    Labelled(
        "a connection to the data is reset",
        "connection reset",
        Culprit.NETWORK,
        "# data\nimport socket, struct\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\n"
        "peer, _ = server.accept()\n"
        "peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))\n"
        "peer.close()\n"
        "client.recv(1)",
    ),
    Labelled(
        "InfiniBand gives up",
        "InfiniBand",
        Culprit.NETWORK,
        "# step\nraise torch.distributed.DistBackendError('NCCL error in:"
        " /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a network error,"
        " NCCL version 2.21.5\\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\\n"
        "Last error:\\n"
        "NET/IB : Got completion from peer 10.20.1.14<47631> with status=12 opcode=0 len=0 vendor err 129 (Send)"
        " localGid fe80::ba59:9fff:fe3c:1d2a remoteGids fe80::ba59:9fff:fe3c:1e02 hca mlx5_0')",
        nodes=None,
        restart=True,
    ),
    # the machine
    Labelled(
        "an NVLink error",
        "NVLink",
        Culprit.MACHINE,
        "# step\nraise torch.AcceleratorError('CUDA error: uncorrectable NVLink error detected during the execution\\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be"
        " incorrect.\\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\\n')",
        on="n0",
        nodes=("n0",),
        advice=Advice.LEAVE_OUT,
    ),
    Labelled(
        "illegal instructions",
        "illegal instruction",
        Culprit.MACHINE,
        "# step\nimport ctypes, mmap\n"
        "page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        "page.write(b'\\x0f\\x0b')\n"
        "ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()",
        times=3,
        advice=Advice.LEAVE_OUT,
    ),
    # the scheduler
    Labelled(
        "scancel reaches torchrun and worker",
        "cancelled",
        Culprit.SCHEDULER,
        "# between\nimport os\nos.kill(os.getppid(), 15)\nos.kill(os.getpid(), 15)",
        on="n0",
        nodes=("n0",),
        planned=True,
    ),
    Labelled(
        "Ctrl-C",
        "interrupted",
        Culprit.SCHEDULER,
        "# step\nimport os\nos.kill(os.getpid(), 2)",
        planned=True,
    ),
    # somebody
    Labelled(
        "torchrun is killed",
        "agent killed",
        Culprit.OUTSIDE,
        "# step\nimport os\nos.kill(os.getppid(), 9)",
        on="n0",
        nodes=("n0",),
    ),
    Labelled(
        "a container is paused",
        "paused",
        Culprit.OUTSIDE,
        "# between\nimport os\nos.kill(os.getppid(), 19)\nos.kill(os.getpid(), 19)",
    ),
)
