"""Whether a command can start as a fork of the template. Pure.

A fork inherits modules that were imported with the template's environment, interpreter options and working directory. A
command fits if all of these that a module may have read during its import are equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

OPTIONS = frozenset({"-u"})
"""The interpreter options that a template can have; torchrun passes no others."""
_OF_ONE_WORKER = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
        "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS", "TORCH_DIST_USE_NCCL2",
    }
)  # fmt: skip
"""Variables that differ between workers: a module that reads one during its import is not preloaded."""
_PREFIXES = ("TORCHELASTIC_", "ELASTIC_TRAINER_")


def of_one_worker(name: str) -> bool:
    """Whether the variable ``name`` belongs to one worker, or one of its lives."""
    return name in _OF_ONE_WORKER or name.startswith(_PREFIXES)


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A Python program: ``python OPTIONS [-m] TARGET ARGUMENTS``."""

    executable: str
    options: tuple[str, ...]
    module: bool
    target: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """How a template was started. ``free`` variables may differ, like those of one worker."""

    executable: str
    options: tuple[str, ...]
    directory: str
    environment: Mapping[str, str] = field(repr=False)
    free: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class StartDecision:
    """The command to fork, or None and the reason for a cold start."""

    command: PythonCommand | None
    reason: str


def decide(words: Sequence[str], environment: Mapping[str, str], directory: str, facts: Facts) -> StartDecision:
    """Whether ``words``, with ``environment`` in ``directory``, can start as a fork of the template of ``facts``."""
    if not words or words[0] != facts.executable:
        return StartDecision(None, f"the command is not one of {facts.executable}")
    count = next((i for i, word in enumerate(words[1:]) if word not in OPTIONS), len(words) - 1)
    options, rest = tuple(words[1 : 1 + count]), words[1 + count :]
    if _unbuffered(options, environment) != _unbuffered(facts.options, facts.environment):
        return StartDecision(None, "its standard output is buffered differently")
    module = bool(rest) and rest[0] == "-m"
    rest = rest[1:] if module else rest
    if not rest or rest[0].startswith("-"):
        return StartDecision(None, "the command names neither a script nor a module")
    if directory != facts.directory:
        return StartDecision(None, f"the working directory is {directory}, not {facts.directory}")
    differing = sorted(name for name in _differing(environment, facts.environment) if name not in facts.free)
    if differing:
        return StartDecision(None, f"the environment differs in {', '.join(differing)}")
    return StartDecision(PythonCommand(words[0], options, module, rest[0], tuple(rest[1:])), "it fits")


def _differing(wanted: Mapping[str, str], had: Mapping[str, str]) -> set[str]:
    return {name for name, _ in wanted.items() ^ had.items() if name in had or not of_one_worker(name)}


def _unbuffered(options: Sequence[str], environment: Mapping[str, str]) -> bool:
    return "-u" in options or bool(environment.get("PYTHONUNBUFFERED"))
