"""Acknowledgements from the detokenizer to the fronts: datagrams between sockets of a directory that only the user may
enter.

No zmq here: a confirmation lies on the way of the text behind it, and handing it to a thread that sends it costs as
much as making the text. A datagram needs no thread on either side.
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

MOST_UNTOLD = 4096  # pairs that may wait for a front; 48 KiB, which fits into a datagram
_MAX_DATAGRAM = 1 << 17


class AckReceiver:
    """The front's side."""

    def __init__(self, socket_dir: Path, front: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        path = _path(socket_dir, front)
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()  # of a front that was killed
        self._socket.bind(path)
        self._decoder = msgspec.msgpack.Decoder(Ack)

    def fileno(self) -> int:
        """For a poller."""
        return self._socket.fileno()

    def receive(self) -> tuple[Int64Array, Int32Array, float]:
        """(uids int64 [n], sequence numbers int32 [n], the first `found_at` or 0) of all that is here, in order."""
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
class _Untold:
    """What one front has to hear, in order."""

    uids: array.array[int] = field(default_factory=lambda: array.array("q"))
    numbers: array.array[int] = field(default_factory=lambda: array.array("i"))
    found_at: float = 0.0

    def shorten(self) -> None:
        """Keeps the last number of each stream, and of one whose client was found gone, that: at most MOST_UNTOLD."""
        last: dict[int, int] = {}
        for uid, number in zip(self.uids, self.numbers, strict=True):
            if last.get(uid) != CANCELLED:
                last[uid] = number
        self.uids = array.array("q", list(last)[-MOST_UNTOLD:])
        self.numbers = array.array("i", list(last.values())[-MOST_UNTOLD:])


class AckSender:
    """The detokenizer's side: notes what was handled for each front (the upper bits of a uid), and tells it when asked.

    Never blocks; used by one thread.
    """

    def __init__(self, socket_dir: Path) -> None:
        self._socket_dir = socket_dir
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._encoder = msgspec.msgpack.Encoder()
        self._paths: dict[int, str] = {}  # by front
        self._untold: dict[int, _Untold] = {}

    def __len__(self) -> int:
        """Pairs that the fronts have still to hear."""
        return sum(len(untold.uids) for untold in self._untold.values())

    def note(self, uid: int, number: int) -> None:
        """The stream's chunk of this number was handled."""
        front = front_of(uid)
        untold = self._untold.get(front)
        if untold is None:
            untold = self._untold[front] = _Untold()
        untold.uids.append(uid)
        untold.numbers.append(number)

    def note_gone(self, uid: int, found_at: float) -> None:
        """The stream's client was found gone, at this time.monotonic() second."""
        self.note(uid, CANCELLED)
        untold = self._untold[front_of(uid)]
        untold.found_at = untold.found_at or found_at

    def tell(self) -> bool:
        """Sends one Ack to each front that has something to hear; True where all went out.

        What a front has no room for now goes with the next one to it; beyond MOST_UNTOLD pairs one a stream is kept,
        which says what those before it said. What a front that is gone should hear is dropped.
        """
        for front, untold in tuple(self._untold.items()):
            if self._send(front, untold):
                del self._untold[front]
            elif len(untold.uids) > MOST_UNTOLD:
                untold.shorten()
        return not self._untold

    def _send(self, front: int, untold: _Untold) -> bool:
        """False where there was no room."""
        handled = Ack(uids=untold.uids.tobytes(), sequence_numbers=untold.numbers.tobytes(), found_at=untold.found_at)
        path = self._paths.get(front)
        if path is None:
            path = self._paths[front] = _path(self._socket_dir, front)
        try:
            self._socket.sendto(self._encoder.encode(handled), path)
        except BlockingIOError:
            return False
        except OSError:  # nobody is there
            pass
        return True

    def close(self) -> None:
        self._socket.close()


def _path(socket_dir: Path, front: int) -> str:
    return str(socket_path(socket_dir, f"front-{front}"))
