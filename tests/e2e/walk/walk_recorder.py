"""Notes which files of the package each process of a server enters, while the file `record` is in the folder WALK.

The core imports it at its start, by sitecustomize.py on PYTHONPATH; Triton's stubs, where the test has told their
models.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = f"{os.sep}minisgl_backend{os.sep}"
# Threads that do the same whether there is a request or not: signs of life once a second, metrics, and grammar
# compilers, which may still be warming when the first request comes.
NOT_OF_REQUESTS = ("grammar-compiler", "heartbeat", "metrics", "watcher")


class Recorder:
    def __init__(self, folder: Path) -> None:
        self._marker = folder / "record"
        self._result = folder / f"{os.getpid()}.files"
        self._entered: dict[str, None] = {}
        self._records = False

    def note_thread(self, frame: FrameType, event: str, _: Any) -> None:
        """The first call in a new thread: while threading sets it up, the thread has no name yet."""
        if frame.f_code.co_name == "run":
            sys.setprofile(None if threading.current_thread().name in NOT_OF_REQUESTS else self.note)

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._records and event == "call" and PACKAGE in (name := frame.f_code.co_filename):
            self._entered[name.rpartition(PACKAGE)[2]] = None

    def watch(self) -> None:
        while True:
            records = self._marker.exists()
            if self._records and not records:
                self._result.write_text("\n".join(self._entered), encoding="utf-8")
            self._records = records
            time.sleep(0.02)


if walk := os.environ.get("WALK"):
    recorder = Recorder(Path(walk))
    threading.Thread(target=recorder.watch, daemon=True).start()
    threading.setprofile(recorder.note_thread)
    sys.setprofile(recorder.note)
