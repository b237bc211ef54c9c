"""Other people's programs: what each needs, how it is started, and the tiny data that it trains on, made on the spot.

Sources that are on no package index (nanoGPT, the DDP tutorial, Accelerate's example) are the user's to fetch, into one
folder for each below ``--sources``; they are copied into the job's folder and run as they are.
"""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

JOB = Path(__file__).with_name("programs_job.py")
IN_PLACE = Path(__file__).parents[1] / "drills" / "frameworks" / "train.py"
STANDINS = Path(__file__).with_name("programs_standins")
ENDLESS, PACE_S = 10**6, 0.005
_WORDS = ("red", "green", "blue", "one", "two", "three", "stands", "runs", "sleeps", "not")


def _nothing(work: Path) -> None:
    """The program brings its own data."""


@dataclass(frozen=True, slots=True)
class Program:
    """One program. ``entry`` is a script, relative to the job's working directory if it is not absolute."""

    name: str
    entry: tuple[str, ...]
    packages: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    """Files below the sources' folder for this program; the folder has the program's name."""
    prepare: Callable[[Path], None] = _nothing
    environment: Mapping[str, str] = field(default_factory=dict)
    in_place: str = ""
    """The script's twin with a session, in ``tests/drills/frameworks/train.py``."""
    needs_gpu: str = ""

    def missing(self, sources: Path | None) -> str:
        """Why it cannot run here; empty if it can."""
        if self.needs_gpu:
            return f"needs a GPU: {self.needs_gpu}"
        absent = [package for package in self.packages if find_spec(package) is None]
        if absent:
            return f"not installed: {', '.join(absent)}"
        if self.sources and sources is None:
            return f"source not given: --sources names no folder with {self.name}/"
        lacking = [name for name in self.sources if sources and not (sources / self.name / name).is_file()]
        return f"source not given: {sources}/{self.name} has no {', '.join(lacking)}" if lacking else ""

    def place(self, work: Path, sources: Path | None) -> None:
        """Fill its working directory: its sources and data."""
        if sources is not None:
            for name in self.sources:
                shutil.copy(sources / self.name / name, work / name)
        self.prepare(work)

    def words(self, work: Path) -> list[str]:
        """What torchrun is given."""
        return [str(work / self.entry[0]), *self.entry[1:]]

    def words_in_place(self, work: Path) -> list[str]:
        """The same for its twin."""
        return [str(IN_PLACE), self.in_place, str(work), str(ENDLESS), f"{PACE_S:g}"]


def _ours(framework: str, *packages: str, in_place: str = "") -> Program:
    entry = (str(JOB), framework, "out", f"{PACE_S:g}")
    return Program(framework, entry, packages, in_place=in_place)


def characters(work: Path) -> None:
    """nanoGPT's data: numbers of characters, two files of them, and how many there are."""
    data = work / "data" / "tiny"
    data.mkdir(parents=True)
    draw = random.Random(1)
    for name in ("train", "val"):
        text = bytes(byte for _ in range(4096) for byte in (draw.randrange(16), 0))  # uint16
        (data / f"{name}.bin").write_bytes(text)
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 16}))


def sentences(work: Path) -> None:
    """What Accelerate's example asks the hub for, as local folders of the same names: a model, its words, and pairs."""
    draw = random.Random(1)
    (pairs := work / "glue").mkdir()
    for split, count in (("train", 40_000), ("validation", 64)):
        rows = [
            {
                "sentence1": " ".join(draw.choices(_WORDS, k=4)),
                "sentence2": " ".join(draw.choices(_WORDS, k=4)),
                "label": draw.randrange(2),
                "idx": number,
            }
            for number in range(count)
        ]
        (pairs / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"      - split: {each}\n        path: {each}.jsonl\n" for each in ("train", "validation"))
    (pairs / "README.md").write_text(f"---\nconfigs:\n  - config_name: mrpc\n    data_files:\n{files}---\n")
    (model := work / "bert-base-cased").mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS]
    (model / "vocab.txt").write_text("\n".join(words) + "\n")
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    BertForSequenceClassification(BertConfig(vocab_size=len(words), **tiny)).save_pretrained(model)
    BertTokenizerFast(str(model / "vocab.txt"), do_lower_case=False).save_pretrained(model)
    (work / "evaluate.py").write_text(_EVALUATE)


_EVALUATE = '''"""Stands in for the package, whose metrics are on the hub."""


class _Accuracy:
    right = of = 0

    def add_batch(self, predictions, references):
        self.right, self.of = self.right + int((predictions == references).sum()), self.of + len(references)

    def compute(self):
        return {"accuracy": self.right / max(1, self.of), "f1": 0.0}


def load(*names):
    return _Accuracy()
'''
_NANOGPT = {
    "backend": "gloo", "device": "cpu", "dtype": "float32", "compile": False, "dataset": "tiny", "eval_interval": 20,
    "eval_iters": 1, "log_interval": 1000, "gradient_accumulation_steps": 2, "batch_size": 4, "block_size": 16,
    "n_layer": 1, "n_head": 2, "n_embd": 16, "max_iters": ENDLESS, "wandb_log": False, "warmup_iters": 0,
}  # fmt: skip
PROGRAMS = (
    _ours("ddp"),
    Program(
        "nanogpt",
        ("train.py", *(f"--{name}={value}" for name, value in _NANOGPT.items())),
        sources=("train.py", "model.py", "configurator.py"),
        prepare=characters,
        environment={"BENCH_WITHOUT_GPU": "1"},
    ),
    _ours("transformers", "transformers", "accelerate", in_place="transformers"),
    Program(
        "accelerate",
        ("complete_nlp_example.py", "--cpu", "--checkpointing_steps=50", "--output_dir=out"),
        packages=("accelerate", "transformers", "datasets"),
        sources=("complete_nlp_example.py",),
        prepare=sentences,
        environment={"HF_HUB_OFFLINE": "1"},
        in_place="accelerate",
    ),
    _ours("lightning", "lightning", in_place="lightning"),
    _ours("fabric", "lightning", in_place="fabric"),
    _ours("ignite", "ignite"),
    Program(
        "multigpu_torchrun",
        ("multigpu_torchrun.py", str(ENDLESS), "1"),
        sources=("multigpu_torchrun.py", "datautils.py"),
        environment={"BENCH_WITHOUT_GPU": "1"},
    ),
    Program(
        "torchtitan",
        ("-m", "torchtitan.train"),
        packages=("torchtitan",),
        needs_gpu="its Trainer takes a CUDA device, and importing it takes triton",
    ),
)
"""``ddp`` is this project's own, so that something is always there to compare; then the eight."""


def chosen(names: Sequence[str]) -> list[Program]:
    """Those with these names; all without any."""
    return [program for program in PROGRAMS if program.name in names or not names]
