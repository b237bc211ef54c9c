"""The one door to the environment and to option strings: typed, validated, frozen settings.

*Fails by* raising ConfigError with one sentence that names the option.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticSerializationError

from elastic_trainer.errors import ConfigError
from elastic_trainer.model import PreflightMode, RecoveryMode, as_text
from elastic_trainer.variables import (
    ENV_ENDPOINT,
    ENV_KUBE_JOB,
    ENV_LOG_LEVEL,
    KUBEFLOW_VARIABLES,
    STORE_VARIABLES,
    WORKER_VARIABLES,
)

DEFAULT_ETCD_PORT = 2379
DEFAULT_ENDPOINT = f"127.0.0.1:{DEFAULT_ETCD_PORT}"
GROUP_TIMEOUT_S = 600.0
"""How long a collective may take where no agent of this package watches the ranks."""
UNLIMITED_S = 30 * 86_400.0
SECRETS = frozenset({"password"})
"""Keys whose values are never shown."""
WITHDRAWN = {
    "last_call_limit": "it is 60 seconds, or last_call if that is longer",
    "join_batch": "it is 1 second",
    "stalled_rounds": "it is 10 rounds, or failure_limit if that is more",
    "preflight_min_disk": "elastic-trainer doctor --min-disk checks it",
    "preflight_timeout": "the checks of a node always have 120 s",
    "preflight_wait": "a node always waits up to 10 s for others' results",
    "preflight_compute": "a node always measures memory and matrix products",
}
"""Options of earlier versions, and what holds now."""


class Frozen(BaseModel):
    """Base of all settings: immutable, unknown keys are errors, and no traceback shows what was written."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)


SettingsT = TypeVar("SettingsT", bound=BaseModel)
Choice = TypeVar("Choice", bound=StrEnum)


def explain(error: ValidationError, where: str) -> ConfigError:
    """Turn pydantic's report into one sentence that names the first wrong field."""
    problems = error.errors()
    first = problems[0]
    name = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    hint = "correct this value"
    if first["type"] == "extra_forbidden" and name in WITHDRAWN:
        text, hint = f"{where}: '{name}' is no option any more: {WITHDRAWN[name]}", "remove it"
    elif first["type"] == "extra_forbidden":
        text, hint = f"{where}: unknown key '{name}'", "remove it or correct its spelling"
    elif first["type"] == "missing":
        text, hint = f"{where}: '{name}' is missing", f"set '{name}'"
    elif not name:  # of several values together, among which may be secrets: the input is not shown
        text, hint = f"{where}: {message}", "correct these options"
    elif name in SECRETS:
        text = f"{where}: '{name}' is wrong: {message}"
    else:
        text = f"{where}: '{name}' is {first['input']!r}: {message}"
    if len(problems) > 1:
        hint += f"; {len(problems) - 1} more problem(s) follow"
    return ConfigError(text, hint=hint)


def as_json(document: BaseModel) -> bytes:
    """``document`` as JSON, with :func:`~elastic_trainer.model.as_text` of what is no Unicode, such as file names."""
    try:
        return document.model_dump_json().encode()
    except PydanticSerializationError:
        return json.dumps(_as_texts(document.model_dump(mode="json"))).encode()


def _as_texts(value: Any) -> Any:
    if isinstance(value, str):
        return as_text(value)
    if isinstance(value, dict):
        return {_as_texts(name): _as_texts(each) for name, each in value.items()}
    return [_as_texts(each) for each in value] if isinstance(value, list | tuple) else value


