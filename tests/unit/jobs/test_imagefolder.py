"""Images in class folders: files, what a network sees of them, the network and the task."""

from __future__ import annotations

import errno
import pickle
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from elastic_trainer.data.sampler import Batch, Fetcher
from elastic_trainer.data.seeds import SampleSeeds
from elastic_trainer.errors import (
    EXIT_CONFIG,
    EXIT_FAILURE,
    ConfigError,
    DataError,
    ElasticTrainerError,
    SampleError,
    StorageReadError,
)
from elastic_trainer.jobs import digits as digit_images
from elastic_trainer.jobs.config import CosineConfig, MultiStepConfig, load_job
from elastic_trainer.jobs.digits import Digits
from elastic_trainer.jobs.imagefolder import (
    Bottleneck,
    ImageClasses,
    ImageFolder,
    ImageFolderData,
    ResNet,
    ResNetOptions,
    as_bytes,
    central_view,
    image_files,
    jittered,
    normalized,
    random_box,
    random_view,
    read_image,
)
from elastic_trainer.jobs.pillow import Image
from elastic_trainer.settings import cache_directory


def folders(root: Path, **classes: int) -> Path:
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 6), (number, 0, 0)).save(root / name / f"{number}.png")
    return root


def test_classes_are_the_sorted_names_of_folders(tmp_path: Path) -> None:
    folders(tmp_path, dog=2, cat=1, **{".hidden": 1})
    (tmp_path / "README").touch()
    (tmp_path / "dog" / "notes.txt").touch()
    files = image_files(tmp_path)
    assert files.classes == ("cat", "dog")
    assert files.samples == (("cat/0.png", 0), ("dog/0.png", 1), ("dog/1.png", 1))
    sample, label = ImageFolder(files, as_bytes, deterministic=True)[2]
    assert (tuple(sample.shape), int(sample[0, 0, 0]), label) == ((3, 6, 8), 1, 1)
    # Fewer files are spread over all classes, whose folders may be links.
    folders(tmp_path / "real", a=6, b=2, c=4)
    (tmp_path / "links").mkdir()
    for name in "abc":
        (tmp_path / "links" / name).symlink_to(tmp_path / "real" / name)
    files = image_files(tmp_path / "links")
    assert [label for _, label in files.thinned(6).samples] == [0, 0, 0, 1, 2, 2]
    assert files.thinned(None) is files.thinned(100) is files


@pytest.mark.parametrize(
    ("classes", "complaint"),
    [
        (None, "No such file or directory"),
        ({}, "holds no class folders"),
        ({"a": 1, "b": 0}, "b: a class without images"),
    ],
)
def test_folders_that_hold_no_data_are_named(tmp_path: Path, classes: dict[str, int] | None, complaint: str) -> None:
    root = tmp_path / "images"
    if classes is not None:
        root.mkdir()
        folders(root, **classes)
    with pytest.raises(DataError, match=complaint) as caught:
        image_files(root)
    one_sentence(caught.value, root)


def one_sentence(error: ElasticTrainerError, path: Path) -> None:
    assert str(path) in str(error)
    assert "\n" not in str(error)
    assert error.hint
    assert error.exit_code == EXIT_CONFIG


def test_an_image_is_rgb_or_corrupt_and_named_by_its_path(tmp_path: Path) -> None:
    """Grey and transparent ones are converted. Cut off anywhere, empty, or something else; also where a data worker
    process has found it."""
    folders(tmp_path, a=0)
    path = tmp_path / "a" / "0.png"
    for mode in ("L", "LA", "RGBA", "P", "1"):
        Image.new(mode, (3, 2)).save(path)
        assert read_image(path).mode == "RGB"
    noise = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 16, 37):
        path.write_bytes(whole[:length])
        with pytest.raises(SampleError) as caught:
            read_image(path)
        one_sentence(pickle.loads(pickle.dumps(caught.value)), path)
    path.write_text("not an image")
    with pytest.raises(SampleError, match="not an image"):
        read_image(path)
    path.unlink()
    with pytest.raises(SampleError, match="No such file"):
        read_image(path)


