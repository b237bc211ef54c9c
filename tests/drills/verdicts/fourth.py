"""More faults by somebody who had not seen the rules, of kinds that are in none of the other sets."""

from __future__ import annotations

from typing import Final

from elastic_trainer.model import Advice, Culprit
from tests.drills.verdicts.faults import POISON, Labelled, poison, unsaved, unstartable

FOURTH: Final[tuple[Labelled, ...]] = (
    # the script
    Labelled(
        "a tensor is changed that the backward pass needs",
        "autograd",
        Culprit.SCRIPT,
        "# step\nweight = torch.ones(3, requires_grad=True)\n"
        "hidden = weight.exp()\n"
        "hidden += 1\n"
        "hidden.sum().backward()",
        restart=True,
    ),
    Labelled(
        "the thread that logs has died, and its queue is full",
        "queue",
        Culprit.SCRIPT,
        "# step\nimport queue, threading\n"
        "rows = queue.Queue(1)\n"
        "threading.Thread(target=lambda: print(float(rows.get())), daemon=True).start()\n"
        "while True: rows.put('n/a')",
        on="n0",
        nodes=("n0",),
        options="step_timeout=4",
    ),
    Labelled(
        "an extension calls Python without its lock",
        "interpreter lock",
        Culprit.SCRIPT,
        "# between\nimport ctypes\nctypes.CDLL(None).PyThreadState_Get()",
    ),
    unstartable(
        "an option that is no number",
        "start: options",
        "import argparse\n"
        "parser = argparse.ArgumentParser('train.py')\n"
        "parser.add_argument('--warmup-steps', type=int)\n"
        "parser.parse_args(['--warmup-steps', '1e3'])",
    ),
    # the data
    Labelled(
        "a quote that is never closed",
        "CSV",
        Culprit.DATA,
        "# data\nimport csv, io\nlist(csv.reader(io.StringIO('id,text\\n7,\"' + 'once upon a time\\n' * 10000)))",
        restart=True,
    ),
    Labelled(
        "a DataLoader waits for too long a clip",
        "loader times out",
        Culprit.DATA,
        "# between\nimport time\n"
        "class Clips(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, index): time.sleep(4)\n"
        "next(iter(torch.utils.data.DataLoader(Clips(), num_workers=1, timeout=2, multiprocessing_context='fork')))",
        on="n0",
        nodes=("n0",),
    ),
    Labelled(
        "only padding in a batch",
        "nothing to learn from",
        Culprit.DATA,
        "# step\nbatch.y.fill_(-100)",
        nodes=None,
        incident="nonfinite_loss",
    ),
    poison(
        "a sample whose links lead in a circle",
        "poison hangs",
        f"# data again\nif index == {POISON}:\n"
        "    links, at = {7: 9, 9: 7}, 7\n"
        "    while at in links: at = links[at]",
        options="step_timeout=4,first_step_timeout=20",
    ),
    # memory
    Labelled(
        "the kernel kills a process of a DataLoader",
        "loader killed for memory",
        Culprit.MEMORY,
        "# between\nimport time\n"
        "class Clips(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, index): time.sleep(60)\n"
        "next(iter(torch.utils.data.DataLoader(Clips(), num_workers=1, multiprocessing_context='fork')))",
        act="oom_loader",
    ),
    Labelled(
        "no memory for cuBLAS",
        "cuBLAS",
        Culprit.MEMORY,
        "# step\nraise RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`')",
        on="n0",
        nodes=("n0",),
        restart=True,
    ),
    # storage
    unsaved(
        "a quota is used up",
        "quota",
        "raise OSError(122, 'Disk quota exceeded', '/home/train/checkpoints/step-1200.tmp/rank-0.safetensors')",
    ),
    Labelled(
        "Lustre has evicted its client",
        "Lustre",
        Culprit.STORAGE,
        "# data\n"
        "raise OSError(108, 'Cannot send after transport endpoint shutdown', '/lustre/scratch/train/shard-00412.bin')",
        restart=True,
    ),
    Labelled("a file system becomes read-only", "file system", Culprit.STORAGE, act="ext4"),
    # the network
    Labelled(
        "no route to the data",
        "route",
        Culprit.NETWORK,
        "# data\nimport urllib.request\nfrom unittest.mock import patch\n"
        "with patch('socket.create_connection', side_effect=OSError(113, 'No route to host')):\n"
        "    urllib.request.urlopen('http://10.20.0.5:9000/train/shard-00042.tar')",
        on="n0",
        nodes=("n0",),
    ),
    Labelled(
        "NCCL cannot connect",
        "NCCL's sockets",
        Culprit.NETWORK,
        "# step\nraise torch.distributed.DistBackendError('NCCL error in:"
        " /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled system error (run with NCCL_DEBUG=INFO for"
        " details), NCCL version 2.27.5\\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \\n"
        "Last error:\\n"
        "socketPollConnect: connect to 10.20.1.14<47631> returned Connection timed out, exceeded error retry count"
        " after 35 attempts')",
        nodes=None,
        restart=True,
    ),
    # the compiler
    Labelled(
        "no configuration of a kernel fits",
        "autotuning",
        Culprit.COMPILER,
        "# step\nclass NoTritonConfigsError(RuntimeError): pass\n"
        "NoTritonConfigsError.__module__ = 'torch._inductor.runtime.triton_heuristics'\n"
        "def kernel(*inputs):\n"
        "    raise NoTritonConfigsError('No valid triton configs. OutOfResources: out of resource: shared memory,"
        " Required: 264192, Hardware limit: 232448. Reducing block sizes or `num_stages` may help.')\n"
        "torch.compile(lambda x: x * 2, backend=lambda graph, inputs: kernel)(torch.ones(1))",
        restart=True,
    ),
    # the machine
    Labelled("memory of an AMD GPU", "AMD", Culprit.MACHINE, act="amdgpu", advice=Advice.LEAVE_OUT),
    Labelled(
        "the firmware reports an error", "APEI", Culprit.MACHINE, act="apei", advice=Advice.LEAVE_OUT, restart=True
    ),
    # the scheduler
    Labelled("an operator restarts a node's workers", "restart", Culprit.SCHEDULER, act="restart_node", planned=True),
    # somebody
    Labelled(
        "somebody sends SIGQUIT to see the stacks",
        "SIGQUIT",
        Culprit.OUTSIDE,
        # A shell lets jobs in the background ignore it.
        "# between\nimport os, signal\nsignal.signal(signal.SIGQUIT, signal.SIG_DFL)\nos.kill(os.getpid(), 3)",
        on="n0",
        nodes=("n0",),
    ),
)
