"""Runs in a network namespace of its own, where every address is this machine's: an endpoint that may fetch from all
public hosts, names and servers for it, and what each URL is answered. Prints JSON: [[URL, status, code], ...] and the
addresses that were connected to."""

from __future__ import annotations

import http.server
import json
import socket
import socketserver
import ssl
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl_backend.images import fetch
from minisgl_backend.openai.triton import ModelInfo
from tests.seeing import picture
from tests.unit.openai.scripted_app import scripted_app

PUBLIC, PRIVATE = "8.8.4.4", "10.0.0.1"
NAMES: dict[str, list[list[str]]] = {  # what is answered first, second ...; the last one for ever
    "open.test": [[PUBLIC]],
    "xn--bcher-kva.test": [[PUBLIC]],
    "both.test": [[PUBLIC, PRIVATE]],
    "inside.test": [[PRIVATE]],
    "rebind.test": [[PUBLIC], ["127.0.0.1"]],
}
PICTURE = picture(8, 8)
REDIRECTS = {
    "/there": "/a.png",
    "/private": f"http://{PRIVATE}/a.png",
    "/metadata": "http://169.254.169.254/a.png",
    "/inside": "//inside.test/a.png",
    "/file": "file:///etc/passwd",
    "/loop": "/loop",
    "/down": "http://open.test/a.png",
}
LONG = PICTURE + b"more"


class Page(http.server.BaseHTTPRequestHandler):
    """By the path; every connection's own end is noted."""

    protocol_version = "HTTP/1.1"
    reached: set[str]

    def log_message(self, *_: Any) -> None:
        pass

    def _say(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if length is None or length >= 0:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.close_connection = True
        self.reached.add(self.connection.getsockname()[0])
        path = self.path.partition("?")[0]
        if path in REDIRECTS:
            self._say(302, Location=REDIRECTS[path])
        elif path[1:].isdigit():
            self._say(int(path[1:]))
        elif path == "/slow":
            self._say(200, length=100)
            for _ in range(40):
                self.wfile.write(b"x")
                time.sleep(0.1)
        elif path == "/endless":
            self._say(200, length=-1, Transfer_Encoding="chunked")
            while True:
                self.wfile.write(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
        elif path == "/large":
            self._say(200, bytes(21 << 20))
        elif path in ("/short", "/lies"):
            self._say(200, PICTURE, length=len(PICTURE) + (9 if path == "/short" else -9))
        elif path == "/gzip":
            self._say(200, PICTURE, Content_Encoding="gzip")
        else:
            self._say(200, PICTURE, Content_Type="image/png")


class Web(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads, allow_reuse_address = True, True

    def handle_error(self, *_: Any) -> None:
        pass  # who was asked has left


class Web6(Web):
    address_family = socket.AF_INET6


def serve_names(ready: socket.socket) -> None:
    """A DNS server of A records; all else has none."""
    asked: dict[str, int] = {}
    while True:
        query, who = ready.recvfrom(1500)
        at, labels = 12, []
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        name, (kind,) = ".".join(labels).lower(), struct.unpack(">H", query[at + 1 : at + 3])
        answers = NAMES.get(name, [[]])
        found = answers[min(asked.get(name, 0), len(answers) - 1)] if kind == 1 else []
        asked[name] = asked.get(name, 0) + (kind == 1)
        records = b"".join(b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + socket.inet_aton(one) for one in found)
        flags = 0x8180 if name in NAMES else 0x8183
        head = query[:2] + struct.pack(">HHHHH", flags, 1, len(found), 0, 0)
        ready.sendto(head + query[12 : at + 5] + records, who)


def main(certificate: str, key: str) -> None:
    Page.reached = set()
    fetch._TOTAL_SECONDS = 1.5
    names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    names.bind(("127.0.0.1", 53))
    threading.Thread(target=serve_names, args=(names,), daemon=True).start()
    servers = [Web(("0.0.0.0", 80), Page), Web(("0.0.0.0", 22), Page), Web(("0.0.0.0", 443), Page)]
    servers.append(Web6(("::1", 80), Page))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    servers[2].socket = tls.wrap_socket(servers[2].socket, server_side=True)
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    urls, found = json.load(sys.stdin), []
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
        scripted_app(Path(folder), patch, media_domains=("*",)) as app,
    ):
        info = msgspec.structs.replace(ModelInfo("demo", 4096, 100, "", []), max_images=20)

        async def model_info() -> ModelInfo:
            return info

        patch.setattr(app.server, "model_info", model_info)
        for url in urls:
            content = [{"type": "image_url", "image_url": {"url": url}}]
            status, answer = app.ask(
                "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}
            )
            found.append([url, status, answer["error"]["code"] if status != 200 else None])
        read = [bytes(one.data) for prompt in app.server.prompts for one in prompt.images]
    assert set(read) <= {PICTURE, PICTURE[:-9]}, read
    print(json.dumps([found, sorted(Page.reached)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
