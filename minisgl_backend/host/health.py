"""An accurate readiness endpoint: the server's own one reports ready while its Python stubs are dead.

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

_ACCEPT_AGAIN_SECONDS = 0.1  # after a connection could not be accepted, mostly for lack of file descriptors


class HealthServer:
    """Serves the endpoint on a thread of its own until `close`. Raises ConfigError if it cannot."""

    def __init__(self, host: str, port: int, not_ready_reason: Callable[[], str | None]) -> None:
        """`not_ready_reason` returns None when ready; it is called on many threads."""
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
        except RuntimeError as error:  # the machine has no thread left
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
            # The connection stays pending, so the loop would try again at once, endlessly.
            time.sleep(_ACCEPT_AGAIN_SECONDS)
            raise


class _HealthHandler(BaseHTTPRequestHandler):
    timeout = 5  # seconds for a client to send its request
    not_ready_reason: Callable[[], str | None]

    def do_GET(self) -> None:
        """Answers one probe."""
        if self.path == "/health/live":
            self._reply(200, {"live": True})
        elif self.path in ("/health/ready", "/health"):
            reason = type(self).not_ready_reason()
            self._reply(200 if reason is None else 503, {"ready": reason is None, "reason": reason or ""})
        else:
            self._reply(404, {"error": "paths: /health/ready, /health/live"})

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: probes come every few seconds."""

    def _reply(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
