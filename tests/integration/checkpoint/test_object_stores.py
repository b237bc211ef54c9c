"""Object stores that refuse, fail, forget to answer or cannot be reached; leases; and how many requests things take."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fsspec import filesystem
from safetensors.torch import load_file

from elastic_trainer.checkpoint import (
    CheckpointManager,
    DamagedError,
    Owner,
    Retention,
    SaveInfo,
    Transition,
    UnreadableError,
    manager,
)
from elastic_trainer.checkpoint import storage as locations
from elastic_trainer.checkpoint.commit import check_writable, commit
from elastic_trainer.checkpoint.manifest import (
    STATE_FILE,
    TENSORS_FILE,
    FileImage,
    Image,
    WriterIdentity,
    temporary_name,
)
from elastic_trainer.checkpoint.storage import objects, open_storage
from elastic_trainer.checkpoint.storage.objects import PART_SIZE, FsspecBucket, ObjectStorage
from elastic_trainer.checkpoint.storage.port import RequestLimits
from elastic_trainer.checkpoint.storage.s3 import PARALLEL_PARTS, S3Bucket
from elastic_trainer.cli.main import main as command
from elastic_trainer.clock import SYSTEM, Deadline, pause
from elastic_trainer.errors import CheckpointError, StorageError
from elastic_trainer.local.hosts import free_ports
from tests.support.s3server import BUCKET, Fault, S3Server
from tests.support.waiting import eventually
from tests.unit.checkpoint.states import load_newest, newest_of

LIMIT_S = 60.0
ELSEWHERE = json.dumps({"run": "a", "job": None, "pid": 1, "start": 2, "boot": "b" * 32, "namespace": 3, "host": "far"})
TEMPORARY = f"tmp-{'0' * 12}-1-2-{'b' * 32}-3-here"


@pytest.fixture(autouse=True)
def two_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")


def bucket_at(url: str) -> S3Bucket:
    return S3Bucket(BUCKET, url.removeprefix(f"s3://{BUCKET}/"), locations.LIMITS)


# ---- requests


def test_the_number_of_requests_does_not_grow_with_the_number_of_checkpoints(s3: S3Server, s3_url: str) -> None:
    """A save with retention takes as many with 30 as with 3; a listing of known ones takes one, resuming a few."""
    counts = []
    for keep in (3, 30):
        checkpoints = CheckpointManager(s3_url, Retention(keep_last=keep))
        for step in range(keep + 1):
            checkpoints.save({"x": torch.ones(10)}, SaveInfo(step, round=keep))
        s3.log()
        checkpoints.save({"x": torch.ones(10)}, SaveInfo(99, round=keep))
        counts.append(len(s3.log()))
    assert counts[0] == counts[1] <= 14
    checkpoints.entries()
    assert len(s3.log()) == 1
    assert CheckpointManager(s3_url).newest() is not None
    assert len(s3.log()) == 2
    assert load_newest(CheckpointManager(s3_url)) is not None
    assert len(s3.log()) <= 6


def test_a_foreign_prefix_with_many_objects_costs_nothing(s3: S3Server, s3_url: str) -> None:
    """More objects than fit one page of a listing lie beside the checkpoints: they are one name in it."""
    bucket = bucket_at(s3_url)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: bucket.put(f"data/{number}", b"x"), range(1100)))
    s3.log()
    assert open_storage(s3_url).names() == ("data",)
    assert len(s3.log()) == 1
    assert len(bucket.items("data/")) == 1100
    assert len(s3.log()) == 2
    bucket.delete([f"data/{number}" for number in range(1100)])
    assert open_storage(s3_url).names() == ()


@pytest.mark.usefixtures("s3")
def test_a_large_file_is_sent_with_bounded_memory(s3_url: str) -> None:
    """320 MB are never more than the parts under way, each twice: as it is filled and as it is sent."""
    piece = memoryview(bytearray(1 << 20))
    large = FileImage(TENSORS_FILE, b"head", 320 << 20, lambda: (piece for _ in range(320)))
    small = FileImage(STATE_FILE, b"{}", 0, lambda: ())
    draft = CheckpointManager(s3_url).draft(SaveInfo(1))
    storage = open_storage(s3_url)
    tracemalloc.start()
    try:
        complete = commit(storage, Image((small, large)), draft)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * (PARALLEL_PARTS + 1) * PART_SIZE
    assert complete.size == (320 << 20) + 6


# ---- refusals and failures


def test_a_refusal_is_not_tried_again_and_names_the_permission(s3: S3Server, s3_url: str) -> None:
    for pattern, permission in (("^PUT", "s3:PutObject"), ("^GET .*list-type", "s3:ListBucket")):
        s3.inject(Fault(pattern, status=403))
        with pytest.raises(CheckpointError, match=f"permission denied .*allow {permission} there"):
            CheckpointManager(s3_url).save({"x": 1}, SaveInfo(1)) if "PUT" in pattern else CheckpointManager(
                s3_url
            ).newest()
        assert s3.hits() == 1


def test_a_passing_failure_is_not_noticed(s3: S3Server, s3_url: str) -> None:
    """One 500 or 503 each for the parts of a file, its completion, the manifest and the reads."""
    checkpoints, state = CheckpointManager(s3_url), {"w": torch.randn(9_000_000)}
    faults = [Fault(pattern, status=status, count=1) for pattern, status in (
        ("^PUT .*partNumber=2", 503), ("^POST .*uploadId", 500), ("^PUT .*manifest.json", 503),
        ("^GET .*tensors", 500), ("^GET .*list-type", 503),
    )]  # fmt: skip
    s3.inject(*faults, Fault("^GET .*tensors", cut=True, count=3))
    checkpoints.save(state, SaveInfo(1))
    loaded = load_newest(CheckpointManager(s3_url))
    assert s3.hits() == len(faults) + 3
    assert loaded is not None
    assert torch.equal(loaded.state["w"], state["w"])


@pytest.mark.parametrize(
    ("size", "last", "count"),
    [(9_000_000, "^POST .*uploadId", 100), (100, "^PUT .*tensors", 100), (100, "^PUT .*manifest.json", 1)],
)
def test_a_file_whose_last_request_was_not_answered_counts_as_written(
    size: int, last: str, count: int, s3: S3Server, s3_url: str
) -> None:
    """Each try fails, and the first one has written the object, from parts or at once: the save goes on. Of a manifest
    the client's second try finds the first one's object, which is ours."""
    checkpoints, state = CheckpointManager(s3_url), {"w": torch.randn(size)}
    s3.inject(Fault(last, status=500, late=True, count=count))
    checkpoints.save(state, SaveInfo(1))
    assert min(2, count) <= s3.hits() <= count
    assert torch.equal(newest_of(CheckpointManager(s3_url)).state["w"], state["w"])


def test_a_mark_whose_answer_was_lost_is_this_writers(s3: S3Server, s3_url: str) -> None:
    """The client's second try finds the first one's; whoever comes then is told that it is taken."""
    storage = open_storage(s3_url)
    s3.inject(Fault("^PUT .*taken-a", status=500, late=True, count=1))
    assert storage.mark(TEMPORARY, "taken-a")
    assert s3.hits() == 1
    assert not storage.mark(TEMPORARY, "taken-a")


def test_what_is_not_deleted_at_once_is_deleted_again(
    s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store refuses single keys of a request that it answers with 200, which no client repeats."""
    bucket, asked = bucket_at(s3_url), list[list[str]]()
    answers = [[{"Key": "b", "Code": "SlowDown"}], [], *[[{"Key": "a", "Code": "AccessDenied"}]] * 2]

    def request(method: str, key: str | None, limit_s: float | None = None, **arguments: Any) -> Any:
        asked.append([each["Key"].rpartition("/")[2] for each in arguments["Delete"]["Objects"]])
        return {"Errors": answers.pop(0)}

    monkeypatch.setattr(bucket, "request", request)
    bucket.delete(["a", "b"])
    with pytest.raises(OSError, match="a cannot be deleted: AccessDenied"):
        bucket.delete(["a"])
    assert asked == [["a", "b"], ["b"], ["a"], ["a"]]


