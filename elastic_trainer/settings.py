"""The one door to the environment and to option strings: typed, validated, frozen settings.

*Fails by* raising ConfigError with one sentence that names the option.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from elastic_trainer.errors import ConfigError
from elastic_trainer.model import RecoveryMode

DEFAULT_ETCD_PORT = 2379


class Frozen(BaseModel):
    """Base of all settings: immutable, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


SettingsT = TypeVar("SettingsT", bound=BaseModel)


def explain(error: ValidationError, where: str) -> ConfigError:
    """Turn pydantic's report into one sentence that names the first wrong field."""
    problems = error.errors()
    first = problems[0]
    name = ".".join(str(part) for part in first["loc"]) or "value"
    if first["type"] == "extra_forbidden":
        text, hint = f"{where}: unknown key '{name}'", "remove it or correct its spelling"
    elif first["type"] == "missing":
        text, hint = f"{where}: '{name}' is missing", f"set '{name}'"
    else:
        message = first["msg"].removeprefix("Value error, ")
        text = f"{where}: '{name}' is {first['input']!r}: {message[:1].lower() + message[1:]}"
        hint = "correct this value"
    if len(problems) > 1:
        hint += f"; {len(problems) - 1} more problem(s) follow"
    return ConfigError(text, hint=hint)


def validated(kind: type[SettingsT], values: Mapping[str, Any], where: str) -> SettingsT:
    """``kind`` built from ``values``; a ConfigError that begins with ``where`` if they are wrong."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise explain(error, where) from error


class Endpoint(Frozen):
    """One address of the store."""

    host: str
    port: int = Field(ge=1, le=65535)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Parse ``host[:port][,host[:port]...]`` (IPv6 hosts in brackets); the default port is 2379."""
    endpoints = []
    for part in (piece.strip() for piece in text.split(",")):
        if not part:
            raise ConfigError(f"store endpoint {text!r} has an empty part", hint="write host:2379[,host:2379...]")
        host, port = _split_endpoint(part)
        try:
            endpoints.append(Endpoint(host=host, port=int(port)))
        except ValueError as error:
            raise ConfigError(
                f"store endpoint {part!r} is not host:port", hint="write host:2379[,host:2379...], without a scheme"
            ) from error
    return tuple(endpoints)


def _split_endpoint(part: str) -> tuple[str, str]:
    if part.startswith("[") and "]" in part:
        host, _, rest = part[1:].partition("]")
        return host, rest.removeprefix(":") or str(DEFAULT_ETCD_PORT)
    host, separator, port = part.rpartition(":")
    if not separator:
        return part, str(DEFAULT_ETCD_PORT)
    if not host or "/" in host or ":" in host:
        return "", "not a port"
    return host, port


class StoreSettings(Frozen):
    """How to reach etcd."""

    endpoints: tuple[Endpoint, ...] = Field(min_length=1)
    prefix: str = "/elastic_trainer"
    user: str | None = None
    password: str | None = Field(default=None, repr=False)
    ca_cert: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @field_validator("prefix")
    @classmethod
    def _prefix(cls, value: str) -> str:
        if not value.startswith("/") or value.endswith("/") or "//" in value or not value.isascii():
            raise ValueError("must begin with '/', not end with it, and be plain ASCII")
        return value

    @model_validator(mode="after")
    def _pairs(self) -> StoreSettings:
        if (self.user is None) != (self.password is None):
            raise ValueError("user and password go together")
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        return self


class RendezvousOptions(Frozen):
    """What ``--rdzv-conf key=value,...`` may say. Times are in seconds."""

    recovery: RecoveryMode = RecoveryMode.RESTART
    ttl: float = Field(default=5.0, ge=2.0, le=600.0, description="lease: how long a silent node counts as alive")
    last_call: float = Field(default=3.0, ge=0.0, le=600.0, description="wait for more nodes once min are there")
    last_call_limit: float = Field(default=60.0, ge=0.0, description="longest sum of such waits")
    join_timeout: float = Field(default=600.0, gt=0.0, description="longest wait for min nodes")
    connect_timeout: float = Field(default=15.0, gt=0.0, description="longest wait for the store at the start")
    regroup_grace: float = Field(default=0.5, gt=0.0, description="in place: how long a silent member is waited for")
    join_batch: float = Field(default=1.0, ge=0.0, description="collect newcomers this long before a planned change")
    join_interval: float = Field(default=5.0, ge=0.0, description="least time between planned changes")
    stop_grace: float = Field(default=5.0, gt=0.0, description="time workers of a broken round get before SIGKILL")
    sever_timeout: float = Field(
        default=30.0, gt=0.0, description="in place: time a worker gets to leave a round that is over, before SIGKILL"
    )
    hang_timeout: float = Field(
        default=60.0, ge=0.0, description="in place: time a worker may answer nothing before SIGKILL; 0: no limit"
    )
    form_timeout: float = Field(default=10.0, gt=0.0, description="in place: longest time to form a process group")
    session_timeout: float = Field(default=60.0, gt=0.0, description="in place: time until a worker opens a Session")
    failure_limit: int = Field(default=3, ge=1, description="failures at one step that end the run")
    stalled_rounds: int = Field(default=10, ge=1, description="rounds without a committed step that end the run")
    reopen: bool = Field(default=False, description="start a new epoch of a closed run")
    node_id: str | None = None
    interface: str | None = Field(default=None, description="address other nodes reach this one by")
    prefix: str = "/elastic_trainer"
    user: str | None = None
    password: str | None = Field(default=None, repr=False)
    ca_cert: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def store(self, endpoint: str) -> StoreSettings:
        """The store settings of these options for ``--rdzv-endpoint`` ``endpoint``."""
        names = ("prefix", "user", "password", "ca_cert", "cert", "key")
        values = {name: getattr(self, name) for name in names}
        return validated(StoreSettings, {"endpoints": parse_endpoints(endpoint), **values}, "--rdzv-conf")


