"""What holds for checkpoints wherever they lie: a directory, S3's own interface, S3 as fsspec shows it, and Google's
and Azure's stores where their emulators are installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from fsspec import filesystem

from elastic_trainer.checkpoint import CheckpointManager, Retention, SaveInfo, Soundness, codec, commit, describe
from elastic_trainer.checkpoint.commit import check_writable, temporary_entry, write_file
from elastic_trainer.checkpoint.manager import sweep
from elastic_trainer.checkpoint.manifest import (
    MANIFEST_FILE,
    OFFER_FILE,
    CheckpointName,
    Image,
    from_bytes,
    rescued_name,
    seal,
    temporary_name,
    tensors_file,
    this_process,
    trash_name,
)
from elastic_trainer.checkpoint.storage import Storage, open_storage
from elastic_trainer.checkpoint.storage.objects import PART_SIZE, FsspecBucket, ObjectStorage
from elastic_trainer.checkpoint.storage.port import RequestLimits
from elastic_trainer.errors import StorageError
from elastic_trainer.local.hosts import HOST, free_ports
from tests.support.s3server import BUCKET
from tests.support.waiting import eventually
from tests.unit.checkpoint.states import Heard, load_newest, newest_of, records, same, training_state
from tests.unit.checkpoint.test_commit import dead_process

Place = Callable[[], Storage]


_GOOGLE = (
    "from gcp_storage_emulator.server import create_server; create_server({host!r}, {port}, True, {bucket!r}).run()"
)
_ACCOUNT, _KEY = "account", "a2V5"


# Google's and Azure's stores on loopback, where their emulators are installed; none is needed by CI:
# ``pip install gcsfs gcp-storage-emulator``; ``pip install adlfs`` and ``npm install --global azurite``.


@pytest.fixture(scope="module")
def gs() -> Iterator[str]:
    if not (find_spec("gcsfs") and find_spec("gcp_storage_emulator")):
        pytest.skip("gs:// needs gcsfs and gcp-storage-emulator")
    (port,) = free_ports(1)
    command = [sys.executable, "-c", _GOOGLE.format(host=HOST, port=port, bucket=BUCKET)]
    with _serving(command, port), setting("STORAGE_EMULATOR_HOST", f"http://{HOST}:{port}"):
        yield f"gs://{BUCKET}"


@pytest.fixture(scope="module")
def az() -> Iterator[str]:
    azurite = shutil.which("azurite-blob")
    if azurite is None or not find_spec("adlfs"):
        pytest.skip("az:// needs adlfs and azurite-blob")
    (port,) = free_ports(1)
    command = [azurite, "--silent", "--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck"]
    where = f"BlobEndpoint=http://{HOST}:{port}/{_ACCOUNT}"
    known = f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};{where};"
    account = setting("AZURITE_ACCOUNTS", f"{_ACCOUNT}:{_KEY}")
    with account, _serving(command, port), setting("AZURE_STORAGE_CONNECTION_STRING", known):
        filesystem("az", skip_instance_cache=True).mkdir(BUCKET)
        yield f"az://{BUCKET}"


@contextmanager
def _serving(command: list[str], port: int) -> Iterator[None]:
    def listens() -> bool:
        with suppress(OSError), socket.create_connection((HOST, port), timeout=1.0):
            return True
        return False

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            eventually(listens, f"{command[0]} does not listen")
            yield
        finally:
            server.kill()


@contextmanager
def setting(name: str, value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


@pytest.fixture(params=["directory", "s3", "fsspec", "gs", "az"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Opens one and the same place, empty at first, anew with each call."""
    if request.param == "directory":
        return lambda: open_storage(tmp_path / "checkpoints")
    if request.param in ("gs", "az"):
        emulated = f"{request.getfixturevalue(request.param)}/{tmp_path.name}/checkpoints"
        return lambda: open_storage(emulated)
    url: str = request.getfixturevalue("s3_url")
    if request.param == "s3":
        return lambda: open_storage(url)
    path = url.removeprefix("s3://")
    return lambda: ObjectStorage(FsspecBucket(url, filesystem("s3", skip_instance_cache=True), path, RequestLimits()))


