"""A fifth set of labelled faults, by someone who did not know the rules: each kind as often as published reports (Llama
3, OPT-175B, MegaScale, ByteRobust, Philly) and the issue trackers of PyTorch have it, so that common kinds repeat."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from elastic_trainer.model import Culprit
from tests.drills.verdicts.faults import BOTH, LEAVE_OUT, STRIKES, Labelled, poison, unsaved, unstartable

N0: Final = ("n0",)


def _cuda(place: str, what: str, name: str) -> str:
    """Code that raises what torch makes of an error of CUDA."""
    message = (
        f"CUDA error: {what}\n"
        f"Search for `{name}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more"
        " information.\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be"
        " incorrect.\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    return f"# {place}\nimport torch\nraise torch.AcceleratorError({message!r})"


def _full(size: str, total: str, free: str, used: str, allocated: str, reserved: str) -> str:
    """Code that raises what torch says where a GPU has too little memory."""
    message = (
        f"CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of {total} of which {free} is free."
        f" Including non-PyTorch memory, this process has {used} memory in use. Of the allocated memory {allocated} is"
        f" allocated by PyTorch, and {reserved} is reserved by PyTorch but unallocated. If reserved but unallocated"
        " memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See"
        " documentation for Memory Management "
        " (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    return f"import torch\nraise torch.OutOfMemoryError({message!r})"


def _nccl(what: str, kind: str, last: str) -> str:
    """Code that raises what torch makes of an error of NCCL."""
    message = (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690,"
        f" {what}, NCCL version 2.27.5\n{kind}\nLast error:\n{last}"
    )
    return f"# step\nimport torch.distributed\nraise torch.distributed.DistBackendError({message!r})"


ECC_IN_NCCL: Final = _nccl(
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "Cuda failure 214 'uncorrectable ECC error encountered'",
)
RETRIES_EXCEEDED: Final = _nccl(
    "remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "NET/IB: Got completion from peer 10.20.4.17<54862> with status=12 opcode=0 len=0 vendor err 129 (Recv)"
    " localGid fe80::1 remoteGidsfe80::2 hca mlx5_3",
)
GPU_LOST: Final = """# between
import pynvml

def log_temperature():
    raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

log_temperature()
"""
LOADER: Final = """# step
import time
from torch.utils.data import DataLoader, Dataset

