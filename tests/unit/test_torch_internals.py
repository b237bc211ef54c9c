"""The door to torch's private parts: each is there or is said to be missing, and no other module names one."""

from __future__ import annotations

import ast
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from structlog.testing import capture_logs
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import elastic_trainer
from elastic_trainer import torch_internals
from elastic_trainer.data.sampler import Fetcher
from elastic_trainer.data.workers import Loading
from elastic_trainer.errors import ConfigError
from elastic_trainer.torch_internals import PARTS, SHARDED, TorchPart
from elastic_trainer.worker.comm.control import InterruptibleWaits
from elastic_trainer.worker.comm.lasting import LastingGroup, ShardLayout
from tests.support.requirements import needs_torch

PACKAGE = Path(elastic_trainer.__file__).parent
NAMES = [(part, name) for part in PARTS for name in part.names]
OF_OTHERS = {
    *("_exit", "_Environ", "_getframe", "_run_module_as_main", "_replace", "_asdict", "_uname_cache"),  # Python
    *("_cat_file", "_pipe_file", "_ls", "_rm_file", "_call_s3"),  # fsspec: those that s3fs, gcsfs and adlfs define
    *("_shared_state", "_set_sync_gradients"),  # accelerate
    *("_data_fetcher", "_combined_loader", "_should_reload_train_dl", "_on_before_batch_transfer", "_after_closure"),
    *("_batches_that_stepped", "_val_check_time_interval", "_num_ready_batches_reached", "_train_time_interval"),
    # Those were lightning's; transformers':
    *("_maybe_log_save_evaluate", "_tr_loss"),
    *("_train_batch_size", "_prepare_inputs", "_get_num_items_in_batch", "_get_train_sampler"),
    "_get_collator_with_removed_columns",
}
"""Private names that are not torch's, and are used where their library is."""


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """This torch has the name no longer; says it as the sentences do."""
    module, _, path = name.partition("(")[0].partition(":")
    *owners, last = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    if not isinstance(owner, type) and last not in vars(owner):
        owner = type(owner)
    owner = next((each for each in getattr(owner, "__mro__", ()) if last in vars(each)), owner)
    monkeypatch.delattr(owner, last)
    return name.partition(":")[2]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.capability)
def test_this_torch_has_all_parts_that_its_version_should(part: TorchPart) -> None:
    old = part.since and torch_internals.version() < torch_internals._numbers(part.since)
    assert bool(part.lacks()) == bool(old), torch_internals.lacking([part])


