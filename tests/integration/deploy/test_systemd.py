"""The units for machines without Kubernetes: systemd understands them, numbers agree, they start what they say."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_trainer.clock import Deadline, pause
from elastic_trainer.errors import EXIT_CONFIG, EXIT_LEFT, EXIT_UNFIT
from elastic_trainer.local.etcd import EtcdServer, find_binary, spawn
from elastic_trainer.local.hosts import HOST, free_ports
from elastic_trainer.settings import RendezvousOptions
from tests.support.commands import quiet, understand
from tests.support.deployment import ran
from tests.support.platform import status
from tests.support.requirements import needs
from tests.support.units import SYSTEMD, UNITS, environment_file, unit

NODE = unit(SYSTEMD / "elastic-trainer@.service")
MONITOR = unit(SYSTEMD / "elastic-trainer-monitor.service")
ETCD = unit(SYSTEMD / "elastic-trainer-etcd.service")
BACKUP = unit(SYSTEMD / "elastic-trainer-etcd-backup.service")
SERVICES = {path.name: unit(path) for path in UNITS if path.suffix == ".service"}
RUN = environment_file(SYSTEMD / "run.env.example")


def node_words() -> list[str]:
    return NODE.words(RUN, instance="mnist-1", host="worker-7")


def option(words: list[str], name: str) -> str:
    (found,) = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    return found


def test_systemd_understands_the_units(tmp_path: Path) -> None:
    """``systemd-analyze verify`` has nothing to say about any of them."""
    analyze = needs("systemd-analyze", "it checks the units")
    names = []
    for path in UNITS:
        name = path.name.replace("@.", "@mnist-1.")
        text = re.sub(r"/opt/elastic-trainer/bin/[\w-]+|/usr/bin/etcd\b", "/bin/true", path.read_text(encoding="utf-8"))
        (tmp_path / name).write_text(text, encoding="utf-8")
        names.append(str(tmp_path / name))
    done = ran(analyze, "verify", "--man=no", *names)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_privileges_to_speak_of(name: str, tmp_path: Path) -> None:
    """systemd's own measure of exposure is below 2.5 of 10 ("OK"); each setting is one that systemd knows."""
    analyze = needs("systemd-analyze", "it rates the units")
    path = shutil.copy(SYSTEMD / name, tmp_path / name.replace("@.", "@mnist-1."))
    done = ran(analyze, "security", "--offline=yes", "--no-pager", "--threshold=25", path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_node_and_monitor_start_what_there_is_with_options_that_exist() -> None:
    """torchrun's own parser, our settings and the job's configuration take the lines as the examples fill them in, and
    nobody has to guess what an environment file may say. The monitor is where Prometheus looks for it."""
    for service, example in ((NODE, "run"), (MONITOR, "monitor")):
        asked = set(re.findall(r"\$\{?(\w+)", service.one("ExecStart")))
        assert asked, example
        assert asked <= environment_file(SYSTEMD / f"{example}.env.example").keys()
    words = node_words()
    assert words[0] == "/opt/elastic-trainer/bin/torchrun"
    understand(["torchrun", *words[1:]])
    conf = dict(pair.split("=") for pair in option(words, "--rdzv-conf").split(","))
    assert (conf["node_id"], conf["recovery"], option(words, "--rdzv-id")) == ("worker-7", "in_place", "mnist-1")
    assert int(option(words, "--max-restarts")) > 0, "in place, a crashed worker is started again"
    words = MONITOR.words(environment_file(SYSTEMD / "monitor.env.example"))
    understand(["elastic-trainer", *words[1:]])
    assert option(words, "--listen").endswith(":9470")


def test_no_etcd_setting_is_given_twice() -> None:
    """etcd ends at once where a variable and an option say the same, also where both say the same value."""
    example = (SYSTEMD / "etcd.env.example").read_text(encoding="utf-8")
    variables = set(re.findall(r"^(?:# )?(ETCD_\w+)=", example, re.MULTILINE))
    options = {word.partition("=")[0] for word in ETCD.words({})[1:]}
    assert {"ETCD_NAME", "ETCD_LISTEN_CLIENT_URLS", "ETCD_INITIAL_CLUSTER"} <= variables
    assert {"--data-dir", "--quota-backend-bytes"} <= options
    assert not options & {name.replace("ETCD_", "--").lower().replace("_", "-") for name in variables}


def test_times_to_leave_contain_each_other_and_exit_codes_mean_what_the_program_means() -> None:
    """systemd waits longer than torchrun, and torchrun longer than a worker gets to leave a round. Left on request is
    success; what would end the same way again is not repeated; else the node comes back."""
    defaults = RendezvousOptions()
    shutdown_s = float(option(node_words(), "--shutdown-timeout"))
    assert NODE.seconds("TimeoutStopSec") >= shutdown_s + 20.0
    assert shutdown_s > defaults.sever_timeout + defaults.form_timeout
    assert shutdown_s > 3.0 * defaults.ttl
    assert (NODE.one("KillMode"), NODE.one("KillSignal"), NODE.one("Type")) == ("mixed", "SIGTERM", "exec")
    assert NODE.one("SuccessExitStatus") == str(EXIT_LEFT)
    assert set(NODE.one("RestartPreventExitStatus").split()) == {str(EXIT_CONFIG), str(EXIT_UNFIT)}
    assert NODE.one("Restart") == "on-failure"
    tries, within_s = int(NODE.one("StartLimitBurst")), NODE.seconds("StartLimitIntervalSec")
    assert tries * NODE.seconds("RestartSec") < within_s, "else the limit on starts would never be reached"
    assert NODE.seconds("RestartSec") > defaults.ttl, "the key of the life before is gone by then"


def test_hardening_leaves_what_training_needs() -> None:
    """GPUs, shared memory, memory that the network adapter registers, compiled kernels: none of it is taken away."""
    kept = {"PrivateDevices", "DevicePolicy", "MemoryDenyWriteExecute", "PrivateNetwork", "PrivateIPC", "ProcSubset"}
    assert [key for _, key, _ in NODE.settings if key in kept | {"MemoryMax", "InaccessiblePaths"}] == []
    assert (NODE.one("LimitMEMLOCK"), NODE.one("TasksMax")) == ("infinity", "infinity")
    assert int(NODE.one("LimitNOFILE")) >= 65536
    for service in SERVICES.values():
        assert (service.one("NoNewPrivileges"), service.one("ProtectSystem")) == ("yes", "strict")


def test_backups_are_whole_and_do_not_pile_up(tmp_path: Path) -> None:
    """The script keeps the newest ones; one that fails leaves what there was, and no file that looks like a backup."""
    (tmp_path / "bin").mkdir()
    etcdctl = tmp_path / "bin" / "etcdctl"
    kept = tmp_path / "kept"
    kept.mkdir()
    for number in range(5):
        (kept / f"2020010{number}T000000Z.db").touch()
    environment = {"PATH": f"{tmp_path}/bin:/bin:/usr/bin", "STATE_DIRECTORY": str(kept), "KEPT": "3"}

    def back_up() -> int:
        return ran(*BACKUP.words({}), env=environment).returncode

    etcdctl.write_text('#!/bin/sh\n[ "$2" != save ] || echo data > "$3"\n')
    etcdctl.chmod(0o755)
    assert back_up() == 0
    names = sorted(path.name for path in kept.iterdir())
    assert names[:2] == ["20200103T000000Z.db", "20200104T000000Z.db"]
    assert len(names) == 3
    etcdctl.write_text('#!/bin/sh\n[ "$2" = save ] && echo part > "$3"\nexit 1\n')
    assert back_up() != 0
    assert sorted(path.name for path in kept.glob("*.db")) == names


LIMIT_S = 120.0


def start(run: str, directory: Path, changes: dict[str, str]) -> subprocess.Popen[bytes]:
    """ExecStart= in the state directory, torchrun being that of this environment."""
    environment = environment_file(SYSTEMD / "run.env.example") | changes
    words = NODE.words(environment, instance=run)
    with (directory / "journal").open("ab") as journal:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words[1:]],
            cwd=directory,
            env=quiet(os.environ) | environment,
            stdout=journal,
            stderr=subprocess.STDOUT,
        )


