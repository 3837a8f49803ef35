"""Whole messages over a connected Unix stream socket; never blocks.

No zmq here: it passes each message through a thread of its own on either side, and waking those two threads would be
part of every token's latency.
"""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<I")  # before each message: its length in bytes
_READ_BYTES = 1 << 16


class FrameSocket:
    """One end of a connection. Used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self.ended = False  # the other end has closed, and all that it had sent was received

    def fileno(self) -> int:
        """For a poller."""
        return self._socket.fileno()

    def send(self, payload: bytes) -> None:
        """Sends as much as there is room for. Call it only when `flush` returns True; raises OSError like `flush`."""
        self._unsent = memoryview(_LENGTH.pack(len(payload)) + payload)
        self.flush()

    def flush(self) -> bool:
        """Sends more of the rest; True when nothing is left.

        Raises OSError if the other end is gone.
        """
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return False
            self._unsent = self._unsent[sent:]
        return True

    def receive(self) -> list[bytes]:
        """The messages that are complete by now, in order."""
        data = self._received
        try:
            # A short read has taken all there was; the next one reports the end.
            while (piece := self._socket.recv(_READ_BYTES)) and len(piece) == _READ_BYTES:
                data += piece
            data += piece
            self.ended = not piece
        except BlockingIOError:
            pass
        except ConnectionError:
            self.ended = True
        messages, start = [], 0
        while len(data) >= start + _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _LENGTH.unpack_from(data, start)[0]
            if end > len(data):
                break
            messages.append(bytes(data[begin:end]))
            start = end
        del data[:start]
        return messages

    def close(self) -> None:
        self._socket.close()
