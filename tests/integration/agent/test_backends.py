"""One script with a Session, unchanged, under torchrun's own etcd backends and under this project's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_trainer.local.etcd import EtcdServer
from tests.integration.worker.launch import finished, started, tail, torchrun

EPOCHS, STEPS, SAMPLES = 1, 6, 86


@pytest.fixture(scope="module")
def etcd_with_v2(etcd_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd that speaks both of its protocols, the old one for torchrun's own backends."""
    flag = "--enable-v2"  # which etcd 3.6 has removed
    with EtcdServer(tmp_path_factory.mktemp("etcd-v2"), binary=etcd_binary, arguments=[flag]) as server:
        yield server


@pytest.mark.timeout(200)
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2", "etcd3"])
def test_two_nodes_train_an_epoch(backend: str, tmp_path: Path, etcd_with_v2: EtcdServer, run_id: str) -> None:
    options = ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-backend={backend}", "--local-addr=127.0.0.1"]
    options += [f"--rdzv-endpoint={etcd_with_v2.endpoint}", f"--rdzv-id={run_id}"]
    node = torchrun(options, "train.py", tmp_path, EPOCHS)
    logs = [tmp_path / "log-a", tmp_path / "log-b"]
    extra = {"ELASTIC_TRAINER_LEDGER_DIR": str(tmp_path / "ledger"), "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        running = [stack.enter_context(started(node, log, extra)) for log in logs]
        for process, log in zip(running, logs, strict=True):
            assert finished(process, log) == 0, tail(log)
    texts = [text for path in (tmp_path / "ledger").iterdir() for text in path.read_text().splitlines()]
    steps = [line for line in map(json.loads, texts) if line["event"] == "step"]
    assert {line["world"] for line in steps} == {2}
    assert Counter(line["step"] for line in steps) == dict.fromkeys(range(1, STEPS + 1), 2)
    assert Counter(sample for line in steps for sample in line["samples"]) == Counter(range(SAMPLES))
