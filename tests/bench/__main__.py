"""``python -m tests.bench`` lists the benchmarks; ``run [THEME ...]`` runs them; ``report`` also writes their page."""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_trainer.clock import SYSTEM, Deadline
from tests.bench import goodput_model
from tests.bench.page import Measured, block, page, with_block
from tests.bench.report import note


@dataclass(frozen=True, slots=True)
class Theme:
    """One benchmark: its name and what it measures."""

    name: str
    summary: str


def themes() -> list[Theme]:
    """Every module beside this one that defines ``main``, found without importing any of them."""
    found = []
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found.append(Theme(path.stem, (ast.get_docstring(tree) or "").partition("\n")[0]))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """List or run; the exit status is 1 if a benchmark could not run, 2 for a wrong call."""
    parser = argparse.ArgumentParser("python -m tests.bench", description=__doc__)
    commands = parser.add_subparsers(dest="what")
    run = commands.add_parser("run", help="run benchmarks one after another (default: all)")
    run.add_argument("themes", nargs="*", metavar="THEME")
    run.add_argument("--quick", action="store_true", help="toy size")
    run.add_argument("--json", action="store_true", help="one line of JSON for each")
    report = commands.add_parser("report", help="run all benchmarks within a time, and write their page")
    report.add_argument("themes", nargs="*", metavar="THEME")
    report.add_argument("--minutes", type=float, default=38.0, help="what is not measured by then is left out (38)")
    report.add_argument("--directory", type=Path, default=ROOT, help="of README.md and deploy (this clone)")
    report.add_argument("--torchft-python", type=Path, help="the python of an environment with torch and torchft")
    options = parser.parse_args(argv)
    known = {theme.name: theme.summary for theme in themes()}
    if options.what is None:
        print("\n".join(f"{name:16} {summary}" for name, summary in known.items()) or "there are no benchmarks")
        return 0
    unknown = [name for name in options.themes if name not in known]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are: {', '.join(known)}")
    if options.what == "report":
        return write_report(options.themes or list(known), options.minutes, options.directory, options.torchft_python)
    flags = [flag for flag, wanted in (("--quick", options.quick), ("--json", options.json)) if wanted]
    return run_all(options.themes or list(known), flags)


ROOT = Path(__file__).parents[2]
PLAN = {
    "goodput": (["--length", "120"], 1200.0),
    "recovery": (["--quick", "--repeats", "3"], 540.0),
    "sharded": (["--repeats", "1"], 300.0),
}
"""How the report calls a benchmark, and the seconds that it gives it; the others run at toy size."""
TOY = (["--quick"], 120.0)
MODEL = "goodput_model"
"""Measures nothing: it reads the page, and adds to it."""
END_S = 60.0
"""For a benchmark that is told to end."""


def write_report(names: Sequence[str], minutes: float, directory: Path, torchft: Path | None) -> int:
    """Measure what ``minutes`` allow, the most telling first; ``deploy/report.md``, its pictures, README's part."""
    deadline, measured, missing = Deadline.after(60.0 * minutes), [], {}
    pictures = directory / "deploy" / "images" / "goodput"
    peer = ["--torchft-python", str(torchft)] if torchft is not None else []
    for name in sorted(set(names) - {MODEL}, key=lambda each: (each not in PLAN, each)):
        words, limit_s = PLAN.get(name, TOY)
        words = [*words, *(["--pictures", os.path.relpath(pictures)] if name == "goodput" else [])]
        words += peer if name in ("goodput", "recovery") else []
        found = _measure(name, words, min(limit_s, deadline.remaining_s()))
        if isinstance(found, Measured):
            measured.append(found)
        else:
            missing[name] = found
    drawn = {path.stem: str(path.relative_to(directory / "deploy")) for path in sorted(pictures.glob("*.svg"))}
    shown = [replace(each, shape=_callable_elsewhere(each.shape, torchft)) for each in measured]
    text = page(shown, missing, drawn if "goodput" not in missing else {})
    (directory / "deploy" / "report.md").write_text(text, encoding="utf-8")
    if MODEL in names:
        goodput_model.write(directory / "deploy")
    readme = directory / "README.md"
    readme.write_text(with_block(readme.read_text(encoding="utf-8"), block(text)), encoding="utf-8")
    return 1 if missing else 0


def _callable_elsewhere(shape: Mapping[str, Any], torchft: Path | None) -> Mapping[str, Any]:
    """``shape`` with a command that names no path of this machine."""
    return shape if torchft is None else {**shape, "command": shape["command"].replace(str(torchft), "$TORCHFT_PYTHON")}


def _measure(name: str, words: Sequence[str], limit_s: float) -> Measured | str:
    if limit_s <= 1.0:
        return "the time was over"
    note(f"== {name}, {limit_s:.0f} s at most")
    began = SYSTEM.monotonic()
    command = [sys.executable, "-m", f"tests.bench.{name}", *words, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            out, _ = running.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            running.terminate()
            try:
                running.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                running.kill()
            return f"it took more than {limit_s:.0f} s"
    if running.returncode != 0:
        return f"it ended with exit code {running.returncode}"
    return Measured(json.loads(out.splitlines()[-1]), SYSTEM.monotonic() - began)


def run_all(names: Sequence[str], flags: Sequence[str]) -> int:
    """Run each benchmark in a process of its own, so that none inherits another's memory, threads or CUDA context."""
    failed = []
    for name in names:
        note(f"== {name}")
        if subprocess.run([sys.executable, "-m", f"tests.bench.{name}", *flags], check=False).returncode != 0:
            failed.append(name)
    if failed:
        note(f"did not run to the end: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
