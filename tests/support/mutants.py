"""How strong the first tier is: small faults are planted in pure rules and cores, and its tests must find each.

``python -m tests.support.mutants [--count N] [--seed S] [--only PART]``, in a clone. cosmic-ray makes the mutations, in
copies of the tree; each is given to the unit tests of its own room, then to all others, the simulator and real nodes.
Prints what nothing found, and JSON with the score; exits 1 below ``--least``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from attrs import evolve
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkResult

ROOT = Path(__file__).parents[2]
ROOMS = {
    "membership": "membership",
    "data/plan.py": "data",
    "checkpoint/reading.py": "checkpoint",
    "checkpoint/manifest.py": "checkpoint",
    "checkpoint/retention.py": "checkpoint",
    "checkpoint/codec.py": "checkpoint",
    "preflight/judge.py": "preflight",
    "agent/health/node_health.py": "agent",
    "agent/workers/conductor.py": "agent",
    "agent/workers/hang_rules.py": "agent",
    "worker/comm/groups.py": "worker",
    "worker/state/saver.py": "worker",
}
"""What is mutated (below ``elastic_trainer``), and the tests (below ``tests/unit``) that are asked first."""
OPERATORS = (
    *("AddNot", "ReplaceUnaryOperator_Delete_Not", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    *("ReplaceComparisonOperator_Lt_LtE", "ReplaceComparisonOperator_LtE_Lt", "ReplaceComparisonOperator_Gt_GtE"),
    *("ReplaceComparisonOperator_GtE_Gt", "ReplaceComparisonOperator_Eq_NotEq", "ReplaceComparisonOperator_NotEq_Eq"),
    *("ReplaceComparisonOperator_Is_IsNot", "ReplaceComparisonOperator_IsNot_Is", "ZeroIterationForLoop"),
    *("ReplaceBinaryOperator_Add_Sub", "ReplaceBinaryOperator_Sub_Add"),
)
"""Faults that people make. Others are mostly TypeErrors, which mypy finds."""
LIMIT_S = 1800.0


def mutations(only: str) -> list[MutationSpec]:
    """All that can be made, in a fixed order; paths are relative to the tree."""
    modules = [
        module
        for name in ROOMS
        for module in sorted((ROOT / "elastic_trainer").glob(name if name.endswith(".py") else f"{name}/*.py"))
        if only in str(module)
    ]
    with use_db(":memory:", WorkDB.Mode.create) as database:
        init(modules, database, {})
        found = [each for item in database.work_items for each in item.mutations]
    wanted = {f"core/{name}" for name in OPERATORS}
    lines = {module: module.read_text(encoding="utf-8").splitlines() for module in modules}
    found = [each for each in found if not _declared(lines[each.module_path], each)]
    kept = [evolve(each, module_path=each.module_path.relative_to(ROOT)) for each in found]
    return sorted(
        (each for each in kept if each.operator_name in wanted),
        key=lambda each: (str(each.module_path), each.start_pos, each.operator_name, each.occurrence),
    )


def _declared(lines: list[str], mutation: MutationSpec) -> bool:
    """Whether it is the value of ``frozen=`` or the like, which changes nothing that a right program does."""
    line, column = mutation.start_pos
    before: str = lines[line - 1][:column]
    return before.endswith(("frozen=", "slots=", "strict="))


def room(module: Path) -> str:
    """The tests that are asked first about ``module``."""
    inside = str(module.relative_to("elastic_trainer"))
    return next(tests for name, tests in ROOMS.items() if inside.startswith(name))


def ask(tests: str) -> int:
    """Let the first tier of this tree find the fault that is in it, the unit tests of one room first."""
    simulated = "tests/unit/membership/test_simulation.py"
    for asked in (
        [f"tests/unit/{tests}", f"--deselect={simulated}"],
        ["tests/unit", f"--ignore=tests/unit/{tests}", f"--ignore={simulated}"],
        [simulated],
        [
            "--numprocesses=3",
            "--dist=loadfile",
            f"--basetemp={Path.cwd()}-nodes",
            f"--deselect={simulated}",
            "@tests/first_tier.txt",
        ],
    ):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *asked]
        if (code := subprocess.run(command, check=False).returncode) != 0:
            return code
    return 0


def asking(copy: Path, tests: str) -> str:
    """The command that asks the tests of ``copy``, those of one room first."""
    inside = f"env -C {copy} PYTHONPATH={copy} PYTHONDONTWRITEBYTECODE=1 PYTEST_DEBUG_TEMPROOT={copy}"
    return f"{inside} {sys.executable} -m tests.support.mutants --ask {tests}"


def tried(mutation: MutationSpec, copies: SimpleQueue[Path]) -> WorkResult:
    """What became of one mutation, in a copy that no other uses."""
    copy = copies.get()
    try:
        here = evolve(mutation, module_path=copy / mutation.module_path)
        return mutate_and_test([here], asking(copy, room(mutation.module_path)), LIMIT_S)
    finally:
        copies.put(copy)


def copied(directory: Path, count: int) -> Iterator[Path]:
    """Copies of the tree as git has it, with what is not committed yet."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    for number in range(count):
        copy = directory / f"tree-{number}"
        for name in names.stdout.decode().splitlines():
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        subprocess.run(["git", "init", "-q", str(copy)], check=True)
        yield copy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many mutations to draw (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--only", default="", help="a part of the modules' paths")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--least", type=float, default=0.95, help="the score that is asked for (0.95)")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        return ask(options.ask)
    possible = mutations(options.only)
    drawn = random.Random(options.seed).sample(possible, min(options.count, len(possible)))
    survived = []
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(options.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for copy in copied(Path(directory), options.jobs):
            copies.put(copy)
        outcome, said = run_tests(asking(copy, "preflight"), LIMIT_S)
        if outcome is not TestOutcome.SURVIVED:
            sys.exit(f"the tests fail without any planted fault:\n{said}")
        for number, result in enumerate(pool.map(partial(tried, copies=copies), drawn), 1):
            outcome = result.test_outcome
            print(f"{number}/{len(drawn)} {outcome}", file=sys.stderr, flush=True)
            if outcome is TestOutcome.INCOMPETENT:
                raise RuntimeError(result.output)
            if outcome is TestOutcome.SURVIVED:
                survived.append(result.diff)
                print(result.diff, file=sys.stderr, flush=True)
    score = 1.0 - len(survived) / len(drawn)
    report = {"possible": len(possible), "drawn": len(drawn), "found": len(drawn) - len(survived), "score": score}
    print(json.dumps(report | {"seed": options.seed}))
    return int(score < options.least)


if __name__ == "__main__":
    sys.exit(main())
