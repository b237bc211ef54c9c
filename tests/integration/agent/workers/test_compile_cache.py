"""A bundle of what compilers made, in an object store."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from elastic_trainer.checkpoint.storage import open_storage
from tests.support.s3server import Fault, S3Server
from tests.unit.agent.workers.test_compile_cache import Run, write


@pytest.mark.timeout(120)
def test_a_bundle_in_an_object_store_is_replaced_and_taken_up(tmp_path: Path, s3: S3Server, s3_url: str) -> None:
    """As in a directory: the one that the store of the run does not name any more is removed."""
    with ExitStack() as ends:
        run = Run(tmp_path, ends)
        cache, place = run.node("a", location=s3_url)
        for name in ("one", "two"):
            write(place.cache / name)
            run.quiet(cache)
        bundles = [each for each in open_storage(s3_url).names() if each.startswith("compile-cache-")]
        assert len(bundles) == 1
        other, there = run.node("b", location=s3_url)
        with capture_logs() as logs:
            assert other.fetch()
        assert logs[-1]["source"] == s3_url
        assert sorted(path.name for path in there.cache.iterdir()) == ["one", "two"]
        s3.inject(Fault("^GET ", status=403))
        with capture_logs() as logs:
            assert not run.node("c", location=s3_url)[0].fetch()
        assert [each["event"] for each in logs] == ["compile_cache.not_fetched"]
