"""What check.sh runs: this project on a CUDA device, row by row, as a table and as JSON.

Each row is played by a process of its own (``check.py --row NUMBER``) in a directory of its own, with a time limit.
When that is over all its processes are killed; the other rows go on. ``check.py --look`` says whether this Python can
run the check at all, which needs nothing but torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from elastic_trainer.drills.measure import Effect
    from elastic_trainer.drills.stage import Setting, Stage

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0
KILL_S = 10.0
FAILED, IMPOSSIBLE = 1, 2
"""Exit codes: a row has failed; this machine cannot run the check."""
WIDTH = 80
OUTCOME, MARK = "outcome.json", "GPU_CHECK_ROW"
OLDEST_TORCH, OLDEST_SHARDED = (2, 11), (2, 13)
DEVICE, NODE = "CUDA_VISIBLE_DEVICES", "ELASTIC_TRAINER_NODE"
REHEARSED_DEVICES = 2
"""As many devices a rehearsal pretends to have."""


class Outcome(StrEnum):
    """How a row ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class Skipped(Exception):
    """This machine lacks what the row needs."""


class Failed(Exception):
    """What the row is about did not hold."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the rows run on; without names of devices it is a rehearsal."""

    torch: str
    cuda: str | None
    nccl: str | None
    python: str
    names: Sequence[str] = ()

    @property
    def rehearsal(self) -> bool:
        """Whether all rows play on the CPU."""
        return not self.names

    @property
    def device(self) -> str:
        """What jobs are told to compute on: ranks of different nodes share it."""
        return "cpu" if self.rehearsal else "cuda:0"

    @property
    def devices(self) -> int:
        """How many there are, or are pretended to be."""
        return REHEARSED_DEVICES if self.rehearsal else len(self.names)

    @property
    def nccl_or_gloo(self) -> str:
        """What stands for NCCL."""
        return "gloo" if self.rehearsal else "nccl"

    def __str__(self) -> str:
        return "cpu (rehearsal)" if self.rehearsal else f"{len(self.names)} x {self.names[0]}"


@dataclass(frozen=True, slots=True)
class Scene:
    """Where one row plays."""

    machine: Machine
    directory: Path
    limit_s: float


