"""Goodput by a model: against nodes and failure rates.

What is assumed stands in ``Assumptions`` and ``MODES``. With ``n`` nodes the mean time to a failure is
``M = 1 / (n * rate)``; after each one the job stands still for ``R`` seconds, and begins to do so anew if another comes
meanwhile. A mode that loses work saves every ``tau`` seconds of training, for which it stands still ``delta`` seconds.
Time to make communicators of thousands of GPUs is measured nowhere here, and left out for all modes alike; a switch or
a power failure that takes many nodes at once is, too.

``--write`` puts section and picture into ``deploy``, as ``make report`` does.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from elastic_trainer.jobs.curves import FAULT, LINE, save
from tests.bench.page import table, with_section
from tests.bench.report import Report, emit, parse

DEPLOY = Path(__file__).parents[2] / "deploy"
REPORT, PICTURE = "report.md", "images/goodput-model.svg"
TICKS = (10, 100, 1000, 10_000)
SIZES, RATES = (8, 100, 1000, 10_000), (1.0, 3.0, 10.0)
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to train, and what was measured of it on three nodes. ``saves`` and ``loads`` are in copies in memory."""

    recover_s: float
    """Standing still after a failure, the worse of a killed worker and a killed node."""
    join_s: float
    """Standing still when the node that replaces the lost one comes."""
    loses_work: bool = True
    """What was done since the last save; else half a step."""
    saves: float = 1.4
    """Standing still for a save (docs/explanation/benchmarks.md: 1.4 here, 39 with torch.save, at 1.2 GB)."""
    loads: float = 0.0
    session: bool = True
    group_nodes: int = 1
    """A lost node takes those that hold its model's other shards out of training."""


MODES = {
    # report.md: Recovery, node_kill; Promises, node_join with members standing still
    "in_place": Mode(0.08, 0.09, loses_work=False),
    # report.md: Promises, sharded: node_kill, join
    "in_place_sharded": Mode(0.21, 0.16, loses_work=False, group_nodes=8),
    # report.md: Recovery, worker_kill; Goodput, join
    "restart_warm": Mode(0.72, 1.6, loads=1.0),
    # report.md: Goodput, join, for both: in the storm its two kills came together
    "restart_cold": Mode(8.6, 8.6, loads=1.0),
    # report.md: Recovery, tuned, node_kill and node_join; loading takes as long as saving
    "c10d": Mode(6.2, 4.3, saves=39.0, loads=39.0, session=False),
}


@dataclass(frozen=True, slots=True)
class Assumptions:
    failures_per_node_s: float = 419 / (54 * DAY_S) / (16_384 / 8)
    """Llama 3 (arXiv:2407.21783): 419 unexpected interruptions in 54 days on 16,384 GPUs, 8 a node."""
    step_s: float = 1.0
    session_s: float = 80e-6
    """Of the main thread, for each step (docs/explanation/benchmarks.md: 65 to 80 us)."""
    copy_s: float = 1.0
    """One copy of a GPU's state into memory: 20 GB at 20 GB/s."""
    durable_every_s: float = 3600.0
    """Between checkpoints of a mode that loses no work without them."""
    replace_s: float = 600.0
    """Until another node is there: until then its capacity is missing."""
    agree_s: Mapping[float, float] = field(default_factory=lambda: {3: 0.0, 64: 1.06, 1024: 1.32, 10_000: 2.6})
    """Nodes, and seconds that these take longer to agree than three, and etcd to send (tests.bench.scale)."""

    def agreeing_s(self, nodes: float) -> float:
        """Between the sizes that were simulated, along a line."""
        return float(np.interp(nodes, list(self.agree_s), list(self.agree_s.values())))


def optimum_s(cost_s: float, mean_s: float) -> float:
    """Seconds of training between two saves of ``cost_s``, at one failure in ``mean_s``.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006), equation
    37. Its first term is J. W. Young's, "A first order approximation to the optimum checkpoint interval", CACM 17
    (1974).
    """
    share = cost_s / (2.0 * mean_s)
    if share >= 1.0:
        return mean_s
    return math.sqrt(2.0 * cost_s * mean_s) * (1.0 + math.sqrt(share) / 3.0 + share / 9.0) - cost_s


def with_saves(every_s: float, cost_s: float, stall_s: float, mean_s: float) -> float:
    """Goodput where a failure costs ``stall_s`` and the work since the last save: Daly, equation 20, turned over."""
    return every_s / (mean_s * math.exp(stall_s / mean_s) * math.expm1((every_s + cost_s) / mean_s))


def without_loss(stall_s: float, mean_s: float) -> float:
    """Goodput where it costs ``stall_s`` alone: what :func:`with_saves` comes to with ever shorter, free intervals."""
    return math.exp(-stall_s / mean_s)


