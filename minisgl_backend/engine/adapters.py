"""Adapters that are read, served and forgotten while an engine core serves: by command, or since a request names one.

Nothing waits: an adapter is read on every rank while steps go on, and `poll` goes on with it between two steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from minisgl_backend.adapters.config import CONFIG_FILE
from minisgl_backend.adapters.roots import TASK_FILE, TASK_PREFIX, TENSOR_FILE, NoAdapter, below, is_folder_name
from minisgl_backend.adapters.served import ServedAdapter
from minisgl_backend.engine.stages import Adapters
from minisgl_backend.errors import CapacityError, ConfigError, EngineDeadError, InvalidRequestError, MinisglError
from minisgl_backend.ipc.messages import (
    AdapterCommand,
    Done,
    DropAdapter,
    Failed,
    ReadAdapter,
    ServeAdapter,
    UnloadAdapter,
)
from minisgl_backend.request import Request
from minisgl_backend.scheduler.adapters import AdapterBook

log = logging.getLogger(__name__)


ASK_AGAIN_S = 0.1  # each time takes a collective


class Source(NamedTuple):
    """Where an adapter that was loaded by name is."""

    folder: str
    digest: bytes  # of what it was then; b"": it is not known


@dataclass
class _Reading:
    """An adapter that the ranks read."""

    folder: str
    command: ReadAdapter | None = None  # that asked for it; None: requests that name it
    name: str = ""  # that they name
    not_before: float = 0.0  # time.monotonic(): when the other ranks are asked again


class Admitted(NamedTuple):
    """A request whose adapter is there, or cannot be."""

    request: Request
    error: MinisglError | None


@dataclass
class AdapterLoader:
    """Used by the core's thread. Commands are answered by `take_answers`, each once."""

    host: Adapters
    book: AdapterBook
    most: int  # on the host
    root: Path | None = None  # folders below it are found by name
    task_root: Path | None = None  # likewise, of what clients have sent as tensors
    sources: dict[str, Source] = field(default_factory=dict)  # by name, of those that were loaded by name
    _reading: dict[int, _Reading] = field(default_factory=dict)  # by number
    _read: dict[tuple[int, int], int] = field(default_factory=dict)  # numbers by front and command
    _waiting: dict[str, list[Request]] = field(default_factory=dict)  # requests by the name that is read for them
    _refused: list[Admitted] = field(default_factory=list)
    _answers: list[tuple[int, Done | Failed]] = field(default_factory=list)  # with the front of each

    @property
    def is_busy(self) -> bool:
        """Whether `poll` will have something to do without a command."""
        return bool(self._reading or self._refused)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their adapter to be read."""
        return sum(map(len, self._waiting.values()))

    def obey(self, command: AdapterCommand) -> None:
        """Begins it, or does it at once."""
        try:
            if isinstance(command, ReadAdapter):
                self._begin(_Reading(command.folder, command))
                return  # answered once it is read
            if isinstance(command, ServeAdapter):
                self._serve(command)
            elif isinstance(command, DropAdapter):
                self._drop(command)
            else:
                self._unload(command)
            self._answer(command, Done(id=command.id))
        except EngineDeadError:
            raise
        except MinisglError as error:
            self._answer(command, Failed(id=command.id, kind=type(error).__name__, message=str(error)))

    def take_answers(self) -> list[tuple[int, Done | Failed]]:
        """(front, answer) of the commands that are done."""
        answers, self._answers = self._answers, []
        return answers

    def forget_front(self, front: int) -> None:
        """What it had read and not served."""
        for key in [key for key in self._read if key[0] == front]:
            self.host.drop(self._read.pop(key))
        for number, one in list(self._reading.items()):
            if one.command is not None and one.command.front == front:
                self._forget(number)

    def holds(self, request: Request, max_waiting: int) -> bool:
        """Whether the request waits here until its adapter has been read; `poll` returns it. Raises
        InvalidRequestError where there is no such adapter, CapacityError where there is no room for it."""
        name = request.params.lora_name
        if name is None or self.book.get(name) is not None:
            return False
        if name not in self._waiting:
            source = self.sources.get(name)
            folder = source.folder if source is not None else self._found(name)
            if folder is None:
                return False  # the scheduler says so
            self._begin(_Reading(folder, name=name))
        if self.num_waiting >= max_waiting:
            raise CapacityError(f"{max_waiting} requests wait for adapters that are being read; try again later")
        self._waiting.setdefault(name, []).append(request)
        return True

    def cancel(self, uid: int) -> int:
        """Removes a request that waits here; returns its number of sequences, 0: it does not."""
        for requests in self._waiting.values():
            for request in requests:
                if request.uid == uid:
                    requests.remove(request)
                    return request.params.n
        return 0

    def overdue(self, now: float) -> list[int]:
        """The uids of requests that wait here beyond their deadline."""
        waiting = (one for requests in self._waiting.values() for one in requests)
        return [one.uid for one in waiting if one.deadline is not None and one.deadline <= now]

    def poll(self) -> list[Admitted]:
        """Goes on with what has been read, and forgets what nothing asks for. Returns requests that need wait no
        longer, in the order in which they came."""
        for number in self.book.take_dropped():
            self.host.drop(number)
        admitted, self._refused = self._refused, []
        now = time.monotonic() if self._reading else 0.0
        for number, reading in list(self._reading.items()):
            if reading.not_before > now or not self.host.is_read(number):
                continue
            digest, error = b"", None
            try:
                if (kept := self.host.keep(number)) is None:
                    reading.not_before = now + ASK_AGAIN_S
                    continue
                digest = kept
            except ConfigError as wrong:
                error = wrong
            del self._reading[number]
            if reading.command is not None:
                self._end_command(reading, number, error, digest)
            else:
                admitted += self._end_search(reading, number, error, digest)
        return admitted

    def _end_command(self, reading: _Reading, number: int, error: ConfigError | None, digest: bytes) -> None:
        command = reading.command
        assert command is not None, "its reading"
        if error is not None:
            self._answer(command, Failed(id=command.id, kind=type(error).__name__, message=str(error)))
            return
        self._read[command.front, command.id] = number
        self._answer(command, Done(id=command.id, result=digest.hex()))

    def _end_search(
        self, reading: _Reading, number: int, error: MinisglError | None, digest: bytes
    ) -> Iterator[Admitted]:
        name, source = reading.name, self.sources.get(reading.name)
        if error is None and source is not None and source.digest not in (b"", digest):
            changed = "whose folder has changed since it was loaded; allowed: once it is loaded again"
            error = InvalidRequestError(f"lora_name is {name[:200]!r}, {changed}")
        if error is None and self.book.get(name) is None:
            self.book.serve(ServedAdapter(name, number, digest))
            log.info("adapter %r was read, since a request names it", name)
        else:  # or loaded by command meanwhile
            self.host.drop(number)
        if isinstance(error, ConfigError):
            log.warning("adapter %r cannot be read: %s", name, error)
            told = "which cannot be read: the server's log says why"  # where it is and what it has is the server's
            is_task = self.task_root is not None and Path(reading.folder).parent == self.task_root
            error = InvalidRequestError(str(error) if is_task else f"lora_name is {name[:200]!r}, {told}")
        yield from [Admitted(request, error) for request in self._waiting.pop(name, ())]

    def _serve(self, command: ServeAdapter) -> None:
        source = self.sources[command.name] = Source(command.folder, bytes.fromhex(command.digest))
        if (number := self._read.pop((command.front, command.read), None)) is None:
            self.book.remove(command.name)
        else:
            self.book.serve(ServedAdapter(command.name, number, source.digest))

    def _drop(self, command: DropAdapter) -> None:
        number = self._read.pop((command.front, command.read), -1)
        for one, reading in list(self._reading.items()):
            if (asked := reading.command) is not None and (asked.front, asked.id) == (command.front, command.read):
                number = one
        self._forget(number)

    def _unload(self, command: UnloadAdapter) -> None:
        known = self.sources.pop(command.name, None) is not None
        if not (self.book.remove(command.name) or known or command.name in self._waiting):
            raise InvalidRequestError(f"adapter {command.name[:200]!r} is not loaded")
        for request in self._waiting.pop(command.name, ()):
            error = InvalidRequestError(f"lora_name is {command.name[:200]!r}, which was unloaded meanwhile")
            self._refused.append(Admitted(request, error))
        for number, reading in list(self._reading.items()):
            if reading.command is None and reading.name == command.name:
                self._forget(number)

    def _forget(self, number: int) -> None:
        """One that is read, or was and not served."""
        self._reading.pop(number, None)
        self.host.drop(number)

    def _found(self, name: str) -> str | None:
        """The folder of that name below the root; None: there is none."""
        is_task = self.task_root is not None and name.startswith(TASK_PREFIX)
        root, files = (self.task_root, (TASK_FILE,)) if is_task else (self.root, (CONFIG_FILE, TENSOR_FILE))
        if root is None or not is_folder_name(name):
            return None
        try:
            return str(below((root,), name, files))
        except NoAdapter:
            return None

    def _begin(self, reading: _Reading) -> None:
        """Raises CapacityError where the host has no room for one more."""
        while self.book.num_on_host + len(self._reading) + len(self._read) >= self.most:
            if (name := self.book.remove_idle()) is None:
                raise CapacityError(
                    f"the host has {self.most} adapters that requests use, all that max_loaded_adapters allows; try "
                    "again later"
                )
            log.info("adapter %r was forgotten for another one; it is read again when a request names it", name)
        number = self.book.new_number()
        self._reading[number] = reading
        self.host.begin(number, reading.folder)

    def _answer(self, command: AdapterCommand, answer: Done | Failed) -> None:
        self._answers.append((command.front, answer))
