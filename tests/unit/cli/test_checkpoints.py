"""``elastic-trainer checkpoints``: looking, comparing, removing; for people, for scripts, and without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from elastic_trainer.checkpoint import CheckpointManager, Retention, SaveInfo, describe
from elastic_trainer.checkpoint.comparison import difference, numbers
from elastic_trainer.cli import checkpoints
from elastic_trainer.cli.main import main
from elastic_trainer.clock import SYSTEM, Deadline
from elastic_trainer.membership.documents import SaveRequest
from elastic_trainer.store.api import Put, RunKeys
from tests.support.memory_store import MemoryStore
from tests.unit.checkpoint.states import flip_bit
from tests.unit.checkpoint.test_commit import another
from tests.unit.checkpoint.test_exporting import tied_model


def state(step: int) -> dict[str, Any]:
    """One with a tensor that depends on ``step`` and one that does not."""
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    weight[1, 2] += step
    return {"model": {"w": weight, "same": torch.ones(4).to(torch.bfloat16)}, "cursor": {"samples": step, "epoch": 1}}


def saved(directory: Path, *steps: int) -> list[str]:
    """Names of checkpoints; that of step 20 is the best."""
    manager = CheckpointManager(directory, Retention(keep_last=100))
    infos = [
        SaveInfo(step, 1, step // 10, step * 4, 2, {"accuracy": step / 100}, best=step == 20, fields={"seed": 1})
        for step in steps
    ]
    return [manager.save(state(info.step), info).name for info in infos]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    saved(tmp_path / "checkpoints", 10, 20, 30)
    return tmp_path / "checkpoints"


def names(directory: Path) -> list[str]:
    return [each.name for each in describe(directory, read_all=False)]


def damage(directory: Path, number: int = 0) -> str:
    name = names(directory)[number]
    flip_bit(
        directory / name / "tensors.safetensors", 8 * (directory / name / "tensors.safetensors").stat().st_size - 9
    )
    return name


def ran(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """What the command wrote; its exit code is ``code``."""
    capsys.readouterr()  # log lines of what the test has saved
    assert main(["checkpoints", *map(str, words)]) == code
    return capsys.readouterr().out


def parsed(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    return json.loads(ran(capsys, *words, "--json", code=code))


# ---- list and show


def test_checkpoints_are_listed_newest_first(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With epoch, age, size, metrics and status, and what cannot be read; nothing is claimed about bytes that were not
    read; that there are none is no error."""
    monkeypatch.setenv("COLUMNS", "100")  # in 80 the metrics take two lines where the age is as long as "12.3 ms"
    rows = [line for line in ran(capsys, "list", directory).splitlines() if "step-0" in line]
    assert [row.split()[0] for row in rows] == names(directory)
    assert ["(best)" in row for row in rows] == [False, True, False]
    assert all("unverified" in row and re.search(r"\d m?s ", row) for row in rows)
    listed = parsed(capsys, "list", directory)["checkpoints"]
    assert [(each["step"], each["best"], each["metrics"]["accuracy"]) for each in listed] == [
        (30, False, 0.3), (20, True, 0.2), (10, False, 0.1),
    ]  # fmt: skip
    name = names(directory)[0]
    (directory / name / "manifest.json").write_text("x")
    output = ran(capsys, "list", directory, code=1)
    assert "damaged" in output
    assert f"{name}: checkpoint {name}: the manifest does not match" in output
    (directory.parent / "empty").mkdir()
    assert ran(capsys, "list", directory.parent / "empty") == f"no checkpoints in {directory.parent}/empty\n"