def goodput(mode: Mode, nodes: float, rate: float = 1.0, given: Assumptions | None = None) -> float:
    """Expected, of ``nodes`` that fail ``rate`` times as often as assumed; 1 would be all of them training always."""
    known = given or Assumptions()
    per_node, cost_s = known.failures_per_node_s * rate, mode.saves * known.copy_s
    away = per_node * known.replace_s * mode.group_nodes
    steady = (1.0 - known.session_s / known.step_s * mode.session) / (1.0 + away)
    if not mode.loses_work:
        steady *= known.durable_every_s / (known.durable_every_s + cost_s)
    if per_node == 0.0:
        return steady
    mean_s = 1.0 / (nodes * per_node)
    stall_s = mode.recover_s + known.agreeing_s(nodes) + mode.loads * known.copy_s + mode.join_s
    if mode.loses_work:
        return steady * with_saves(optimum_s(cost_s, mean_s), cost_s, stall_s, mean_s)
    return steady * without_loss(stall_s + known.step_s / 2.0, mean_s)


def extrapolated() -> dict[str, dict[str, dict[str, float]]]:
    return {
        str(nodes): {f"{rate:g}": {name: goodput(mode, nodes, rate) for name, mode in MODES.items()} for rate in RATES}
        for nodes in SIZES
    }


def section() -> str:
    known = Assumptions()
    rows = [
        (f"{int(nodes):,} nodes, failures x {rate}", [f"{each:.4f}" for each in by_mode.values()])
        for nodes, by_rate in extrapolated().items()
        for rate, by_mode in by_rate.items()
    ]
    cheap = goodput(replace(MODES["c10d"], saves=1.4, loads=1.0), SIZES[-1])
    per_year, rest = 365 * DAY_S * known.failures_per_node_s, (known.step_s, known.copy_s, known.replace_s)
    parts = [
        HEADING,
        textwrap.fill(TEXT.format(per_year, *rest, cheap, SIZES[-1]), width=118),
        table(["", *map(_words, MODES)], rows),
        f"![Goodput by the model, against nodes, and against the rate of failures]({PICTURE})",
    ]
    return "\n\n".join(parts)


def _words(name: str) -> str:
    return name.replace("_", " ")


HEADING = "## Goodput by a model"
TEXT = """`python -m tests.bench.goodput_model` computes what to expect where nothing was measured, from recoveries
measured on three nodes, seconds to agree by the simulator, and assumptions: {:.2f} failures of a node a year (Llama
3's), steps of {:g} s, {:g} s for a copy of the state in memory, {:g} s until a lost node is replaced. All of them, and
the formulas (Young, Daly), are in that module. Modes that lose work save at Daly's optimum. Left out for all: making
communicators of thousands of GPUs, starts slower than here, failures of many nodes at once. Ten times the failures do
what recoveries and saves ten times as long would do. Most of what c10d loses is torch.save's: with saves and loads as
cheap as restart mode's it would come to {:.4f} at {:,} nodes."""


def draw(output: Path) -> None:
    """Two panels: against nodes, and against the rate at the largest size; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.set_ylim(0.0, 1.03)
    left.set_ylabel("goodput")
    sizes, rates = np.geomspace(SIZES[0], SIZES[-1], 60), np.geomspace(RATES[0], RATES[-1], 60)
    for (name, mode), (colour, style) in zip(MODES.items(), LINES, strict=True):
        look: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": 2}
        left.plot(sizes, [goodput(mode, nodes) for nodes in sizes], label=_words(name), **look)
        right.plot(rates, [goodput(mode, SIZES[-1], rate) for rate in rates], **look)
    left.set(xscale="log", xlabel="nodes of 8 GPUs, failing as in Llama 3's training")
    right.set(xscale="log", xlabel=f"times as many failures, {SIZES[-1]:,} nodes")
    left.set_xticks(TICKS, [f"{size:,}" for size in TICKS])
    right.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    right.minorticks_off()
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(MODES), fontsize="small")
    save(figure, output)


LINES = (("#1e8449", "-"), ("#2e86c1", "--"), ("#b7950b", "-"), (FAULT, "-"), (LINE, ":"))


def write(deploy: Path) -> None:
    report = deploy / REPORT
    report.write_text(with_section(report.read_text(encoding="utf-8"), HEADING, section()), encoding="utf-8")
    draw(deploy / PICTURE)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse("goodput_model", __doc__, argv, repeats=1, extend=_own_options)
    if options.extra.write:
        write(DEPLOY)
    return emit(Report(options, {"goodput": extrapolated()}))


def _own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="put section and picture into deploy/report.md")


if __name__ == "__main__":
    sys.exit(main())