Numbers = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One thing to check; ``act`` returns its numbers, or raises."""

    name: str
    limit_s: float
    act: Callable[[Scene], Numbers]


@dataclass(frozen=True, slots=True)
class Played:
    """A row of the table."""

    name: str
    outcome: Outcome
    seconds: float
    numbers: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


# ---- what is checked


def lose_a_node(scene: Scene) -> Numbers:
    """Two nodes share a device: gloo, with tensors on the device."""
    return drilled(scene, {"device": scene.machine.device, "backend": "gloo"}, kill_and_rejoin)


def lose_a_node_of_nccl(scene: Scene) -> Numbers:
    """Two nodes, each with a device of its own."""
    if scene.machine.devices < 2:
        raise Skipped("one device: NCCL takes one rank of a job on each, so two nodes need two")
    entry = (str(Path(__file__).resolve()), "--worker")
    backend = scene.machine.nccl_or_gloo
    return drilled(scene, {"device": scene.machine.device, "backend": backend, "entry": entry}, kill_and_rejoin)


def restart_on_nccl(scene: Scene) -> Numbers:
    """One node with one rank, whose worker is killed: a new one goes on from what the agent holds in memory."""
    backend = scene.machine.nccl_or_gloo
    alone = {"nodes": 1, "max_nodes": 1, "save_every_s": 1.0}
    return drilled(scene, {**alone, "device": scene.machine.device, "backend": backend}, kill_and_restart)


def lose_a_node_of_shards(scene: Scene) -> Numbers:
    """Two nodes of two ranks, all on one device: each node holds the model in two shards (HSDP)."""
    if version(scene.machine.torch) < OLDEST_SHARDED:
        raise Skipped("sharded models need torch 2.13")
    from elastic_trainer.drills.job import Sharded

    shared = {"workers": 2, "sharded": Sharded.GROUP, "backend": "gloo"}
    return drilled(scene, {**shared, "device": scene.machine.device}, kill_and_rejoin)


def drilled(scene: Scene, setting: Mapping[str, Any], act: Callable[[Stage], tuple[Effect, list[str]]]) -> Numbers:
    """A drill of this setting (see ``elastic-trainer drill``): what the fault cost, if all that must hold does."""
    from elastic_trainer.drills.stage import Setting, staged
    from elastic_trainer.local import agents

    agents.preload()
    nodes: dict[str, Any] = {"nodes": 2, "min_nodes": 1, "max_nodes": 2, "limit_s": scene.limit_s / 2}
    played: Setting = Setting(**{**nodes, **setting})
    with staged(played, scene.directory / "job") as stage:
        effect, problems = act(stage)
    if problems := [*effect.problems, *problems]:
        raise Failed("; ".join(problems))
    shape = {"backend": played.backend, "nodes": played.nodes, "workers_per_node": played.workers}
    costs = {"recovery_s": effect.recovery_s, "steps_lost": effect.steps_lost, **effect.details}
    return {**shape, **{name: round(value, 3) for name, value in costs.items()}}


def kill_and_rejoin(stage: Stage) -> tuple[Effect, list[str]]:
    """SIGKILL the first node, and start another one in its place; ranks must agree bit by bit, samples be exact."""
    from elastic_trainer.drills.run import conclusions
    from elastic_trainer.drills.stage import now
    from elastic_trainer.drills.strikes import aftermath, kill_nodes

    before, name = stage.settled(), stage.cluster.nodes[0].name
    t = kill_nodes(stage, [name])
    effect = aftermath(stage, before, f"node {name} killed", t, [name])
    began = now()
    stage.restore()
    standing = stage.settled()
    (newcomer,) = {*standing.nodes} - {*before.nodes}
    first = stage.book.first_step(newcomer, standing.round)
    lost = [f"{effect.steps_lost} committed steps were made again"] if effect.steps_lost else []
    effect = effect.amended({"rejoin_s": first - began} if first is not None else {}, [*effect.problems, *lost])
    return effect, conclusions(stage)


def kill_and_restart(stage: Stage) -> tuple[Effect, list[str]]:
    """SIGKILL the only worker once a checkpoint is there; samples must be exact, and no saved step lost."""
    from elastic_trainer.drills.faults import Fault, FaultKind, Injected
    from elastic_trainer.drills.measure import Effect, recovery, round_problems, sample_problems
    from elastic_trainer.drills.strikes import worker
    from elastic_trainer.local.cluster import kill
    from elastic_trainer.local.ledger import LineKind

    def saved() -> int:
        stage.look()
        return max((line.step for line in stage.book.lines if line.event is LineKind.CHECKPOINT), default=0)

    before = stage.settled()
    step = stage.until(saved, "a checkpoint")
    (name,) = before.nodes
    t = kill([worker(stage, before, name)]).t
    stage.settled()
    problems = [*stage.finish(), *sample_problems(stage.book.lines, stage.setting.samples)]
    fault = Fault(FaultKind.KILL_WORKER, step)
    found = recovery(Injected(fault, name, (), t, before.round, step), stage.book.lines)
    if found is None:
        raise Failed("no step was made after the kill")
    lost = max(0, step + 1 - found.step)
    problems += [f"{lost} steps that a checkpoint held were made again"] if lost else []
    again = {"steps_repeated": float(found.steps_repeated)}
    effect = Effect(f"worker of {name} killed", found.recovery_s, found.pause_s, lost, again)
    return effect, [*problems, *round_problems(stage.history)]


def saves(scene: Scene) -> Numbers:
    """How long a save stops training, beside a copy of the same bytes to the same kind of memory, and torch's saves."""
    from tests.bench.checkpoint_training import measure_training
    from tests.bench.report import median

    megabytes, repeats = (30, 3) if scene.machine.rehearsal else (1000, 5)
    found = measure_training(scene.directory / "saves", megabytes, repeats, scene.machine.device)
    if "snapshot.not_pinned" in (scene.directory / "log").read_text(errors="replace"):
        raise Failed("the memory for copies was not pinned: see snapshot.not_pinned in the log")
    stalls = {who: round(1000 * median(stall), 2) for who, stall in found["stall_s"].items() if who != "no_save"}
    ratio = round(found["stall_over_memcpy"]["elastic_trainer"], 2)
    return {"megabytes": round(found["bytes"] / 1e6), "stall_over_memcpy": ratio, "stall_ms": stalls}