def validated(kind: type[SettingsT], values: Mapping[str, Any], where: str) -> SettingsT:
    """``kind`` built from ``values``; a ConfigError that begins with ``where`` if they are wrong."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise explain(error, where) from error


def one_of(kind: type[Choice], value: str, what: str) -> Choice:
    """``value`` as one of ``kind``; ConfigError names them all."""
    if value not in list(kind):
        raise ConfigError(f"{what} is {value!r}", hint=f"use one of {', '.join(map(repr, map(str, kind)))}")
    return kind(value)


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


def secret(path: Path, option: str) -> str:
    """The first line of the file that ``option`` names, which holds a secret."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        cause = error.strerror or type(error).__name__
        raise ConfigError(f"{option} {str(path)!r} cannot be read: {cause}", hint="check its path") from error
    except UnicodeDecodeError:  # its text shows a byte of the file
        raise ConfigError(f"{option} {str(path)!r} is not text in UTF-8", hint="check its path") from None
    if not lines or not lines[0].strip():
        raise ConfigError(f"{option} {str(path)!r} holds nothing", hint="its first line is the secret")
    return lines[0].strip()


class StoreSettings(Frozen):
    """How to reach etcd. ``password_file``: its first line is the password, read anew at each login."""

    endpoints: tuple[Endpoint, ...] = Field(min_length=1, description="where etcd is, `--rdzv-endpoint`")
    prefix: str = Field(default="/elastic_trainer", description="prefix of all keys in etcd")
    user: str | None = Field(default=None, description="for etcd, with a password; null: `ELASTIC_TRAINER_USER`")
    password: str | None = Field(
        default=None,
        repr=False,
        description="for etcd, with `user`. All users of the machine can read it in `ps`: prefer `password_file`",
    )
    password_file: Path | None = Field(
        default=None, description="its first line is the password; null: `ELASTIC_TRAINER_PASSWORD_FILE`"
    )
    ca_cert: Path | None = Field(default=None, description="for etcd over TLS; null: `ELASTIC_TRAINER_CA_CERT`")
    cert: Path | None = Field(default=None, description="for etcd over TLS, with `key`; null: `ELASTIC_TRAINER_CERT`")
    key: Path | None = Field(default=None, description="for etcd over TLS, with `cert`; null: `ELASTIC_TRAINER_KEY`")

    @field_validator("prefix")
    @classmethod
    def _prefix(cls, value: str) -> str:
        if not value.startswith("/") or value.endswith("/") or "//" in value or not value.isascii():
            raise ValueError("must begin with '/', not end with it, and be plain ASCII")
        return value

    @property
    def renewable(self) -> bool:
        """Whether credentials are in files, which may be replaced while they are read."""
        return any(path is not None for path in (self.password_file, self.ca_cert, self.cert))

    @model_validator(mode="after")
    def _pairs(self) -> StoreSettings:
        if self.password is not None and self.password_file is not None:
            raise ValueError("password and password_file are both given")
        if (self.user is None) != (self.password is None and self.password_file is None):
            raise ValueError("user and password go together")
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        return self


