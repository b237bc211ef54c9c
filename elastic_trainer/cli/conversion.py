"""The four changes that make a script with DistributedDataParallel elastic, made to its text. Pure.

Only a loop that is written out is changed: ``for x, y in loader:`` with ``loss.backward()`` in it.
*Fails by* ConfigError that names what was not found; half a change would be worse than none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from elastic_trainer.errors import ConfigError

_STEP = 4
_HINT = "docs/tutorial.md shows the four changes, docs/frameworks.md those for Accelerate, Lightning and transformers"
_WRAPPERS = ("DistributedDataParallel", "DDP")
_WORLD = re.compile(r"\s*//\s*(?:[\w.]*get_world_size\(\)|\w*world_size\w*)")
_KEPT = {"num_workers": "workers", "collate_fn": "collate", "pin_memory": "pin_memory", "shuffle": "shuffle"}
"""Arguments of a DataLoader, and of ``session.batches``. A sampler that shuffles is the session's own business."""


def converted(text: str, directory: str) -> str:
    """``text`` with a Session that keeps its checkpoints in ``directory``."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"this is not a Python script: {error}", hint="name a script that runs") from error
    if re.search(r"\belastic_trainer\b", text):
        raise ConfigError("the script uses elastic_trainer already", hint="there is nothing to change")
    return _Conversion(text, tree).made(directory)


class _Conversion:
    """Edits by line: what replaces it, what is added behind it, how far it moves to the right."""

    def __init__(self, text: str, tree: ast.Module) -> None:
        self._tree = tree
        self._lines = text.splitlines()
        self._instead: dict[int, list[str]] = {}
        self._behind: dict[int, list[str]] = {}
        self._moved: dict[int, int] = {}
        self._inside: set[int] = set()
        """Lines that begin inside a string: moved, it would be another string."""
        self._homes: dict[ast.stmt, tuple[ast.AST, list[ast.stmt]]] = {}
        for node in ast.walk(tree):
            for _, block in ast.iter_fields(node):
                if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                    self._homes.update(dict.fromkeys(block, (node, block)))
            if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno is not None:
                self._inside.update(range(node.lineno + 1, node.end_lineno + 1))

    def made(self, directory: str) -> str:
        start = self._one(self._calling("init_process_group"), "call of init_process_group()")
        wrapped = self._one(self._assigned(_WRAPPERS), "`model = DistributedDataParallel(model)`")
        back = self._one(self._calling("backward"), "`loss.backward()`")
        loop = self._around(back, ast.For)
        if loop is None:
            raise ConfigError("loss.backward() is not inside a loop over batches in this script", hint=_HINT)
        self._open(start, directory)
        self._wrap(wrapped)
        self._iterate(loop)
        self._write(back, f"step.backward({ast.unparse(back.value.func.value)})")  # type: ignore[attr-defined]
        for unneeded in [*self._calling("set_epoch"), *self._calling("destroy_process_group")]:
            self._write(unneeded)
        for sampler in self._assigned(("DistributedSampler",)):
            self._write(sampler)
        if self._function(loop) is not self._function(start):
            function = self._function(loop)
            if not isinstance(function, ast.FunctionDef):
                raise ConfigError("init_process_group() is called in another function than the loop", hint=_HINT)
            words = len(function.body) > 1 and ast.get_docstring(function) is not None
            first = function.body[int(words)]
            self._add(first.lineno - 1, first, "session = Session.opened()")
        imports = [node for node in self._tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        self._add(imports[-1].end_lineno or 0, imports[-1], "from elastic_trainer import Session")
        return self._text()

    def _open(self, start: ast.stmt, directory: str) -> None:
        """1: the Session is open around what follows the beginning of the process group."""
        self._write(start, f'with Session(checkpoint_dir="{directory}") as session:')
        _, block = self._homes[start]
        following = block[block.index(start) + 1 :]
        if not following:
            raise ConfigError("nothing follows init_process_group() in its block", hint=_HINT)
        self._shift(following[0].lineno, following[-1].end_lineno or 0)

    def _wrap(self, wrapped: ast.stmt) -> None:
        """2: the model is wrapped behind its optimizer."""
        assert isinstance(wrapped, ast.Assign)
        assert isinstance(wrapped.value, ast.Call)
        function = self._function(wrapped)
        optimizer = self._one(
            (each for each in self._optimizers() if self._function(each) is function), "optimizer beside the model"
        )
        assert isinstance(optimizer, ast.Assign)
        name, model = ast.unparse(wrapped.targets[0]), ast.unparse(wrapped.value.args[0])
        call = f"{name} = session.wrap({model}, optimizer={ast.unparse(optimizer.targets[0])})"
        if optimizer.lineno < wrapped.lineno:
            self._write(wrapped, call)
            return
        self._write(wrapped)
        self._write(optimizer, ast.unparse(optimizer).replace(f"{name}.parameters", f"{model}.parameters"), call)

    def _iterate(self, loop: ast.For) -> None:
        """3 and 4: the session's batches, one step for each."""
        loader = self._one(
            (each for each in self._assigned(("DataLoader",)) if _target(each) == ast.unparse(loop.iter)),
            f"`{ast.unparse(loop.iter)} = DataLoader(...)`, which is looped over",
        )
        assert isinstance(loader, ast.Assign)
        assert isinstance(loader.value, ast.Call)
        uses = [node for node in ast.walk(self._tree) if isinstance(node, ast.Name) and node.id == _target(loader)]
        if len(uses) > 2:
            raise ConfigError(f"{_target(loader)!r} is used for more than the loop", hint=_HINT)
        words = {each.arg: ast.unparse(each.value) for each in loader.value.keywords}
        words |= dict(zip(("dataset", "batch_size"), map(ast.unparse, loader.value.args), strict=False))
        size = _WORLD.sub("", words.get("batch_size", "1"))
        options = [words["dataset"], f"global_batch_size={size}"]
        options += [f"{ours}={words[theirs]}" for theirs, ours in _KEPT.items() if theirs in words]
        self._write(loader)
        names = ast.unparse(loop.target).strip("()")
        end = loop.body[-1].end_lineno or 0
        self._shift(loop.body[0].lineno, end)
        epochs = self._around(loop, ast.For)
        if epochs is not None and re.fullmatch(r"range\([^,]*\)", ast.unparse(epochs.iter)):
            total = ast.unparse(epochs.iter).removeprefix("range(").removesuffix(")")
            self._head(epochs, f"for {ast.unparse(epochs.target)} in session.epochs({total}):")
        else:
            options.append("epochs=1")
        self._head(loop, f"for batch in session.batches({', '.join(options)}):")
        body = " " * _STEP
        values = ", ".join(f"batch.{each}" for each in "xy") if "," in names else "batch.data"
        self._add(loop.body[0].lineno - 1, loop, f"{body}with session.step() as step:", f"{body}    {names} = {values}")

    # ---- finding

    def _statements(self) -> Iterator[ast.stmt]:
        return iter(sorted(self._homes, key=lambda each: each.lineno))

    def _calling(self, name: str) -> Iterator[ast.stmt]:
        for each in self._statements():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) and _last_name(each.value) == name:
                yield each

    def _assigned(self, names: tuple[str, ...]) -> Iterator[ast.stmt]:
        for each in self._statements():
            if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call) and _last_name(each.value) in names:
                yield each

    def _optimizers(self) -> Iterator[ast.stmt]:
        for each in self._statements():
            if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call):
                arguments = " ".join(
                    map(ast.unparse, [*each.value.args, *(word.value for word in each.value.keywords)])
                )
                if ".parameters()" in arguments:
                    yield each

    @staticmethod
    def _one(found: Iterator[ast.stmt], what: str) -> ast.stmt:
        all_found = list(found)
        if len(all_found) != 1:
            count = len(all_found) or "no"
            raise ConfigError(f"the script has {count} {what}, where one is expected", hint=_HINT)
        return all_found[0]

    def _around(self, statement: ast.stmt, kind: type[ast.For]) -> ast.For | None:
        """The innermost loop of the same function around ``statement``."""
        home = self._homes[statement][0]
        while isinstance(home, ast.stmt) and not isinstance(home, ast.FunctionDef):
            if isinstance(home, kind):
                return home
            home = self._homes[home][0]
        return None

    def _function(self, statement: ast.stmt) -> ast.AST:
        home = self._homes[statement][0]
        while isinstance(home, ast.stmt) and not isinstance(home, ast.FunctionDef):
            home = self._homes[home][0]
        return home if isinstance(home, ast.FunctionDef) else self._tree

    # ---- changing

    def _write(self, statement: ast.stmt, *instead: str) -> None:
        """``instead`` of ``statement``, at its place."""
        for line in range(statement.lineno, (statement.end_lineno or 0) + 1):
            self._instead[line] = []
        self._instead[statement.lineno] = [" " * statement.col_offset + each for each in instead]

    def _head(self, loop: ast.For, text: str) -> None:
        for line in range(loop.lineno, loop.body[0].lineno):
            if self._lines[line - 1].strip() and not self._lines[line - 1].lstrip().startswith("#"):
                self._instead[line] = []
        self._instead[loop.lineno] = [" " * loop.col_offset + text]

    def _add(self, line: int, like: ast.stmt, *texts: str) -> None:
        self._behind.setdefault(line, []).extend(" " * like.col_offset + each for each in texts)

    def _shift(self, first: int, last: int) -> None:
        for line in range(first, last + 1):
            self._moved[line] = self._moved.get(line, 0) + _STEP

    def _text(self) -> str:
        out = []
        for number, line in enumerate(self._lines, 1):
            move = " " * self._moved.get(number, 0)
            texts = self._instead.get(number, [line])
            out += texts if number in self._inside else [move + each if each else each for each in texts]
            out += [move + each for each in self._behind.get(number, [])]
        return "\n".join(out) + "\n"


def _last_name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2] if not isinstance(call.func, ast.Call) else ""


def _target(statement: ast.stmt) -> str:
    return ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