def precise(precision: str, *, compiled: bool = False) -> Callable[[Scene], Numbers]:
    """Train the small GPT in one precision: all losses are numbers, and they fall."""

    def act(scene: Scene) -> Numbers:
        rehearsal = scene.machine.rehearsal
        if rehearsal and precision == "fp16":
            raise Skipped("fp16 needs a CUDA device")
        if compiled and not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
            raise Skipped("torch.compile needs a C compiler")
        steps, few = (20, 5) if rehearsal else (300, 20)
        words = ["gpt", "options.max_tokens=null", f"device={scene.machine.device}", f"precision={precision}"]
        words += [f"compile={str(compiled).lower()}", f"max_steps={steps}", "epochs=null", "workers=2"]
        words += ["pin_memory=true", "logging.loss_every=1", f"checkpoint.directory={scene.directory / 'run'}"]
        words += ["model.layers=1", "model.width=32", "model.heads=2"] if rehearsal else []
        run([sys.executable, "-m", "elastic_trainer.training", *words], scene, scene.limit_s)
        lines = [json.loads(line) for line in (scene.directory / "run" / "steps.jsonl").read_text().splitlines()]
        taken = [line for line in lines if line["kind"] == "loss"]
        losses = [line["loss"] for line in taken]
        if len(losses) != steps or not all(map(math.isfinite, losses)):
            raise Failed(f"{len(losses)} of {steps} losses were written, or one is not finite")
        first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
        if last >= first:
            raise Failed(f"the loss did not fall: {first:.3f} at first, {last:.3f} at last")
        later = taken[steps // 2 :]
        speed = (len(later) - 1) / (later[-1]["wall"] - later[0]["wall"])
        return {"first_loss": round(first, 3), "last_loss": round(last, 3), "steps_per_s": round(speed, 1)}

    return act


def marked_tests(scene: Scene) -> Numbers:
    """``pytest -m gpu``. Only plug-ins that the tests need are loaded, and only files that have such tests."""
    files = [each for each in ROOT.glob("tests/**/test_*.py") if "pytest.mark.gpu" in each.read_text(encoding="utf-8")]
    words = ["-m", "gpu", "-v", "-p", "pytest_timeout", "-p", "no:cacheprovider", "--basetemp"]
    words += [str(scene.directory / "tmp"), *(str(each.relative_to(ROOT)) for each in sorted(files))]
    more = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if scene.machine.rehearsal:
        more["ELASTIC_TRAINER_TEST_DEVICE"] = "cpu"
    error = ""
    try:
        said = run([sys.executable, "-m", "pytest", *words], scene, scene.limit_s - KILL_S, ROOT, more)
    except Failed as failed:
        said, error = (scene.directory / "said").read_text(errors="replace"), str(failed)
    found = re.findall(r"^(\S+::\S+) (PASSED|FAILED|ERROR|SKIPPED)\b", said, re.MULTILINE)
    ended = {word.lower(): sum(outcome == word for _, outcome in found) for word in ("PASSED", "FAILED", "SKIPPED")}
    broken = [name.partition("::")[2] for name, outcome in found if outcome in ("FAILED", "ERROR")]
    if error or broken or not ended["passed"]:
        raise Failed(f"{ended['passed']} passed; {', '.join(broken) or error or 'none was run'}")
    return ended


ROWS = (
    Row("two nodes share a device, gloo: one is killed, another joins", 90.0, lose_a_node),
    Row("one node of one rank, NCCL: its worker is killed, restarted", 90.0, restart_on_nccl),
    Row("two nodes, a device each, NCCL: one is killed, another joins", 90.0, lose_a_node_of_nccl),
    Row("saves through pinned memory, beside a memcpy", 90.0, saves),
    Row("training in fp32", 60.0, precise("fp32")),
    Row("mixed precision, bf16", 60.0, precise("bf16")),
    Row("mixed precision, fp16 with the scaler", 60.0, precise("fp16")),
    Row("torch.compile, bf16", 90.0, precise("bf16", compiled=True)),
    Row("HSDP, 2 nodes of 2 shards on a device, gloo: one is killed", 90.0, lose_a_node_of_shards),
    Row("pytest -m gpu", 400.0, marked_tests),
)


def run(
    command: Sequence[str],
    scene: Scene,
    limit_s: float,
    where: Path | None = None,
    more: Mapping[str, str] | None = None,
) -> str:
    """Run a program to its end; what it said. Failed if it ends badly or takes too long."""
    said = scene.directory / "said"
    with said.open("wb") as output:
        try:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                cwd=where or scene.directory,
                env={**os.environ, **(more or {})},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{command[2]} took more than {limit_s:.0f} s: {last_line(said)}") from None
    if done.returncode:
        raise Failed(f"{command[2]} ended with {done.returncode}: {last_line(said)}")
    return said.read_text(errors="replace")


def last_line(file: Path) -> str:
    """The last words of a log."""
    lines = file.read_text(errors="replace").split("\n") if file.exists() else []
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")


# ---- one row, in a process of its own


def play(row: Row, scene: Scene) -> None:
    """Play it, and write its outcome."""
    try:
        outcome, numbers, reason = Outcome.PASSED, row.act(scene), ""
    except Skipped as skipped:
        outcome, numbers, reason = Outcome.SKIPPED, {}, str(skipped)
    except Failed as failed:
        outcome, numbers, reason = Outcome.FAILED, {}, str(failed)
    found = {"outcome": outcome, "numbers": numbers, "reason": reason}
    (scene.directory / OUTCOME).write_text(json.dumps(found))


def worker(arguments: list[str]) -> None:
    """A worker of a node that has a device of its own: n0's is the first, n1's the second, n2's the first again."""
    if visible := os.environ.get(DEVICE, "0,1"):
        devices = visible.split(",")
        os.environ[DEVICE] = devices[int(os.environ[NODE].removeprefix("n")) % REHEARSED_DEVICES]
    from elastic_trainer.drills.job import main as job

    job(arguments)


def supervise(name: str, command: Sequence[str], directory: Path, limit_s: float) -> Played:
    """Start a row's process; when it has ended, or its time is over, none of its processes is left."""
    from elastic_trainer.clock import Deadline
    from elastic_trainer.local import processes

    directory.mkdir(parents=True)
    marks = {MARK: str(directory)}
    began, late = time.monotonic(), False
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ, **marks, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            family = processes.tree(process.pid) if process.poll() is None else []
            processes.kill_all(family, marks, Deadline.after(KILL_S))
            process.wait(KILL_S)
    seconds = round(time.monotonic() - began, 1)
    outcome = directory / OUTCOME
    if outcome.exists() and process.returncode == 0:
        found = json.loads(outcome.read_text())
        return Played(name, Outcome(found["outcome"]), seconds, found["numbers"], found["reason"])
    what = f"ended after {limit_s:.0f} s" if late else f"its process ended with {process.returncode}"
    return Played(name, Outcome.FAILED, seconds, reason=f"{what}: {last_line(directory / 'log')}")


# ---- all rows


def look(*, rehearse: bool) -> None:
    """Print what the check would run on, or exit with a sentence that says why it cannot."""
    try:
        import torch
    except ImportError:
        refuse(f"{sys.executable} has no torch: name the Python that has it, as in PYTHON=/opt/conda/bin/python3")
    if version(torch.__version__) < OLDEST_TORCH:
        refuse(f"this check is for torch 2.11 and newer, and {sys.executable} has {torch.__version__}")
    count = torch.cuda.device_count() if torch.cuda.is_available() and not rehearse else 0
    if not count and not rehearse:
        refuse(f"torch {torch.__version__} sees no CUDA device here; --rehearse plays all rows on the CPU")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if count else None  # type: ignore[no-untyped-call]
    names = [torch.cuda.get_device_name(number) for number in range(count)]
    python = ".".join(map(str, sys.version_info[:3]))
    print(json.dumps(asdict(Machine(torch.__version__, torch.version.cuda, nccl, python, names))))


def examined(rehearse: bool) -> Machine:
    """The machine, seen by a process that ends: the one that plays rows must not hold a device."""
    command = [sys.executable, __file__, "--look", *(["--rehearse"] if rehearse else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return Machine(**json.loads(done.stdout))


def refuse(sentence: str) -> NoReturn:
    """End, since this machine cannot run the check."""
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(IMPOSSIBLE)


def version(text: str) -> tuple[int, ...]:
    """``2.11.0+cu130`` as (2, 11)."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def table(played: Sequence[Played]) -> str:
    """The rows in lines of 80 columns: numbers and reasons stand below the row that they are of."""
    lines = [f"{'':{WIDTH - 17}} outcome  seconds", "-" * WIDTH]
    for row in played:
        lines.append(f"{row.name:{WIDTH - 17}.{WIDTH - 17}} {row.outcome:7} {row.seconds:8.1f}")
        shown = row.reason or ", ".join(f"{name} {value}" for name, value in flat(row.numbers))
        lines += textwrap.wrap(shown, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def flat(numbers: Mapping[str, Any], of: str = "") -> list[tuple[str, Any]]:
    """Numbers within numbers, by both names."""
    found = []
    for name, value in numbers.items():
        found += flat(value, f"{name} of ") if isinstance(value, dict) else [(f"{of}{name}", value)]
    return found


def all_rows(rows: Sequence[Row], machine: Machine, directory: Path, limit_s: float) -> list[Played]:
    """Play them one after the other; what no time is left for has failed, and says so."""
    began, played = time.monotonic(), list[Played]()
    for number, row in enumerate(rows):
        left_s = min(row.limit_s, limit_s - (time.monotonic() - began) - KILL_S)
        if left_s <= 0:
            played.append(Played(row.name, Outcome.FAILED, 0.0, reason="not begun: the time is over"))
            continue
        print(f"{row.name} ...", file=sys.stderr, flush=True)
        place = directory / f"row-{number}"
        words = ["--row", str(number), "--directory", str(place), "--limit", str(left_s)]
        command = [sys.executable, __file__, *words, "--machine", json.dumps(asdict(machine))]
        played.append(supervise(row.name, command, place, left_s))
    return played


def report(played: Sequence[Played], machine: Machine, seconds: float) -> dict[str, Any]:
    """The JSON object."""
    from tests.bench import report as host

    return {
        "device": str(machine),
        **asdict(machine),
        "machine": {name: value for name, value in host.machine().items() if name != "gpus"},
        "versions": host.versions(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(seconds, 1),
        "ok": all(row.outcome is not Outcome.FAILED for row in played),
        "rows": [asdict(row) for row in played],
    }


def check(directory: Path, limit_s: float, *, rehearse: bool) -> int:
    """Play all rows, print the table and write ``result.json``; the exit code."""
    began = time.monotonic()
    machine = examined(rehearse)
    if machine.rehearsal:
        os.environ[DEVICE] = ""
    sys.path.insert(0, str(ROOT))
    for old in directory.glob("row-*"):
        shutil.rmtree(old)
    played = all_rows(ROWS, machine, directory, limit_s)
    found = report(played, machine, time.monotonic() - began)
    result = directory / "result.json"
    result.write_text(json.dumps(found, indent=1) + "\n")
    kinds = {kind: sum(row.outcome is kind for row in played) for kind in Outcome}
    has = f"torch {machine.torch}, CUDA {machine.cuda}, NCCL {machine.nccl}, Python {machine.python}"
    print(f"\ndevice: {machine}; {has}")
    print(table(played))
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    print(f"{counts} in {found['seconds']:.0f} s; logs are beside the JSON:\n{result}")
    return 0 if found["ok"] else FAILED


def main(arguments: list[str]) -> int:
    """See the options."""
    if arguments[:1] == ["--worker"]:
        worker(arguments[1:])
        return 0
    parser = argparse.ArgumentParser(prog="check.sh", allow_abbrev=False, description="check this project on CUDA")
    parser.add_argument("--rehearse", action="store_true", help="without a CUDA device: all rows on the CPU")
    hidden = argparse.SUPPRESS
    parser.add_argument("--look", action="store_true", help=hidden)
    parser.add_argument("--row", type=int, help=hidden)
    parser.add_argument("--machine", type=lambda text: Machine(**json.loads(text)), help=hidden)
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "gpu-check", help=hidden)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=hidden)
    options = parser.parse_args(arguments)
    if options.look:
        look(rehearse=options.rehearse)
        return 0
    if options.row is not None:
        sys.path.insert(0, str(ROOT))
        play(ROWS[options.row], Scene(options.machine, options.directory, options.limit))
        return 0
    return check(options.directory.absolute(), options.limit, rehearse=options.rehearse)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("interrupted: there is no result")
