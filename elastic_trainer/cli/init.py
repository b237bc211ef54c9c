"""``elastic-trainer init FILE``: a script or a job to start from, or what in a script a Session takes over, by line.

A script is read with ``ast`` and not changed: whether a replacement is right only its author knows.

*Runs in* the process of the command. *Owns* the new files that it writes.
*Fails by* ConfigError where a file is in the way, or is not a script.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from elastic_trainer.cli.main import PROGRAM
from elastic_trainer.errors import ConfigError, StorageError

_PACKAGE = Path(__file__).parents[1]
_SCRIPT = _PACKAGE / "jobs" / "scripts" / "ddp_script_elastic.py"
_TEMPLATES = Path(__file__).with_name("templates")
_DOCS = "https://elastic-trainer.github.io/elastic_trainer"


def configure_init(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = "examples: elastic-trainer init; elastic-trainer init job.yaml; elastic-trainer init mine.py"
    what = "a new .py or .yaml to write, or a script that is there, to see what in it changes (default: train.py)"
    parser.add_argument("file", type=Path, nargs="?", default=Path("train.py"), metavar="FILE", help=what)
    parser.add_argument("--write", action="store_true", help="refused: scripts are not rewritten any more")


def run_init(arguments: argparse.Namespace) -> int:
    """Write new files, or show what in a script a Session takes over."""
    file: Path = arguments.file
    if file.suffix not in (".py", ".yaml", ".yml"):
        raise ConfigError(f"{str(file)!r} is neither a script.py nor a job.yaml", hint="say for example train.py")
    if arguments.write:
        raise ConfigError(
            "init does not rewrite scripts: only their authors can tell whether a change keeps what they train",
            hint=f"leave --write out, and change by hand the lines that {PROGRAM} init {file} lists",
        )
    if file.suffix == ".py" and file.exists():
        return _show(file)
    for path, text in _new(file).items():
        try:
            with path.open("x", encoding="utf-8") as new:
                new.write(text)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}", hint="check the directory") from error
        print(f"wrote {path}")
    way = f"python {file}" if file.suffix == ".py" else f"python -m elastic_trainer.training {file}"
    print(f"try it: {way}")
    print(f"and lose a node: {PROGRAM} local --nodes 1:2 --recovery in_place --kill-node-at 100 -- {file}")
    return 0


def _show(file: Path) -> int:
    try:
        source = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{str(file)!r} cannot be read: {error.strerror}", hint="name a script") from error
    try:
        found = advice(source, f"runs/{file.stem}")
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}", hint=error.hint) from error
    if not found:
        print(f"{file} has nothing that a Session takes over; {PROGRAM} init new.py writes a script to start from")
        return 0
    width = len(str(max(line for each in found for line in each.found)))
    for each in found:
        print(f"{each.topic}")
        for line, text in sorted(each.found.items()):
            print(f"  {line:{width}}  {text}")
        print("  becomes")
        for text in each.instead:
            print(f"  {'':{width}}  {text}")
        print()
    print(f"Nothing was written. A whole script before and after: {_SCRIPT.with_name('ddp_script.py')}")
    print(f"and {_SCRIPT.name} beside it.")
    print(f"As it is, it runs in restart mode: {PROGRAM} run --nodes 2:4 --endpoint ETCD -- {file}")
    return 0


def _new(file: Path) -> dict[Path, str]:
    """What a new ``file`` needs, none of which may be there."""
    if file.suffix == ".py":
        texts = {file: _SCRIPT.read_text(encoding="utf-8").replace("runs/ddp", f"runs/{file.stem}")}
    else:
        job, task = ((_TEMPLATES / name).read_text(encoding="utf-8") for name in ("spirals.yaml", "spirals.py"))
        texts = {file: job.replace("runs/spirals", f"runs/{file.stem}"), file.with_name("spirals.py"): task}
    for path in texts:
        if path.exists():
            raise ConfigError(f"{str(path)!r} is there already", hint="give another name or directory")
    return texts


# ---- what a Session takes over, by line

WIDTH = 90
"""Columns that are shown of a line of the script."""
_LOADERS = ("DataLoader", "StatefulDataLoader")
_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "transformers")
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_BREAKS = (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class Topic(StrEnum):
    """What a Session does in a script's place. The value is the heading."""

    FRAMEWORK = "a framework's loop"
    GROUP = "the process group"
    RANKS = "ranks and devices"
    MODEL = "the wrapped model"
    SCHEDULE = "the schedule"
    SCALER = "mixed precision"
    DATA = "epochs and batches"
    STEP = "the step"
    ACCUMULATION = "accumulation"
    CLIPPING = "clipping"
    CHECKPOINTS = "checkpoints"
    COLLECTIVES = "collectives between steps"


