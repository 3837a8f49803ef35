"""The front's handle to the engine core: submit, abort, and whole step records back."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zmq

from minisgl_backend.config import EngineConfig
from minisgl_backend.delivery.credits import StreamCredits
from minisgl_backend.errors import ConfigError, EngineDeadError, MinisglError
from minisgl_backend.host.core_supervisor import Supervisor
from minisgl_backend.host.status_files import up_mark
from minisgl_backend.ipc.acks import AckReceiver
from minisgl_backend.ipc.channel import FrontChannel, make_private
from minisgl_backend.ipc.messages import (
    Abort,
    Command,
    Event,
    GetStats,
    Outputs,
    Rejected,
    Stats,
    Submit,
    Welcome,
    uid_of,
)
from minisgl_backend.request import FinishReason, Request

log = logging.getLogger(__name__)

AcknowledgedCallback = Callable[["npt.NDArray[np.int64]", "npt.NDArray[np.int32]"], None]

MAX_FRONT = 65534
CONNECT_WAIT_MS = 100
EXPIRE_WAIT_MS = 10  # between looks at the credits, while there are any
IDLE_WAIT_MS = 100


class EngineClient:
    """One front of the engine core of a socket directory.

    The first client of a directory takes its lock, starts the core and restarts it when it dies; the others attach,
    and one of them takes over when the first one goes. All callbacks run on the client's receive thread, one at a
    time and in order; they must return quickly and may call any method except `start`, `stats` and `close`.

    * `on_outputs(outputs)`: one record of a step, merged with later ones where this front was behind. It may name
      uids that this front does not know: ignore them.
    * `on_rejected(rejected)`: a request that the core refused; nothing else will come for it.
    * `on_down(reason)`: the core is gone; every request submitted so far is lost and nothing more comes for it.
    * `on_up(welcome)`: a core is ready; also called for the first one, before `start` returns.
    * `on_acknowledged(uids, sequence_numbers)`: the detokenizer has handled these (int64 [n], int32 [n]), after
      `credits` has counted them.
    * `on_lost(uids)`: `credits` knows by now that responses of these were dropped on the way.

    Streams that were lost so, or that the detokenizer saw cancelled, are aborted with CANCELLED by the client itself;
    their last record then arrives through `on_outputs` as any other.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        front: int,
        socket_dir: Path,
        on_outputs: Callable[[Outputs], None],
        on_rejected: Callable[[Rejected], None],
        on_down: Callable[[str], None],
        on_up: Callable[[Welcome], None] | None = None,
        on_acknowledged: AcknowledgedCallback | None = None,
        on_lost: Callable[[list[int]], None] | None = None,
        credits: StreamCredits | None = None,
    ) -> None:
        """`front` is unique among the clients of `socket_dir`; 0 to 65534."""
        if not 0 <= front <= MAX_FRONT:
            raise ConfigError(f"front is {front}; allowed: 0 to {MAX_FRONT}")
        self.credits = credits or StreamCredits()
        self._front = front
        self._socket_dir = socket_dir
        self._on_outputs = on_outputs
        self._on_rejected = on_rejected
        self._on_down = on_down
        self._on_up = on_up
        self._on_acknowledged = on_acknowledged
        self._on_lost = on_lost
        self._supervisor = Supervisor(config, socket_dir, self._note_first_failure)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(target=self._receive_all, name=f"engine-front-{front}", daemon=True)
        self._closing = False
        self._next_expire = 0.0
        # Guards what follows; notified whenever one of them changes.
        self._changed = threading.Condition()
        self._channel: FrontChannel | None = None  # to a core that is ready
        self._welcome: Welcome | None = None
        self._failure: MinisglError | None = None  # why the first start failed
        self._stats: Stats | None = None
        self._num_ups = 0
        # Microseconds since the epoch: a front that starts again does not repeat uids that the core still knows.
        self._next_counter = (time.time_ns() // 1000) % (1 << 46)

    @property
    def welcome(self) -> Welcome | None:
        """Facts about the core, None while there is none."""
        return self._welcome

    @property
    def core_pid(self) -> int | None:
        """Process id of the core, None while there is none."""
        welcome = self._welcome
        return welcome.pid if welcome is not None else None

    def start(self, timeout_s: float | None = None) -> Welcome:
        """Starts or joins the core and waits until it is ready.

        Raises ConfigError with the core's own words where it cannot start, EngineDeadError where it died or was
        not ready in time.
        """
        make_private(self._socket_dir)
        self._thread.start()
        self._supervisor.start()
        with self._changed:
            self._changed.wait_for(lambda: self._welcome is not None or self._failure is not None, timeout_s)
            if self._failure is not None:
                raise self._failure
            if self._welcome is None:
                raise EngineDeadError(f"the engine core was not ready after {timeout_s:g} s")
            return self._welcome

    def new_uid(self, count: int = 1) -> int:
        """The first of `count` consecutive uids that no other request of any front has; thread-safe."""
        with self._changed:
            counter = self._next_counter
            self._next_counter += count
        return uid_of(self._front, counter)

    def submit(self, request: Request) -> None:
        """Sends the request to the core; thread-safe. Raises EngineDeadError while there is no core."""
        self._send(Submit(request=request))

    def abort(self, uids: Iterable[int], reason: FinishReason, found_at: float = 0.0) -> None:
        """Ends sequences; unknown uids and a dead core are no error; thread-safe.

        `found_at`: when their client was found gone, time.monotonic() seconds; 0 where it was not.
        """
        try:
            self._send(Abort(uids=tuple(uids), reason=int(reason), found_at=found_at))
        except EngineDeadError:
            log.debug("nothing to abort: there is no engine core")

    def stats(self, timeout_s: float = 1.0) -> Stats:
        """Counters and gauges of the core and `restarts`; thread-safe. Raises EngineDeadError without an answer."""
        with self._changed:
            self._stats = None
            self._send(GetStats(front=self._front))
            self._changed.wait_for(lambda: self._stats is not None or self._channel is None, timeout_s)
            if self._stats is None:
                raise EngineDeadError(f"the engine core did not answer within {timeout_s:g} s")
            values = {**self._stats.values, "restarts": float(max(self._num_ups - 1, 0))}
            return Stats(values=values, histograms=self._stats.histograms)

    def close(self) -> None:
        """Ends the threads, and the core where this client started it. Safe to call twice."""
        if self._closing:
            return
        self._closing = True
        self._supervisor.close()
        if self._thread.is_alive():
            self._thread.join()
        self._context.term()

    def _send(self, command: Command) -> None:
        channel = self._channel
        if channel is None:
            raise EngineDeadError("the engine is not running at the moment; try again in a few seconds")
        channel.send(command)

    def _note_first_failure(self, error: MinisglError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    # ---- the receive thread

    def _receive_all(self) -> None:
        handled = AckReceiver(self._socket_dir, self._front)
        try:
            while not self._closing:
                channel = FrontChannel(self._context, self._socket_dir)
                try:
                    self._attend(channel, handled)
                finally:
                    self._go_down()
                    channel.close()
        finally:
            handled.close()

    def _attend(self, channel: FrontChannel, handled: AckReceiver) -> None:
        """From the first Hello to the end of the connection."""
        while not channel.greet(self._front, CONNECT_WAIT_MS):
            if self._closing:
                return
        poller = select.poll()
        poller.register(channel, select.POLLIN)
        poller.register(handled, select.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(EXPIRE_WAIT_MS if self.credits.num_in_flight else IDLE_WAIT_MS))
            if channel.fileno() in ready:
                for event in channel.receive():
                    self._dispatch(channel, event)
                if channel.ended:
                    return
            if handled.fileno() in ready:
                self._acknowledge(*handled.receive())
            self._expire()

    def _dispatch(self, channel: FrontChannel, event: Event) -> None:
        if isinstance(event, Outputs):
            self._call(self._on_outputs, event)
        elif isinstance(event, Rejected):
            self._call(self._on_rejected, event)
        elif isinstance(event, Stats):
            with self._changed:
                self._stats = event
                self._changed.notify_all()
        else:
            self._go_up(channel, event)

    def _go_up(self, channel: FrontChannel, welcome: Welcome) -> None:
        if self._channel is channel:
            return  # the answer to a Hello of a connection that broke before it was up
        self._num_ups += 1
        self._channel = channel
        if self._on_up is not None:
            self._call(self._on_up, welcome)
        with self._changed:
            self._welcome = welcome
            self._changed.notify_all()
        up_mark(self._socket_dir, self._front).touch(0o600)

    def _go_down(self) -> None:
        with self._changed:
            was_up = self._channel is not None
            self._channel = None
            self._welcome = None
            self._changed.notify_all()
        up_mark(self._socket_dir, self._front).unlink(missing_ok=True)
        self.credits.clear()
        if was_up and not self._closing:
            self._call(self._on_down, "the engine died while it computed this answer; it starts again by itself")

    def _acknowledge(
        self, uids: npt.NDArray[np.int64], sequence_numbers: npt.NDArray[np.int32], found_at: float
    ) -> None:
        if not len(uids):
            return
        gone = self.credits.acknowledge(uids.tolist(), sequence_numbers.tolist(), time.monotonic())
        if gone:
            self.abort(gone, FinishReason.CANCELLED, found_at)
        if self._on_acknowledged is not None:
            self._call(self._on_acknowledged, uids, sequence_numbers)

    def _expire(self) -> None:
        now = time.monotonic()
        if now < self._next_expire:
            return
        self._next_expire = now + EXPIRE_WAIT_MS / 1000
        gone = self.credits.expire(now)
        if gone:
            log.debug("%d streams have no reader any more", len(gone))
            if self._on_lost is not None:
                self._call(self._on_lost, gone)
            self.abort(gone, FinishReason.CANCELLED, now)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:
            log.exception("a callback of the engine client failed")
