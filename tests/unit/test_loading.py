"""Nothing that this package reads can execute code."""

from __future__ import annotations

import ast
from pathlib import Path

import yaml

PACKAGE = Path(__file__).parents[2] / "elastic_trainer"
ALLOWED = {
    ("checkpoint/exchange.py", "torch.load"),  # weights_only, see below
    ("checkpoint/exchange.py", "_Unpickler"),  # it knows a few classes, see tests/unit/checkpoint/test_exporting.py
    ("data/workers.py", "pickle.loads"),  # an exception of this node's own data worker, through a pipe to its parent
    ("local/launch.py", "cloudpickle.loads"),  # what its processes returned, or whoever started them wants called
    ("jobs/scripts/ddp_script.py", "torch.load"),  # as people write it: torch loads weights only by default
    ("jobs/config.py", "yaml.load"),  # with a SafeLoader, see below
    ("warm/template.py", "exec"),  # the script that torchrun was given, as python itself would run it
}
EXECUTING = {
    *("pickle.load", "pickle.loads", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "marshal.loads"),
    *("joblib.load", "dill.loads", "cloudpickle.loads", "pandas.read_pickle", "shelve.open", "eval", "exec"),
    *("dist.broadcast_object_list", "dist.all_gather_object", "dist.gather_object", "dist.scatter_object_list"),
    *("pickle.Unpickler", "Unpickler", "_Unpickler"),
    *("torch.jit.load", "torch.package.PackageImporter", "torch.hub.load", "os.system"),
}
"""Calls that run what they are given, torch's collectives of objects among them, which unpickle what peers send."""


def calls(text: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]


def found_in(text: str) -> set[str]:
    """The calls of EXECUTING in a module, by whatever it imports them from."""
    written = {ast.unparse(call.func) for call in calls(text)}
    return {name for name in EXECUTING if any(_means(each, name) for each in written)}


def _means(written: str, name: str) -> bool:
    """Whether the call ``written`` ends with all parts of ``name``; ``model.eval`` is not ``eval``."""
    return written == name or ("." in name and written.endswith(f".{name}"))


def test_no_module_loads_what_can_execute_code() -> None:
    """Checkpoints, messages, documents, data and job files alike; the exceptions say why."""
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        for name in found_in(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED


def test_torch_numpy_and_yaml_load_data_only() -> None:
    """Weights, arrays without pickles, and YAML with a loader that makes plain values."""
    from elastic_trainer.jobs import config

    options: dict[str, list[str]] = {"np.load": [], "torch.load": []}
    for path in (each for each in PACKAGE.rglob("*.py") if each.name != "ddp_script.py"):
        for call in calls(path.read_text(encoding="utf-8")):
            if (name := ast.unparse(call.func)) in options:
                options[name].append(" ".join(f"{word.arg}={ast.unparse(word.value)}" for word in call.keywords))
    assert {*options["np.load"]} == {"allow_pickle=False"}
    assert options["torch.load"]
    assert all("weights_only=True" in each for each in options["torch.load"])
    assert issubclass(config._UniqueKeys, yaml.SafeLoader)


def test_such_a_call_would_be_found() -> None:
    assert found_in("import torch\nx = torch.load('a')") == {"torch.load"}
    assert found_in("y = eval('1')") == {"eval"}
    assert found_in("model.eval()") == set()
    assert found_in("torch.distributed.dist.all_gather_object(a, b)") == {"dist.all_gather_object"}
