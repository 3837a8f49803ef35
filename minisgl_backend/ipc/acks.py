"""Acknowledgements from the detokenizer to the fronts: datagrams between sockets in a directory that only the user may
enter.

No zmq here: an acknowledgement is on the path of the next text, and handing it to a sending thread costs as much as
making the text. A datagram needs no thread on either side.
"""

from __future__ import annotations

import array
import contextlib
import socket
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from minisgl_backend.arrays import Int32Array, Int64Array
from minisgl_backend.ipc.channel import socket_path
from minisgl_backend.ipc.messages import CANCELLED, Ack, front_of

MAX_UNSENT = 4096  # pairs that may wait for a front; 48 KiB, which fits into a datagram
_MAX_DATAGRAM = 1 << 17


class AckReceiver:
    """The front's end."""

    def __init__(self, socket_dir: Path, front: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        path = _path(socket_dir, front)
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()  # left by a front that was killed
        self._socket.bind(path)
        self._decoder = msgspec.msgpack.Decoder(Ack)

    def fileno(self) -> int:
        """For a poller."""
        return self._socket.fileno()

    def receive(self) -> tuple[Int64Array, Int32Array, float]:
        """All that has arrived, in order: (uids int64 [n], sequence numbers int32 [n], the first `found_at` or 0)."""
        uids, numbers, found_at = bytearray(), bytearray(), 0.0
        while (payload := self._next()) is not None:
            with contextlib.suppress(msgspec.MsgspecError):
                handled = self._decoder.decode(payload)
                if len(handled.uids) == 2 * len(handled.sequence_numbers):
                    uids += handled.uids
                    numbers += handled.sequence_numbers
                    found_at = found_at or handled.found_at
        return np.frombuffer(uids, dtype=np.int64), np.frombuffer(numbers, dtype=np.int32), found_at

    def _next(self) -> bytes | None:
        try:
            return self._socket.recv(_MAX_DATAGRAM)
        except BlockingIOError:
            return None

    def close(self) -> None:
        self._socket.close()


@dataclass(slots=True)
class _Unsent:
    """Acknowledgements not yet sent to one front, in order."""

    uids: array.array[int] = field(default_factory=lambda: array.array("q"))
    numbers: array.array[int] = field(default_factory=lambda: array.array("i"))
    found_at: float = 0.0

    def shorten(self) -> None:
        """Keeps at most MAX_UNSENT pairs: the last number of each stream, or CANCELLED if its client has left."""
        last: dict[int, int] = {}
        for uid, number in zip(self.uids, self.numbers, strict=True):
            if last.get(uid) != CANCELLED:
                last[uid] = number
        self.uids = array.array("q", list(last)[-MAX_UNSENT:])
        self.numbers = array.array("i", list(last.values())[-MAX_UNSENT:])


class AckSender:
    """The detokenizer's end: collects acknowledgements for each front (the upper bits of a uid) and sends them on
    `flush`.

    Never blocks; used by one thread.
    """

    def __init__(self, socket_dir: Path) -> None:
        self._socket_dir = socket_dir
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._encoder = msgspec.msgpack.Encoder()
        self._paths: dict[int, str] = {}  # by front
        self._unsent: dict[int, _Unsent] = {}

    def __len__(self) -> int:
        """Number of pairs not yet sent."""
        return sum(len(unsent.uids) for unsent in self._unsent.values())

    def note(self, uid: int, number: int) -> None:
        """The stream's chunk with this number was handled."""
        front = front_of(uid)
        unsent = self._unsent.get(front)
        if unsent is None:
            unsent = self._unsent[front] = _Unsent()
        unsent.uids.append(uid)
        unsent.numbers.append(number)

    def note_gone(self, uid: int, found_at: float) -> None:
        """The stream's client was found to have left, at this time.monotonic() second."""
        self.note(uid, CANCELLED)
        unsent = self._unsent[front_of(uid)]
        unsent.found_at = unsent.found_at or found_at

    def flush(self) -> bool:
        """Sends one Ack to each front with unsent pairs; True if all were sent.

        What a front has no room for goes with its next Ack; beyond MAX_UNSENT pairs only the last one of each stream is
        kept, which implies the earlier ones. Pairs for a front that is gone are dropped.
        """
        for front, unsent in tuple(self._unsent.items()):
            if self._send(front, unsent):
                del self._unsent[front]
            elif len(unsent.uids) > MAX_UNSENT:
                unsent.shorten()
        return not self._unsent

    def _send(self, front: int, unsent: _Unsent) -> bool:
        """False if there was no room."""
        handled = Ack(uids=unsent.uids.tobytes(), sequence_numbers=unsent.numbers.tobytes(), found_at=unsent.found_at)
        path = self._paths.get(front)
        if path is None:
            path = self._paths[front] = _path(self._socket_dir, front)
        try:
            self._socket.sendto(self._encoder.encode(handled), path)
        except BlockingIOError:
            return False
        except OSError:  # the front is gone
            pass
        return True

    def close(self) -> None:
        self._socket.close()


def _path(socket_dir: Path, front: int) -> str:
    return str(socket_path(socket_dir, f"front-{front}"))
