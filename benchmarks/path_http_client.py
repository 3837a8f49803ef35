"""An HTTP client that costs next to nothing, for streams of server-sent events: the sibling of path_client.

Requests are packed before, what comes back is noted as bytes and read after the run. One connection for each slot.
"""

from __future__ import annotations

import gc
import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_READ_BYTES = 1 << 18
_END = b"\r\n0\r\n\r\n"  # the last chunk of a body


@dataclass
class HttpExchange:
    """One request and what came back; times are time.monotonic() seconds."""

    slot: int
    request: bytes  # head and body
    sent: float = 0.0
    done: float = 0.0  # when the response had ended
    received: list[tuple[float, bytes]] = field(default_factory=list)  # pieces as they came, borders mean nothing

    @property
    def status(self) -> int:
        """Of the response; 0 where there is none."""
        line = b"".join(piece for _, piece in self.received[:2]).split(b"\r\n", 1)[0].split()
        return int(line[1]) if len(line) > 1 else 0

    def events(self) -> list[tuple[float, Any]]:
        """(when its last byte came, the event) in order; an event is JSON or the text [DONE]."""
        return [(moment, _event(line)) for moment, text in self._chunks() for line in text.split(b"\n\n") if line]

    def _chunks(self) -> Iterator[tuple[float, bytes]]:
        data = b"".join(piece for _, piece in self.received)
        ends, total = [], 0
        for moment, piece in self.received:
            total += len(piece)
            ends.append((total, moment))
        position, piece_number = data.find(b"\r\n\r\n") + 4, 0
        while (line_end := data.find(b"\r\n", position)) >= 0:
            length = int(data[position:line_end], 16)
            end = line_end + 2 + length
            if not length or end > len(data):
                return
            while ends[piece_number][0] < end:
                piece_number += 1
            yield ends[piece_number][1], data[line_end + 2 : end]
            position = end + 2


def packed_request(address: str, path: str, body: dict[str, Any], request_id: str) -> bytes:
    """A POST, ready to be sent."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nX-Request-Id: {request_id}"
    head += f"\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def run_http_exchanges(
    host: str, port: int, slots: Sequence[Sequence[bytes]], *, give_up_s: float
) -> list[HttpExchange]:
    """Sends the requests of each slot one after the other, all slots at once; returns when the last one has ended.

    Exchanges that have not ended when nothing has come for `give_up_s` have `done` 0.
    """
    waiting = [deque(HttpExchange(slot, request) for request in requests) for slot, requests in enumerate(slots)]
    exchanges = [exchange for queue in waiting for exchange in queue]
    selector = selectors.DefaultSelector()
    connections = [_connect(host, port) for _ in slots]
    current: list[HttpExchange] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for slot, connection in enumerate(connections):
            selector.register(connection, selectors.EVENT_READ, slot)
            current.append(waiting[slot].popleft())
            _send(connection, current[slot])
        unfinished = len(exchanges)
        while unfinished:
            ready = selector.select(give_up_s)
            if not ready:
                break
            for key, _ in ready:
                exchange, connection = current[key.data], connections[key.data]
                data = connection.recv(_READ_BYTES)
                now = time.monotonic()
                exchange.received.append((now, data))
                if not data:
                    raise ConnectionError("the endpoint closed a connection")
                if _has_ended(exchange, data):
                    exchange.done = now
                    unfinished -= 1
                    if waiting[key.data]:
                        current[key.data] = waiting[key.data].popleft()
                        _send(connection, current[key.data])
    finally:
        gc.enable()
        gc.unfreeze()
        selector.close()
        for connection in connections:
            connection.close()
    return exchanges


def _connect(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _send(connection: socket.socket, exchange: HttpExchange) -> None:
    exchange.sent = time.monotonic()
    connection.sendall(exchange.request)


def _has_ended(exchange: HttpExchange, data: bytes) -> bool:
    if len(data) < len(_END):
        data = b"".join(piece for _, piece in exchange.received[-len(_END) :])
    return data.endswith(_END)


def _event(line: bytes) -> Any:
    text = line.strip().removeprefix(b"data: ")
    return "[DONE]" if text == b"[DONE]" else json.loads(text)
