"""A front's connection to one engine core, from its first Hello to its end, and the next one after it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import zmq

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import EngineDeadError, MinisglError
from minisgl_backend.host.core_supervisor import Supervisor
from minisgl_backend.ipc.channel import FrontChannel
from minisgl_backend.ipc.messages import Command, Event, Stats, Welcome

log = logging.getLogger(__name__)

NOT_RUNNING = "the engine is not running at the moment; try again in a few seconds"


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

    @property
    def is_up(self) -> bool:
        """Requests may go there."""
        return self.welcome is not None

    def greet(self) -> bool:
        """Says Hello where there is a core to hear it; never waits."""
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