@pytest.mark.parametrize(("part", "name"), NAMES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_torch_without_a_part_is_told_by_a_sentence(
    part: TorchPart, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what does not work, the version and the name."""
    needs_torch(part)
    lost = hide(monkeypatch, name)
    lacks = part.lacks()
    assert lacks == lost or not torch_internals._has(next(each for each in part.names if each.endswith(lacks)))
    assert torch_internals.lacking([part]) == [
        f"{part.capability} {part.without}: torch {torch.__version__} has no {lacks}"
    ]


def test_a_method_that_has_other_parameters_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = torch_internals._subprocess_handler()
    monkeypatch.setattr(handler, "_popen", lambda self, command: None)
    assert torch_internals.WARM_STARTS.lacks() == "SubprocessHandler._popen(self, args, env)"


@pytest.mark.parametrize(("version", "needed"), [("2.11.0+cu130", "torch 2.13 or newer"), ("2.99.0", "another torch")])
def test_sharded_models_are_refused_in_a_sentence_that_names_the_version(
    version: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer torch without them is not asked for an older one."""
    needs_torch(SHARDED)
    monkeypatch.setattr(torch, "__version__", version)
    lost = hide(monkeypatch, SHARDED.names[0])
    with (
        pytest.raises(ConfigError, match=re.escape(f"sharded models need {needed}: torch {version} has no {lost}")),
        elastic_trainer.Session() as session,
    ):
        session.init_device_mesh((1,), mesh_dim_names=("shard",))


class Squares:
    """A data set of its own kind, read by data workers if there are any."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor(number**2)


def test_without_data_workers_samples_are_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, torch_internals.DATA_WORKERS.names[0])
    with capture_logs() as logs:
        fetcher = Fetcher(Squares(), torch.device("cpu"), loading=Loading(workers=2))
    assert fetcher._workers is None
    assert [each["event"] for each in logs] == ["data.workers_refused"]
    assert logs[0]["reason"].startswith("data workers are off: samples are read in the training process: torch ")
    drawn = fetcher(torch.arange(3).numpy())
    assert drawn.data.tolist() == [0, 1, 4]
    assert Fetcher(TensorDataset(torch.ones(3)), torch.device("cpu"), loading=Loading(workers=2)).immediate


@pytest.mark.parametrize(
    ("version", "chosen", "expected", "nccl2"),
    [
        ("2.13.0", None, None, False),
        ("2.14.1", None, None, False),
        ("2.14.1", "1", "1", True),
        ("2.15.0", None, "0", False),
        ("2.15.0", "1", "1", True),
    ],
)
def test_workers_get_the_nccl_that_lets_them_live(
    version: str, chosen: str | None, expected: str | None, nccl2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(dist, "ProcessGroupNCCL2", object, raising=False)
    monkeypatch.setattr(os, "environ", {} if chosen is None else {torch_internals._NCCL2: chosen})
    torch_internals.survive_nccl_errors()
    kept = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
    assert os.environ == kept | ({} if expected is None else {torch_internals._NCCL2: expected})
    assert torch_internals.nccl_is_nccl2() is nccl2


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: list[ast.Module]) -> Iterator[str]:
    for node in (each for tree in trees for each in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for each in (each for target in targets for each in ast.walk(target)):
                if isinstance(each, ast.Name):
                    yield each.id
                elif isinstance(each, ast.Attribute) and ast.unparse(each.value) in ("self", "cls"):
                    yield each.attr


def test_only_the_door_names_private_parts_of_torch() -> None:
    """Foreach operations are documented. A name of another library stands in the list above."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    door = trees.pop(Path(torch_internals.__file__))
    own = set(own_names(list(trees.values())))
    of_torch = {each.attr for each in ast.walk(door) if isinstance(each, ast.Attribute) and private(each.attr)} - own
    assert of_torch >= {"_popen", "_get_backend", "_register_backend", "_fsdp_param_groups"} - own
    found, known = [], own | OF_OTHERS
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
                words = [*str(node.module).split("."), *(each.name for each in node.names)]
            elif isinstance(node, ast.Import):
                words = [word for each in node.names if each.name.startswith("torch") for word in each.name.split(".")]
            elif isinstance(node, ast.Attribute) and node.attr not in known:
                words = [node.attr]
            else:
                continue
            found += [
                f"{path.relative_to(PACKAGE)}:{node.lineno} {word}"
                for word in words
                if private(word) and not word.startswith("_foreach_")
            ]
    assert found == []


def test_a_pass_that_is_left_keeps_the_gradients_of_shards_alone() -> None:
    """A peer may have committed the step that they belong to; those of whole parameters would be counted twice."""
    needs_torch(SHARDED)
    layout = ShardLayout("cpu", (1,), ("alone",), 0, 1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    with layout.parallelizing():
        for each in (*model, model):
            fully_shard(each, mesh=layout.mesh)
    layout.enter(None, [None], InterruptibleWaits())
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    model(torch.ones(1, 3)).sum().backward()
    finished = [each.grad.to_local().clone() for each in model.parameters() if isinstance(each.grad, DTensor)]
    assert len(finished) == 4
    model(torch.ones(1, 3))
    held = [each for module in modules for group in torch_internals.fsdp_groups(module) for each in group.fsdp_params]
    for parameter in held:
        parameter.unsharded_param.grad = torch.ones_like(parameter.unsharded_param)
    torch_internals.leave_fsdp_pass(modules)
    kept = [each.grad.to_local() for each in model.parameters() if isinstance(each.grad, DTensor)]
    assert all(torch.equal(mine, other) for mine, other in zip(kept, finished, strict=True))
    assert [parameter._unsharded_param.grad for parameter in held] == [None] * 4
    model(torch.ones(1, 3)).sum().backward()
    twice = [each.grad.to_local() for each in model.parameters() if isinstance(each.grad, DTensor)]
    assert all(torch.equal(mine, 2 * other) for mine, other in zip(twice, finished, strict=True))
    layout.leave()


class Recorded:
    """A group of a backend that sends several tensors as one operation."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _get_backend(self, device: torch.device) -> Recorded:
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)

        return call


def test_several_transfers_are_one_operation_where_the_backend_can() -> None:
    """torch 2.14 asks any group how it sends them; what is waited for is the operation's work, not the parts'."""
    group, real = LastingGroup("pair", 0, [0, 1]), Recorded()
    group.point_at(real, InterruptibleWaits())
    tensor, device = torch.ones(1), torch.device("cpu")
    assert group._get_backend(device).supports_coalescing
    group._start_coalescing(device)
    parts = [group.send([tensor], 1, 0), group.recv([tensor], 1, 0)]
    work = group._end_coalescing(device)
    assert not any(hasattr(each, "_works") for each in parts)
    assert work.wait()
    assert hasattr(group.send([tensor], 1, 0), "_works")
    assert real.calls == ["_start_coalescing", "send", "recv", "_end_coalescing", "send"]
    group.unregister()