def test_a_save_of_unknown_outcome_is_whole_or_unseen(s3: S3Server, s3_url: str) -> None:
    """No answer comes at all, though the manifest was written: the save fails, and the data must stay."""
    s3.inject(Fault("^PUT .*manifest.json", status=500, late=True))
    checkpoints = CheckpointManager(s3_url)
    with pytest.raises(StorageError, match="the store fails"):
        checkpoints.save({"x": torch.ones(100)}, SaveInfo(1))
    s3.inject()
    loaded = newest_of(CheckpointManager(s3_url))
    assert bool((loaded.state["x"] == 1).all())


def test_a_missing_object_is_damage_and_a_missing_manifest_is_none(s3: S3Server, s3_url: str) -> None:
    checkpoints, bucket = CheckpointManager(s3_url), bucket_at(s3_url)
    first, second, third = (checkpoints.save({"x": step}, SaveInfo(step)) for step in (1, 2, 3))
    bucket.delete([f"{third.name}/manifest.json", f"{second.name}/{STATE_FILE}"])
    with pytest.raises(DamagedError, match="is missing"):
        CheckpointManager(s3_url).load(second.entry)
    loaded = newest_of(CheckpointManager(s3_url))
    assert loaded.name == first.name
    assert s3.process.poll() is None


def test_what_is_wrong_is_one_sentence(s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bucket, no answer in time, nobody there, no credentials: for who saves, who resumes, and preflight."""
    short = replace(locations.LIMITS, request_s=2.0, silence_s=1.0, connect_s=1.0)
    s3.inject(Fault("stalled", status=503, stall_s=3600.0))
    refused_port = f"http://127.0.0.1:{free_ports(1)[0]}"
    for url, variable, value, sentence in (
        (f"s3://{BUCKET}-missing/x", "", "", "the bucket does not exist"),
        (f"{s3_url}/stalled", "", "", "the store did not answer in time"),
        (s3_url, "AWS_ENDPOINT_URL", refused_port, "the store cannot be reached"),
        (s3_url, "AWS_ACCESS_KEY_ID", "", "credentials"),
    ):
        with monkeypatch.context() as context:
            if "stalled" in url:  # alone: where retries outlast the limit, nobody learns that nothing listens
                context.setattr(locations, "LIMITS", short)
            if variable and value:
                context.setenv(variable, value)
            elif variable:
                context.delenv(variable)
                context.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
            for attempt in (lambda url=url: check_writable(open_storage(url)), CheckpointManager(url).newest):
                with pytest.raises(CheckpointError, match=sentence) as caught:
                    attempt()
                assert caught.value.hint
                assert "\n" not in str(caught.value)
            if "stalled" not in url:  # that process has limits of a minute
                assert sentence in examined(url)
    s3.inject()
    shown = examined(s3_url)
    assert f"{s3_url} can be written" in shown
    assert len(re.findall(r"disk\.(write|read)", shown)) == 2
    assert open_storage(s3_url).names() == ()


@pytest.mark.parametrize("falls_silent", ["^PUT .*partNumber=2", "^GET .*tensors"])
def test_a_store_behind_fsspec_that_falls_silent_amid_a_file_costs_the_limit(
    s3: S3Server, s3_url: str, falls_silent: str
) -> None:
    """The save or the load fails in words, and the next one works."""
    short = RequestLimits(part_s=8.0)
    path = s3_url.removeprefix("s3://")

    def opened(limits: RequestLimits = locations.LIMITS) -> CheckpointManager:
        files = filesystem("s3", skip_instance_cache=True)
        return CheckpointManager("", storage=ObjectStorage(FsspecBucket(s3_url, files, path, limits)))

    state = {"w": torch.randn(9_000_000)}
    opened().save(state, SaveInfo(1))
    s3.inject(Fault(falls_silent, stall_s=3600.0, count=1))
    began = SYSTEM.monotonic()
    if "PUT" in falls_silent:
        with pytest.raises(StorageError, match="did not answer in time"):
            opened(short).save(state, SaveInfo(2))
    else:
        with pytest.raises(UnreadableError, match="did not answer in time"):
            opened(short).load(CheckpointManager(s3_url).entries()[0])
    assert SYSTEM.monotonic() - began < LIMIT_S
    assert s3.hits() == 1
    assert opened().save(state, SaveInfo(3)).name
    assert torch.equal(newest_of(opened()).state["w"], state["w"])


def examined(url: str) -> str:
    command = [sys.executable, "-m", "elastic_trainer.preflight.directory", url, "0", str(LIMIT_S)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def test_a_checkpoint_is_committed_without_torch_and_directories_need_no_fsspec(s3_url: str) -> None:
    code = (
        "import sys; from elastic_trainer.checkpoint import CheckpointManager, SaveInfo;"
        "CheckpointManager('/nowhere'); assert not {'fsspec', 's3fs', 'botocore'} & set(sys.modules);"
        f"CheckpointManager({s3_url!r}).save({{'x': 1}}, SaveInfo(1)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=LIMIT_S)
    assert CheckpointManager(s3_url).newest() is not None


# ---- leases


@pytest.mark.usefixtures("s3")
def test_a_second_job_is_refused_with_the_name_of_the_first(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its start, as soon as the first has shown that it lives, and at each save; nothing of the first job's is
    touched. It may begin when the first has let go."""
    monkeypatch.setattr(manager, "CLAIM_S", 0.2)
    monkeypatch.setattr(objects, "RENEW_S", 1.0)
    first, second = (CheckpointManager(s3_url, owner=Owner(run)) for run in ("a", "b"))
    first.check_writable()
    name = first.save({"x": 1}, SaveInfo(1)).name
    monkeypatch.setattr("elastic_trainer.checkpoint.commit.alive", lambda *_: None)  # as if on another machine
    sentence = re.compile(rf"is in use by run 'a' \(process {os.getpid()} on ")
    for attempt in (second.check_writable, lambda: second.save({"x": 2}, SaveInfo(2))):
        with pytest.raises(StorageError, match=sentence):
            attempt()
    assert [entry.name for entry in second.entries()] == [name]
    first.close()
    second.save({"x": 2}, SaveInfo(2))
    with pytest.raises(StorageError, match="is in use by run 'b'"):
        first.save({"x": 3}, SaveInfo(3))
    second.close()


@pytest.mark.usefixtures("s3")
def test_the_lease_of_a_dead_holder_expires(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It died on a machine that cannot be asked: of those that wait, exactly one takes over, and none before."""
    bucket_at(s3_url).put(f"{objects.DIRECTORY}{7:012d}.json", ELSEWHERE.encode())
    managers = [CheckpointManager(s3_url, owner=Owner(f"run-{number}")) for number in range(3)]
    with pytest.raises(StorageError, match=r"in use by run 'a' \(process 1 on far"):
        managers[0].save({"x": 1}, SaveInfo(1))
    monkeypatch.setattr(objects, "TAKEOVER_S", 12.0)  # in which a new holder renews also on a loaded machine

    def attempt(each: CheckpointManager) -> bool:
        try:
            each.check_writable()
        except StorageError as error:
            return "in use by run 'run-" not in str(error)
        return True

    monkeypatch.setattr(objects, "RENEW_S", 0.5)
    with ThreadPoolExecutor(3) as pool:
        assert sorted(pool.map(attempt, managers)) == [False, False, True]
    for each in managers:
        each.close()


@pytest.mark.usefixtures("s3")
def test_a_holder_that_was_taken_over_publishes_nothing(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still until another took over, and finds out by itself; when that one has gone, it may save again."""
    monkeypatch.setattr(objects, "RENEW_S", 0.2)
    checkpoints, bucket = CheckpointManager(s3_url, owner=Owner("a")), bucket_at(s3_url)
    checkpoints.save({"x": 1}, SaveInfo(1))
    successor = f"{objects.DIRECTORY}{2:012d}.json"
    bucket.put(successor, ELSEWHERE.replace('"a"', '"b"').encode(), new=True)
    storage = checkpoints._storage
    eventually(lambda: storage._lease.was_lost, "it does not find out")  # type: ignore[attr-defined]
    with pytest.raises(StorageError, match="in use by run 'b'"):
        checkpoints.save({"x": 2}, SaveInfo(2))
    with pytest.raises(StorageError, match="may have been taken over"):
        storage.publish(TEMPORARY, "step-000000002-r0-000000000000")
    bucket.put(successor, b"")
    checkpoints.save({"x": 3}, SaveInfo(3))
    assert [entry.step for entry in checkpoints.entries()] == [3, 1]
    checkpoints.close()


@pytest.mark.usefixtures("s3")
def test_a_lease_that_was_not_renewed_in_time_is_regained_if_nobody_took_it(s3_url: str) -> None:
    """The store was away, or the process stood still: what is uploaded is published, and renewing goes on."""
    checkpoints = CheckpointManager(s3_url, owner=Owner("a"))
    checkpoints.save({"x": 1}, SaveInfo(1))
    storage = cast(ObjectStorage, checkpoints._storage)
    held, publish = storage._lease, storage.publish

    def late(temporary: str, name: str) -> None:
        held._renewed_at = -math.inf
        held._stop.set()
        assert held.was_lost
        publish(temporary, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "publish", late)
        checkpoints.save({"x": 2}, SaveInfo(2))
    assert [entry.step for entry in checkpoints.entries()] == [2, 1]
    assert not held.was_lost
    assert not held._stop.is_set()
    checkpoints.close()


@pytest.mark.usefixtures("s3")
def test_the_same_run_and_the_killed_on_this_machine_are_not_waited_for(s3_url: str) -> None:
    """A run that is started again takes the lease over at once; so does any other job if the kernel knows that the
    holder is dead."""
    code = (
        "import sys, os; from elastic_trainer.checkpoint import CheckpointManager, Owner;"
        f"CheckpointManager({s3_url!r}, owner=Owner('a', 'a')).check_writable(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S).returncode == -9
    other = CheckpointManager(s3_url, owner=Owner("b"))
    other.save({"x": 1}, SaveInfo(1))
    other.close()
    bucket_at(s3_url).put(f"{objects.DIRECTORY}{9:012d}.json", ELSEWHERE.replace("null", '"a"').encode())
    same = CheckpointManager(s3_url, owner=Owner("a", "a"))
    same.save({"x": 2}, SaveInfo(2))
    same.close()


def test_an_upload_from_elsewhere_is_swept_when_it_has_been_silent_by_the_stores_clock(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that arrives counts as a sign of life. Then the objects and the parts of the unfinished upload go."""
    monkeypatch.setattr(manager, "ELSEWHERE_S", 4.0)
    writer = WriterIdentity(1, 2, "b" * 32, 3, "far")
    name, temporary = "step-000000001-r0-000000000001", temporary_name(writer)
    storage, bucket = open_storage(s3_url), bucket_at(s3_url)
    storage.create(temporary, name)
    upload = bucket.upload(f"{name}/{TENSORS_FILE}")
    patience = Deadline.after(6.0)
    while not patience.expired:  # longer than the limit, but never silent
        upload.add(bytearray(5 << 20))
        assert list(manager.sweep(open_storage(s3_url))) == []
        pause(0.5)
    assert len(bucket._uploads("")) == 1
    patience = Deadline.after(LIMIT_S)
    while not (swept := list(manager.sweep(open_storage(s3_url)))):
        assert not patience.expired
        pause(0.5)
    assert [(event.kind, event.name) for event in swept] == [(Transition.SWEPT, temporary)]
    assert "far" in swept[0].reason
    assert (bucket._uploads(""), bucket.items("")) == ([], ())


def test_the_commands_take_urls(s3_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        CheckpointManager(s3_url).save({"model": {"w": torch.full((9,), float(step))}}, SaveInfo(step))

    def ran(*words: object, code: int = 0) -> str:
        capsys.readouterr()
        assert command(["checkpoints", *map(str, words)]) == code
        return capsys.readouterr().out

    assert [each["step"] for each in json.loads(ran("list", s3_url, "--json"))["checkpoints"]] == [3, 2, 1]
    assert json.loads(ran("show", f"{s3_url}/newest", "--json"))["step"] == 3
    assert len(json.loads(ran("verify", s3_url, "--all", "--json"))["checkpoints"]) == 3
    ran("diff", f"{s3_url}/step-000000001", f"{s3_url}/step-000000002", code=1)
    ran("export", s3_url, tmp_path / "model.safetensors", "--to", "safetensors")
    assert float(load_file(tmp_path / "model.safetensors")["w"][0]) == 3.0
    ran("prune", s3_url, "--keep-last", 1)
    assert [each["step"] for each in json.loads(ran("list", s3_url, "--json"))["checkpoints"]] == [3]
