"""The front's handle to the engine cores: submits and aborts requests, receives whole step records."""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import zmq

from minisgl_backend.arrays import Int32Array, Int64Array
from minisgl_backend.config import EngineConfig
from minisgl_backend.delivery.core_commands import CoreCommands
from minisgl_backend.delivery.core_link import NOT_RUNNING, CoreLink, Pauses
from minisgl_backend.delivery.credits import StreamCredits
from minisgl_backend.delivery.router import Router
from minisgl_backend.errors import ConfigError, EngineDeadError, MinisglError
from minisgl_backend.ipc.acks import AckReceiver
from minisgl_backend.ipc.messages import (
    Abort,
    Done,
    Event,
    Failed,
    GetStats,
    Outputs,
    Rejected,
    Stats,
    Submit,
    Welcome,
    uid_of,
)
from minisgl_backend.ipc.private import make_private
from minisgl_backend.process.status_files import UpMark
from minisgl_backend.request import FinishReason, Request

log = logging.getLogger(__name__)

MAX_FRONT = 65534
CONNECT_WAIT_MS = 10  # between attempts to reach a core that is down
EXPIRE_WAIT_MS = 10  # between checks of the credits, while there are any
IDLE_WAIT_MS = 100

CORE_DIED = "the engine died while it computed this answer; it starts again by itself"
CORE_UNHEARD = "the connection to the engine was lost while it computed this answer; it comes back by itself"


class Listener:
    """What a client hears of the cores, on its receive thread: one call at a time, in order.

    The methods must return quickly and may call any method of the client except `start`, `stats` and `close`.
    """

    def on_outputs(self, outputs: Outputs) -> None:
        """The record of a core's step, merged with later ones if this front was behind. May contain unknown uids, to be
        ignored."""

    def on_rejected(self, rejected: Rejected) -> None:
        """A core refused a request; nothing else will come for it."""

    def on_down(self, uids: list[int], reason: str) -> None:
        """A core or the connection to it is gone, and with it these sequences, all that this front had there."""

    def on_up(self, welcome: Welcome) -> None:
        """A core is ready; also called for the first ones, before `start` returns."""

    def on_acknowledged(self, uids: Int64Array, sequence_numbers: Int32Array) -> None:
        """The detokenizer has handled these (int64 [n], int32 [n]), which `credits` has counted."""

    def on_lost(self, uids: list[int]) -> None:
        """By `credits`, responses of these were dropped on the way."""