def test_a_storage_that_fails_is_no_mistake_in_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit code is one that is tried again: a file server that hesitates must not end a job for good."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(StorageReadError, match="Input/output error") as caught:
        read_image(tmp_path / "a.png")
    assert caught.value.exit_code == EXIT_FAILURE
    assert SampleError.exit_code == EXIT_CONFIG


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is refused before anything is read."""
    for name in [name for name in sys.modules if name == "PIL" or name.startswith("PIL.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "elastic_trainer.jobs.pillow")
    with pytest.raises(DataError, match=r"pip install elastic-trainer\[examples\]") as caught:
        __import__("elastic_trainer.jobs.pillow")
    assert caught.value.exit_code == EXIT_CONFIG


def few_digits() -> Digits:
    labels = (np.arange(1020) % 10).astype(np.uint8)
    return Digits(np.repeat(labels, 784).reshape(-1, 28, 28), labels)


def test_digits_become_class_folders_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels arrive unchanged, and a second call finds what the first one wrote."""
    monkeypatch.setattr(digit_images, "shipped_digits", few_digits)
    root = digit_images.digit_images(tmp_path)
    train, test = image_files(root / "train"), image_files(root / "test")
    assert (len(train), len(test), train.classes) == (20, 1000, tuple("0123456789"))
    sample, label = ImageFolder(train, as_bytes, deterministic=True)[-1]
    assert (torch.unique(sample).tolist(), label) == ([9], 9)
    monkeypatch.setattr(digit_images, "shipped_digits", None)
    assert digit_images.digit_images(tmp_path) == root


def test_several_processes_may_write_the_digits_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All find them missing, all write, one is first: each gets the whole of it, and nothing else is left."""
    found: list[int] = []
    others = iter(range(2))

    def make() -> None:
        found.append(len(image_files(digit_images.digit_images(tmp_path) / "test")))

    def meanwhile() -> Digits:
        if next(others, None) is not None:
            make()
        return few_digits()

    monkeypatch.setattr(digit_images, "shipped_digits", meanwhile)
    make()
    assert found == [1000] * 3
    assert [path.name for path in tmp_path.iterdir()] == [digit_images.NAME]


@pytest.mark.parametrize("fault", ["unwritable", "damaged"])
def test_the_users_own_cache_is_no_reason_to_fail(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits are written to a temporary directory where it cannot be written, or holds a file without a byte."""
    monkeypatch.setattr(digit_images, "shipped_digits", few_digits)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" if fault == "unwritable" else tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if fault == "unwritable":
        (tmp_path / "file").touch()
        with pytest.raises(ElasticTrainerError, match=r"cannot be written.*data\.cache"):  # one that was asked for is
            digit_images.digit_images(tmp_path / "file" / "cache")
    else:
        (digit_images.digit_images() / "train" / "0" / "0000.png").write_bytes(b"")
    root = digit_images.digit_images()
    assert root.parent.name.startswith("elastic-trainer-digit-images-1-")
    assert len(image_files(root / "test")) == 1000


