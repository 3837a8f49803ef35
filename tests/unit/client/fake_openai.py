"""A stand-in for servers of OpenAI's API: real sockets, scripted streams."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PIECES = ["Zwölf ", "鱼 und ", "🦜"]
TOKENS_PER_PIECE = 2


@dataclass
class Script:
    """What the server does, and what it saw."""

    usage: str = "last"  # in the "last" event, in "each", or in "none"
    failure: str = ""  # "refuse every third", "in the stream", "cut", "html"
    endless: bool = False
    reasoning: str = ""  # said before the answer
    parts: bool = False  # contents and thoughts come as lists of parts
    models: Any = field(default_factory=lambda: [{"id": "first"}, {"id": "second"}])
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)  # a client has left before the end


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": self.script.models}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script = self.script
        script.requests.append({**body, "path": self.path})
        script.keys.append(self.headers["Authorization"])
        number = sum(request.get("max_tokens") != 1 for request in script.requests)  # without questions about lengths
        if script.failure == "refuse every third" and body.get("max_tokens") != 1 and number % 3 == 0:
            message = f"request {number}: the queue is full"
            self._send(429, json.dumps({"error": {"message": message, "code": "rate_limit"}}).encode())
        elif script.failure == "html":
            self._send(502, b"<html>Bad Gateway</html>")
        else:
            self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in self._events(body):
                text = event if isinstance(event, str) else json.dumps(event)
                data = f"data: {text}\n\n".encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.script.left.set()
            self.close_connection = True

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
        script, chat = self.script, "messages" in body
        counts = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
        if chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None}
        if script.reasoning and script.parts:
            thoughts = {"type": "thinking", "thinking": _as_parts(script.reasoning)}
            yield {"choices": [{"index": 0, "delta": {"content": [thoughts]}}]}
        elif script.reasoning:
            yield {"choices": [{"index": 0, "delta": {"reasoning_content": script.reasoning}}]}
        number = 0
        while script.endless or number < len(PIECES):
            text = f"{number} " if script.endless else PIECES[number]
            number += 1
            content = _as_parts(text) if script.parts else text
            choice: dict[str, Any] = {"index": 0, **({"delta": {"content": content}} if chat else {"text": text})}
            if number == len(PIECES) and not script.endless:
                choice["finish_reason"] = "stop"
            if script.failure == "cut" and number == len(PIECES):
                return
            if script.failure == "in the stream" and number == 2:
                yield {"error": {"message": "the engine died", "code": 503}}
                return
            event: dict[str, Any] = {"choices": [choice]}
            if script.usage == "each":
                event["usage"] = {**counts, "completion_tokens": number * TOKENS_PER_PIECE}
            yield event
            time.sleep(0.005)
        if script.usage == "last":
            yield {"choices": [], "usage": {**counts, "completion_tokens": number * TOKENS_PER_PIECE}}
        yield "[DONE]"

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text[:1]}, {"type": "reference"}, {"type": "text", "text": text[1:]}]


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


def start_openai(script: Script) -> tuple[ThreadingHTTPServer, str]:
    """A server on a free port and its URL; `shutdown()` and `server_close()` end it."""
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"script": script}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}/v1"