def test_the_list_fits_eighty_columns(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No name is cut or broken, with months of age and many metrics."""
    narrow = Console(width=80)
    narrow.print(checkpoints.table(describe(directory, read_all=False), SYSTEM.wall() + 1e7))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.startswith("step-")] == names(directory)


def test_one_is_shown_with_its_tensors_and_totals(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest by default; ``best``, or a name that may be cut short, chooses another."""
    output = ran(capsys, "show", directory)
    assert all(part in output for part in ("model/w", "BF16", "fields.seed"))
    shown = parsed(capsys, "show", directory / "best")
    assert (shown["step"], shown["fields"], shown["format"]) == (20, {"seed": 1}, 1)
    assert shown["tensors"] == [
        {"name": "model/w", "dtype": "F32", "shape": [2, 3], "bytes": 24},
        {"name": "model/same", "dtype": "BF16", "shape": [4], "bytes": 8},
    ]
    assert shown["parts"] == {"model": {"tensors": 2, "bytes": 32}}
    assert parsed(capsys, "show", f"{directory}/step-000000010")["step"] == 10
    assert parsed(capsys, "show", directory / "newest")["step"] == 30


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["show", "{}/step-00000002"], "3 checkpoints of {} begin with step-00000002 (give more of step-0000000"),
        (["show", "{}/step-7"], "no checkpoint of {} begins with step-7 (see elastic-trainer checkpoints list {})"),
        (["show", "{}/gone"], "there is no directory '{}/gone'"),
        (["show", "{}/gone/best"], "there is no directory '{}/gone'"),
        (["show", "{}/empty"], "there are no checkpoints in {}/empty"),
        (["show", "{}/empty/best"], "no checkpoint in {}/empty was saved as best"),
        (["verify", "{}/empty", "--all"], "there are no checkpoints in {}/empty"),
        (["prune", "{}"], "the following arguments are required: --keep-last"),
        (["prune", "{}", "--keep-last", "0"], "keep_last is 0"),
        (["prune", "{}", "--keep-last", "1", "--keep-best", "1"], "--keep-best and --metric need each other"),
        (["export", "{}", "x", "--to", "onnx"], "argument --to: invalid choice: 'onnx'"),
        (["export", "{}", "x", "--to", "huggingface", "--all"], "--all and --to huggingface exclude each other"),
        (["import", "{}/gone.pt", "--into", "{}"], "there is no '{}/gone.pt'"),
        ([], "the following arguments are required: ACTION"),
        (["forget"], "argument ACTION: invalid choice: 'forget'"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: Sequence[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And exit code 78; suggestions can be copied as they are."""
    directory = tmp_path / "my runs"
    saved(directory, 20, 21, 22)
    (directory / "empty").mkdir()
    assert main(["checkpoints", *(word.format(directory) for word in words)]) == 78
    error = capsys.readouterr().err
    said = sentence.replace("list {}", f"list '{directory}'").format(*[directory] * 3)
    assert error.startswith(f"elastic-trainer: {said}")
    assert error.count("\n") == 1


# ---- verify


def test_verify_reads_every_byte(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped bit is exit code 1 and the name of the damaged checkpoint; the others are verified."""
    assert {each["status"] for each in parsed(capsys, "verify", directory, "--all")["checkpoints"]} == {"verified"}
    name = damage(directory, 1)
    found = parsed(capsys, "verify", directory, "--all", code=1)["checkpoints"]
    assert [each["status"] for each in found] == ["verified", "damaged", "verified"]
    assert (found[1]["name"], "do not match their checksum" in found[1]["problem"]) == (name, True)
    assert ran(capsys, "verify", directory).startswith(f"{names(directory)[0]}: verified")
    assert f"{name}: damaged" in ran(capsys, "verify", directory / name, code=1)


# ---- diff


def test_diff_names_what_differs(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Facts, values, and tensors with the number of elements and the largest difference; exit code 1.

    What is damaged is trouble, no difference.
    """
    found = parsed(capsys, "diff", directory / "step-000000010", directory / "step-000000030", code=1)
    assert {"path": "step", "left": 10, "right": 30} in found["facts"]
    assert {"path": "metrics.accuracy", "left": 0.1, "right": 0.3} in found["facts"]
    assert found["values"] == [{"path": "cursor/samples", "left": 10, "right": 30}]
    assert found["tensors"] == [
        {"path": "model/w", "left": "F32[2, 3]", "right": "F32[2, 3]", "elements": 6, "different": 1, "largest": 20.0}
    ]
    assert found["equal_tensors"] == 1
    text = ran(capsys, "diff", directory / "step-000000010", directory, code=1)
    assert "  model/w F32[2, 3]: 1 of 6 differ, by up to 20\n" in text
    assert "  cursor/samples: 10 -> 30\n" in text
    damage(directory)
    assert main(["checkpoints", "diff", str(directory), f"{directory}/best"]) == 2
    assert "do not match their checksum" in capsys.readouterr().err


def test_equal_checkpoints_do_not_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever their names and times are; tensors of equal files are not even read."""
    saved(tmp_path / "a", 10)
    saved(tmp_path / "b", 10)
    assert ran(capsys, "diff", tmp_path / "a", tmp_path / "b") == "no differences\ntensors: 2 equal, 0 different\n"


def test_tensors_of_other_shapes_or_only_one_side_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are not compared element by element; two names of one stored tensor are two tensors."""
    one, tied = torch.zeros(2), torch.zeros(3)
    for name, content in (("a", {"x": one, "t": [tied, tied]}), ("b", {"x": torch.zeros(3), "t": [tied], "y": one})):
        CheckpointManager(tmp_path / name).save(content, SaveInfo(1))
    found = parsed(capsys, "diff", tmp_path / "a", tmp_path / "b", code=1)["tensors"]
    assert [(each["path"], each["left"], each["right"]) for each in found] == [
        ("x", "F32[2]", "F32[3]"), ("t/1", "F32[3]", None), ("y", None, "F32[2]"),
    ]  # fmt: skip


KINDS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_elements_of_every_type_are_numbers(dtype: torch.dtype) -> None:
    """What numpy makes of their bytes is what torch makes of them, over the whole range of the small types."""
    from elastic_trainer.checkpoint.codec import element_type, memory

    raw = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.uint8)
    few = raw if dtype is not torch.bool else raw % 2
    elements = few.view(dtype)
    found = torch.from_numpy(
        numbers(torch.frombuffer(memory(elements), dtype=torch.uint8).numpy(), element_type(elements))
    )
    assert torch.equal(found.nan_to_num(7e77), elements.double().nan_to_num(7e77))


def test_a_difference_to_no_number_is_none() -> None:
    import numpy as np

    left, right = np.array([1.0, np.nan, 3.0], "f4").view(np.uint8), np.array([1.0, np.nan, 5.0], "f4").view(np.uint8)
    assert difference(left, right, "F32") == (1, 2.0)
    count, largest = difference(left, np.array([1.0, 2.0, 5.0], "f4").view(np.uint8), "F32")
    assert (count, largest != largest) == (2, True)


# ---- prune


def test_prune_applies_the_rules_of_training(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--dry-run`` says what would go and removes nothing; the best stays, and what is damaged."""
    saved(directory, 40, 50, 60)
    (directory / names(directory)[2] / "manifest.json").write_text("x")
    before = names(directory)
    words = ("prune", directory, "--keep-last", 1, "--keep-every", 50)
    text = ran(capsys, *words, "--dry-run")
    assert text.count("would go") == 2
    assert names(directory) == before
    ruled = parsed(capsys, *words)["checkpoints"]
    assert [each["name"] for each in ruled if not each["keep"]] == [before[3], before[5]]
    assert names(directory) == [before[0], before[1], before[2], before[4]]


def test_prune_keeps_the_best_by_a_metric(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = names(directory)
    ran(capsys, "prune", directory, "--keep-last", 1, "--keep-best", 1, "--metric", "accuracy", "--mode", "min")
    assert names(directory) == before, "the newest, the one saved as best, the one with the lowest accuracy"
    ran(capsys, "prune", directory, "--keep-last", 1, "--keep-best", 1, "--metric", "accuracy", "--mode", "max")
    assert names(directory) == before[:2]


def test_a_directory_in_use_is_not_pruned(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 73 and who uses it, while another process holds its lock; ``--force`` prunes, ``--dry-run`` looks."""
    before = names(directory)
    with another(directory, "night"):
        assert main(["checkpoints", "prune", str(directory), "--keep-last", "1"]) == 73
        error = capsys.readouterr().err
        assert "in use by run 'night'" in error
        assert f"elastic-trainer checkpoints prune {directory} --keep-last 1 --dry-run" in error
        assert names(directory) == before
        ran(capsys, "prune", directory, "--keep-last", 1, "--dry-run")
        ran(capsys, "prune", directory, "--keep-last", 1, "--force")
        assert names(directory) == before[:2]
    ran(capsys, "prune", directory, "--keep-last", 1)


def test_looking_comparing_and_pruning_need_no_torch(directory: Path, tmp_path: Path) -> None:
    """Nor do exports to safetensors and the way back: a machine for storage need not have it."""
    CheckpointManager(directory).save(tied_model(), SaveInfo(40))
    goal = tmp_path / "model.safetensors"
    program = (
        "import sys\nfrom elastic_trainer.cli.main import main\n"
        "d, f = sys.argv[1:]\n"
        "for words, code in [(['list', d], 0), (['show', d], 0), (['verify', d, '--all'], 0),\n"
        "    (['diff', d, d + '/best'], 1), (['prune', d, '--keep-last', '2'], 0),\n"
        "    (['export', d, f, '--to', 'safetensors'], 0), (['export', d, f + '.hf', '--to', 'huggingface'], 0),\n"
        "    (['export', d, f, '--to', 'safetensors', '--all', '--force'], 0),\n"
        "    (['import', f, '--into', d + '/in'], 0)]:\n"
        "    assert main(['checkpoints', *words]) == code, words\n"
        "assert 'torch' not in sys.modules\n"
    )
    words = [sys.executable, "-c", program, str(directory), str(goal)]
    ran_ = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert ran_.returncode == 0, ran_.stderr


KEYS = RunKeys("/p", "run")


def test_an_answer_is_heard_though_the_next_request_has_replaced_it() -> None:
    """Which may have its own answer by then; the request before both is forgotten."""
    store = MemoryStore()

    def answer(request: SaveRequest, name: str) -> None:
        text = request.model_copy(update={"name": name}).encode()
        store.transact([], [Put(KEYS.save, text)], deadline=Deadline.after(1.0))

    def heard(asked: SaveRequest) -> str:
        answered = checkpoints._wait(store, KEYS, asked, Deadline.after(1.0))
        return "" if answered is None else answered.name

    first = checkpoints._ask(store, KEYS)
    answer(first, "step-1")
    second = checkpoints._ask(store, KEYS)
    assert heard(first) == "step-1"
    answer(second, "step-2")
    assert [heard(first), heard(second)] == ["step-1", "step-2"]
    third = checkpoints._ask(store, KEYS)
    assert heard(second) == "step-2"
    assert third.before is not None
    assert third.before.before is None
