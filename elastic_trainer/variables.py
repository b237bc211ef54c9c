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
ENV_MACHINE: Final = "ELASTIC_TRAINER_MACHINE"
ENV_ENDPOINT: Final = "ELASTIC_TRAINER_ENDPOINT"
ENV_REPLAY: Final = "ELASTIC_TRAINER_REPLAY"
ENV_KUBE_JOB: Final = "ELASTIC_TRAINER_KUBE_JOB"

KUBEFLOW_VARIABLES: Final = (
    "KUBEFLOW_TRAINER_SERVER_URL",
    "KUBEFLOW_TRAINER_SERVER_TOKEN",
    "KUBEFLOW_TRAINER_SERVER_CA_CERT",
)

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

MEANINGS: Final = {
    ENV_LOG_FORMAT: (
        "you, the image",
        "`json`: log lines are JSON objects; else text. `elastic-trainer --log-format json COMMAND` sets it",
    ),
    ENV_LOG_LEVEL: ("you", "`debug`, `info`, `warning`, `error`; `info` by default"),
    ENV_ENDPOINT: (
        "you",
        "where commands with `--endpoint` look for etcd, except `doctor` and `k8s render`; 127.0.0.1:2379 by default",
    ),
    ENV_MACHINE: (
        "you, the manifests in `k8s`",
        "the name of the machine that this node runs on, by which its faults are remembered for later runs; without it "
        "that of Slurm (`SLURMD_NODENAME`), or the host's. In a container give the machine's, not the container's",
    ),
    "ELASTIC_TRAINER_USER": (
        "you",
        "who to be for etcd, in commands without `--user` and nodes without `user` in `--rdzv-conf`; the file's first "
        "line is the password",
    ),
    "ELASTIC_TRAINER_PASSWORD_FILE": (
        "you",
        "who to be for etcd, in commands without `--user` and nodes without `user` in `--rdzv-conf`; the file's first "
        "line is the password",
    ),
    "ELASTIC_TRAINER_CA_CERT": ("you", "speak TLS with etcd, for which this CA vouches (PEM)"),
    "ELASTIC_TRAINER_CERT": ("you", "show this certificate to etcd, with its key (PEM)"),
    "ELASTIC_TRAINER_KEY": ("you", "show this certificate to etcd, with its key (PEM)"),
    "ELASTIC_TRAINER_METRICS_PORT": (
        "you",
        "where no agent of this package is: a worker answers Prometheus at this port plus its local rank",
    ),
    "ELASTIC_TRAINER_METRICS_ADDRESS": ("you", "and at this address; `127.0.0.1` by default"),
    "ELASTIC_TRAINER_METRICS_TOKEN_FILE": ("you", "readers must present the token in this file"),
    "ELASTIC_TRAINER_METRICS_CERT": ("you", "answer over TLS with these files (PEM)"),
    "ELASTIC_TRAINER_METRICS_KEY": ("you", "answer over TLS with these files (PEM)"),
    ENV_LEAVE_WITHIN: (
        "you, `k8s render`",
        "seconds that a worker has after a SIGTERM, its last checkpoint included: then it exits with 143 whatever is "
        "being written, since the machine is about to go and SIGKILL would count as a failure. 10 s less than a pod's "
        "`--shutdown-timeout`, or than the notice of a cloud (EC2: 110; GCE, Azure: 20)",
    ),
    ENV_LEDGER_DIR: ("you, `elastic-trainer local`", "write one JSON line for each committed step and rank there"),
    "OMP_NUM_THREADS": ("you, torchrun", "threads that each worker computes with; checked against the cores"),
    "TORCHINDUCTOR_CACHE_DIR": (
        "the node agent, or you",
        "where Inductor keeps what it compiles; one that you set is not shared with other nodes (`compile_cache_mb`)",
    ),
    "TRITON_CACHE_DIR": ("the node agent, or you", "the same for Triton's kernels"),
    "XDG_CACHE_HOME": ("you", "data that can be made again is kept in `elastic_trainer` below it; by default ~/.cache"),
    "GLOO_SOCKET_IFNAME": (
        "you",
        "the network interface for gloo. Where unset, each group of a `Session`'s job uses the loopback if all its "
        "ranks are on one machine, else the address that this node announces (`interface`), or without an agent the "
        "one that reaches rank 0; `/etc/hosts` does not matter",
    ),
    ENV_REPLAY: (
        "`elastic-trainer replay`",
        "JSON: the directory in which the script's Session works, the step it stops behind, samples it leaves out",
    ),
    ENV_KUBE_JOB: (
        "you, k8s/components/progress",
        "the Job whose annotations say how far the run is; the pod's token must allow to patch it",
    ),
    "KUBERNETES_SERVICE_HOST": ("Kubernetes", "the API server's address, for these annotations"),
    "KUBERNETES_SERVICE_PORT": ("Kubernetes", "its port"),
    "KUBEFLOW_TRAINER_SERVER_URL": ("Kubeflow Trainer", "where the TrainJob's progress is reported"),
    "KUBEFLOW_TRAINER_SERVER_TOKEN": ("Kubeflow Trainer", "the file with the token for that"),
    "KUBEFLOW_TRAINER_SERVER_CA_CERT": ("Kubeflow Trainer", "the file with the CA that vouches for that address"),
    "RANK": ("torchrun", "number among all processes"),
    "LOCAL_RANK": ("torchrun", "number on this node"),
    "WORLD_SIZE": ("torchrun", "processes of all nodes"),
    "LOCAL_WORLD_SIZE": ("torchrun", "processes of this node"),
    "MASTER_ADDR": ("torchrun", "where the ranks meet"),
    "MASTER_PORT": ("torchrun", "where the ranks meet"),
    "TORCHELASTIC_USE_AGENT_STORE": ("torchrun", "whether torchrun hosts the meeting point"),
    "TORCHELASTIC_RUN_ID": ("torchrun", "the run's name, `--rdzv-id`"),
    "TORCHELASTIC_RESTART_COUNT": ("torchrun", "how often this node's workers were started again"),
    "TORCHELASTIC_ERROR_FILE": (
        "torchrun",
        "where a worker leaves its error for torchrun's report; in its directory the workers of a "
        "node see which mistakes were printed already",
    ),
    ENV_NODE: ("the node agent", "this node's name"),
    ENV_ROUND: ("the node agent", "number of the round"),
    ENV_ROUND_REASON: ("the node agent", "why it was formed"),
    ENV_RECOVERY: ("the node agent", "`restart` or `in_place`"),
    ENV_FORM_TIMEOUT: ("the node agent", "`form_timeout` of `--rdzv-conf`"),
    ENV_GROUP_TIMEOUT: ("the node agent", "how long a collective may take"),
    ENV_SHARD_NODES: ("the node agent, or you under plain torchrun", "`shard_nodes` of `--rdzv-conf`"),
    ENV_SHARD_PLACE: ("the node agent", "in place: which of these nodes this one is"),
    ENV_PAGES: ("the node agent", "directory of the heartbeat pages, by which it sees how its workers are"),
    ENV_MEMORY: ("the node agent", "memory files that it holds for snapshots of the state"),
    ENV_ADDRESS: ("the node agent", "the address at which other nodes reach this one"),
    ENV_COPIES_HERE: ("the node agent", "where it serves these snapshots to other nodes: host, port, key"),
    ENV_REACHED: ("the node agent", "the newest step known to have been made before: up to there steps are repeated"),
    ENV_CHANNEL: ("the node agent", "its socket, in place"),
}
"""Who sets each variable, and what it says. Also those of others that settings read."""
