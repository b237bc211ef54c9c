"""Images in class folders: the network and the task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from elastic_trainer.data.sampler import Batch, Fetcher
from elastic_trainer.errors import ConfigError, DataError
from elastic_trainer.jobs.config import CosineConfig, MultiStepConfig, load_job
from elastic_trainer.jobs.imagefolder import Bottleneck, ImageClasses, ResNet, ResNetOptions, hits_among
from elastic_trainer.jobs.pillow import Image
from elastic_trainer.jobs.task import decay_groups


@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
def test_parameters_are_those_of_the_published_networks(depth: Any, parameters: int) -> None:
    with torch.device("meta"):
        network = ResNet(1000, ResNetOptions(depth=depth))
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def test_parameters_are_named_as_torchvision_names_them() -> None:
    with torch.device("meta"):
        names = set(ResNet(1000, ResNetOptions(depth=50)).state_dict())
    assert {
        "conv1.weight",
        "bn1.running_mean",
        "layer1.0.downsample.0.weight",
        "layer1.0.downsample.1.num_batches_tracked",
        "layer3.5.conv2.weight",
        "layer4.2.bn3.bias",
        "fc.weight",
        "fc.bias",
    } <= names
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


def test_classes_are_the_folders_and_part_of_the_identity(tmp_path: Path) -> None:
    made = task(images(tmp_path))
    assert made.identity() == {"classes": ("a", "b", "c")}
    assert made.model().eval()(torch.zeros(2, 3, 16, 16)).shape == (2, 3)


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
    assert set(whole) == {"top1", "top2", "loss"}
    for name, (total, count) in whole.items():
        assert count == 12
        assert sum(float(part[name][0]) for part in parts) == pytest.approx(float(total))
    assert int(whole["top1"][0]) == int((scores.argmax(1) == batch.y).sum())
    loss = functional.cross_entropy(scores, batch.y)
    assert float(whole["loss"][0]) / 12 == pytest.approx(float(loss))
    assert float(smoothed) == pytest.approx(float(functional.cross_entropy(scores, batch.y, label_smoothing=0.1)))


def test_hits_among_the_best_guesses() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    labels = torch.tensor([0, 1, 2])
    assert [int(hits_among(scores, labels, count)) for count in (1, 2, 3)] == [1, 2, 3]


def test_norms_and_biases_do_not_decay_unless_asked(tmp_path: Path) -> None:
    network = ResNet(3, ResNetOptions(width=4))
    weights, others = decay_groups(network.parameters())
    assert others["weight_decay"] == 0.0
    assert {parameter.dim() for parameter in weights["params"]} == {2, 4}
    assert {parameter.dim() for parameter in others["params"]} == {1}
    assert len(weights["params"]) + len(others["params"]) == len(list(network.parameters()))
    made = task(images(tmp_path))
    decays = [group["weight_decay"] for group in made.optimizer(network).param_groups]
    assert decays == [0.0005, 0.0]
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


def test_classes_that_the_test_lacks_are_named(tmp_path: Path) -> None:
    images(tmp_path, "abc", ("train",))
    images(tmp_path, "ab", ("val",))
    with pytest.raises(DataError, match=r"val lacks class 'c' of .*train"):
        task(tmp_path)


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
