"""``python -m tests.bench`` lists the benchmarks; ``python -m tests.bench run [THEME ...]`` runs them in turn."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from tests.bench.report import note
from tests.bench.themes import themes


def main(argv: Sequence[str] | None = None) -> int:
    """List or run; the exit status is 1 if a benchmark could not run, 2 for a wrong call."""
    parser = argparse.ArgumentParser("python -m tests.bench", description=__doc__)
    commands = parser.add_subparsers(dest="what")
    run = commands.add_parser("run", help="run benchmarks one after another (default: all)")
    run.add_argument("themes", nargs="*", metavar="THEME")
    run.add_argument("--quick", action="store_true", help="toy size")
    run.add_argument("--json", action="store_true", help="one line of JSON for each")
    options = parser.parse_args(argv)
    known = {theme.name: theme.summary for theme in themes()}
    if options.what is None:
        print("\n".join(f"{name:16} {summary}" for name, summary in known.items()) or "there are no benchmarks")
        return 0
    unknown = [name for name in options.themes if name not in known]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are: {', '.join(known)}")
    flags = [flag for flag, wanted in (("--quick", options.quick), ("--json", options.json)) if wanted]
    return run_all(options.themes or list(known), flags)


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
