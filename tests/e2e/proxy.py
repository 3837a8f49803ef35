"""A proxy between a client and the endpoint, as reverse proxies are: it gives up on a server that says nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_OWN = ("host", "connection", "content-length", "transfer-encoding", "accept-encoding")
Edit = Callable[[dict[str, Any]], None]


@contextlib.contextmanager
def running_proxy(url: str, *, read_timeout: float = 600.0, edit: Edit = lambda body: None) -> Iterator[str]:
    """The URL of a proxy before `url`. `read_timeout`: seconds without a byte; `edit` may change JSON bodies."""
    upstream = urlsplit(url).netloc

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on(None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            with contextlib.suppress(ValueError):
                value = json.loads(body)
                edit(value)
                body = json.dumps(value).encode()
            self._pass_on(body)

        def _pass_on(self, body: bytes | None) -> None:
            """An answer's end is the connection's: one that is cut off has no end of chunks, and is none."""
            self.close_connection = True
            connection = http.client.HTTPConnection(upstream, timeout=read_timeout)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN}
            with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _OWN:
                        self.send_header(name, value)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while data := answer.read1(65536):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: Any) -> None:
            pass

    Handler.protocol_version = "HTTP/1.1"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
