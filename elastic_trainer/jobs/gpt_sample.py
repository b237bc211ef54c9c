"""``python -m elastic_trainer.jobs.gpt_sample RUN_DIR --prompt TEXT``: let the model of a run write.

Reads the run's ``config.yaml`` and one of its checkpoints; the texts it was trained on are not needed.
*Fails by* one line on standard error and the exit code of the error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.checkpoint import CheckpointManager, Entry, Retention
from elastic_trainer.errors import CheckpointError, ConfigError, ElasticTrainerError, last_line
from elastic_trainer.jobs.config import CheckpointConfig, load_job
from elastic_trainer.jobs.corpus import tokenizer_of
from elastic_trainer.jobs.gpt import Gpt, Manner, Transformer, written
from elastic_trainer.jobs.task import find_task
from elastic_trainer.jobs.trainer import CONFIG_FILE
from elastic_trainer.telemetry import logs

_AVERAGED = "module."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``; the exit status."""
    arguments = _parser().parse_args(argv)
    logs.configure()
    try:
        print(_run(arguments))
    except ElasticTrainerError as error:
        print(f"error: {error}".replace("\n", " "), file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m elastic_trainer.jobs.gpt_sample", description=__doc__)
    add = parser.add_argument
    add("directory", type=Path, metavar="RUN_DIR", help="the checkpoint.directory of a gpt job")
    add("overrides", nargs="*", metavar="key=value", help="as for the job, for example data.bpe=DIR")
    add("--prompt", default="\n", metavar="TEXT", help="what the text begins with (default: a new line)")
    add("--tokens", type=_at_least(1, int), default=200, metavar="N", help="tokens to write (default: 200)")
    add("--temperature", type=_at_least(0.0, float), default=0.8, metavar="T", help="0: always the likeliest token")
    add("--top-k", type=_at_least(1, int), metavar="K", help="draw from the K likeliest tokens (default: all)")
    add("--seed", type=_at_least(0, int), default=0, metavar="S", help="the same seed writes the same text")
    add("--best", action="store_true", help="the best checkpoint instead of the newest")
    return parser


def _at_least(least: float, kind: type[int] | type[float]) -> Any:
    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < float("inf"):
            raise ValueError(text)
        return value

    number.__name__ = f"number from {least}"
    return number


def _run(arguments: argparse.Namespace) -> str:
    if not arguments.prompt:
        raise ConfigError("--prompt is empty", hint="give at least one character")
    directory: Path = arguments.directory
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{directory} is not the directory of a run: it has no {CONFIG_FILE}", hint="name another")
    config = load_job(str(path), arguments.overrides)
    kind = find_task(config.task)
    if not issubclass(kind, Gpt):
        raise ConfigError(f"{path}: the task {config.task} is not a language model", hint="name the run of a gpt job")
    task = kind(config)
    state = _state(directory, task.config.checkpoint, best=arguments.best)
    # Characters are kept with the checkpoint.
    tokenizer = tokenizer_of(task.data_options, lambda: state["user"]["identity"]["facts"]["characters"])
    if tokenizer is None:
        hint = "for gpt2 tokens, add data.bpe=DIRECTORY"
        raise ConfigError(f"tokens of tokenizer {task.data_options.tokenizer} cannot be read here", hint=hint)
    manner = Manner(arguments.tokens, arguments.temperature, arguments.top_k, arguments.seed)
    return written(_model(task, tokenizer.size, state), tokenizer, arguments.prompt, manner)


def _state(directory: Path, config: CheckpointConfig, *, best: bool) -> Mapping[str, Any]:
    """The state in the newest or the best checkpoint; changes nothing in the directory."""
    source = config.directory if "://" in config.directory else directory
    manager = CheckpointManager(source, Retention(metric=config.metric, mode=config.mode))
    entry: Entry | None = manager.best() if best else manager.newest()
    if entry is None:
        what = "checkpoint that was the best" if best else "checkpoint"
        raise CheckpointError(f"{source} has no {what}", hint="train for longer, or name another directory")
    return manager.load(entry).state


def _model(task: Gpt, vocabulary: int, state: Mapping[str, Any]) -> Transformer:
    """With the averaged parameters, where the run keeps an average: those are what it evaluates."""
    model = Transformer(task.model_options, vocabulary)
    parameters: Mapping[str, Any] = state["model"]
    if state.get("average") is not None:
        averaged: Mapping[str, Any] = state["average"]
        parameters = {name.removeprefix(_AVERAGED): averaged[name] for name in averaged if name.startswith(_AVERAGED)}
    try:
        model.load_state_dict(dict(parameters))
    except RuntimeError as error:  # names what is missing, and what has another shape
        raise CheckpointError(
            f"the checkpoint is not of this model: {last_line(error)}", hint="give the model's options of the run"
        ) from error
    return model.eval()


if __name__ == "__main__":
    sys.exit(main())
