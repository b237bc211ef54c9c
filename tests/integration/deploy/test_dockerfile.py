"""The Dockerfile and compose.yaml: pinned, small, not root, explained, in one piece with what they start."""

from __future__ import annotations

import re
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement

from elastic_trainer.cli import health
from elastic_trainer.cli.main import COMMANDS
from elastic_trainer.monitor.serve import DEFAULT_PORT
from tests.integration.worker.launch import LIMIT_S, finished, plain, run, started, tail
from tests.support.deployment import DEPLOY, PROMETHEUS, ROOT, load, ran
from tests.support.dockerfile import DOCKERFILE, IGNORE, arguments, copied, instructions, values, variables, words
from tests.support.requirements import needs, needs_root
from tests.support.waiting import eventually

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_hadolint_finds_nothing() -> None:
    """The usual mistakes, among them those of the shell lines; consecutive RUNs are layers that change apart."""
    tool = needs("hadolint", "judges the Dockerfile")
    done = ran(tool, "--no-color", "--ignore", "DL3059", DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")


def test_one_base_image_of_an_exact_version_is_fetched_with_a_python_that_the_package_accepts() -> None:
    """It can be replaced; all other stages are made here, and no syntax line asks a registry for a frontend."""
    stages = [value.split() for value in values("FROM")]
    made = {stage[2] for stage in stages if len(stage) == 3}
    assert {stage[0] for stage in stages} <= {"scratch", "${BASE_IMAGE}", *made}
    python = re.fullmatch(r"python:(\d+\.\d+\.\d+)-slim-[a-z]+", arguments()["BASE_IMAGE"])
    assert python is not None
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(python[1])
    assert "syntax=" not in DOCKERFILE.read_text(encoding="utf-8").splitlines()[0]


def test_every_package_is_one_of_constraints_txt() -> None:
    """All of pip's work happens under the constraints; what has no line there is named with its version."""
    environment = " ".join(values("ENV"))
    assert "PIP_CONSTRAINT=/src/constraints.txt" in environment
    assert "PIP_BUILD_CONSTRAINT=/src/constraints.txt" in environment
    pinned = {
        line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    }
    installs = [value for value in values("RUN") if re.search(r"\bpip\b.* install ", value)]
    assert len(installs) == 3
    for value in installs:
        for word in value.partition(" --find-links /wheels ")[2].split():
            named = not word.startswith(("$", "-", '"'))
            assert not named or word in pinned or re.fullmatch(r"[\w-]+==[\d.]+", word), word


def test_it_is_small_unless_cuda_is_asked_for() -> None:
    """torch comes from the index of CPU builds, and from there it alone, so that no other package can."""
    assert arguments()["TORCH_INDEX"].endswith("/cpu")
    using = [value for value in values("RUN") if "TORCH_INDEX" in value]
    assert len(using) == 1
    assert "--no-deps" in using[0]
    assert using[0].split()[-1] == "torch"


def test_it_runs_as_a_numeric_user_and_caches_nothing_outside_of_tmp() -> None:
    """Kubernetes checks ``runAsNonRoot`` only against a number; in the manifests the root file system is read-only."""
    assert arguments()["UID"] == "10001"
    assert values("USER", last_stage=True) == ["${UID}:${UID}"]
    order = [each.name for each in instructions() if each.stage == instructions()[-1].stage]
    assert not {"RUN", "COPY", "ADD"} & set(order[order.index("USER") :])
    caches = {name: value for name, value in variables().items() if re.search("CACHE|CONFIG", name)}
    assert {"XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} <= set(caches)
    assert {name for name, value in caches.items() if not value.startswith("/tmp/")} == set()
    assert variables()["PYTHONDONTWRITEBYTECODE"] == "1"
    program, command = words(values("HEALTHCHECK")[0])
    assert program == "elastic-trainer"
    assert command in {each.name for each in COMMANDS}
    assert health.MONITOR_PORT == DEFAULT_PORT


def test_dockerignore_lets_through_what_is_copied_and_nothing_else() -> None:
    """A list of what goes in: a new folder, a password or a run of gigabytes stays out by itself. A clean clone has it
    all; a file that git ignores would be there on one machine only."""
    lines = [line for line in IGNORE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == set(copied())
    assert all(line.startswith(("!", "**/")) for line in lines[1:])
    git = needs("git", "knows which files belong to the repository")
    for name in copied():
        assert ran(git, "-C", ROOT, "ls-files", "--", name).stdout.strip(), name


ORPHAN = """
import os, sys, time
reading, writing = os.pipe()
if os.fork() == 0:
    orphan = os.fork()
    if orphan:
        os.write(writing, str(orphan).encode())
        os._exit(0)
    time.sleep(0.2)  # outlive the parent
    os._exit(0)
os.wait()
orphan = os.read(reading, 20).decode()
until = time.monotonic() + 60
while os.path.exists("/proc/" + orphan):
    if time.monotonic() > until:
        sys.exit("the orphan " + orphan + " was not waited for: " + open(f"/proc/{orphan}/stat").read())
    time.sleep(0.02)
print("the orphan is gone")
"""


def contained(*command: str) -> list[str]:
    needs_root("makes a namespace of processes")
    unshare = needs("unshare", "makes a namespace of processes (Debian: util-linux)")
    program, *options = words(values("ENTRYPOINT")[0])
    init = needs(program, "is process 1 of the image")
    return [unshare, "--pid", "--fork", "--mount-proc", "--kill-child", init, *options, *command]


@pytest.mark.parametrize("code", [0, 1, 143, 128 + signal.SIGKILL])
def test_the_exit_code_is_the_commands(code: int, tmp_path: Path) -> None:
    """Kubernetes decides by it whether a pod has failed, left, or must not be tried again. One that a signal ended has
    128 and the signal's number, as a shell says it: 137 for a process that ran out of memory."""
    command = "kill -9 $$" if code == 128 + signal.SIGKILL else f"exit {code}"
    run(contained("sh", "-c", command), tmp_path / "log", expected=code)


def test_sigterm_to_process_1_lets_a_training_save_and_leave_with_143(tmp_path: Path) -> None:
    """It reaches the command, and process 1 waits for it."""
    log = tmp_path / "log"
    with started(
        contained(*plain("train.py", tmp_path, "1000", "--step-s", "0.02", "--save-every", "3")), log
    ) as process:
        eventually(lambda: list(tmp_path.glob("checkpoints/*")), lambda: tail(log), LIMIT_S)
        (init,) = psutil.Process(process.pid).children()
        init.send_signal(signal.SIGTERM)
        assert finished(process, log) == 143, tail(log)


def test_orphans_of_a_worker_are_waited_for(tmp_path: Path) -> None:
    """Data workers of a worker that was killed become children of process 1; torchrun there would leave them dead."""
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    log = tmp_path / "log"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    run(contained(*torchrun), log)
    assert "the orphan is gone" in log.read_text()


COMPOSE: dict[str, Any] = load(DEPLOY / "compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OWN = "elastic-trainer:latest"


def binds(service: dict[str, Any]) -> list[dict[str, Any]]:
    return [mount for mount in service.get("volumes", ()) if mount["type"] == "bind"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_pinned_watched_and_closed(name: str) -> None:
    """A version for each image, a health check, a restart, ports for this machine alone unless asked, and configuration
    from this folder, read-only."""
    service = SERVICES[name]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]) or service["image"] == OWN
    assert ("build" in service) == (service["image"] == OWN)
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["restart"] == "unless-stopped"
    for port in service["ports"]:
        assert re.fullmatch(r"\$\{[A-Z]+_BIND:-127\.0\.0\.1\}:(\d+):\1", port)
    for mount in binds(service):
        assert (DEPLOY / mount["source"]).exists(), mount
        assert mount["read_only"] is True


def test_services_find_each_other_by_name() -> None:
    """Names and ports in the configuration files are those of the services."""
    config = load(PROMETHEUS / "prometheus.yml")
    targets = [
        *config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"],
        *config["scrape_configs"][0]["static_configs"][0]["targets"],
        *re.findall(r"//([^/]+)/", config["scrape_configs"][1]["http_sd_configs"][0]["url"]),
    ]
    for target in targets:
        host, port = target.split(":")
        assert SERVICES[host]["ports"][0].endswith(f":{port}")
    depends = {other for service in SERVICES.values() for other in service.get("depends_on", ())}
    assert depends <= set(SERVICES)


def test_secrets_are_files_that_git_does_not_keep() -> None:
    """No password stands in the file or in the environment, and what is put into ``secrets`` is never committed."""
    settings = {name: str(value) for each in SERVICES.values() for name, value in each.get("environment", {}).items()}
    spoken = [name for name in settings if re.search("PASSWORD|TOKEN|SECRET|KEY", name)]
    assert [
        name for name in spoken if not (name.endswith("__FILE") and settings[name].startswith("/run/secrets/"))
    ] == []
    assert spoken
    assert all(Path(secret["file"]).parts[0] == "secrets" for secret in COMPOSE["secrets"].values())
    assert "\n*\n" in (DEPLOY / "secrets/.gitignore").read_text(encoding="utf-8")
    receivers = (DEPLOY / "alertmanager/alertmanager.yml").read_text(encoding="utf-8")
    mounted = [mount["target"] for mount in binds(SERVICES["alertmanager"])]
    for path in re.findall(r"_file: (\S+)", receivers):
        assert str(Path(path).parent) in mounted
