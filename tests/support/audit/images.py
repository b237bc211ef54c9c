"""The images that files name, compared with ``deploy/images.yaml``: pinned in one place, none with a known hole.

Offline: which versions have holes is written down there by whoever looks, and the audit says when nobody has for long.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path

import yaml
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tests.support.audit.asking import AuditError
from tests.support.audit.judging import Verdict

LOOK_EVERY = timedelta(days=90)
OURS = "elastic-trainer"
"""Built from this repository, and nobody else's to pin."""
_REFERENCE = re.compile(r"""^\s*(?:image:\s*|ARG BASE_IMAGE=)["']?([^\s"'#]+)""", re.MULTILINE)


class Image(BaseModel):
    """One line of the file. ``digest``: None where nobody could look it up."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    tag: str
    at_least: str
    reason: str = Field(min_length=20)
    digest: str | None = Field(pattern="^sha256:[0-9a-f]{64}$")

    @property
    def reference(self) -> str:
        return f"{self.name}:{self.tag}" + (f"@{self.digest}" if self.digest else "")


class Images(BaseModel):
    """The file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    looked_at: date
    images: tuple[Image, ...]


def read_images(path: Path) -> Images:
    """The file of images."""
    try:
        return Images.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise AuditError(f"{path}: {error}") from error


def references(root: Path) -> dict[str, list[str]]:
    """The images that manifests, compose files and the Dockerfile name, by file; that of the chart is the user's."""
    manifests = [path for path in root.glob("k8s/**/*.yaml") if not path.is_relative_to(root / "k8s/chart")]
    files = [root / "Dockerfile", *root.glob("deploy/*.yaml"), *manifests]
    found = {
        str(path.relative_to(root)): _REFERENCE.findall(path.read_text(encoding="utf-8")) for path in sorted(files)
    }
    return {name: each for name, each in found.items() if each}


def judge_images(known: Images, used: Mapping[str, Sequence[str]], today: date, *, strict: bool = False) -> Verdict:
    """What is wrong with the images of ``used``, and what should be looked at."""
    failures, notes, seen = [], [], set()
    pinned = {image.reference: image for image in known.images}
    for file, names in used.items():
        for name in names:
            if name.partition(":")[0].rpartition("/")[2] == OURS:
                continue
            seen.add(name)
            if name not in pinned:
                failures.append(f"{file} names {name}, which deploy/images.yaml does not")
    for reference, image in pinned.items():
        if _version(image.tag) < _version(image.at_least):
            failures.append(f"{reference} is older than {image.at_least}: {image.reason}")
        if reference not in seen:
            failures.append(f"deploy/images.yaml pins {reference}, which no file names")
    missing = [image.name for image in known.images if image.digest is None]
    if missing:
        notes.append(f"by tag and not by digest, since no registry was asked: {', '.join(missing)}")
    if today - known.looked_at > LOOK_EVERY:
        late = f"nobody has compared the images with their releases since {known.looked_at}; see deploy/images.yaml"
        (failures if strict else notes).append(late)
    return Verdict(tuple(failures), tuple(notes))


def _version(tag: str) -> Version:
    return Version(tag.partition("-")[0].removeprefix("v"))