class RendezvousOptions(Frozen):
    """What ``--rdzv-conf key=value,...`` may say. Times are in seconds."""

    recovery: RecoveryMode = Field(
        default=RecoveryMode.RESTART, description="what happens to the other workers when one is lost"
    )
    ttl: float = Field(default=5.0, ge=2.0, le=600.0, description="how long a silent node counts as alive; from 2")
    last_call: float = Field(
        default=3.0,
        ge=0.0,
        le=600.0,
        description=(
            "wait for more nodes once the minimum is there; each that comes begins it anew, for a minute "
            "at most, or for one `last_call` that is longer"
        ),
    )
    join_timeout: float = Field(default=600.0, gt=0.0, description="longest wait for the minimum")
    connect_timeout: float = Field(default=15.0, gt=0.0, description="longest wait for etcd at the start")
    regroup_grace: float = Field(
        default=0.5,
        gt=0.0,
        description=(
            "in place: how long a member whose agent is silent is waited for; longer where machines "
            "stall, as overcommitted ones do"
        ),
    )
    join_interval: float = Field(
        default=5.0,
        ge=0.0,
        description=(
            "least time between planned changes, before each of which newcomers are collected for a "
            "second; longer where a change is dear, as a restart is"
        ),
    )
    stop_grace: float = Field(default=5.0, gt=0.0, description="what workers of a broken round get before SIGKILL")
    sever_timeout: float = Field(
        default=30.0,
        gt=0.0,
        description=(
            "in place: how long a worker may stay blocked in a round that is over, before SIGKILL; one "
            "that saves, evaluates, compiles or is between two steps is waited for as long as the limits "
            "below allow"
        ),
    )
    hang_timeout: float = Field(
        default=60.0, ge=0.0, description="in place: how long a worker may answer nothing before SIGKILL; 0: no limit"
    )
    step_timeout: float = Field(
        default=300.0,
        ge=0.0,
        description=(
            "how long a worker may take for a step, beside ten of its usual steps, before SIGKILL; 0: no limit"
        ),
    )
    first_step_timeout: float = Field(
        default=1800.0,
        ge=0.0,
        description=(
            "the same for the first two steps of a round, which may compile, and for a process's first samples; "
            "at least `step_timeout`, 0: no limit"
        ),
    )
    phase_timeout: float = Field(
        default=3600.0, ge=0.0, description="the same for a save, a load or a turn of an evaluation; 0: no limit"
    )
    evict_stragglers: bool = Field(
        default=False, description="let a node go whose ranks compute much longer than the others', if another is ready"
    )
    evict_mismatched: bool = Field(
        default=False, description="let a node go whose ranks an audit has found to be wrong, if `--nnodes` allows it"
    )
    evict_faulty: bool = Field(
        default=True,
        description="ask a node to leave on which workers fail again and again, if `--nnodes` allows it (verdicts)",
    )
    sick_machines: PreflightMode = Field(
        default=PreflightMode.REFUSE,
        description=(
            "what comes of a node whose machine has failed lately in two runs of this etcd, or has been left out of "
            "this one: it ends with 71, joins with a warning, or is not asked"
        ),
    )
    preemption: str | None = Field(
        default=None,
        pattern=r"^(ec2|gce|azure)(@\S+)?$",
        description=(
            "`ec2`, `gce` or `azure`: ask the cloud's metadata service every 3 s whether it takes this "
            "machine back, and leave then as after a SIGTERM; `ec2@http://HOST:PORT` for a service "
            "elsewhere"
        ),
    )
    log_lines: int = Field(
        default=8,
        ge=0,
        le=100,
        description=(
            "how many of the last lines that its workers wrote a node shows on the status page, where their output "
            "goes to files; everybody who may see the page can read them; 0: none"
        ),
    )
    metrics_address: str = Field(
        default="127.0.0.1", description="where the node listens for Prometheus; empty: nowhere"
    )
    metrics_port: int = Field(default=0, ge=0, le=65535, description="at which port; 0: one that is free")
    metrics_token_file: Path | None = Field(
        default=None,
        description="its content is the token that readers of `/metrics` must present: `Authorization: Bearer`",
    )
    metrics_cert: Path | None = Field(default=None, description="answer over TLS, with `metrics_key`")
    metrics_key: Path | None = Field(default=None, description="the key of `metrics_cert`")
    alive_file: Path | None = Field(
        default=None,
        description=(
            "a file that the agent touches every 5 seconds while it works, whatever etcd and others do; "
            "for a liveness probe that needs no port"
        ),
    )
    form_timeout: float = Field(
        default=10.0,
        gt=0.0,
        description=("in place: longest time to form a process group; longer where NCCL connects thousands of ranks"),
    )
    session_timeout: float = Field(
        default=3600.0,
        gt=0.0,
        description="in place: time until a worker opens a Session, downloads and compilation before it included",
    )
    failure_limit: int = Field(
        default=3,
        ge=1,
        description=(
            "failures at one step that end the run; in place so do as many rounds without a committed "
            "step, and of a script without a Session as many equal lives in a row, but at least 10"
        ),
    )
    preflight: PreflightMode = Field(
        default=PreflightMode.OFF, description="check the node before it joins: log what is bad, or end with 71"
    )
    preflight_dir: str | None = Field(default=None, description="the checkpoint directory or URL to look at")
    preflight_ratio: float = Field(
        default=0.5, gt=0.0, le=1.0, description="unfit: slower than this part of the other nodes' median"
    )
    preload: str = Field(
        default="auto",
        pattern=r"^(off|auto|[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)*)$",
        description=(
            "modules that workers find imported when they start, joined by colons; `auto`: what the last "
            "ones imported; `off`: none (warm starts)"
        ),
    )
    compile_cache_mb: int = Field(
        default=1024,
        ge=0,
        le=1 << 20,
        description=(
            "how many MB of what `torch.compile` has made nodes keep in memory and in the run's directory, for nodes "
            "that join and for the next start; 0: none"
        ),
    )
    compile_cache_dir: str | None = Field(
        default=None,
        description=(
            "a directory or URL that all nodes reach, for the same; null: `preflight_dir`, else the checkpoint "
            "directory where the script's command names it (`--checkpoint-dir`)"
        ),
    )
    sizes: str | None = Field(
        default=None,
        pattern=r"^[1-9]\d{0,5}(:[1-9]\d{0,5})*$",
        description=(
            "the numbers of nodes that rounds may have, joined by colons (`1:2:4`), for scripts that "
            "divide by the world size; nodes beyond the largest that fits stand by"
        ),
    )
    multiple_of: int = Field(default=1, ge=1, description="the same: only multiples of it")
    shard_nodes: int = Field(
        default=1,
        ge=1,
        description=(
            "how many nodes hold one sharded model together; `--nnodes` and `sizes` still count nodes, "
            "and must be multiples of it"
        ),
    )
    reopen: bool = Field(default=False, description="go on with a run that was closed")
    allow_different: str | None = Field(
        default=None,
        pattern=r"^(user|checkpoint_dir|script|command)(:(user|checkpoint_dir|script|command))*$",
        description=(
            "what of the job may differ from what the run was started with, joined by colons: `user`, "
            "`checkpoint_dir`, `script`, `command`"
        ),
    )
    node_id: str | None = Field(default=None, description="this node's name")
    interface: str | None = Field(
        default=None,
        description=(
            "the address that others reach this node by, as torchrun's `--local-addr`; null: the one that "
            "reaches etcd. Where etcd is on this machine, and `--nnodes` allows others: that of the "
            "default route, else of the first interface that is up"
        ),
    )
    prefix: str = Field(default="/elastic_trainer", description="prefix of all keys in etcd")
    user: str | None = Field(default=None, description="for etcd, with a password; null: `ELASTIC_TRAINER_USER`")
    password: str | None = Field(
        default=None,
        repr=False,
        description="for etcd, with `user`. All users of the machine can read it in `ps`: prefer `password_file`",
    )
    password_file: Path | None = Field(
        default=None, description="its first line is the password; null: `ELASTIC_TRAINER_PASSWORD_FILE`"
    )
    ca_cert: Path | None = Field(default=None, description="for etcd over TLS; null: `ELASTIC_TRAINER_CA_CERT`")
    cert: Path | None = Field(default=None, description="for etcd over TLS, with `key`; null: `ELASTIC_TRAINER_CERT`")
    key: Path | None = Field(default=None, description="for etcd over TLS, with `cert`; null: `ELASTIC_TRAINER_KEY`")

    @property
    def may_differ(self) -> frozenset[str]:
        """The fields that ``allow_different`` names."""
        return frozenset((self.allow_different or "").split(":"))

    @property
    def group_timeout_s(self) -> float:
        """How long ranks wait for a busy one: the watchdog's limits for all it may do, one after the other."""
        limits = (self.step_timeout, self.first_step_timeout, self.phase_timeout)
        return GROUP_TIMEOUT_S + sum(limits) if all(limits) else UNLIMITED_S

    def store(self, endpoint: str, environ: Mapping[str, str] = os.environ) -> StoreSettings:
        """The store settings for ``--rdzv-endpoint`` ``endpoint``; the environment says what is left open."""
        names = ("prefix", "user", "password", "password_file", "ca_cert", "cert", "key")
        values = {name: getattr(self, name) for name in names}
        return resolved_store(endpoint, values, "--rdzv-conf", environ)


