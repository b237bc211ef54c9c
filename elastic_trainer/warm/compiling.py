"""Importing this compiles a function of no use, so that forks of this process need not find out what it shows.

A first ``torch.compile`` of a process asks the C++ compiler and the processor what they can do, in processes that it
starts, hashes all sources of torch, and preprocesses torch's headers: three quarters of what a start costs whose
kernels are all in the caches. Nothing of it depends on what is compiled, and torch keeps the answers as long as the
process lives.

*Runs in* the template, which imports it once a worker has imported Inductor, and judges it as any module: it leaves no
thread, process, open file or random number behind. *Owns* what its function adds to ``sys.modules``.
*Fails by* whatever torch raises: the template goes on without. Torch for GPUs is left alone: it would look at them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def _compile() -> None:
    bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    before, interval = set(sys.modules), getattr(bars, "monitor_interval", None)
    if bars is not None:
        bars.monitor_interval = 0  # else a bar starts a thread, even where none is shown
    try:
        with torch.no_grad():
            compiled = torch.compile(lambda x: (x * 2 + 1).sum(), options={"compile_threads": 1})
            compiled(torch.ones(64))
    finally:
        if bars is not None:
            bars.monitor_interval = interval
        torch.compiler.reset()
        for name in set(sys.modules) - before:  # the kernels, which are nobody's modules
            if not name.isascii() or not name.startswith(("torch.", "sympy.")) or ".compile_tasks." in name:
                del sys.modules[name]


if torch.version.cuda is None and torch.version.hip is None and torch.version.xpu is None:
    _compile()
