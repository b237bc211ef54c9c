"""``elastic-trainer health``: asks the monitor or node of this container whether it works; the image's health check.

*Runs in* a process of its own, for seconds. *Owns* nothing.
*Fails by* exit code 1 and one line; never by a traceback.
"""

from __future__ import annotations

import argparse
import http.client
import ssl
from collections.abc import Mapping
from contextlib import closing

from elastic_trainer.errors import EXIT_FAILURE

MONITOR_PORT, NODE_PORT = 9470, 9471
"""Where ``elastic-trainer monitor`` listens, and where ``metrics_port=9471`` lets a node listen."""
PATH = "/healthz"
LIMIT_S = 3.0
_LONGEST = 200
Said = tuple[int | None, str]
"""The status of HTTP, None without an answer, and the words."""


def configure_health(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add = parser.add_argument
    add(
        "--port",
        type=int,
        action="append",
        metavar="PORT",
        help="this port must answer, and no other is asked; may be given again",
    )
    add("--address", default="127.0.0.1", metavar="HOST", help="where it listens (default: 127.0.0.1)")


def run_health(arguments: argparse.Namespace) -> int:
    """Ask, say what was heard; 0 if all is well."""
    ports = arguments.port or (MONITOR_PORT, NODE_PORT)
    heard = {port: ask(arguments.address, port) for port in ports}
    well, reason = judge(heard, required=bool(arguments.port))
    print(reason)
    return 0 if well else EXIT_FAILURE


def judge(heard: Mapping[int, Said | None], *, required: bool) -> tuple[bool, str]:
    """Whether all is well, and why: all that listen must say 200. No listener (None) is no fault unless the ports were
    ``required``: a job may have no endpoint, and the container knows by itself whether its process lives."""
    asked = {port: said or (None, "nobody listens") for port, said in heard.items() if said is not None or required}
    if not asked:
        return True, f"nobody listens on {' or '.join(map(str, heard))}: nothing to ask"
    sick = {port: said for port, said in asked.items() if said[0] != http.client.OK}
    return not sick, "; ".join(f"port {port}: {text}" for port, (_, text) in (sick or asked).items())


def ask(address: str, port: int) -> Said | None:
    """Ask ``port`` over HTTP, and over TLS if it does not speak that; None: no process listens."""
    try:
        return _answer(http.client.HTTPConnection(address, port, timeout=LIMIT_S))
    except ConnectionRefusedError:
        return None
    except (http.client.HTTPException, ConnectionError):
        pass  # what a server that waits for TLS does with a plain request
    except (OSError, OverflowError) as error:
        return None, f"no answer: {error}"
    # Without checking the certificate: it names the address that others use, and nothing secret is sent.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        return _answer(http.client.HTTPSConnection(address, port, timeout=LIMIT_S, context=context))
    except (http.client.HTTPException, OSError) as error:
        return None, f"no answer: {error}"


def _answer(connection: http.client.HTTPConnection) -> Said:
    with closing(connection):
        connection.request("GET", PATH)
        response = connection.getresponse()
        text = response.read(_LONGEST).decode("utf-8", "replace").strip()
        return response.status, text or response.reason
