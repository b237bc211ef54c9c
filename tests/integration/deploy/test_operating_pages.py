"""The pages for operators name commands, units and numbers that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.commands import understand
from tests.support.deployment import DEPLOY
from tests.support.units import SYSTEMD, UNITS, unit

PAGES = (DEPLOY / "operations.md", DEPLOY / "capacity.md", DEPLOY / "slurm" / "README.md")
ETCD = unit(SYSTEMD / "elastic-trainer-etcd.service")
BACKUP = unit(SYSTEMD / "elastic-trainer-etcd-backup.service")
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}


def lines(page: Path) -> list[str]:
    """The lines of all fenced blocks."""
    return [
        line for block in re.findall(r"^```\w*\n(.*?)^```$", TEXTS[page], re.M | re.S) for line in block.splitlines()
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DEPLOY)))
def test_commands_exist(page: Path) -> None:
    """Each of ours is understood by its own parser; files that are copied or submitted are there."""
    for line in lines(page):
        words = shlex.split(line, comments=True)
        if words[:1] == ["elastic-trainer"]:
            understand(words)
        for word in words:
            if word.startswith("deploy/"):
                assert (DEPLOY.parent / word).is_file(), line


def test_units_and_numbers_are_those_of_the_files() -> None:
    """What the page says of the units stands in them."""
    page = TEXTS[DEPLOY / "operations.md"]
    files = {path.name for path in UNITS}
    assert {
        f"{name}.{kind}" for name, kind in re.findall(r"`(elastic-trainer[\w@-]*)\.(service|timer)`", page)
    } <= files
    node = (SYSTEMD / "elastic-trainer@.service").read_text(encoding="utf-8")
    for number in re.findall(r"^\| `([-\w]+=\w+)`", page, re.M):
        assert number in node, number
    quota = re.findall(r"--quota-backend-bytes=\d+", page)
    assert quota
    assert all(each in (SYSTEMD / "elastic-trainer-etcd.service").read_text(encoding="utf-8") for each in quota)


def test_data_is_restored_where_the_unit_looks_for_it() -> None:
    """Elsewhere etcd would start on its old data, and nobody would notice."""
    page = TEXTS[DEPLOY / "operations.md"]
    (place,) = ETCD.words({})[1:2]
    assert set(re.findall(r"--data-dir[ =](\S+)", page)) == {place.partition("=")[2]}
    assert f"chown -R {ETCD.one('User')}:{ETCD.one('Group')} {place.partition('=')[2]}\n" in page
    assert f"`/var/lib/{BACKUP.one('StateDirectory')}`" in page


def test_every_page_is_found_from_another() -> None:
    """Operators begin at the page about watching, or at that about operating."""
    operations, slurm = TEXTS[DEPLOY / "operations.md"], TEXTS[DEPLOY / "slurm" / "README.md"]
    assert "](capacity.md)" in operations
    assert "](slurm/README.md)" in operations
    assert "](operations.md)" in (DEPLOY / "README.md").read_text(encoding="utf-8")
    assert "train.sbatch" in slurm