_CALLED = {
    Topic.GROUP: "init_process_group destroy_process_group",
    Topic.RANKS: "get_rank get_world_size get_node_local_rank set_device",
    Topic.MODEL: "DistributedDataParallel DataParallel FullyShardedDataParallel fully_shard convert_sync_batchnorm",
    Topic.SCALER: "GradScaler autocast unscale_ unscale_gradients",
    Topic.DATA: "DataLoader StatefulDataLoader set_epoch",
    Topic.CLIPPING: "clip_grad_norm_ clip_grad_value_",
    Topic.STEP: "backward zero_grad",
    Topic.ACCUMULATION: "no_sync",
    Topic.CHECKPOINTS: "torch.save torch.load load_state_dict",
    Topic.COLLECTIVES: "all_reduce all_gather all_gather_object broadcast barrier",
}
_CALLS = {name: topic for topic, names in _CALLED.items() for name in names.split()}
"""Calls by their last name, or by their whole one."""


_INSTEAD = {
    Topic.FRAMEWORK: f"# stays, with two or three lines: {_DOCS}/how-to/frameworks/",
    Topic.GROUP: """\
from elastic_trainer import Session
with Session(checkpoint_dir={directory}) as session:  # opens the process group, and closes it
    ...  # all that follows""",
    Topic.RANKS: """\
session.rank, session.world_size, session.is_rank0  # after session.wrap(); in place they change
session.device  # wrap moves the model there, and batches are there already""",
    Topic.SCHEDULE: """\
# stays where it is made; give it to session.wrap(..., scheduler=...), and delete its step():
# it advances after each committed step, so its length counts steps of the optimizer, not epochs""",
    Topic.SCALER: """\
# autocast stays; a GradScaler is made as before and given to session.wrap(..., scaler=...):
{step}.backward(loss)  # scales; delete scale, unscale_ and update
optimizer.step()  # unscales, and adapts the scale""",
    Topic.STEP: """\
with session.step() as {step}:  # around forward, backward and update; zero_grad is not needed
    {step}.backward(loss)
    optimizer.step()  # behind the block, under `if {step}.committed:`, what happens once a step""",
    Topic.ACCUMULATION: """\
session.batches(..., passes=N)  # global_batch_size counts the samples of all passes and ranks
for part in {step}.micro_batches({batch}):  # inside the step; one update behind the loop
    {step}.backward(loss)  # the mean loss of part, not divided by N""",
    Topic.CLIPPING: "{step}.clip(max_norm)  # behind the last backward; unscales first where there is a scaler",
    Topic.CHECKPOINTS: """\
# delete what saves and resumes: the session does both, with the place in the data (after wrap)
session.save(metrics, best=True)  # to keep a state by a metric; on all ranks, not inside a step
session.register(name, part)  # what else has state_dict() and is to be resumed""",
    Topic.COLLECTIVES: """\
session.all_reduce(tensor)  # and all_gather, broadcast, barrier
session.evaluate(model, dataset, batch_size, fn)  # in place of sums over ranks of one's own""",
}
"""The lines that replace what was found of a topic, whatever the script."""


@dataclass(slots=True)
class Advice:
    """What was found of one topic: lines of the script, and the lines to write in their place."""

    topic: Topic
    found: dict[int, str] = field(default_factory=dict)
    instead: list[str] = field(default_factory=list)


def advice(source: bytes, directory: str) -> list[Advice]:
    """What ``source`` has that a Session, with its checkpoints in ``directory``, does for it; in the script's order."""
    try:
        tree = ast.parse(source)
        script = _Script(tree)
        found = script.read()
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the parser's words for too deep a nesting
        cause = str(error) if isinstance(error, SyntaxError | ValueError) else "it is nested too deep"
        raise ConfigError(f"this is not a Python script: {cause}", hint="name one that runs") from error
    for each in found.values():
        each.instead = script.instead(each.topic, directory)
    return sorted(found.values(), key=lambda each: min(each.found))


