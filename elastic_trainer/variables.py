"""The names of the environment variables: those that users set, and those by which agents and workers talk. Pure."""

from __future__ import annotations

from typing import Final

ENV_CHANNEL: Final = "ELASTIC_TRAINER_CHANNEL"
ENV_NODE: Final = "ELASTIC_TRAINER_NODE"
ENV_ROUND: Final = "ELASTIC_TRAINER_ROUND"
ENV_ROUND_REASON: Final = "ELASTIC_TRAINER_ROUND_REASON"
ENV_RECOVERY: Final = "ELASTIC_TRAINER_RECOVERY"
ENV_FORM_TIMEOUT: Final = "ELASTIC_TRAINER_FORM_TIMEOUT"
ENV_GROUP_TIMEOUT: Final = "ELASTIC_TRAINER_GROUP_TIMEOUT"
ENV_SHARD_NODES: Final = "ELASTIC_TRAINER_SHARD_NODES"
ENV_SHARD_PLACE: Final = "ELASTIC_TRAINER_SHARD_PLACE"
ENV_PAGES: Final = "ELASTIC_TRAINER_PAGES"
ENV_MEMORY: Final = "ELASTIC_TRAINER_MEMORY"
ENV_ADDRESS: Final = "ELASTIC_TRAINER_ADDRESS"
ENV_COPIES_HERE: Final = "ELASTIC_TRAINER_COPIES_HERE"
ENV_REACHED: Final = "ELASTIC_TRAINER_REACHED"
ENV_LEDGER_DIR: Final = "ELASTIC_TRAINER_LEDGER_DIR"
ENV_LOG_LEVEL: Final = "ELASTIC_TRAINER_LOG_LEVEL"
ENV_LOG_FORMAT: Final = "ELASTIC_TRAINER_LOG_FORMAT"
ENV_LEAVE_WITHIN: Final = "ELASTIC_TRAINER_LEAVE_WITHIN"
ENV_ENDPOINT: Final = "ELASTIC_TRAINER_ENDPOINT"

STORE_VARIABLES: Final = {
    "user": "ELASTIC_TRAINER_USER",
    "password_file": "ELASTIC_TRAINER_PASSWORD_FILE",
    "ca_cert": "ELASTIC_TRAINER_CA_CERT",
    "cert": "ELASTIC_TRAINER_CERT",
    "key": "ELASTIC_TRAINER_KEY",
}

WORKER_VARIABLES: Final = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "use_agent_store": "TORCHELASTIC_USE_AGENT_STORE",
    "run_id": "TORCHELASTIC_RUN_ID",
    "restart_count": "TORCHELASTIC_RESTART_COUNT",
    "error_file": "TORCHELASTIC_ERROR_FILE",
    "node": ENV_NODE,
    "round": ENV_ROUND,
    "round_reason": ENV_ROUND_REASON,
    "channel": ENV_CHANNEL,
    "recovery": ENV_RECOVERY,
    "form_timeout": ENV_FORM_TIMEOUT,
    "group_timeout": ENV_GROUP_TIMEOUT,
    "shard_nodes": ENV_SHARD_NODES,
    "shard_place": ENV_SHARD_PLACE,
    "pages": ENV_PAGES,
    "memory": ENV_MEMORY,
    "address": ENV_ADDRESS,
    "copies_here": ENV_COPIES_HERE,
    "reached": ENV_REACHED,
    "metrics_address": "ELASTIC_TRAINER_METRICS_ADDRESS",
    "metrics_base_port": "ELASTIC_TRAINER_METRICS_PORT",
    "metrics_token_file": "ELASTIC_TRAINER_METRICS_TOKEN_FILE",
    "metrics_cert": "ELASTIC_TRAINER_METRICS_CERT",
    "metrics_key": "ELASTIC_TRAINER_METRICS_KEY",
    "ledger_dir": ENV_LEDGER_DIR,
    "leave_within": ENV_LEAVE_WITHIN,
}
