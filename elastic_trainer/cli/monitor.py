"""``elastic-trainer monitor``: options in, a status page and metrics out; the work is monitor/service's.

*Runs in* a process of its own, until SIGTERM or SIGINT, which end it with 0.
*Fails by* ConfigError for options that cannot be meant or a port that is taken.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from elastic_trainer.cli import connection
from elastic_trainer.cli.main import seconds
from elastic_trainer.clock import pause
from elastic_trainer.errors import ConfigError
from elastic_trainer.local.processes import Interrupts
from elastic_trainer.monitor.serve import Monitor
from elastic_trainer.settings import secret
from elastic_trainer.store import connect
from elastic_trainer.telemetry import logs
from elastic_trainer.web.server import Access, is_loopback, tls_context

DEFAULT_LISTEN = "127.0.0.1:9470"
_LOOK_EVERY_S = 0.2
_EXAMPLE = "example: elastic-trainer monitor --endpoint 127.0.0.1:2379, then open http://127.0.0.1:9470"


def configure_monitor(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.epilog = _EXAMPLE
    add = parser.add_argument
    add(
        "--listen",
        default=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help=f"where to answer (default: {DEFAULT_LISTEN}); port 0: any",
    )
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=("ask for the token in its first line: Authorization: Bearer, or a browser's password with any name"),
    )
    add("--cert", type=Path, metavar="FILE", help="answer over TLS with this certificate")
    add("--key", type=Path, metavar="FILE", help="the key of --cert")
    add(
        "--forget",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help=(
            "drop the metrics of runs that ended longer ago, 3600; of runs that all nodes left, after a day at least"
        ),
    )
    connection.add_options(parser)


def run_monitor(arguments: argparse.Namespace) -> int:
    """Answer until SIGTERM or SIGINT."""
    logs.configure()
    host, port = listen_address(arguments.listen)
    settings = connection.store_settings(arguments)
    if (arguments.cert is None) != (arguments.key is None):
        raise ConfigError("--cert and --key go together", hint="give both, or none of them")
    token = None if arguments.token_file is None else secret(arguments.token_file, "--token-file")
    if token is not None and not token.isascii():
        raise ConfigError("the token of --token-file is not ASCII", hint="headers of HTTP carry nothing else safely")
    access = Access(token, loopback=is_loopback(host))
    context = None if arguments.cert is None else tls_context(arguments.cert, arguments.key)
    forget_s = seconds(arguments.forget, "--forget")
    if token is None and not access.loopback:
        logs.logger().warning("monitor.unguarded", listen=arguments.listen, hint="give --token-file")
    with (
        Interrupts() as interrupts,
        closing(connect(settings)) as store,
        Monitor(
            store, settings.prefix, host=host, port=port, access=access, context=context, forget_s=forget_s
        ) as monitor,
    ):
        print(f"the status page is at {monitor.url}", flush=True)
        while interrupts.signal is None:
            pause(_LOOK_EVERY_S)
    return 0


def listen_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT`` (an IPv6 host in brackets; port 0: any that is free)."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"--listen {text!r} is not HOST:PORT", hint="for example 0.0.0.0:9470")
    return host.removeprefix("[").removesuffix("]"), int(port)