TORCHRUN_OPTIONS = frozenset({"timeout", "read_timeout", "rank"})
"""Options that torchrun itself adds to every backend's configuration; they mean nothing here."""


def rendezvous_options(config: Mapping[str, Any]) -> RendezvousOptions:
    """Validate ``--rdzv-conf``; options that torchrun adds by itself are passed over."""
    mine = {name: value for name, value in config.items() if name not in TORCHRUN_OPTIONS}
    options = validated(RendezvousOptions, mine, "--rdzv-conf")
    if (options.metrics_cert is None) != (options.metrics_key is None):
        raise ConfigError("--rdzv-conf: metrics_cert and metrics_key go together", hint="give both, or none")
    for name in ("password_file", "ca_cert", "cert", "key", "metrics_token_file", "metrics_cert", "metrics_key"):
        path = getattr(options, name)
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(f"--rdzv-conf: '{name}' is {str(path)!r}: the file cannot be read", hint="check its path")
    return options


class WorkerEnvironment(Frozen):
    """What the launcher passes to a training process (torchrun's variables, and this package's own)."""

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
    error_file: Path | None = None
    """Where torchrun looks for a failure: in a directory of this worker's, beside those of its node's others."""
    node: str = "local"
    round: int = 0
    round_reason: str = ""
    channel: Path | None = None
    """The agent's socket, where this package's agent started the process."""
    recovery: RecoveryMode = RecoveryMode.RESTART
    form_timeout: float = Field(default=10.0, gt=0.0)
    """In place: how many seconds the forming of a process group may take."""
    shard_nodes: int = Field(default=1, ge=1)
    shard_place: int | None = Field(default=None, ge=0)
    """How many nodes hold one sharded model together, and which of them this is; None: as its rank says."""
    group_timeout: float = Field(default=GROUP_TIMEOUT_S, gt=0.0)
    """How many seconds a collective may take."""
    pages: Path | None = None
    """Where this process's heartbeat page belongs, where this package's agent started it."""
    memory: tuple[Path, ...] = ()
    """The memory files that the node's agent holds for snapshots of the state, where it started the process."""
    address: str = ""
    """The address at which other nodes reach this one, as its agent announces it; empty without an agent."""
    copies_here: str | None = None
    """Where the node's agent serves them to other nodes, and keeps copies of shards of theirs (``HOST PORT KEY``)."""
    reached: int = Field(default=0, ge=0)
    """The newest step that the job is known to have made before: up to there steps are repeated."""
    metrics_address: str = "127.0.0.1"
    """Where a process that no agent of this package started listens for Prometheus."""
    metrics_base_port: int = Field(default=0, ge=0, le=65000)
    """At which port, plus its local rank; 0: it does not."""
    metrics_token_file: Path | None = None
    metrics_cert: Path | None = None
    metrics_key: Path | None = None
    ledger_dir: Path | None = None
    """Where to write one line for each committed step (``ELASTIC_TRAINER_LEDGER_DIR``)."""
    leave_within: float | None = Field(default=None, gt=0.0)
    """Seconds from SIGTERM to this machine's end, less what the agent needs to leave; None: no limit is known."""

    @field_validator("memory", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        return tuple(value.split(os.pathsep)) if isinstance(value, str) else value

    @property
    def midway(self) -> bool:
        """Whether this process takes up a training that was under way, as far as its launcher can know."""
        return self.reached > 0 or self.restart_count > 0 or self.round > 1

    @property
    def run_name(self) -> str | None:
        """What the user calls the run; None for a process alone, and where torchrun makes a name up."""
        named = self.launched and self.run_id not in _NO_NAMES and not _MADE_UP.fullmatch(self.run_id)
        return self.run_id if named else None

    @property
    def in_place(self) -> bool:
        """Whether this process is led through rounds by its node's agent."""
        return self.recovery is RecoveryMode.IN_PLACE and self.channel is not None


_NO_NAMES = ("local", "none")
"""The run of a script alone, and torchrun's own default."""
_MADE_UP = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}|local-[0-9a-f]{8}")
"""What ``torchrun --standalone`` (a random UUID) and ``elastic-trainer local`` name their runs, anew at each start."""


