"""The worker processes of a front: started when the first image comes, replaced when they die or take too long."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from minisgl_backend.errors import CapacityError, InvalidRequestError
from minisgl_backend.images.tasks import MAX_ANSWER_BYTES, Answer, Decode, Open
from minisgl_backend.process.spawn import python_executable

START_S = 60.0  # importing takes a fraction of a second, on a full machine longer
TASK_S = 30.0  # of time; a worker also limits its own seconds on a processor
MAX_WAITING = 1024  # tasks

Result = TypeVar("Result", covariant=True)


class Job(Protocol[Result]):
    def __call__(self, worker: Worker) -> Result: ...


def default_workers() -> int:
    """Half of the processors, at most 4."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2 if hasattr(os, "sched_getaffinity") else 2))


class Worker:
    """One process and the connection to it. Used by one thread at a time."""

    def __init__(self) -> None:
        """Raises CapacityError if it does not start."""
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        # The path is this process's: -I takes none from the environment, which is empty.
        path = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        code = f"import sys; sys.path[:] = {path!r}; from minisgl_backend.images.worker import main; main({{}})"
        with theirs:
            try:
                self._popen = subprocess.Popen(
                    [python_executable(), "-I", "-c", code.format(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env={"OPENBLAS_NUM_THREADS": "1", "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")},
                )
            except OSError as error:
                self._connection.close()
                raise CapacityError(f"an image worker cannot be started: {error}; try again later") from error
        try:
            self._receive(START_S)
        except (EOFError, OSError) as error:
            self.end()
            raise CapacityError(
                "an image worker did not start; it needs Pillow: pip install 'minisgl-backend[images]'"
            ) from error

    @property
    def pid(self) -> int:
        return self._popen.pid

    def open(self, task: Open, data: bytes) -> Answer:
        """Raises EOFError or OSError if the worker died or took too long; it is to be ended then."""
        self._connection.send_bytes(msgspec.json.encode(task))
        self._connection.send_bytes(data)
        return self._answer()

    def decode(self, task: Decode) -> Answer:
        """Writes the open image's pixels. Raises EOFError or OSError as `open`."""
        self._connection.send_bytes(msgspec.json.encode(task))
        return self._answer()

    def _answer(self) -> Answer:
        try:
            return msgspec.json.decode(self._receive(TASK_S), type=Answer)
        except msgspec.MsgspecError as error:
            raise EOFError(str(error)) from error

    def _receive(self, seconds: float) -> bytes:
        if not self._connection.poll(seconds):
            raise EOFError(f"no answer in {seconds:g} s")
        return self._connection.recv_bytes(MAX_ANSWER_BYTES)

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._connection.close()


class Pool:
    """Thread-safe."""

    def __init__(self, num_workers: int) -> None:
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="images")
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0

    def close(self) -> None:
        """Ends all workers; tasks that wait are cancelled. Safe to call twice."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().end()

    def submit(self, job: Job[Result]) -> Future[Result]:
        """Runs the job on a worker's thread. A worker that dies in it is replaced, and the job's future raises
        InvalidRequestError. Raises CapacityError if too many wait."""
        with self._lock:
            if self._waiting >= MAX_WAITING:
                raise CapacityError(
                    f"{self._waiting} images wait for a worker; allowed: {MAX_WAITING}; try again later"
                )
            self._waiting += 1
        future = self._threads.submit(self._run, job)
        future.add_done_callback(lambda _: self._leave())
        return future

    def _leave(self) -> None:
        with self._lock:
            self._waiting -= 1

    def _run(self, job: Job[Result]) -> Result:
        with self._worker() as worker:
            return job(worker)

    @contextlib.contextmanager
    def _worker(self) -> Iterator[Worker]:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = Worker()
        try:
            yield worker
        except (EOFError, OSError) as error:
            worker.end()
            raise InvalidRequestError(
                f"took a worker down ({str(error) or 'it ended'}): too much memory or more than 10 s; "
                "allowed: a smaller or another file"
            ) from None
        except BaseException:
            self._idle.put(worker)
            raise
        else:
            self._idle.put(worker)
