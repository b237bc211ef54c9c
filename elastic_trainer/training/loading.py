"""From a YAML file and ``key.sub=value`` overrides to a checked JobConfig.

*Fails by* raising ConfigError: one sentence that names the file, the line or the key, and what to do.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from elastic_trainer.errors import ConfigError, last_line
from elastic_trainer.training.config import JobConfig

READY_MADE = "elastic_trainer.tasks"
"""The package of ready-made tasks. Named, not imported: it lies above this one and is loaded like a plug-in."""

ModelT = TypeVar("ModelT", bound=BaseModel)


class _UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, but a key given twice is an error instead of silently winning, and a date is a text."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' is given twice", key.start_mark)
        if isinstance(key, yaml.ScalarNode):
            seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML document; a ConfigError with the line number if it is not one."""
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{where}{line}: {error.problem or 'not valid YAML'}", hint="correct the YAML") from error
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{where}: not valid YAML: {reason}", hint="correct the YAML") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deeply", hint="correct the YAML") from error
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:  # of PyYAML's constructors
        raise ConfigError(f"{where}: a value does not fit its type: {last_line(error)}", hint="correct it") from error


def read_job_file(source: str) -> tuple[str, dict[str, Any]]:
    """The name (for messages) and the content of ``source``: a YAML file, or the name of a ready-made task."""
    if source.endswith((".yaml", ".yml")) or "/" in source:
        return source, _checked_mapping(parse_yaml(_read(Path(source)), source), source)
    shipped = resources.files(READY_MADE)
    names = sorted(item.name.removesuffix(".yaml") for item in shipped.iterdir() if item.name.endswith(".yaml"))
    if source not in names:
        raise ConfigError(
            f"there is no ready-made task {source!r} and it is not a .yaml file",
            hint=did_you_mean(source, names) or f"ready-made tasks: {', '.join(names)}",
        )
    where = f"{source}.yaml"
    return where, _checked_mapping(parse_yaml((shipped / where).read_text(encoding="utf-8"), where), where)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file", hint="check the path of the job file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8", hint="give a YAML file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", hint="give a readable YAML file") from error


def _checked_mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        found = "empty" if value is None else f"a {type(value).__name__}"
        raise ConfigError(f"{where}: a mapping of keys to values is expected, but it is {found}", hint="see --help")
    return value


def with_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """``values`` with each ``key.sub=value`` set; values are read as YAML (``0.1``, ``null``, ``[1, 2]``)."""
    result = dict(values)
    for text in overrides:
        name, separator, raw = text.partition("=")
        path = name.split(".")
        if not separator or not all(part.isidentifier() for part in path):
            raise ConfigError(f"override {text!r} is not key=value", hint="write for example optimizer.lr=0.01")
        _set(result, path, parse_yaml(raw, f"override {text!r}"), text)
    return result


def _set(target: dict[str, Any], path: Sequence[str], value: Any, text: str) -> None:
    for depth, part in enumerate(path[:-1]):
        inner = target.get(part)
        if inner is not None and not isinstance(inner, dict):
            name = ".".join(path[: depth + 1])
            raise ConfigError(f"override {text!r}: '{name}' is {inner!r}, which has no parts", hint=f"set {name}=...")
        target[part] = dict(inner or {})  # a copy: an alias in the YAML may share it
        target = target[part]
    target[path[-1]] = value


def load_job(source: str, overrides: Sequence[str] = ()) -> JobConfig:
    """The configuration of the job file or ready-made task ``source`` with ``overrides`` applied."""
    where, values = read_job_file(source)
    names = [text.partition("=")[0] for text in overrides]
    return checked(JobConfig, with_overrides(values, overrides), where, overridden=names)


def checked(
    kind: type[ModelT], values: Mapping[str, Any], where: str, *, prefix: str = "", overridden: Sequence[str] = ()
) -> ModelT:
    """``kind`` built from ``values``, or a ConfigError about the first wrong one.

    ``prefix`` is put before the names of keys (``data.``); a key in ``overridden`` came from the command line.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise _explained(error, kind, values, where, prefix, overridden) from error


def _explained(
    error: ValidationError,
    kind: type[BaseModel],
    values: Mapping[str, Any],
    where: str,
    prefix: str,
    overridden: Sequence[str],
) -> ConfigError:
    # A misspelt key is reported before the key that is missing because of it.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    path = _written_path(first["loc"], values, missing=first["type"] == "missing")
    name = prefix + ".".join(path)
    origin = "command line" if any(name == key or name.startswith(f"{key}.") for key in overridden) else where
    more = f"; {len(problems) - 1} more problem(s) follow" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(path[-1], _fields_at(kind, first["loc"][:-1])) or "remove it"
        return ConfigError(f"{origin}: unknown key '{name}'", hint=hint + more)
    if first["type"] in ("missing", "union_tag_not_found"):
        name += ".name" if first["type"] == "union_tag_not_found" else ""
        return ConfigError(f"{origin}: '{name}' is missing", hint=f"set '{name}'" + more)
    if first["type"] == "union_tag_invalid":
        context = first["ctx"]
        tag, known = context["tag"], context["expected_tags"].replace("'", "").split(", ")
        hint = did_you_mean(tag, known) or f"choose from {', '.join(known)}"
        return ConfigError(f"{origin}: '{name}.name' is {tag!r}, which is not known", hint=hint + more)
    message = first["msg"].removeprefix("Value error, ")
    if not path:
        return ConfigError(f"{origin}: {message}", hint="correct this" + more)
    text = f"'{name}' is {reprlib.repr(first['input'])}: {message[:1].lower() + message[1:]}"
    return ConfigError(f"{origin}: {text}", hint="correct this value" + more)


def _written_path(loc: Sequence[int | str], values: Any, *, missing: bool) -> list[str]:
    """The keys of ``loc`` as the user wrote them: pydantic also names the member of a union that it tried."""
    path: list[str] = []
    for position, part in enumerate(loc):
        here = isinstance(values, Mapping) and part in values
        here = here or (isinstance(values, list | tuple) and isinstance(part, int) and part < len(values))
        if here:
            values = values[part]
        if here or (missing and position == len(loc) - 1):
            path.append(str(part))
    return path


def _fields_at(kind: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    """The keys that may stand at ``loc``."""
    candidates = [kind]
    for part in loc:
        tagged = [model for model in candidates if _tag(model) == part]
        candidates = tagged or [inner for model in candidates for inner in _nested(model, part)]
    return sorted({name for model in candidates for name in model.model_fields})


def _tag(model: type[BaseModel]) -> object:
    name = model.model_fields.get("name")
    values = get_args(name.annotation) if name is not None else ()
    return values[0] if values else None


def _nested(model: type[BaseModel], name: int | str) -> list[type[BaseModel]]:
    field = model.model_fields.get(str(name))
    kinds = (field.annotation, *get_args(field.annotation)) if field is not None else ()
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def did_you_mean(word: object, known: Iterable[str]) -> str | None:
    """A hint with the nearest of the ``known`` words, if one is near."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else None


def as_yaml(config: JobConfig) -> str:
    """``config`` as YAML that :func:`load_job` reads back to an equal one."""
    return str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
