"""The metadata services of clouds on this machine, as strict as the real ones about tokens and headers."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from elastic_trainer.local.hosts import reachable

TOKEN = "AQAEAfake=="


class MetadataServer:
    """A context. ``preempt(times)`` answers that many of the next questions with a notice, and the others with none."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken = False
        self._notices = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                server.asked.append(self.path)
                given = "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
                self._say(*((200, TOKEN) if given and self.path == "/latest/api/token" else (400, "")))

            def do_GET(self) -> None:
                server.asked.append(self.path)
                self._say(*((500, "try later") if server.broken else server.answer(self.path, self.headers)))

            def _say(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((reachable(), 0), Handler)
        self.url = f"http://{reachable()}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metadata")

    def preempt(self, times: int = 1) -> None:
        with self._lock:
            self._notices = times

    def answer(self, path: str, headers: Any) -> tuple[int, str]:
        if path == "/latest/meta-data/spot/instance-action":
            if headers.get("X-aws-ec2-metadata-token") != TOKEN:
                return 401, ""
            return (200, '{"action": "terminate", "time": "2026-11-23T22:00:00Z"}') if self._taken() else (404, "")
        if path.startswith("/computeMetadata/v1/instance/"):
            if headers.get("Metadata-Flavor") != "Google":
                return 403, ""
            return 200, ("TRUE" if path.endswith("preempted") and self._taken() else "FALSE")
        if headers.get("Metadata") != "true" or "api-version=" not in path:
            return 400, ""
        if path.startswith("/metadata/instance/compute/name"):
            return 200, "vm_1"
        event = {"EventType": "Preempt", "Resources": ["vm_1"], "NotBefore": "Mon, 23 Nov 2026 22:00:00 GMT"}
        others = {**event, "Resources": ["vm_2"]}
        frozen = {**event, "EventType": "Freeze"}
        return 200, json.dumps({"Events": [others, frozen, *([event] if self._taken() else [])]})

    def _taken(self) -> bool:
        with self._lock:
            self._notices -= 1
            return self._notices >= 0

    def __enter__(self) -> MetadataServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