TORCHRUN_OPTIONS = frozenset({"timeout", "read_timeout", "rank"})
"""Options that torchrun itself adds to every backend's configuration; they mean nothing here."""


def rendezvous_options(config: Mapping[str, Any]) -> RendezvousOptions:
    """Validate ``--rdzv-conf``; options that torchrun adds by itself are passed over."""
    mine = {name: value for name, value in config.items() if name not in TORCHRUN_OPTIONS}
    options = validated(RendezvousOptions, mine, "--rdzv-conf")
    for name in ("ca_cert", "cert", "key"):
        path = getattr(options, name)
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"--rdzv-conf: '{name}' is {str(path)!r}: the file cannot be read", hint="check its path")
    return options


class WorkerEnvironment(Frozen):
    """What a training process is told by its launcher (torchrun's variables, and this package's own)."""

    rank: int = Field(default=0, ge=0)
    local_rank: int = Field(default=0, ge=0)
    world_size: int = Field(default=1, ge=1)
    local_world_size: int = Field(default=1, ge=1)
    launched: bool = False
    """Whether a launcher set RANK and WORLD_SIZE; False for a plain ``python script.py``."""
    master_addr: str | None = None
    """Where the ranks meet; ``use_agent_store``: the launcher hosts that store, else rank 0 does."""
    master_port: int | None = Field(default=None, ge=1, le=65535)
    use_agent_store: bool = False
    run_id: str = "local"
    restart_count: int = 0
    node: str = "local"
    round: int = 0
    round_reason: str = ""
    channel: Path | None = None
    """The agent's socket, where this package's agent started the process."""
    recovery: RecoveryMode = RecoveryMode.RESTART
    form_timeout: float = Field(default=10.0, gt=0.0)
    """In place: how many seconds the forming of a process group may take."""
    ledger_dir: Path | None = None
    """Where to write one line for each committed step (``ELASTIC_TRAINER_LEDGER_DIR``)."""
    log_level: str = "info"

    @property
    def in_place(self) -> bool:
        """Whether this process is led through rounds by its node's agent."""
        return self.recovery is RecoveryMode.IN_PLACE and self.channel is not None


ENV_CHANNEL = "ELASTIC_TRAINER_CHANNEL"
ENV_NODE = "ELASTIC_TRAINER_NODE"
ENV_ROUND = "ELASTIC_TRAINER_ROUND"
ENV_ROUND_REASON = "ELASTIC_TRAINER_ROUND_REASON"
ENV_RECOVERY = "ELASTIC_TRAINER_RECOVERY"
ENV_FORM_TIMEOUT = "ELASTIC_TRAINER_FORM_TIMEOUT"
ENV_LEDGER_DIR = "ELASTIC_TRAINER_LEDGER_DIR"
ENV_LOG_LEVEL = "ELASTIC_TRAINER_LOG_LEVEL"

_WORKER_VARIABLES = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "use_agent_store": "TORCHELASTIC_USE_AGENT_STORE",
    "run_id": "TORCHELASTIC_RUN_ID",
    "restart_count": "TORCHELASTIC_RESTART_COUNT",
    "node": ENV_NODE,
    "round": ENV_ROUND,
    "round_reason": ENV_ROUND_REASON,
    "channel": ENV_CHANNEL,
    "recovery": ENV_RECOVERY,
    "form_timeout": ENV_FORM_TIMEOUT,
    "ledger_dir": ENV_LEDGER_DIR,
    "log_level": ENV_LOG_LEVEL,
}


def worker_environment(environ: Mapping[str, str] | None = None) -> WorkerEnvironment:
    """Read the launcher's variables (default: of this process)."""
    source = os.environ if environ is None else environ
    values: dict[str, Any] = {
        field: source[variable] for field, variable in _WORKER_VARIABLES.items() if source.get(variable)
    }
    values["launched"] = "RANK" in source and "WORLD_SIZE" in source
    return validated(WorkerEnvironment, values, "environment")


def log_level(environ: Mapping[str, str] | None = None) -> str:
    """The log level asked for (``ELASTIC_TRAINER_LOG_LEVEL``), ``info`` by default."""
    return (os.environ if environ is None else environ).get(ENV_LOG_LEVEL, "info")


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where data that can be made again is kept for other runs: in ``$XDG_CACHE_HOME``, by default ``~/.cache``."""
    root = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(root) if os.path.isabs(root) else Path(os.path.expanduser("~/.cache"))) / "elastic_trainer"


def prefer_loopback() -> None:
    """Let gloo use the loopback interface in this process, unless the user chose one.

    Otherwise it resolves this host's name, which fails or hangs on machines whose name has no address.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
