"""Adapters that are read, served and forgotten while an engine core serves: by command, or since a request names one.

Nothing waits: folders are looked for on a thread, an adapter is read on every rank while steps go on, and `poll` goes
on with both between two steps. One adapter is read at a time, and others are forgotten for it once it has been read:
the host has one more than it keeps at most, and what cannot be read costs no other adapter.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from concurrent.futures import Executor, Future, ThreadPoolExecutor
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
FAILED_S = 5.0  # for which a folder that cannot be read is not read again, unless it changes
MOST_FAILED = 256  # that are remembered
_FILES = (CONFIG_FILE, TENSOR_FILE, TASK_FILE)


class Source(NamedTuple):
    """Where an adapter that was loaded by name is."""

    folder: str
    digest: bytes  # of what it was then; b"": it is not known


class _Place(NamedTuple):
    folder: str
    times: tuple[int, ...]  # when it and its files were changed


@dataclass
class _Search:
    """An adapter that requests name and the host does not have."""

    name: str
    expected: bytes  # the digest of what the name stands for; b"": it is not known
    place: Future[_Place | None]
    waiting: list[Request] = field(default_factory=list)
    # What the name is to stand for next, once the requests that came before have what it stood for.
    then: list[ServeAdapter] = field(default_factory=list)


@dataclass
class _Reading:
    """An adapter that the ranks read, or will."""

    folder: str
    asked: ReadAdapter | _Search
    begun: bool = False
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
    finder: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="adapter-folders"))
    _searches: dict[str, _Search] = field(default_factory=dict)  # by name
    _reading: dict[int, _Reading] = field(default_factory=dict)  # by number; the first one has begun
    _read: dict[tuple[int, int], int] = field(default_factory=dict)  # numbers by front and command
    _failed: OrderedDict[tuple[str, str, bytes], tuple[float, tuple[int, ...], MinisglError]] = field(
        default_factory=OrderedDict
    )  # by name, folder and digest: until when it is not read again unless its times differ, and why
    _later: list[ServeAdapter] = field(default_factory=list)  # to be obeyed next
    _admitted: list[Admitted] = field(default_factory=list)
    _answers: list[tuple[int, Done | Failed]] = field(default_factory=list)  # with the front of each

    @property
    def is_busy(self) -> bool:
        """Whether `poll` will have something to do without a command."""
        return bool(self._searches or self._reading or self._admitted or self._later)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their adapter to be read."""
        return sum(len(search.waiting) for search in self._searches.values())

    def obey(self, command: AdapterCommand) -> None:
        """Begins it, or does it at once."""
        self._serve_later()
        try:
            if isinstance(command, ReadAdapter):
                self._enqueue(_Reading(command.folder, command))
                return  # answered once it is read
            if isinstance(command, ServeAdapter):
                if (search := self._searches.get(command.name)) is not None:
                    search.then.append(command)
                    return  # answered once the search has ended
                self._serve(command)
            elif isinstance(command, DropAdapter):
                self._drop(command)
            else:
                self._unload(command)
            self._answer(command, Done(id=command.id))
        except EngineDeadError:
            raise
        except MinisglError as error:
            self._fail(command, error)

    def take_answers(self) -> list[tuple[int, Done | Failed]]:
        """(front, answer) of the commands that are done."""
        answers, self._answers = self._answers, []
        return answers

    def forget_front(self, front: int) -> None:
        """What it had read and not served."""
        for key in [key for key in self._read if key[0] == front]:
            self.host.drop(self._read.pop(key))
        for number, one in list(self._reading.items()):
            if isinstance(one.asked, ReadAdapter) and one.asked.front == front:
                self._forget(number)

    def holds(self, request: Request, max_waiting: int) -> bool:
        """Whether the request waits here until its adapter has been read; `poll` returns it. Raises CapacityError
        where too many wait."""
        name = request.params.lora_name
        if name is None or self.book.get(name) is not None:
            return False
        if (search := self._searches.get(name)) is None and not self._may_be_found(name):
            return False  # the scheduler says so
        if self.num_waiting >= max_waiting:
            raise CapacityError(f"{max_waiting} requests wait for adapters that are being read; try again later")
        if search is None:
            source = self.sources.get(name)
            place = self.finder.submit(self._find, name, None if source is None else source.folder)
            search = self._searches[name] = _Search(name, b"" if source is None else source.digest, place)
        search.waiting.append(request)
        return True

    def cancel(self, uid: int) -> int:
        """Removes a request that waits here; returns its number of sequences, 0: it does not."""
        for search in self._searches.values():
            for request in search.waiting:
                if request.uid == uid:
                    search.waiting.remove(request)
                    self._abandon(search)
                    return request.params.n
        return 0

    def overdue(self, now: float) -> list[int]:
        """The uids of requests that wait here beyond their deadline."""
        waiting = (one for search in self._searches.values() for one in search.waiting)
        return [one.uid for one in waiting if one.deadline is not None and one.deadline <= now]

    def poll(self) -> list[Admitted]:
        """Goes on with what has been found and read, and forgets what nothing asks for. Returns requests that need
        wait no longer, in the order in which they came; they are submitted before anything else is called here."""
        self._serve_later()
        for search in [one for one in self._searches.values() if one.place.done()]:
            if not any(one.asked is search for one in self._reading.values()):
                self._end_finding(search)
        for number, reading in list(self._reading.items())[:1]:
            self._go_on(number, reading)
        for number in self.book.take_dropped():
            self.host.drop(number)
        self._begin_next()
        admitted, self._admitted = self._admitted, []
        return admitted

    def _may_be_found(self, name: str) -> bool:
        return name in self.sources or (self._root_of(name)[0] is not None and is_folder_name(name))

    def _root_of(self, name: str) -> tuple[Path | None, tuple[str, ...]]:
        """Where a folder of that name would be, and the files that it needs."""
        is_task = self.task_root is not None and name.startswith(TASK_PREFIX)
        return (self.task_root, (TASK_FILE,)) if is_task else (self.root, (CONFIG_FILE, TENSOR_FILE))

    def _find(self, name: str, folder: str | None) -> _Place | None:
        """On the finder's thread, as disks may be slow. folder: of what was loaded by name; None: it is below the
        root. Returns None where there is none."""
        try:
            if folder is None:
                root, files = self._root_of(name)
                assert root is not None, "see _may_be_found"
                folder = str(below((root,), name, files))
        except NoAdapter:
            return None
        except OSError as error:
            log.warning("the folder of adapter %r cannot be looked for: %s", name, error)
            return None
        return _Place(folder, tuple(map(_changed, (folder, *(os.path.join(folder, one) for one in _FILES)))))

    def _end_finding(self, search: _Search) -> None:
        if (place := search.place.result()) is None:
            self._end_search(search, self._not_served(search.name))
        elif (error := self._known_failure(search, place)) is not None:
            self._end_search(search, error)
        else:
            self._enqueue(_Reading(place.folder, search))

    def _not_served(self, name: str) -> InvalidRequestError:
        try:
            self.book.find(name)
        except InvalidRequestError as error:
            return error
        raise AssertionError(f"{name!r} is served")

    def _known_failure(self, search: _Search, place: _Place) -> MinisglError | None:
        key = (search.name, place.folder, search.expected)
        until, times, error = self._failed.get(key, (0.0, (), None))
        return error if times == place.times and time.monotonic() < until else None

    def _enqueue(self, reading: _Reading) -> None:
        self._reading[self.book.new_number()] = reading
        self._begin_next()

    def _begin_next(self) -> None:
        """Begins the first one, unless it has begun; those that come while the host has no room are refused."""
        for number, reading in list(self._reading.items()):
            if reading.begun:
                return
            if self._is_full and not self.book.has_idle:
                del self._reading[number]
                self._refuse(reading, self._no_room())
                continue
            reading.begun = True
            self.host.begin(number, reading.folder)
            return

    @property
    def _is_full(self) -> bool:
        return self.book.num_on_host + len(self._read) >= self.most

    def _make_room(self) -> None:
        """For one more. Raises CapacityError where there is none."""
        while self._is_full:
            if (name := self.book.remove_idle()) is None:
                raise self._no_room()
            log.info("adapter %r was forgotten for another one; it is read again when a request names it", name)

    def _no_room(self) -> CapacityError:
        return CapacityError(
            f"the host has {self.most} adapters that requests use, all that max_loaded_adapters allows; try again later"
        )

    def _go_on(self, number: int, reading: _Reading) -> None:
        now = time.monotonic()
        if reading.not_before > now or not self.host.is_read(number):
            return
        try:
            if (digest := self.host.keep(number)) is None:
                reading.not_before = now + ASK_AGAIN_S
                return
            self._check(reading, digest)
            self._make_room()
        except (ConfigError, InvalidRequestError, CapacityError) as error:
            self._forget(number)
            self._refuse(reading, error)
            return
        del self._reading[number]
        if isinstance(reading.asked, ReadAdapter):
            self._read[reading.asked.front, reading.asked.id] = number
            self._answer(reading.asked, Done(id=reading.asked.id, result=digest.hex()))
        else:
            self.book.serve(ServedAdapter(reading.asked.name, number, digest))
            log.info("adapter %r was read, since a request names it", reading.asked.name)
            self._end_search(reading.asked, None)

    def _check(self, reading: _Reading, digest: bytes) -> None:
        """Raises InvalidRequestError where it is not what the name stands for."""
        search = reading.asked
        if isinstance(search, _Search) and search.expected not in (b"", digest):
            changed = "whose folder has changed since it was loaded; allowed: once it is loaded again"
            raise InvalidRequestError(f"lora_name is {search.name[:200]!r}, {changed}")

    def _refuse(self, reading: _Reading, error: MinisglError) -> None:
        search = reading.asked
        if isinstance(search, ReadAdapter):
            self._fail(search, error)
            return
        if isinstance(error, ConfigError):
            log.warning("adapter %r cannot be read: %s", search.name, error)
            told = "which cannot be read: the server's log says why"  # where it is and what it has is the server's
            is_task = self.task_root is not None and Path(reading.folder).parent == self.task_root
            error = InvalidRequestError(str(error) if is_task else f"lora_name is {search.name[:200]!r}, {told}")
        place = search.place.result()
        if isinstance(error, InvalidRequestError) and place is not None:
            key = (search.name, place.folder, search.expected)
            self._failed[key] = (time.monotonic() + FAILED_S, place.times, error)
            self._failed.move_to_end(key)
            if len(self._failed) > MOST_FAILED:
                self._failed.popitem(last=False)
        self._end_search(search, error)

    def _end_search(self, search: _Search, error: MinisglError | None) -> None:
        """Its requests need wait no longer."""
        del self._searches[search.name]
        self._later += search.then
        if error is not None and search.then:
            self._serve_later()
            error = None  # what the name stands for now is there
        self._admitted += [Admitted(request, error) for request in search.waiting]

    def _abandon(self, search: _Search) -> None:
        """Unless something waits for it, or it is being read: others may name it soon."""
        readings = [(number, one) for number, one in self._reading.items() if one.asked is search]
        if not (search.waiting or search.then or any(one.begun for _, one in readings)):
            self._end_at_once(search)

    def _end_at_once(self, search: _Search) -> None:
        del self._searches[search.name]
        search.place.cancel()
        for number, one in list(self._reading.items()):
            if one.asked is search:
                self._forget(number)

    def _serve_later(self) -> None:
        later, self._later = self._later, []
        for command in later:
            self._serve(command)
            self._answer(command, Done(id=command.id))

    def _serve(self, command: ServeAdapter) -> None:
        source = self.sources[command.name] = Source(command.folder, bytes.fromhex(command.digest))
        if (number := self._read.pop((command.front, command.read), None)) is None:
            self.book.remove(command.name)
        else:
            self.book.serve(ServedAdapter(command.name, number, source.digest))

    def _drop(self, command: DropAdapter) -> None:
        number = self._read.pop((command.front, command.read), -1)
        for one, reading in list(self._reading.items()):
            asked = reading.asked
            if isinstance(asked, ReadAdapter) and (asked.front, asked.id) == (command.front, command.read):
                number = one
        self._forget(number)

    def _unload(self, command: UnloadAdapter) -> None:
        if (search := self._searches.get(command.name)) is not None:
            self._end_at_once(search)
            self._later += search.then
            self._serve_later()
            error = InvalidRequestError(f"lora_name is {command.name[:200]!r}, which was unloaded meanwhile")
            self._admitted += [Admitted(request, error) for request in search.waiting]
        known = self.sources.pop(command.name, None) is not None
        if not (self.book.remove(command.name) or known or search is not None):
            raise InvalidRequestError(f"adapter {command.name[:200]!r} is not loaded")

    def _forget(self, number: int) -> None:
        """One that is read, or was and not served."""
        self._reading.pop(number, None)
        self.host.drop(number)

    def _answer(self, command: AdapterCommand, answer: Done | Failed) -> None:
        self._answers.append((command.front, answer))

    def _fail(self, command: AdapterCommand, error: MinisglError) -> None:
        self._answer(command, Failed(id=command.id, kind=type(error).__name__, message=str(error)))


def _changed(path: str) -> int:
    """When it was, in ns; 0: it cannot be told."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