class _Script:
    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._found: dict[Topic, Advice] = {}
        self._aliases: dict[str, str] = {}
        """Names in the script, and what they were imported as."""
        self._called: dict[str, list[ast.Call]] = {}
        """By the last name of what is called."""
        self._targets: dict[ast.Call, str] = {}
        """Where the result of a call goes."""
        self._optimizers: list[str] = []
        self._schedulers: list[str] = []
        self._names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}

    def read(self) -> dict[Topic, Advice]:
        nodes = list(ast.walk(self._tree))
        for node in nodes:
            self._learn(node)
        if "elastic_trainer.Session" in self._aliases.values():
            raise ConfigError("the script has a Session already", hint="there is nothing to list")
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            self._called.setdefault(self._name(call).rpartition(".")[2], []).append(call)
        for node in nodes:
            if isinstance(node, ast.Call):
                self._call(node)
            elif isinstance(node, ast.Constant) and node.value in _VARIABLES:
                self._add(Topic.RANKS, node, f'"{node.value}" in the environment')
            elif isinstance(node, ast.Import | ast.ImportFrom):
                modules = (
                    [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
                )
                if any(each.partition(".")[0] in _FRAMEWORKS for each in modules):
                    self._add(Topic.FRAMEWORK, node)
        self._loops(nodes)
        return self._found

    # ---- reading

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            self._aliases.update({each.asname: each.name for each in node.names if each.asname})
        elif isinstance(node, ast.ImportFrom):
            self._aliases.update({each.asname or each.name: f"{node.module}.{each.name}" for each in node.names})
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            name, call = self._name(node.value), node.value
            self._targets[call] = ast.unparse(target)
            if "lr_scheduler" in name or re.search(r"LR$|_schedule", name):
                self._schedulers.append(self._targets[call])
            elif any(".parameters()" in ast.unparse(each) for each in [*call.args, *call.keywords]):
                self._optimizers.append(self._targets[call])

    def _name(self, call: ast.Call) -> str:
        """``torch.save`` of ``save(...)`` behind ``from torch import save``."""
        written = ast.unparse(call.func) if isinstance(call.func, ast.Name | ast.Attribute) else ""
        first, dot, rest = written.partition(".")
        return self._aliases.get(first, first) + dot + rest

    def _call(self, call: ast.Call) -> None:
        name = self._name(call)
        last, owner = name.rpartition(".")[2], name.rpartition(".")[0]
        topic = _CALLS.get(name, _CALLS.get(last))
        if last.endswith("Sampler") or (
            name == "len" and call.args and ast.unparse(call.args[0]) in self._made_by(*_LOADERS)
        ):
            topic = Topic.DATA
        elif "lr_scheduler." in name or (last == "step" and (owner in self._schedulers or "sched" in owner.lower())):
            topic = Topic.SCHEDULE
        elif last in ("step", "update") and ("scaler" in owner.lower() or owner in self._made_by("GradScaler")):
            topic = Topic.SCALER
        elif last == "step" and (owner in self._optimizers or "opt" in owner.lower()):
            topic = Topic.STEP
        if topic is not None:
            self._add(topic, call)

    def _made_by(self, *names: str) -> list[str]:
        """What the script calls the results of such calls."""
        return [self._targets[call] for call in self._calls(*names) if call in self._targets]

    def _calls(self, *names: str) -> list[ast.Call]:
        return [call for name in names for call in self._called.get(name, [])]

    def _loops(self, nodes: list[ast.AST]) -> None:
        """The loops over batches and epochs: those with a step in them, which may be in a function that they call."""
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        steps = self._reaching(functions, {"backward"})
        passes = self._reaching(functions, steps, loops=True)
        for loop in _loops_in(self._tree):
            if _calls_within(loop.body) & passes or any(_calls_within(each.body) & steps for each in _loops_in(loop)):
                target = re.sub(r"^\((.*)\)$", r"\1", ast.unparse(loop.target))
                self._add(Topic.DATA, loop, f"for {target} in {ast.unparse(loop.iter)}:")
        for node in nodes:
            test = ast.unparse(node.test) if isinstance(node, ast.If) else ""
            if isinstance(node, ast.If) and "%" in test and _calls_within(node.body) & {"step", "zero_grad"}:
                self._add(Topic.ACCUMULATION, node, f"if {test}:")

    @staticmethod
    def _reaching(functions: list[ast.FunctionDef], names: set[str], *, loops: bool = False) -> set[str]:
        """``names`` and the functions that call them; with ``loops`` only those that do so in a loop, or call such."""
        starts = {each.name for each in functions if any(_calls_within(loop.body) & names for loop in _loops_in(each))}
        reached = starts if loops else set(names)
        while more := {each.name for each in functions if _calls_within(each.body) & reached} - reached:
            reached |= more
        return reached

    def _add(self, topic: Topic, node: ast.expr | ast.stmt, text: str | None = None) -> None:
        shown = text or ast.unparse(node)
        shown = shown if len(shown) <= WIDTH else f"{shown[: WIDTH - 3]}..."
        self._found.setdefault(topic, Advice(topic)).found.setdefault(node.lineno, shown)

    # ---- writing

    def _free(self, name: str) -> str:
        """``name``, unless the script uses it for something of its own."""
        return f"session_{name}" if name in self._names else name

    def instead(self, topic: Topic, directory: str) -> list[str]:
        """The lines that replace what was found of ``topic``, with the script's own names where they are plain."""
        if topic is Topic.MODEL:
            return self._wrap()
        if topic is Topic.DATA:
            return self._batches(self._free("batch"))
        return [
            line.format(step=self._free("step"), batch=self._free("batch"), directory=repr(directory))
            for line in _INSTEAD[topic].splitlines()
        ]

    def _wrap(self) -> list[str]:
        wrapped = self._calls("DistributedDataParallel", "DataParallel")
        plain = [call for call in wrapped if call.args and _is_plain(call.args[0])]
        model = ast.unparse(plain[0].args[0]) if len(plain) == 1 else "model"
        target = self._targets.get(plain[0], "model") if len(plain) == 1 else "model"
        words = [f"optimizer={_one_or_several(self._optimizers, 'optimizer')}"]
        words += [f"scheduler={_one_or_several(self._schedulers, 'scheduler')}"] if self._schedulers else []
        words += [f"scaler={each}" for each in self._made_by("GradScaler")[:1]]
        words += ["sync_batchnorm=True"] if self._calls("convert_sync_batchnorm") else []
        options = {
            word.arg: ast.unparse(word.value)
            for call in wrapped
            for word in call.keywords
            if word.arg not in (None, "module", "device_ids", "output_device")
        }
        if options:
            words.append("ddp_options={" + ", ".join(f'"{name}": {value}' for name, value in options.items()) + "}")
        sharded = self._calls("FullyShardedDataParallel", "fully_shard")
        return [
            "# first make the optimizer of the bare model's parameters, then",
            f"{target} = session.wrap({model}, {', '.join(words)})  # to the device, resumed, in DDP",
            *([f"# sharded models: {_DOCS}/deploy/sharded/"] if sharded else []),
        ]

    def _batches(self, batch: str) -> list[str]:
        loaders = self._calls(*_LOADERS)
        told = {word.arg for call in loaders for word in call.keywords if word.arg}
        plain = {ast.unparse(call.args[0]) for call in loaders if call.args and _is_plain(call.args[0])}
        data = plain.pop() if len(plain) == 1 else "dataset"
        lines = [
            "for epoch in session.epochs(EPOCHS):  # goes on where the run was",
            f"    for {batch} in session.batches({data}, global_batch_size=...):  # {batch}.x, {batch}.y",
            "# global_batch_size: over all ranks, so the loader's batch_size times ranks and accumulation;",
            "# shuffle, drop_last, collate_fn, num_workers and pin_memory are shuffle=, drop_last=, collate=, workers=",
            "# and pin_memory= there",
        ]
        if len(loaders) > 1:
            lines.append("# the data of an evaluation go to session.evaluate(model, dataset, batch_size, fn)")
        if any(ast.unparse(call.args[0]) in self._made_by(*_LOADERS) for call in self._calls("len") if call.args):
            lines.append("# len(loader), in steps of the optimizer: len(dataset) // global_batch_size with drop_last")
        if kept := sorted(told & {"worker_init_fn", "generator", "timeout", "persistent_workers"}):
            lines.append(f"# {', '.join(kept)}: keep a DataLoader, with batch_sampler=session.sampler(...):")
            lines.append(f"# {_DOCS}/how-to/data/")
        samplers = [name for name in self._called if name.endswith("Sampler") and name != "DistributedSampler"]
        if samplers or "batch_sampler" in told:
            named = ", ".join(sorted(samplers)) or "batch_sampler"
            lines.append(f"# {named}: an order of one's own is a SeekableStream, see {_DOCS}/how-to/data/")
        return lines


def _loops_in(node: ast.AST) -> Iterator[ast.For]:
    return (each for each in ast.walk(node) if isinstance(each, ast.For))


def _calls_within(body: list[ast.stmt]) -> set[str]:
    """Last names of what ``body`` calls, without loops and functions in it."""
    found, waiting = set[str](), list[ast.AST](body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, _BREAKS):
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            found.add(node.func.id if isinstance(node.func, ast.Name) else node.func.attr)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def _is_plain(node: ast.expr) -> bool:
    """A name or an attribute: what may be written again without being made again."""
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_plain(node.value))


def _one_or_several(names: list[str], generic: str) -> str:
    several = list(dict.fromkeys(names))
    if len(several) <= 1:
        return several[0] if several else generic
    return "{" + ", ".join(f'"{each.rpartition(".")[2]}": {each}' for each in several) + "}"
