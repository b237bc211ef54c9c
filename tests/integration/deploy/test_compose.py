"""compose.yaml names files that are there, pins what it fetches, and opens nothing to strangers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployment import DEPLOY, PROMETHEUS, load

COMPOSE: dict[str, Any] = load(DEPLOY / "compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OWN = "elastic-trainer:latest"


def binds(service: dict[str, Any]) -> list[dict[str, Any]]:
    return [mount for mount in service.get("volumes", ()) if mount["type"] == "bind"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_pinned_watched_and_closed(name: str) -> None:
    """A version for each image, a health check, a restart, and ports for this machine alone unless asked."""
    service = SERVICES[name]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]) or service["image"] == OWN
    assert ("build" in service) == (service["image"] == OWN)
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["restart"] == "unless-stopped"
    for port in service["ports"]:
        assert re.fullmatch(r"\$\{[A-Z]+_BIND:-127\.0\.0\.1\}:(\d+):\1", port)


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_exists_and_cannot_be_written(name: str) -> None:
    """Configuration comes from this folder, read-only."""
    for mount in binds(SERVICES[name]):
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
