"""The pages for operators name commands, units and numbers that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.commands import understand
from tests.support.deployment import DEPLOY
from tests.support.units import SYSTEMD, unit

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


def test_data_is_restored_where_the_unit_looks_for_it() -> None:
    """Elsewhere etcd would start on its old data, and nobody would notice."""
    page = TEXTS[DEPLOY / "operations.md"]
    (place,) = ETCD.words({})[1:2]
    assert set(re.findall(r"--data-dir[ =](\S+)", page)) == {place.partition("=")[2]}
    assert f"chown -R {ETCD.one('User')}:{ETCD.one('Group')} {place.partition('=')[2]}\n" in page
    assert f"`/var/lib/{BACKUP.one('StateDirectory')}`" in page
