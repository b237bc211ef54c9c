"""The pages for operators name commands, units and numbers that there are."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.agent.health.node_health import LEAST_INTERVAL_S, NODES_PER_SECOND
from elastic_trainer.membership.documents import RoundDocument, RoundMember, RoundState
from tests.bench.capacity import NODES, REQUEST_LIMIT, Costs, costs, need, table
from tests.support.commands import understand
from tests.support.deployment import DEPLOY
from tests.support.units import SYSTEMD, unit

PAGES = (DEPLOY / "operations.md", DEPLOY / "capacity.md", DEPLOY / "slurm" / "README.md")
ETCD = unit(SYSTEMD / "elastic-trainer-etcd.service")
BACKUP = unit(SYSTEMD / "elastic-trainer-etcd-backup.service")
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}


def lines(page: Path) -> list[str]:
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


PUBLISHED: dict[str, Any] = json.loads((DEPLOY / "capacity.json").read_text(encoding="utf-8"))
COSTS: Costs = costs(PUBLISHED["costs"])
PAGE = (DEPLOY / "capacity.md").read_text(encoding="utf-8")


def test_the_page_has_the_table_of_the_published_figures() -> None:
    """Nobody has changed a number by hand, in the page or in the formula alone. However many nodes there are, health
    writes stay at the product's limit."""
    assert table(COSTS) in PAGE
    for nodes in (1, 100, 250, 1000, 10_000):
        assert need(nodes, COSTS)["health_writes"] <= NODES_PER_SECOND + 1.0
    assert need(10, COSTS)["health_writes"] == pytest.approx(10 / LEAST_INTERVAL_S + 1.0)


@pytest.mark.parametrize("nodes", NODES)
def test_a_round_of_each_size_fits_into_a_request(nodes: int) -> None:
    """A planned change holds two rounds; etcd takes no larger request. The document is as large as the table says."""
    members = tuple(RoundMember(f"trainer-{n:05d}", 123_456 + n, 0, 8 * n, 8) for n in range(nodes))
    active = RoundDocument(number=9, nonce="0" * 16, state=RoundState.ACTIVE, members=members, reason="all are here")
    draining = active.model_copy(update={"state": RoundState.DRAINING, "next": active})
    assert len(draining.encode()) < REQUEST_LIMIT
    assert len(active.encode()) < 2.0 * need(nodes, COSTS)["round_document"] + 1000.0
