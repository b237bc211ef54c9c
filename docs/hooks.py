"""Builds the site: the pages in ``docs``, those that stand beside what they describe, and tables made of code.

A page of ``deploy`` or ``k8s``, the README (the home page) and CONTRIBUTING have the addresses of their files. A
relative link leads to another page where there is one, else to the file on GitHub; one that leads nowhere fails the
build. A line ``<!-- make: NAME ARGUMENT -->`` is replaced by what the function of that name in ``MAKERS`` gives.
"""

from __future__ import annotations

import argparse
import ast
import json
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from importlib import import_module
from itertools import pairwise
from operator import attrgetter
from pathlib import Path, PurePath
from types import ModuleType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import elastic_trainer
from elastic_trainer import errors, model, variables
from elastic_trainer.cli import connection
from elastic_trainer.cli.main import COMMANDS, PROGRAM, Parser, whole_parser
from elastic_trainer.jobs.main import _parser as training_parser
from elastic_trainer.telemetry.families import FAMILIES

ROOT = Path(__file__).parents[1]
HOME = "README.md"
OUTSIDE = (HOME, "CHANGELOG.md", "CONTRIBUTING.md", "deploy/**/*.md", "k8s/**/*.md", "deploy/images/**/*")
LINK = re.compile(r"(?P<before>\]\(\s*)(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?P<after>\s*\))")
MAKE = re.compile(r"^<!-- make: (\w+)((?: \S+)*) -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures outside of ``docs``."""
    for pattern in OUTSIDE:
        for path in sorted(filter(Path.is_file, ROOT.glob(pattern))):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, "index.md" if name == HOME else name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the tables, and lead each relative link to where its file is: on the site, or in the repository."""
    source = Path(str(page.file.abs_src_path)).relative_to(ROOT)

    def led(match: re.Match[str]) -> str:
        target = match["target"]
        if "://" in target or target.startswith(("mailto:", "<")):
            return match[0]
        path = posixpath.normpath(posixpath.join(source.parent.as_posix(), target))
        if not (ROOT / path).exists():
            raise PluginError(f"{source}: the link {target} leads nowhere")
        there = "index.md" if path == HOME else path.removeprefix("docs/")
        if files.get_file_from_path(there) is None and (ROOT / path / "README.md").exists():
            there = f"{path}/README.md"
        if files.get_file_from_path(there) is not None:
            led_to = posixpath.relpath(there, posixpath.dirname(page.file.src_uri) or ".")
        else:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            led_to = f"{str(config.repo_url).rstrip('/')}/{kind}/main/{path}"
        return f"{match['before']}{led_to}{match['anchor'] or ''}{match['after']}"

    return LINK.sub(led, MAKE.sub(lambda match: MAKERS[match[1]](*match[2].split()), markdown))


def table(heading: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table of Markdown, of whose rows each says what it means."""
    head, cells = list(heading), [list(row) for row in rows]
    if silent := [row[0] for row in cells if not row[-1]]:
        raise PluginError(f"{silent[0]} has no description: write one where it is defined")
    lines = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


# ---- classes and keys


def names() -> str:
    """What ``from elastic_trainer import`` offers, with the first sentence about each."""

    def first_sentence(name: str) -> str:
        text = (getattr(elastic_trainer, name).__doc__ or "").strip().split("\n\n")[0]
        return re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", " ".join(text.split())).replace("``", "`")

    offered = [name for name in elastic_trainer.__all__ if not name.startswith("__")]
    return table(("name", "what it is"), [(f"`{name}`", first_sentence(name)) for name in offered])


def keys(name: str, prefix: str = "") -> str:
    """Each key of the pydantic model ``module:Class``, sections opened, with its type, default and description."""
    module, _, kind = name.partition(":")
    return table(("key", "type", "default", "meaning"), _rows(attrgetter(kind)(import_module(module)), prefix))


def _rows(kind: type[BaseModel], prefix: str) -> Iterator[tuple[str, ...]]:
    for name, field in kind.model_fields.items():
        members = _members(field.annotation)
        models = [each for each in members if isinstance(each, type) and issubclass(each, BaseModel)]
        if len(models) < len(members):
            kinds = " or ".join(map(_word, members))
            yield f"`{prefix}{name}`", kinds, _default(field), field.description or ""
            continue
        for each in models:  # of alternatives each is named: optimizer.lr (sgd)
            tag = f" ({get_args(each.model_fields['name'].annotation)[0]})" if len(models) > 1 else ""
            yield from ((f"{key}{tag}", *rest) for key, *rest in _rows(each, f"{prefix}{name}."))


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{each.value}`" for each in kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "mapping"
    spoken = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path", type(None): "null"}
    return (spoken | {tuple: "list", dict: "mapping"})[get_origin(kind) or kind]


def _default(field: FieldInfo) -> str:
    """As YAML says it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    value = value.value if isinstance(value, Enum) else str(value) if isinstance(value, PurePath) else value
    if isinstance(value, tuple):
        value = [item.model_dump() if isinstance(item, BaseModel) else item for item in value]
    if isinstance(value, str) and not value.isprintable():
        return f"`{json.dumps(value)}`"
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).strip().removesuffix("...").strip()
    return f"`{text}`"


# ---- the command line


def commands() -> str:
    """A heading for each command, with its usage and options."""
    parser, _ = whole_parser([command.name for command in COMMANDS])
    (found,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return "\n\n".join(_command(name, each, "##") for name, each in found.choices.items())


def _command(name: str, parser: argparse.ArgumentParser, level: str) -> str:
    parts = [f"{level} {PROGRAM} {name}", _sentence(parser.description)]
    parts += [f"```text\n{parser.format_usage().strip()}\n```", options(parser), _epilog(parser.epilog)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parts += [_command(f"{name} {each}", its, f"{level}#") for each, its in action.choices.items()]
    return "\n\n".join(part for part in parts if part)


def _sentence(text: str | None) -> str:
    text = " ".join((text or "").split())
    return text and f"{text[0].upper()}{text[1:].rstrip('.')}."


def _epilog(text: str | None) -> str:
    """A sentence, or lines that stand as they are."""
    lines = (text or "").strip()
    return f"```text\n{lines}\n```" if "\n" in lines else _sentence(lines)


def options(parser: argparse.ArgumentParser) -> str:
    """The options of ``parser``; those for etcd, which many commands share, are one line."""
    formatter = parser._get_formatter()
    shared = set(_options_of(connection.add_options))
    rows = []
    for action in parser._actions:
        if action.dest == "help" or action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        flags = action.option_strings
        if flags and shared <= _all_flags(parser) and flags[0] in shared:
            continue
        value = "" if action.nargs == 0 or not flags else f" {formatter._format_args(action, action.dest.upper())}"
        name = ", ".join(f"`{flag}{value}`" for flag in flags) or f"`{_words(action, formatter)}`"
        rows.append((name, formatter._expand_help(action)))
    if shared <= _all_flags(parser):
        rows.append(("`--endpoint`, `--user`, ...", "[where etcd is, and how to be let in](#options-for-etcd)"))
    return table(("option", "meaning"), rows) if rows else ""


def _words(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """What stands for an argument without a flag."""
    if action.nargs == argparse.REMAINDER:
        return f"-- {action.metavar or action.dest.upper()} ..."
    return formatter._format_args(action, action.dest)


def _all_flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def _options_of(add: Callable[[argparse.ArgumentParser], None]) -> set[str]:
    add(parser := Parser(add_help=False))
    return _all_flags(parser)


def etcd_options() -> str:
    """What the commands that read etcd share."""
    connection.add_options(parser := Parser(add_help=False))
    formatter = parser._get_formatter()
    rows = [(f"`{each.option_strings[0]} {each.metavar}`", formatter._expand_help(each)) for each in parser._actions]
    return table(("option", "meaning"), rows)


# ---- constants


def environment() -> str:
    """The environment variables, by who sets them."""
    rows = [(f"`{name}`", *told) for name, told in variables.MEANINGS.items()]
    return table(("variable", "set by", "meaning"), rows)


def exit_codes() -> str:
    """The exit codes of commands and nodes."""
    told = {getattr(errors, name): text for name, text in _explained(errors).items() if name.startswith("EXIT_")}
    return table(("code", "meaning"), sorted(({0: "Done.", 130: "Interrupted by SIGINT."} | told).items()))


def phases() -> str:
    """The phases of a rank."""
    told = _explained(model, "Phase")
    return table(("phase", "what the time goes into"), [(f"`{each}`", told[each.name]) for each in model.Phase])


def _explained(module: ModuleType, kind: str = "") -> dict[str, str]:
    """The constants of ``module``, or of a class in it, with the text that stands below each."""
    body = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body
    if kind:
        (found,) = (each for each in body if isinstance(each, ast.ClassDef) and each.name == kind)
        body = found.body
    told = {}
    for assigned, below in pairwise(body):
        if isinstance(assigned, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            told[ast.unparse(assigned.targets[0])] = " ".join(str(below.value.value).split())
    return told


def metrics() -> str:
    """Every metric, in the order of the code."""
    rows = [
        (f"`{each.full_name}`", each.kind, ", ".join(f"`{label}`" for label in each.labels), each.source, each.text)
        for each in FAMILIES
    ]
    return table(("metric", "kind", "labels", "from", "meaning"), rows)


MAKERS: dict[str, Callable[..., str]] = {
    "names": names,
    "keys": keys,
    "commands": commands,
    "etcd_options": etcd_options,
    "job_options": lambda: options(training_parser()),
    "environment": environment,
    "exit_codes": exit_codes,
    "metrics": metrics,
    "phases": phases,
}