def worker_environment(environ: Mapping[str, str] = os.environ) -> WorkerEnvironment:
    """Read the launcher's variables (default: of this process)."""
    values: dict[str, Any] = {
        field: environ[variable] for field, variable in WORKER_VARIABLES.items() if environ.get(variable)
    }
    values["launched"] = "RANK" in environ and "WORLD_SIZE" in environ
    return validated(WorkerEnvironment, values, "environment")


def log_level() -> str:
    """The log level asked for (``ELASTIC_TRAINER_LOG_LEVEL``), ``info`` by default."""
    return os.environ.get(ENV_LOG_LEVEL, "info")


def store_endpoint() -> str:
    """Where commands look for etcd (``ELASTIC_TRAINER_ENDPOINT``); this machine by default."""
    return os.environ.get(ENV_ENDPOINT) or DEFAULT_ENDPOINT


def resolved_store(
    endpoint: str, given: Mapping[str, Any], where: str, environ: Mapping[str, str] = os.environ
) -> StoreSettings:
    """How to reach etcd at ``endpoint``: as ``given``, and where that is None as the environment says.

    ``where`` begins the sentence of a ConfigError. A password that was given is not replaced by a file's.
    """
    values = {name: value for name, value in given.items() if value is not None}
    open_to_environment = {name: variable for name, variable in STORE_VARIABLES.items() if name not in values}
    if "password" in values:
        open_to_environment.pop("password_file", None)
    found = {name: environ[variable] for name, variable in open_to_environment.items() if environ.get(variable)}
    told = f"{where} with {', '.join(STORE_VARIABLES[name] for name in found)}" if found else where
    return validated(StoreSettings, {"endpoints": parse_endpoints(endpoint), **values, **found}, told)