class EngineClient:
    """One front of the engine cores of a socket directory: `config.dp` cores, each request at one of them.

    The first client of a directory starts the cores and restarts those that die; the others attach, and one takes over
    when the first one goes. The client itself aborts with CANCELLED the streams that were lost, or that the detokenizer
    found cancelled; their last record then arrives through `on_outputs` like any other.
    """

    def __init__(
        self,
        config: EngineConfig,
        listener: Listener,
        *,
        front: int,
        socket_dir: Path,
        credits: StreamCredits | None = None,
    ) -> None:
        """`front`: 0 to 65534, unique among the clients of `socket_dir`."""
        if not 0 <= front <= MAX_FRONT:
            raise ConfigError(f"front is {front}; allowed: 0 to {MAX_FRONT}")
        self.credits = credits or StreamCredits()
        self._listener = listener
        self._front = front
        self._socket_dir = socket_dir
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = Router(config.dp)
        self._thread = threading.Thread(target=self._receive_all, name=f"engine-front-{front}", daemon=True)
        self._closing = False
        self._next_expire = 0.0
        self._up_mark = UpMark(socket_dir, front)
        # Guards all below and the links' state of their cores; notified whenever these change.
        self._changed = threading.Condition()
        self._links = [
            CoreLink(
                config,
                core,
                front=front,
                socket_dir=socket_dir,
                context=self._context,
                on_first_failure=self._note_first_failure,
            )
            for core in range(config.dp)
        ]
        self.commands = CoreCommands(self._links, front, self._changed)
        self._failure: MinisglError | None = None  # why a core failed at its first start
        self._unsent_aborts: dict[int, tuple[FinishReason, float]] = {}  # uid -> abort that a core could not take yet
        # Starts at the microseconds since the epoch: a restarted front does not repeat uids that the cores still know.
        self._next_counter = (time.time_ns() // 1000) % (1 << 46)

    @property
    def num_cores(self) -> int:
        """Number of cores when all are up."""
        return len(self._links)

    @property
    def welcomes(self) -> list[Welcome | None]:
        """The facts of each core, None for one that is down."""
        return [link.welcome for link in self._links]

    @property
    def core_pids(self) -> list[int | None]:
        """The process id of each core, None for one that is down."""
        return [None if welcome is None else welcome.pid for welcome in self.welcomes]

    def start(self, timeout_s: float | None = None) -> None:
        """Starts or joins the cores and waits until all of them are ready.

        Raises ConfigError with a core's own message if it cannot start, EngineDeadError if one died or was not ready in
        time.
        """
        make_private(self._socket_dir)
        self._thread.start()
        for link in self._links:
            link.supervisor.start()
        with self._changed:
            self._changed.wait_for(self._has_started, timeout_s)
            if self._failure is not None:
                raise self._failure
            if not self._has_started():
                raise EngineDeadError(f"the engine core was not ready after {timeout_s:g} s")

    def _has_started(self) -> bool:
        return self._failure is not None or all(link.num_ups for link in self._links)

    def new_uid(self, count: int = 1) -> int:
        """The first of `count` consecutive uids that no other request of any front has; thread-safe."""
        with self._changed:
            counter = self._next_counter
            self._next_counter += count
        return uid_of(self._front, counter)

    def submit(self, request: Request) -> None:
        """Sends the request to one of the living cores; thread-safe. Raises EngineDeadError if none takes it."""
        count, salt = request.params.n, (request.params.lora_name, request.params.cache_salt)
        failed: set[int] = set()  # cores that have just died or cannot keep up
        problem = EngineDeadError(NOT_RUNNING)
        prompt = request.token_ids, failed, salt, request.contents
        while (core := self._router.assign(request.uid, count, *prompt)) is not None:
            try:
                self._links[core].send(Submit(request=request))
                return
            except EngineDeadError as error:
                self._router.release(range(request.uid, request.uid + count))
                failed.add(core)
                problem = error
        raise problem

    def abort(self, uids: Iterable[int], reason: FinishReason, found_at: float = 0.0) -> None:
        """Ends sequences; unknown uids and a dead core are no error; thread-safe.

        `found_at`: when their client was found to have left, time.monotonic() seconds; 0 if it was not.
        """
        for core, group in self._router.by_core(uids).items():
            if not self._tell(core, group, reason, found_at):
                # a core that is down has nothing to abort; one with a full command queue gets it later
                with self._changed:
                    self._unsent_aborts.update(dict.fromkeys(group, (reason, found_at)))

    def _tell(self, core: int, uids: Sequence[int], reason: FinishReason, found_at: float) -> bool:
        """False if the core takes no commands."""
        try:
            self._links[core].send(Abort(uids=tuple(uids), reason=int(reason), found_at=found_at))
        except EngineDeadError:
            return False
        return True

    def stats(self, timeout_s: float = 1.0) -> list[Stats | None]:
        """Counters and gauges of each core, and its `restarts`; None for one that does not answer; thread-safe.

        Raises EngineDeadError if none answers.
        """
        with self._changed:
            for link in self._links:
                link.stats = None
                with contextlib.suppress(EngineDeadError):
                    link.send(GetStats(front=self._front))
            self._changed.wait_for(
                lambda: all(link.stats is not None or not link.is_up for link in self._links), timeout_s
            )
            found = [link.counted_stats() for link in self._links]
        if all(stats is None for stats in found):
            raise EngineDeadError(f"the engine core did not answer within {timeout_s:g} s")
        return found

    def close(self) -> None:
        """Ends the threads, and the cores that this client started. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        for link in self._links:
            link.supervisor.stop()  # all at once: each may take seconds
        for link in self._links:
            link.supervisor.close()
        if self._thread.is_alive():
            self._thread.join()
        self._context.term()

    def _note_first_failure(self, error: MinisglError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    # ---- the receive thread

    def _receive_all(self) -> None:
        """Runs until `close`. After a failure (no file descriptor is free, the disk is full) it fails the requests in
        flight and starts again: without this thread all would wait for ever."""
        pauses = Pauses()
        while not self._closing:
            try:
                self._receive()
            except Exception as error:
                if pauses.note(error):
                    log.exception("front %d cannot receive; it attaches to the engine anew", self._front)
                if not self._has_started():
                    self._note_first_failure(EngineDeadError(f"the front cannot receive: {error}"))
                time.sleep(pauses.left_s)

    def _receive(self) -> None:
        """Runs until `close`. Raises any error of this side; no core is attached then."""
        handled = AckReceiver(self._socket_dir, self._front)
        poller = select.poll()
        poller.register(handled, select.POLLIN)
        greeted: dict[int, CoreLink] = {}  # by file descriptor
        try:
            while not self._closing:
                if len(greeted) < len(self._links):
                    for link in [link for link in self._links if not link.greeted and link.greet()]:
                        greeted[link.fileno()] = link
                        poller.register(link, select.POLLIN)
                acknowledged = False
                for descriptor, _ in poller.poll(self._wait_ms(len(greeted))):
                    if descriptor not in greeted:
                        acknowledged = True
                    elif problem := self._hear(greeted[descriptor]):
                        poller.unregister(descriptor)
                        self._go_down(greeted.pop(descriptor), problem)
                if acknowledged:
                    self._acknowledge(*handled.receive())
                self._expire()
                self._show_state()
        finally:
            for link in self._links:
                self._go_down(link, CORE_UNHEARD)
            self._show_state()
            handled.close()

    def _wait_ms(self, num_greeted: int) -> int:
        if num_greeted < len(self._links):
            return CONNECT_WAIT_MS
        return EXPIRE_WAIT_MS if self.credits.num_in_flight else IDLE_WAIT_MS

    def _hear(self, link: CoreLink) -> str:
        """Handles what a core sent. Returns why the connection has ended; empty while it has not."""
        try:
            for event in link.receive():
                self._dispatch(link, event)
        except Exception as error:  # an error of one core; the others are fine
            link.note_unheard(error)
            return CORE_UNHEARD
        return CORE_DIED if link.ended else ""

    def _dispatch(self, link: CoreLink, event: Event) -> None:
        if isinstance(event, Outputs):
            self._call(self._listener.on_outputs, event)
            if event.reasons.count(0) < len(event.reasons):
                uids = np.frombuffer(event.uids, dtype="<i8")
                self._router.release(uids[np.frombuffer(event.reasons, dtype=np.uint8) != 0].tolist())
        elif isinstance(event, Rejected):
            self._call(self._listener.on_rejected, event)
            self._router.release(range(event.uid, event.uid + event.count))
        elif isinstance(event, Stats):
            with self._changed:
                link.stats = event
                self._changed.notify_all()
        elif isinstance(event, Done | Failed):
            self.commands.note(link.core, event)
        else:
            self._go_up(link, event)

    def _go_up(self, link: CoreLink, welcome: Welcome) -> None:
        if link.is_up:
            return  # the reply to a Hello whose connection broke before it was up
        self._call(self._listener.on_up, welcome)
        with self._changed:
            link.note_up(welcome)
            self._router.note_up(link.core, welcome.page_size, welcome.num_pages)
            self._changed.notify_all()

    def _go_down(self, link: CoreLink, reason: str) -> None:
        lost = self._router.note_down(link.core)
        with self._changed:
            was_up = link.is_up
            link.disconnect()
            self._changed.notify_all()
        self.commands.note_down(link.core)
        self.credits.drop(lost)
        if was_up and not self._closing:
            self._call(self._listener.on_down, lost, reason)

    def _show_state(self) -> None:
        is_up = any(link.is_up for link in self._links)
        if is_up != self._up_mark.shown:
            self._up_mark.show(is_up)

    def _acknowledge(self, uids: Int64Array, sequence_numbers: Int32Array, found_at: float) -> None:
        if not len(uids):
            return
        gone = self.credits.acknowledge(uids.tolist(), sequence_numbers.tolist(), time.monotonic())
        if gone:
            self.abort(gone, FinishReason.CANCELLED, found_at)
        self._call(self._listener.on_acknowledged, uids, sequence_numbers)

    def _expire(self) -> None:
        now = time.monotonic()
        if now < self._next_expire:
            return
        self._next_expire = now + EXPIRE_WAIT_MS / 1000
        self._tell_again()
        gone = self.credits.expire(now)
        if gone:
            log.debug("%d streams have no reader any more", len(gone))
            self._call(self._listener.on_lost, gone)
            self.abort(gone, FinishReason.CANCELLED, now)

    def _tell_again(self) -> None:
        if not self._unsent_aborts:
            return
        with self._changed:
            aborts, self._unsent_aborts = self._unsent_aborts, {}
        left: dict[int, tuple[FinishReason, float]] = {}
        for core, uids in self._router.by_core(aborts).items():  # the router knows only those that have not ended
            groups: dict[tuple[FinishReason, float], list[int]] = {}
            for uid in uids:
                groups.setdefault(aborts[uid], []).append(uid)
            for (reason, found_at), group in groups.items():
                if not self._tell(core, group, reason, found_at):
                    break  # it takes no more commands now
                for uid in group:
                    del aborts[uid]
            left.update((uid, aborts[uid]) for uid in uids if uid in aborts)
        with self._changed:
            self._unsent_aborts = left | self._unsent_aborts

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:
            log.exception("a callback of the engine client failed")
