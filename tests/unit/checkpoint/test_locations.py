"""From a path or URL to a storage."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elastic_trainer.checkpoint.storage import PosixStorage, is_url, open_storage
from elastic_trainer.errors import ConfigError
from elastic_trainer.jobs.config import load_job


@pytest.mark.parametrize("path", ["runs/a", "/data/run-7", "s3:/bucket/x", Path("s3://bucket/x"), "a b://c"])
def test_what_is_no_url_is_a_directory(path: str | Path) -> None:
    assert not is_url(path)
    assert isinstance(open_storage(path), PosixStorage)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("s4://bucket/x", "give a directory, or one of s3://, gs://, az://"),
        ("memory://x", "cannot be stored at 'memory://x'"),
        ("s3://", "names no bucket"),
        ("s3:///x", "write s3://BUCKET/PREFIX"),
    ],
)
def test_a_url_that_cannot_be_one_of_checkpoints_is_refused(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        open_storage(url)


@pytest.mark.parametrize(("scheme", "module", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs")])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, scheme: str, module: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"need {module}.*pip install 'elastic-trainer\[{extra}\]'"):
        open_storage(f"{scheme}://bucket/x")


def test_files_of_a_job_with_a_url_stay_on_disk() -> None:
    config = load_job("mnist", ["checkpoint.directory=s3://bucket/team/run-7/"])
    assert (config.checkpoint.directory, config.checkpoint.files) == ("s3://bucket/team/run-7/", Path("runs/run-7"))
    assert load_job("mnist", ["checkpoint.directory=/data/x"]).checkpoint.files == Path("/data/x")