@pytest.fixture
def conditional_writes(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["place"] == "gs":
        pytest.skip("gcp-storage-emulator ignores ifGenerationMatch")


def opened(place: Place, keep: int = 3, **options: object) -> CheckpointManager:
    return CheckpointManager("", Retention(keep_last=keep), storage=place(), **options)  # type: ignore[arg-type]


def test_a_state_comes_back_bit_by_bit(place: Place) -> None:
    """Also one of several parts, whose tensors do not end where parts or blocks do."""
    state = {**training_state(), "large": torch.randn(PART_SIZE // 4 * 2 + 12_345)}
    opened(place).save(state, SaveInfo(7, metrics={"loss": 0.5}))
    loaded = newest_of(opened(place))
    assert same(loaded.state, state)
    assert loaded.manifest.metrics == {"loss": 0.5}
    assert place().free_bytes() is None or isinstance(place().free_bytes(), int)


def test_who_would_rescue_a_state_sees_that_another_process_does(place: Place) -> None:
    """As long as that one writes; not for another step, nor for an offer of a process that has died."""
    manager, storage = opened(place), place()
    storage.prepare()
    draft = manager.draft(SaveInfo(7, 3))
    offer = from_bytes(OFFER_FILE, seal(draft.model_copy(update={"name": rescued_name(3, 7, 0)})))
    with temporary_entry(storage, rescued_name(3, 7, 0)) as temporary:
        assert not manager.offered(draft)
        write_file(storage, temporary, offer)
        assert manager.offered(draft)
        assert not manager.offered(manager.draft(SaveInfo(8, 3)))
    storage.remove(temporary)
    assert not manager.offered(draft)
    storage.create(dead := temporary_name(dead_process()), rescued_name(3, 7, 0))
    write_file(storage, dead, offer)
    assert not manager.offered(draft)


def test_retention_leaves_no_object_of_what_it_removes(place: Place) -> None:
    checkpoints = opened(place, keep=2)
    names = [checkpoints.save({"x": step}, SaveInfo(step)).name for step in range(5)]
    assert sorted(place().names()) == names[-2:]
    assert [entry.name for entry in opened(place).entries()] == names[:-3:-1]


@pytest.mark.usefixtures("conditional_writes")
def test_several_processes_write_one_checkpoint(place: Place) -> None:
    """One helps with what nobody has taken; nothing of that is left, and what is published is all there."""
    state = {"large": torch.randn(3_000_000), "small": [torch.ones(3)]}
    checkpoints = opened(place)
    image, draft = codec.encode(state, parts=3), checkpoints.draft(SaveInfo(1))
    manifest = draft.with_files(records(image))
    saver, helper = place(), place()
    saver.prepare()
    with temporary_entry(saver, manifest.name) as temporary:
        write_file(saver, temporary, from_bytes(OFFER_FILE, seal(manifest)))
        assert saver.mark(temporary, f"taken-{image.files[0].name}")
        wrote = commit.write_share(helper, image, manifest, 1, Event())
        assert set(wrote) == {each.name for each in image.files[1:]}
        assert {f"record-{each}" for each in wrote} < saver.files(temporary)
        assert not saver.mark(temporary, f"taken-{wrote[0]}")
        saver.remove(temporary)
    assert place().names() == ()
    stop = Event()
    work = Thread(target=commit.write_share, args=(helper, image, manifest, 1, stop))
    work.start()
    commit.commit(saver, image, manifest)
    stop.set()
    work.join(60.0)
    assert not work.is_alive()
    loaded = newest_of(opened(place))
    assert same(loaded.state, state)
    assert place().names() == (manifest.name,)


def test_two_places_write_their_files_of_one_checkpoint(place: Place) -> None:
    """Each its own; the notes that they leave for each other are gone when it is published."""
    state = {"large": torch.randn(3_000_000), "small": [torch.ones(3)]}
    large, structure, rest = codec.encode(state, parts=2).files
    first, second = Image((large, structure)), Image((rest,))
    saver, helper = opened(place), opened(place)
    done: list[tuple[str, ...]] = []
    draft = helper.draft(SaveInfo(1))
    thread = Thread(target=lambda: done.append(helper.write_share(second, draft, 0, Event())))
    thread.start()
    committed = saver.commit(first, saver.draft(SaveInfo(1)))
    thread.join(60.0)
    assert done == [(tensors_file(1, 2),)]
    loaded = newest_of(opened(place))
    assert same(loaded.state, state)
    assert place().names() == (committed.name,)
    assert not any(place().files(committed.name) - {each.name for each in loaded.manifest.files} - {MANIFEST_FILE})


@pytest.mark.usefixtures("conditional_writes")
def test_a_checkpoint_is_unseen_until_it_is_published(place: Place) -> None:
    """And a name is never published twice: the second writer gets a sentence, the first one's bytes stay."""
    name, storages = str(CheckpointName(1, 2)), (place(), place())
    storages[0].prepare()
    temporaries = [temporary_name(this_process()) for _ in storages]
    for number, (storage, temporary) in enumerate(zip(storages, temporaries, strict=True)):
        storage.create(temporary, name)
        sink = storage.sink(temporary, "manifest.json")
        sink.write(memoryview(b"%d" % number))
        sink.finish()
        sink.abandon()
    assert not place().exists(name)
    storages[0].publish(temporaries[0], name)
    with pytest.raises(StorageError, match=f"already has a {name}"):
        storages[1].publish(temporaries[1], name)
    storages[1].remove(temporaries[1])
    source, content = place().source(name, "manifest.json"), bytearray(1)
    assert source.read_into(memoryview(content), 0)
    assert (source.size, bytes(content)) == (1, b"0")
    assert not source.read_into(memoryview(content), 1)
    source.close()
    assert place().names() == (name,)


@pytest.mark.timeout(400)
def test_writers_at_the_same_time_lose_nothing(place: Place) -> None:
    """Four save the same steps: each checkpoint is there once, and whole. Hundreds of requests to one small server."""
    writers = [opened(place, keep=100) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: [each.save({"x": torch.ones(1000)}, SaveInfo(step)) for step in range(2)], writers))
    entries = opened(place).entries()
    assert sorted(entry.step for entry in entries) == sorted([*range(2)] * 4)
    for entry in entries:
        assert bool((opened(place).load(entry).state["x"] == 1).all())


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_loaded(place: Place) -> None:
    heard = Heard()
    checkpoints = opened(place, on_event=heard.append)
    good = checkpoints.save({"x": torch.zeros(1000)}, SaveInfo(1)).name
    bad = checkpoints.save({"x": torch.ones(1000)}, SaveInfo(2)).name
    overwrite(place(), bad, "state.json")
    location = place().location
    assert [each.status for each in describe(location)] == [Soundness.DAMAGED, Soundness.VERIFIED]
    assert describe(location, read_all=False)[0].path == f"{location}/{bad}"
    loaded = newest_of(checkpoints)
    assert loaded.name == good
    assert "checkpoint.quarantined" in heard.kinds()
    assert f"corrupt-{bad}-1" in place().names()
    assert load_newest(opened(place)) is not None
    assert [entry.name for entry in opened(place).entries()] == [good]


def overwrite(storage: Storage, name: str, file: str) -> None:
    source = storage.source(name, file)
    content = bytearray(source.size)
    source.read_into(memoryview(content), 0)
    source.close()
    content[-1] ^= 1
    if isinstance(storage, ObjectStorage):
        storage._bucket.put(f"{name}/{file}", bytes(content))
    else:
        Path(storage.location, name, file).write_bytes(content)


def test_a_dead_writers_leftovers_go_and_nothing_else(place: Place) -> None:
    """Torn checkpoints of a dead process, marks that it left behind, and interrupted removals; not those of the
    living, nor what is foreign."""
    checkpoints = opened(place)
    kept, in_trash = (checkpoints.save({"x": step}, SaveInfo(step)).name for step in (1, 2))
    storage, dead = place(), dead_process()
    living, torn = temporary_name(this_process()), [temporary_name(dead), temporary_name(dead)]
    torn_names = [str(CheckpointName(9, step)) for step in (1, 2)]
    for temporary, name in zip(torn, torn_names, strict=True):
        storage.create(temporary, name)
        sink = storage.sink(temporary, "tensors.safetensors")
        sink.write(memoryview(bytes(100)))
        sink.finish()
    storage.create(living)
    storage.rename(in_trash, trash_name(in_trash))
    swept = [event.name for event in sweep(place())]
    assert sorted(swept) == sorted([*torn, *(name for name in swept if name.startswith("trash-"))])
    assert len(swept) == 3
    assert sorted(place().names()) == sorted([kept, living])
    place().remove(living)
    assert place().names() == (kept,)


def test_a_trial_leaves_nothing_behind(place: Place) -> None:
    check_writable(place())
    assert (opened(place).newest(), load_newest(opened(place)), place().names()) == (None, None, ())
