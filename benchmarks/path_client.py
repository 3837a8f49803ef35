"""A gRPC client that costs next to nothing: requests packed before, responses noted as bytes and read after the run.

It speaks as much HTTP/2 (RFC 9113) as a streaming gRPC call needs, over plain TCP: a client on gRPC's own Python
library would take as much of two cores as the server that it measures.
"""

from __future__ import annotations

import gc
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

PATH = "/inference.GRPCInferenceService/ModelStreamInfer"

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 0x1, 0x1, 0x4, 0x8
_CANCEL = 8  # an error code
_INITIAL_WINDOW_SIZE = 4  # a setting
_LARGEST_WINDOW = (1 << 31) - 1
_DEFAULT_WINDOW = 65535
_READ_BYTES = 1 << 18
_WINDOW_STEP = 1 << 28  # bytes read before the connection's window is opened again


@dataclass
class Exchange:
    """One request and what came back; times are time.monotonic() seconds."""

    slot: int  # requests of one slot follow each other
    request: bytes  # the packed message
    sent: float = 0.0
    done: float = 0.0  # when the server ended the call
    received: list[tuple[float, bytes]] = field(default_factory=list)  # pieces as they came, borders mean nothing

    def messages(self) -> list[tuple[float, bytes]]:
        """(when its last byte came, packed message) for each response, in order."""
        data = b"".join(piece for _, piece in self.received)
        ends, total = [], 0
        for moment, piece in self.received:
            total += len(piece)
            ends.append((total, moment))
        found, position, last = [], 0, 0  # `last`: the piece that brought a message's end
        while position + 5 <= len(data):
            (length,) = struct.unpack_from(">I", data, position + 1)
            end = position + 5 + length
            while last < len(ends) and ends[last][0] < end:
                last += 1
            if last == len(ends):
                break  # the server ended the call in the middle of a message
            found.append((ends[last][1], data[position + 5 : end]))
            position = end
        return found


class Connection:
    """One TCP connection. Used by one thread."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._authority = f"{host}:{port}"
        self._headers = _request_headers(self._authority)
        self._open: dict[int, Exchange] = {}
        self._next_stream = 1
        self._unsent: deque[Exchange] = deque()
        self._send_window = _DEFAULT_WINDOW
        self._read = 0
        self._rest = b""
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _LARGEST_WINDOW)
        opening = _frame(_SETTINGS, 0, 0, settings) + _window_update(_LARGEST_WINDOW - _DEFAULT_WINDOW)
        self.socket.sendall(_PREFACE + opening)

    def start(self, exchange: Exchange) -> None:
        self._unsent.append(exchange)
        self._send()

    def cancel(self, exchange: Exchange) -> None:
        """Ends a call that has been sent, as gRPC clients do; what is on its way is not noted any more."""
        stream = next(number for number, one in self._open.items() if one is exchange)
        del self._open[stream]
        self.socket.sendall(_frame(_RESET, 0, stream, struct.pack(">I", _CANCEL)))

    def _send(self) -> None:
        while self._unsent and len(self._unsent[0].request) + 5 <= self._send_window:
            exchange = self._unsent.popleft()
            stream, self._next_stream = self._next_stream, self._next_stream + 2
            self._open[stream] = exchange
            body = b"\0" + struct.pack(">I", len(exchange.request)) + exchange.request
            self._send_window -= len(body)
            headers = _frame(_HEADERS, _END_HEADERS, stream, self._headers)
            exchange.sent = time.monotonic()
            self.socket.sendall(headers + _frame(_DATA, _END_STREAM, stream, body))

    def receive(self) -> list[Exchange]:
        """Notes what is there; the exchanges that the server has ended. Raises ConnectionError."""
        data = self.socket.recv(_READ_BYTES)
        now = time.monotonic()
        if not data:
            raise ConnectionError("the server closed the connection")
        self._read += len(data)
        if self._read >= _WINDOW_STEP:
            self.socket.sendall(_window_update(self._read))
            self._read = 0
        data = self._rest + data if self._rest else data
        position, end, ended = 0, len(data), []
        while position + 9 <= end:
            high, low, kind, flags, stream = struct.unpack_from(">BHBBI", data, position)
            after = position + 9 + (high << 16) + low
            if after > end:
                break
            exchange = self._open.get(stream)
            if kind != _DATA:
                self._control(kind, flags, stream, data[position + 9 : after])
            elif exchange is not None:
                exchange.received.append((now, data[position + 9 : after]))
            is_last = (flags & _END_STREAM and kind in (_DATA, _HEADERS)) or kind == _RESET
            if is_last and exchange is not None:
                del self._open[stream]
                exchange.done = now
                ended.append(exchange)
            position = after
        self._rest = data[position:]
        return ended

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self.socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self.socket.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE and stream == 0:
            self._send_window += struct.unpack(">I", payload)[0]
            self._send()
        elif kind == _GOAWAY:
            raise ConnectionError(f"the server ended the connection: {payload[8:].decode(errors='replace')}")


def run_exchanges(
    host: str, port: int, slots: Sequence[Sequence[bytes]], *, connections: int, give_up_s: float
) -> list[Exchange]:
    """Sends the requests of each slot one after the other, all slots at once; returns when the last one has ended.

    Exchanges that have not ended when nothing has come for `give_up_s` have `done` 0.
    """
    waiting = [deque(Exchange(slot, request) for request in requests) for slot, requests in enumerate(slots)]
    exchanges = [exchange for queue in waiting for exchange in queue]
    selector = selectors.DefaultSelector()
    opened = [Connection(host, port) for _ in range(connections)]
    for connection in opened:
        selector.register(connection.socket, selectors.EVENT_READ, connection)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for slot, queue in enumerate(waiting):
            opened[slot % connections].start(queue.popleft())
        unfinished = len(exchanges)
        while unfinished:
            ready = selector.select(give_up_s)
            if not ready:
                break
            for key, _ in ready:
                for ended in key.data.receive():
                    unfinished -= 1
                    if waiting[ended.slot]:
                        key.data.start(waiting[ended.slot].popleft())
    finally:
        gc.enable()
        gc.unfreeze()
        selector.close()
        for connection in opened:
            connection.socket.close()
    return exchanges


def _request_headers(authority: str) -> bytes:
    """The header block of a call (RFC 7541), without compression."""
    plain = ((":path", PATH), (":authority", authority), ("te", "trailers"), ("content-type", "application/grpc"))
    literals = b"".join(b"\0" + _text(name) + _text(value) for name, value in plain)
    return b"\x83\x86" + literals  # :method POST, :scheme http


def _text(value: str) -> bytes:
    data = value.encode()
    if len(data) > 126:
        raise ValueError(f"header value {value!r} is longer than 126 bytes")
    return bytes((len(data),)) + data


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _window_update(increment: int) -> bytes:
    return _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", increment))
