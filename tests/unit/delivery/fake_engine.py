"""An engine client under the test's control: records are delivered when the test says so, on the test's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from minisgl_backend.config import EngineConfig
from minisgl_backend.delivery.arrays import Arrays
from minisgl_backend.delivery.credits import StreamCredits
from minisgl_backend.delivery.engine_client import Listener
from minisgl_backend.errors import EngineDeadError
from minisgl_backend.ipc.messages import Outputs, Welcome
from minisgl_backend.ipc.wire import Chunk
from minisgl_backend.request import FinishReason, Request
from minisgl_backend.step import SequenceDetail

PROMPT = np.zeros(1, dtype=np.int32)
WELCOME = Welcome(
    pid=1, max_seq_len=100, vocab_size=300, eos_token_ids=(2,), page_size=16, num_pages=10, description="fake"
)


class FakeEngine:
    """Looks like EngineClient to a front."""

    def __init__(
        self,
        config: EngineConfig,
        listener: Listener,
        *,
        front: int,
        socket_dir: Path,
        credits: StreamCredits,
    ) -> None:
        self.credits = credits
        self.on_outputs, self.on_rejected, self.on_down = listener.on_outputs, listener.on_rejected, listener.on_down
        self._on_up, self._on_acknowledged, self.on_lost = listener.on_up, listener.on_acknowledged, listener.on_lost
        self.requests: list[Request] = []
        self.aborted: list[tuple[int, FinishReason]] = []
        self.dead = False
        self._next_uid = 1

    def start(self, timeout_s: float | None = None) -> None:
        self._on_up(WELCOME)

    def new_uid(self, count: int = 1) -> int:
        self._next_uid += count
        return self._next_uid - count

    def submit(self, request: Request) -> None:
        if self.dead:
            raise EngineDeadError("the engine is not running")
        self.requests.append(request)

    def abort(self, uids: Iterable[int], reason: FinishReason, found_at: float = 0.0) -> None:
        self.aborted += [(uid, reason) for uid in uids]

    def close(self) -> None:
        pass

    def give(self, *records: tuple[int, int, int], details: dict[int, SequenceDetail] | None = None) -> None:
        """Records of one step: (uid, token or -1, reason)."""
        uids, tokens, reasons = zip(*records, strict=True)
        self.on_outputs(
            Outputs(
                uids=np.array(uids, dtype="<i8").tobytes(),
                token_ids=np.array(tokens, dtype="<i4").tobytes(),
                reasons=bytes(reasons),
                details=details or {},
            )
        )

    def confirm(self, uid: int, number: int) -> None:
        self.credits.acknowledge([uid], [number], time.monotonic())
        self._on_acknowledged(np.array([uid]), np.array([number]))


class Recorder:
    """A sender that keeps what it was told."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.details: list[Arrays] = []  # one for each chunk
        self.error: tuple[str, str] | None = None
        self.cancelled = False
        self.threads: set[str] = set()
        self._ended = threading.Event()
        self._changed = threading.Condition()

    def send(self, chunk: Chunk, details: Arrays, final: bool) -> None:
        assert not self._ended.is_set(), "nothing may follow the final response"
        self.threads.add(threading.current_thread().name)
        with self._changed:
            self.chunks.append(chunk)
            self.details.append(details)
            if chunk.failure is not None:
                self.error = chunk.failure
            self._changed.notify_all()
        if final:
            self._ended.set()

    def fail(self, status: str, message: str) -> None:
        assert not self._ended.is_set(), "nothing may follow the final response"
        self.error = (status, message)
        self._ended.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def wait_end(self) -> None:
        assert self._ended.wait(30)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait_chunks(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.chunks) >= count, 30)

    def tokens(self) -> list[int]:
        data = b"".join(part.token_ids for chunk in self.chunks for part in chunk.parts)
        return np.frombuffer(data, dtype="<i4").tolist()

    def text(self) -> str:
        return "".join(part.text or "" for chunk in self.chunks for part in chunk.parts)


def anything(*_: Any) -> None:
    """A probe that reaches nobody."""
