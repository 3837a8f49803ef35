"""A readiness endpoint that tells the truth: the server's own one says ready while its Python stubs are dead.

    GET /health/ready   200 or 503, with a JSON object {"ready": ..., "reason": ...}
GET /health/live    200 while the supervisor runs
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from minisgl_backend.errors import ConfigError

_ACCEPT_AGAIN_SECONDS = 0.1  # after a connection could not be taken, for want of file descriptors most of the time


class HealthServer:
    """Serves the endpoint from a thread of its own until `close`. Raises ConfigError where it cannot."""

    def __init__(self, host: str, port: int, not_ready_reason: Callable[[], str | None]) -> None:
        """`not_ready_reason` returns None when ready; it is called from many threads."""
        handler = type("_Handler", (_HealthHandler,), {"not_ready_reason": staticmethod(not_ready_reason)})
        server_class = type(
            "_Server", (_Listener,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET}
        )
        try:
            self._server: _Listener = server_class((host, port), handler)
        except OSError as error:
            raise ConfigError(f"--health-port is {port}, which cannot be had on {host}: {error}") from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="health", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # the machine has none left
            self._server.server_close()
            raise ConfigError(f"--health-port is {port}, which cannot be served: {error}") from None

    @property
    def port(self) -> int:
        """The TCP port in use."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            # The connection goes on waiting, and the loop would ask for it again at once, and again.
            time.sleep(_ACCEPT_AGAIN_SECONDS)
            raise


class _HealthHandler(BaseHTTPRequestHandler):
    timeout = 5  # seconds for a client to send its request
    not_ready_reason: Callable[[], str | None]

    def do_GET(self) -> None:
        """Answer one probe."""
        if self.path == "/health/live":
            self._reply(200, {"live": True})
        elif self.path in ("/health/ready", "/health"):
            reason = type(self).not_ready_reason()
            self._reply(200 if reason is None else 503, {"ready": reason is None, "reason": reason or ""})
        else:
            self._reply(404, {"error": "paths: /health/ready, /health/live"})

    def log_message(self, format: str, *args: object) -> None:
        """Probes come every few seconds: not a word."""

    def _reply(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