class Documents(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(3600)

next(iter(DataLoader(Documents(), num_workers=1)))
"""
SHARED_MEMORY: Final = """# step
try:
    raise RuntimeError(
        "DataLoader worker (pid 3141) is killed by signal: Bus error. It is possible that dataloader's workers are out"
        " of shared memory. Please try to raise your shared memory limit."
    )
except RuntimeError as e:
    raise RuntimeError("DataLoader worker (pid(s) 3141) exited unexpectedly") from e
"""
ARGUMENTS: Final = """import argparse
parser = argparse.ArgumentParser(prog="train.py")
parser.add_argument("--lr", type=float, default=3e-4)
parser.parse_args(["--learning-rate", "1e-4"])
"""
IMPORT: Final = """import sys, types
sys.modules["models"] = types.ModuleType("models")
from models import build_model
"""
STATE: Final = """import torch
from torch import nn

class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.head = nn.Linear(32, classes)

Classifier(10).load_state_dict(Classifier(1000).state_dict())
"""
NAN: Final = """# step
with torch.autograd.detect_anomaly():
    distance = torch.zeros(4, requires_grad=True)
    (torch.sqrt(distance) * 0).sum().backward()
"""
DEVICES: Final = """# step
raise RuntimeError(
    "Expected all tensors to be on the same device, but got index is on cpu, different from other tensors on cuda:0"
    " (when checking argument in method wrapper_CUDA__index_select)"
)
"""
DEADLOCK: Final = """# step
import threading
metrics_lock = threading.Lock()
metrics = {}

def flush_metrics():
    with metrics_lock:
        metrics.clear()

def log_metrics(**values):
    with metrics_lock:
        metrics.update(values)
        flush_metrics()

log_metrics(loss=1.0)
"""
WAITING: Final = """# between
import time
evaluation_done = False

def wait_for_evaluation():
    while not evaluation_done:
        time.sleep(0.5)

wait_for_evaluation()
"""
NO_IMAGE: Final = """# data
import io
from PIL import Image
Image.open(io.BytesIO(b"<html><head><title>404 Not Found</title></head></html>")).convert("RGB")
"""
TRUNCATED: Final = """# data
import io
from PIL import Image
whole = io.BytesIO()
Image.effect_noise((256, 256), 80).save(whole, "JPEG")
Image.open(io.BytesIO(whole.getvalue()[:20000])).convert("RGB")
"""
DECODER: Final = """# data
import os

def decode_video(stream):
    header = os.read(stream, 16)
    return header

from_decoder, to_script = os.pipe()
decode_video(from_decoder)
"""
TOKEN: Final = "torch.nn.functional.embedding(torch.tensor([[11, 50257]]), torch.ones(50257, 4))"
THROTTLED: Final = """# data
from botocore.exceptions import ClientError
answer = {
    "Error": {"Code": "SlowDown", "Message": "Please reduce your request rate."},
    "ResponseMetadata": {"HTTPStatusCode": 503, "RetryAttempts": 4, "MaxAttemptsReached": True},
}
raise ClientError(answer, "GetObject")
"""
HUB: Final = """# between
import httpx

def load_tokenizer():
    try:
        raise httpx.ConnectTimeout("[Errno 110] Connection timed out")
    except httpx.ConnectTimeout as e:
        raise OSError(
            "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached"
            " files.\\nCheck your internet connection or see how to run the library in offline mode at"
            " 'https://huggingface.co/docs/transformers/installation#offline-mode'."
        ) from e

load_tokenizer()
"""
RESET: Final = """# step
raise RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:535] Read error [10.1.3.122]:42916: Connection reset by peer"
)
"""
INDUCTOR: Final = """# step
from torch._inductor.exc import InductorError
cause = RuntimeError(
    "No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 131072 Hardware limit:101376"
    " Reducing block sizes or `num_stages` may help."
)
raise InductorError(cause, None)
"""
LARGE_MODEL: Final = _full("448.00 MiB", "23.64 GiB", "201.06 MiB", "23.43 GiB", "23.02 GiB", "3.18 MiB")
LARGE_STEP: Final = _full("1.95 GiB", "79.11 GiB", "1.21 GiB", "77.89 GiB", "74.02 GiB", "2.61 GiB")
LARGE_EVALUATION: Final = _full("15.66 GiB", "79.11 GiB", "9.94 GiB", "69.15 GiB", "55.40 GiB", "12.03 GiB")

FIFTH: Final[tuple[Labelled, ...]] = (
    # hardware
    Labelled(
        "an ECC error in a kernel",
        "gpu",
        Culprit.MACHINE,
        _cuda("step", "uncorrectable ECC error encountered", "cudaErrorECCUncorrectable"),
        advice=LEAVE_OUT,
    ),
    Labelled(
        "an ECC error in NCCL",
        "gpu",
        Culprit.MACHINE,
        ECC_IN_NCCL,
        on="n0",
        nodes=N0,
        advice=LEAVE_OUT,
        restart=True,
    ),
    Labelled(
        "an NVLink error",
        "gpu",
        Culprit.MACHINE,
        _cuda("step", "uncorrectable NVLink error detected during the execution", "cudaErrorNvlinkUncorrectable"),
        on="n0",
        nodes=N0,
        advice=LEAVE_OUT,
    ),
    Labelled(
        "NVML has lost a GPU",
        "gpu",
        Culprit.MACHINE,
        GPU_LOST,
        on="n0",
        nodes=N0,
        advice=LEAVE_OUT,
        restart=True,
    ),
    Labelled("a GPU off the bus", "gpu", Culprit.MACHINE, act="xid", advice=LEAVE_OUT),
    Labelled("a broken DIMM", "host", Culprit.MACHINE, act="dimm", advice=LEAVE_OUT, restart=True),
    Labelled("a node vanishes", "host", Culprit.MACHINE, act="power_off"),
    # memory
    Labelled("a GPU is full in a step", "memory of a GPU", Culprit.MEMORY, f"# step\n{LARGE_STEP}", on="n0", nodes=N0),
    Labelled(
        "a GPU is full in an evaluation",
        "memory of a GPU",
        Culprit.MEMORY,
        f"# between\n{LARGE_EVALUATION}",
        restart=True,
    ),
    replace(
        unstartable("the model does not fit into a GPU", "memory of a GPU", LARGE_MODEL, restart=True),
        culprit=Culprit.MEMORY,
    ),
    Labelled("the OOM killer takes a worker", "memory of a host", Culprit.MEMORY, act="oom", restart=True),
    Labelled("the OOM killer takes a loader's process", "memory of a host", Culprit.MEMORY, LOADER, act="oom_loader"),
    Labelled(
        "a loader is out of shared memory",
        "memory of a host",
        Culprit.MEMORY,
        SHARED_MEMORY,
        on="n0",
        nodes=N0,
        restart=True,
    ),
    # the script
    unstartable("an unknown argument", "script cannot start", ARGUMENTS, restart=True),
    unstartable("no file of settings", "script cannot start", 'open("configs/llama3_8b.yaml")'),
    unstartable("a name that a module lacks", "script cannot start", IMPORT, restart=True),
    unstartable("weights of another size", "script cannot start", STATE),
    Labelled(
        "shapes that do not multiply",
        "script raises",
        Culprit.SCRIPT,
        "# step\ntorch.nn.Linear(768, 10)(torch.ones(32, 512))",
        on="n0",
        nodes=N0,
        restart=True,
    ),
    Labelled(
        "a tensor in a format string",
        "script raises",
        Culprit.SCRIPT,
        '# between\nprint(f"accuracy {torch.ones(2):.4f}")',
        on="n0",
        nodes=N0,
    ),
    Labelled("tensors on two devices", "script raises", Culprit.SCRIPT, DEVICES, restart=True),
    Labelled("NaN in a gradient", "script raises", Culprit.SCRIPT, NAN, on="n0", nodes=N0, restart=True),
    Labelled("a lock taken twice", "script hangs", Culprit.SCRIPT, DEADLOCK, options="step_timeout=4"),
    Labelled(
        "a flag that nobody sets",
        "script hangs",
        Culprit.SCRIPT,
        WAITING,
        on="n0",
        nodes=N0,
        restart=True,
        options="step_timeout=4",
    ),
    # data
    Labelled("a page in place of an image", "sample", Culprit.DATA, NO_IMAGE, restart=True),
    Labelled("half an image", "sample", Culprit.DATA, TRUNCATED, on="n0", nodes=N0),
    poison("a token outside the vocabulary", "sample", STRIKES.format(TOKEN)),
    Labelled(
        "a decoder that never answers", "data hangs", Culprit.DATA, DECODER, restart=True, options="step_timeout=4"
    ),
    # storage
    unsaved("the disk is full", "checkpoint", "raise OSError(28, 'No space left on device')"),
    Labelled(
        "a stale handle of NFS",
        "reading",
        Culprit.STORAGE,
        "# data\nraise OSError(116, 'Stale file handle', '/mnt/nfs/datasets/c4/train-00041.arrow')",
        restart=True,
    ),
    Labelled("S3 slows down", "reading", Culprit.STORAGE, THROTTLED, on="n0", nodes=N0, restart=True),
    # the network
    Labelled("a connection of gloo is reset", "between nodes", Culprit.NETWORK, RESET, on="n0", nodes=None),
    Labelled(
        "InfiniBand retries in vain", "between nodes", Culprit.NETWORK, RETRIES_EXCEEDED, nodes=None, restart=True
    ),
    Labelled("a switch forwards nothing", "between nodes", Culprit.NETWORK, act="part_for_a_while", nodes=BOTH),
    Labelled("the hub cannot be reached", "to a service", Culprit.NETWORK, HUB, on="n0", nodes=N0),
    # the compiler
    Labelled("Inductor finds no kernel", "compiler", Culprit.COMPILER, INDUCTOR, on="n0", nodes=N0, restart=True),
    # somebody
    Labelled("somebody kills a worker", "signal", Culprit.OUTSIDE, act="kill_worker", restart=True),
    Labelled("somebody stops a worker", "signal", Culprit.OUTSIDE, act="freeze_worker"),
    # decisions
    Labelled("a pod is evicted", "decision", Culprit.SCHEDULER, act="terminate_node", planned=True),
    Labelled("a spot machine is taken back", "decision", Culprit.SCHEDULER, act="preempt", nodes=None, planned=True),
    Labelled("a node is drained for maintenance", "decision", Culprit.SCHEDULER, act="drain", planned=True),
)