def test_the_cache_follows_the_xdg_variable(tmp_path: Path) -> None:
    """An absolute one; else it is in the home directory."""
    assert cache_directory({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "elastic_trainer"
    at_home = Path("~/.cache/elastic_trainer").expanduser()
    assert cache_directory({}) == cache_directory({"XDG_CACHE_HOME": "relative"}) == at_home


def picture(width: int = 40, height: int = 30) -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def test_a_sample_is_seen_alike_wherever_it_is_drawn_and_otherwise_in_another_epoch() -> None:
    options = ImageFolderData(size=16, jitter=(0.4, 0.4, 0.4))
    seeds = SampleSeeds(3)

    def drawn(epoch: int, number: int) -> torch.Tensor:
        seeds.sample(epoch, number)
        return random_view(picture(), options)

    first = drawn(1, 5)
    others = [drawn(1, 6), drawn(2, 5)]
    assert first.shape == (3, 16, 16)
    assert first.dtype is torch.uint8
    assert torch.equal(drawn(1, 5), first)
    assert not any(torch.equal(other, first) for other in others)


@given(
    width=st.integers(1, 500),
    height=st.integers(1, 500),
    least=st.floats(0.01, 1.0),
    ratio=st.floats(0.1, 1.0),
    seed=st.integers(0, 99),
)
def test_a_random_part_lies_within_the_image(width: int, height: int, least: float, ratio: float, seed: int) -> None:
    random.seed(seed)
    left, top, right, bottom = random_box(width, height, (least, 1.0), (ratio, 1 / ratio))
    assert 0 <= left < right <= width + 1e-9
    assert 0 <= top < bottom <= height + 1e-9


def test_flips_are_as_frequent_as_asked() -> None:
    square = picture(30, 30)
    plain = as_bytes(square)
    for flip, seen in ((0.0, plain), (1.0, plain.flip(2))):
        options = ImageFolderData(size=30, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=flip)
        assert torch.equal(random_view(square, options), seen)


def test_jitter_changes_colours_only_where_asked() -> None:
    """None leaves the image itself; brightness moves by at most its part."""
    image = Image.new("RGB", (4, 4), (100, 100, 100))
    assert jittered(image, (0.0, 0.0, 0.0)) is image
    random.seed(0)
    seen = {int(as_bytes(jittered(image, (0.5, 0.0, 0.0))).max()) for _ in range(50)}
    assert min(seen) >= 50
    assert max(seen) <= 150
    assert len(seen) > 10


def test_tests_see_the_middle() -> None:
    """The shorter side becomes `resize`, and the square in the middle of it is cut out."""
    array = np.zeros((20, 40, 3), dtype=np.uint8)
    array[5:15, 15:25] = 255
    seen = central_view(Image.fromarray(array), ImageFolderData(size=10, resize=20))
    assert seen.shape == (3, 10, 10)
    assert int(seen.min()) == 255


def test_bytes_are_normalized_by_colour() -> None:
    """White is 1 before the mean is taken off."""
    image = torch.tensor([255, 0, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    assert normalized(image, (0.5, 0.5, 0.0), (0.5, 0.25, 0.1)).flatten().tolist() == pytest.approx([1.0, -2.0, 2.0])


@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_parameters_are_those_of_the_published_networks(depth: Any, parameters: int) -> None:
    """As many as the papers count, with torchvision's names."""
    with torch.device("meta"):
        network = ResNet(1000, ResNetOptions(depth=depth))
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    names = set(network.state_dict())
    block = {"layer2.0.downsample.0.weight", "layer2.0.downsample.1.num_batches_tracked", "layer3.1.conv2.weight"}
    assert {"conv1.weight", "bn1.running_mean", "layer4.1.bn2.bias", "fc.weight", "fc.bias"} | block <= names
    assert {name.split(".")[0] for name in names} == {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"}


@pytest.mark.parametrize(("stem", "side"), [("small", 4), ("imagenet", 1)])
def test_the_small_stem_keeps_the_resolution(stem: Any, side: int) -> None:
    """Of 32 pixels 4 are left before the last mean, of the usual stem one."""
    network = ResNet(3, ResNetOptions(width=4, stem=stem)).eval()
    sides: list[int] = []
    network.layer4.register_forward_hook(lambda _module, _inputs, output: sides.append(output.shape[-1]))
    with torch.no_grad():
        assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    assert sides == [side]


def test_with_zero_gamma_blocks_begin_as_the_identity() -> None:
    """What goes past a block is all that comes out of it."""
    network = ResNet(2, ResNetOptions(depth=50, width=4, stem="small")).eval()
    block = network.layer1[1]
    assert isinstance(block, Bottleneck)
    x = torch.rand(2, 16, 8, 8)
    with torch.no_grad():
        assert torch.equal(block(x), x)
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert [bool(norm.weight.any()) for norm in norms].count(False) == 16


SMALL = ("data.size=16", "data.resize=16", "model.width=4")


def images(root: Path, classes: str = "abc", parts: tuple[str, ...] = ("train", "val"), count: int = 4) -> Path:
    for part in parts:
        for number, name in enumerate(classes):
            (root / part / name).mkdir(parents=True)
            for index in range(count):
                value = 60 * number + index
                Image.new("L", (20, 16), value).save(root / part / name / f"{index}.png")
    return root


def task(root: Path, *overrides: str) -> ImageClasses:
    made = ImageClasses(load_job("imagefolder", [f"data.directory={root}", *SMALL, *overrides]))
    made.data = made.datasets()  # type: ignore[attr-defined]
    return made


def test_metrics_are_sums_and_counts_that_add_up(tmp_path: Path) -> None:
    """Those of parts add up to those of the whole, which are those computed by hand; top5 of three classes is none."""
    made = task(images(tmp_path), "options.label_smoothing=0.1", "options.top=[1, 2, 5]")
    data, model = made.datasets(), made.model().eval()
    fetch = Fetcher(data.test, torch.device("cpu"))
    ids = np.arange(12)
    with torch.no_grad():
        whole, *parts = (made.metrics(model, Batch(fetch, part, part)) for part in (ids, ids[:5], ids[5:]))
        batch = Batch(fetch, ids, ids)
        scores = model((batch.x / 255.0 - 0.1307) / 0.3081)
        smoothed = made.loss(model, batch)
    assert made.identity() == {"classes": ("a", "b", "c")}
    assert scores.shape == (12, 3)
    assert set(whole) == {"top1", "top2", "loss"}
    for name, (total, count) in whole.items():
        assert count == 12
        assert sum(float(part[name][0]) for part in parts) == pytest.approx(float(total))
    assert int(whole["top1"][0]) == int((scores.argmax(1) == batch.y).sum())
    assert int(whole["top2"][0]) == int((scores.argsort(descending=True)[:, :2] == batch.y[:, None]).sum())
    loss = functional.cross_entropy(scores, batch.y)
    assert float(whole["loss"][0]) / 12 == pytest.approx(float(loss))
    assert float(smoothed) == pytest.approx(float(functional.cross_entropy(scores, batch.y, label_smoothing=0.1)))


def test_norms_and_biases_do_not_decay_unless_asked(tmp_path: Path) -> None:
    network = ResNet(3, ResNetOptions(width=4))
    made = task(images(tmp_path))
    weights, others = made.optimizer(network).param_groups
    assert (weights["weight_decay"], others["weight_decay"]) == (0.0005, 0.0)
    assert {parameter.dim() for parameter in weights["params"]} == {2, 4}
    assert {parameter.dim() for parameter in others["params"]} == {1}
    assert len(weights["params"]) + len(others["params"]) == len(list(network.parameters()))
    everything = task(tmp_path, "options.decay_all=true").optimizer(network)
    assert [group["weight_decay"] for group in everything.param_groups] == [0.0005]


def test_test_images_may_be_in_val_or_test_or_anywhere(tmp_path: Path) -> None:
    """`directory` has either name; `train` and `test` name both folders."""
    one = images(tmp_path / "one", parts=("train", "test"))
    assert len(task(one).datasets().test) == 12
    apart = [f"data.train={one / 'train'}", f"data.test={one / 'test'}"]
    assert len(ImageClasses(load_job("imagefolder", [*SMALL, *apart])).datasets().test) == 12
    (one / "test").rename(one / "elsewhere")
    with pytest.raises(DataError, match="has neither val/ nor test/"):
        task(one)
    with pytest.raises(DataError, match="there is no such directory"):
        task(tmp_path / "absent")


@pytest.mark.parametrize(
    ("train", "val", "sentence"),
    [("abc", "b", "val lacks classes 'a', 'c' of .*train"), ("b", "ab", "train lacks class 'a' of .*val")],
)
def test_training_and_test_classes_must_be_the_same(tmp_path: Path, train: str, val: str, sentence: str) -> None:
    images(tmp_path, train, ("train",))
    images(tmp_path, val, ("val",))
    with pytest.raises(DataError, match=sentence) as caught:
        task(tmp_path)
    one_sentence(caught.value, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["data.train=x"], "'train' and 'test' go together"),
        (["data.train=x", "data.test=y", "data.directory=z"], "either 'directory' or 'train' and 'test'"),
        (["data.scale=[0.9, 0.5]"], "a least and a most"),
        (["data.scale=[0, 0.5]"], "data.scale"),
        (["data.resize=20"], "'resize' 20 is below 'size' 28"),
        (["model.depth=19"], "model.depth"),
        (["model.stem=big"], "model.stem"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ImageClasses(load_job("imagefolder", overrides))


def test_the_job_file_for_imagenet_is_right(tmp_path: Path) -> None:
    """It parses, its network is ResNet-50, and its schedule falls at the published epochs."""
    root = images(tmp_path)
    made = ImageClasses(load_job("imagefolder_imagenet", [f"data.directory={root}"]))
    made.datasets()
    with torch.device("meta"):
        network = made.model()
    assert sum(parameter.numel() for parameter in network.parameters()) == 25_557_032 - (1000 - 3) * 2049
    assert (made.config.epochs, made.config.global_batch) == (90, 256)
    assert isinstance(made.config.scheduler, MultiStepConfig)
    assert list(made.config.scheduler.milestones) == [30, 60, 80]
    assert isinstance(load_job("imagefolder").scheduler, CosineConfig)
