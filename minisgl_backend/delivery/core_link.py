"""A front's connection to one engine core, from its first Hello to its end, and the next one after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import EngineDeadError, MinisglError
from minisgl_backend.host.core_supervisor import Supervisor
from minisgl_backend.ipc.channel import FrontChannel
from minisgl_backend.ipc.messages import Command, Event, Stats, Welcome

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1  # after a failure on the front's side; twice as long after each, up to the next
MAX_PAUSE_S = 2.0
HEALTHY_S = 10.0  # without a failure: the next one is the first again

NOT_RUNNING = "the engine is not running at the moment; try again in a few seconds"


class Pauses:
    """When to try again after failures, and which of them are news. For one thread."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._until = 0.0  # time.monotonic()
        self._problem = ""

    def note(self, error: Exception) -> bool:
        """Begins a pause. False where the failure before was the same, HEALTHY_S ago or less."""
        now, problem, before = time.monotonic(), repr(error), self._problem
        if now - self._until > HEALTHY_S:
            self._pause_s, before = 0.0, ""
        self._pause_s = min(2 * self._pause_s or FIRST_PAUSE_S, MAX_PAUSE_S)
        self._until, self._problem = now + self._pause_s, problem
        return problem != before

    @property
    def left_s(self) -> float:
        """Seconds of the pause that are left; 0 where it is over."""
        return max(self._until - time.monotonic(), 0.0)


class CoreLink:
    """`send` is for any thread, and so is reading the attributes; all else is for an EngineClient's receive thread.

    The link of one front starts the core, and starts it again when it dies; those of other fronts attach, and one of
    them takes over when that front goes.
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
        self.greeted = False  # it has heard our Hello
        self.welcome: Welcome | None = None  # facts about it, from when it is ready until it is gone
        self.num_ups = 0
        self.stats: Stats | None = None  # its answer to the last GetStats
        self._problem = ""  # why no connection could be made
        self._pauses = Pauses()  # after what could not be heard

    @property
    def is_up(self) -> bool:
        """Requests may go there."""
        return self.welcome is not None

    def greet(self) -> bool:
        """Says Hello where there is a core to hear it, but for a while after `note_unheard`; never waits."""
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
        """For a poller: there is something to receive. Once it was greeted."""
        assert self._channel is not None
        return self._channel.fileno()

    def receive(self) -> list[Event]:
        """All events that are here by now."""
        return [] if self._channel is None else self._channel.receive()

    @property
    def ended(self) -> bool:
        """The core is gone, and all that it said before was received."""
        return self._channel is not None and self._channel.ended

    def note_up(self, welcome: Welcome) -> None:
        """The core is ready."""
        self.num_ups += 1
        self.welcome = welcome
        self.supervisor.note_ready()

    def note_unheard(self, error: Exception) -> None:
        """What the core said was not understood. Each Hello costs it all our sequences: the next one may have to wait,
        the longer the more often this happens."""
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
