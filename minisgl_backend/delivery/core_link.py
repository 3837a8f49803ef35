"""A front's connection to one engine core, from its first Hello to its end, and the connections after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import EngineDeadError, MinisglError
from minisgl_backend.host.core_supervisor import Supervisor
from minisgl_backend.ipc.channel import FrontChannel
from minisgl_backend.ipc.messages import Command, Event, Stats, Welcome

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1  # after a failure on the front's side; doubles with each, up to the next constant
MAX_PAUSE_S = 2.0
HEALTHY_S = 10.0  # without a failure for that long, the next pause is the first again

NOT_RUNNING = "the engine is not running at the moment; try again in a few seconds"


class Pauses:
    """When to try again after failures, and which failures are worth logging. For one thread."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._until = 0.0  # time.monotonic()
        self._problem = ""

    def note(self, error: Exception) -> bool:
        """Begins a pause. False if the previous failure was the same and at most HEALTHY_S ago."""
        now, problem, before = time.monotonic(), repr(error), self._problem
        if now - self._until > HEALTHY_S:
            self._pause_s, before = 0.0, ""
        self._pause_s = min(2 * self._pause_s or FIRST_PAUSE_S, MAX_PAUSE_S)
        self._until, self._problem = now + self._pause_s, problem
        return problem != before

    @property
    def left_s(self) -> float:
        """Remaining seconds of the pause; 0 if it is over."""
        return max(self._until - time.monotonic(), 0.0)


class CoreLink:
    """`send` and the attributes may be used by any thread; all else belongs to an EngineClient's receive thread.

    The link of one front starts the core, and restarts it when it dies. Those of other fronts attach, and one of them
    takes over when that front goes.
    """

    def __init__(
        self,
        config: EngineConfig,
        core: int,
        *,
        front: int,
        socket_dir: Path,
        context: zmq.Context[zmq.Socket[bytes]],
        on_first_failure: Callable[[MinisglError], None],
    ) -> None:
        """`core`: its number, 0 to dp - 1. `on_first_failure`: see Supervisor."""
        self.core = core
        self.supervisor = Supervisor(config, socket_dir, on_first_failure, core)
        self._front = front
        self._connect = lambda: FrontChannel(context, socket_dir, core)
        self._channel: FrontChannel | None = None
        self.greeted = False  # it has received our Hello
        self.welcome: Welcome | None = None  # the core's facts, while it is up
        self.num_ups = 0
        self.stats: Stats | None = None  # its reply to the last GetStats
        self._problem = ""  # why no connection was possible
        self._pauses = Pauses()  # after connections that failed

    @property
    def is_up(self) -> bool:
        """Whether requests may be sent there."""
        return self.welcome is not None

    def greet(self) -> bool:
        """Says Hello if the core listens, but not during a pause after `note_unheard`; never waits."""
        if self._pauses.left_s:
            return False
        try:
            if self._channel is None:
                self._channel = self._connect()
            self.greeted = self._channel.greet(self._front, 0)
            self._problem = ""
        except (OSError, zmq.ZMQError) as error:  # no file descriptor is free; other cores are served meanwhile
            if self._problem != str(error):
                self._problem = str(error)
                log.error("engine core %d cannot be reached: %s", self.core, error)
        return self.greeted

    def fileno(self) -> int:
        """For a poller: readable when there is something to receive. Only after `greet`."""
        assert self._channel is not None
        return self._channel.fileno()

    def receive(self) -> list[Event]:
        """All events that have arrived."""
        return [] if self._channel is None else self._channel.receive()

    @property
    def ended(self) -> bool:
        """The core is gone, and all that it had sent was received."""
        return self._channel is not None and self._channel.ended

    def counted_stats(self) -> Stats | None:
        """`stats`, with the number of restarts."""
        if self.stats is None:
            return None
        values = {**self.stats.values, "restarts": float(self.num_ups - 1)}
        return msgspec.structs.replace(self.stats, values=values)

    def note_up(self, welcome: Welcome) -> None:
        """The core is ready."""
        self.num_ups += 1
        self.welcome = welcome
        self.supervisor.note_ready()

    def note_unheard(self, error: Exception) -> None:
        """A message of the core could not be read. The connection starts anew with a Hello, at the cost of all our
        sequences there; the more often this happens, the longer the pause before."""
        if self._pauses.note(error):
            log.error("engine core %d cannot be heard", self.core, exc_info=error)

    def send(self, command: Command) -> None:
        """Raises EngineDeadError while there is no core."""
        channel = self._channel
        if channel is None or not self.is_up:
            raise EngineDeadError(NOT_RUNNING)
        channel.send(command)

    def disconnect(self) -> None:
        """Forgets a core that is gone; the next one needs another Hello."""
        channel, self._channel = self._channel, None
        self.greeted, self.welcome, self.stats = False, None, None
        if channel is not None:
            channel.close()