def steps(directory: Path) -> bool:
    log = directory / "saved" / "steps.jsonl"
    return log.exists() and log.stat().st_size > 0


@pytest.mark.timeout(300)
def test_a_unit_trains_and_leaves_within_its_time(tmp_path: Path, etcd: EtcdServer, run_id: str) -> None:
    """``systemctl stop`` sends SIGTERM to the main process: it saves, and ends with the status that counts as success
    before TimeoutStopSec. Wrong limits for that run then end with the status that is not started again."""
    changes = {
        "NODES": "1:2",
        "ELASTIC_TRAINER_ENDPOINT": etcd.endpoint,
        "METRICS_PORT": str(free_ports(1)[0]),
        "TRAINING": "-m elastic_trainer.training mnist epochs=1000 checkpoint.directory=saved",
    }
    node = start(run_id, tmp_path, changes)
    try:
        deadline = Deadline.after(LIMIT_S)
        while not steps(tmp_path):
            assert node.poll() is None, (tmp_path / "journal").read_text()
            assert not deadline.expired, (tmp_path / "journal").read_text()
            pause(0.1)
        mistaken = start(run_id, tmp_path, changes | {"NODES": "1:3", "METRICS_PORT": str(free_ports(1)[0])})
        assert mistaken.wait(LIMIT_S) == EXIT_CONFIG
        node.send_signal(getattr(signal, NODE.one("KillSignal")))
        assert node.wait(NODE.seconds("TimeoutStopSec")) == EXIT_LEFT, (tmp_path / "journal").read_text()
    finally:
        node.kill()
        node.wait()
    assert list((tmp_path / "saved").glob("step-*")), (tmp_path / "journal").read_text()


def test_etcd_starts_with_its_unit_and_the_example(tmp_path: Path) -> None:
    """It takes the options and the variables together, and answers where the example says, but for ports that are free
    here and the directory."""
    client, peer = free_ports(2)
    example = environment_file(SYSTEMD / "etcd.env.example")
    variables = {name: value.replace(":2379", f":{client}") for name, value in example.items()}
    at = f"http://{HOST}:{peer}"
    variables |= {"ETCD_LISTEN_PEER_URLS": at, "ETCD_INITIAL_ADVERTISE_PEER_URLS": at}
    variables["ETCD_INITIAL_CLUSTER"] = f"{variables['ETCD_NAME']}={at}"
    options = [word.replace("/var/lib/etcd", str(tmp_path)) for word in ETCD.words(variables)[1:]]
    given = [f"{name}={value}" for name, value in variables.items()]
    log = tmp_path / "journal"
    with log.open("wb") as journal:
        process = spawn([shutil.which("env") or "/usr/bin/env", *given, find_binary(), *options], journal)
    try:
        deadline = Deadline.after(LIMIT_S)
        while status(f"http://{HOST}:{client}/health") != 200:
            assert process.poll() is None, log.read_text(errors="replace")
            assert not deadline.expired, log.read_text(errors="replace")
            pause(0.1)
    finally:
        process.kill()
        process.wait()