def without_store(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without its etcd variables, for nodes that meet at another etcd."""
    return {name: value for name, value in environ.items() if name not in {ENV_ENDPOINT, *STORE_VARIABLES.values()}}


def worker_threads() -> int | None:
    """Threads that each worker computes with, where somebody has set them (``OMP_NUM_THREADS``)."""
    # A list gives the numbers of nested regions; the first counts.
    text = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """For data that can be made again: ``$XDG_CACHE_HOME``, if absolute as its specification asks, or ``~/.cache``."""
    root = environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path(os.path.expanduser("~/.cache"))) / "elastic_trainer"


def gloo_interfaces() -> str:
    """The network interfaces that the user chose for gloo (``GLOO_SOCKET_IFNAME``); empty for none."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


class ProgressTarget(Frozen):
    """Where an agent says how far the run is; ``token`` is read anew each time, since it changes."""

    url: str
    token: Path
    ca: Path
    kubeflow: bool = False


SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def progress_targets(environ: Mapping[str, str] | None = None, account: Path = SERVICE_ACCOUNT) -> list[ProgressTarget]:
    """The Kubeflow TrainJob that this pod belongs to, and the Job that it may annotate."""
    source, found = os.environ if environ is None else environ, []
    url, token, ca = (source.get(name) for name in KUBEFLOW_VARIABLES)
    if url and token and ca:
        found.append(ProgressTarget(url=url, token=Path(token), ca=Path(ca), kubeflow=True))
    host, job = source.get("KUBERNETES_SERVICE_HOST"), source.get(ENV_KUBE_JOB)
    if host and job:
        try:
            space = (account / "namespace").read_text(encoding="utf-8").strip()
        except OSError:  # the pod has no token
            return found
        port = source.get("KUBERNETES_SERVICE_PORT", "443")
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}/apis/batch/v1/namespaces/{space}/jobs/{job}"
        found.append(ProgressTarget(url=url, token=account / "token", ca=account / "ca.crt"))
    return found
