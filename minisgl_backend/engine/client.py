"""The front's handle to the engine core: submit, abort, and whole step records back.

Knows nothing of Triton, texts or steps; it neither schedules nor computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.confirmations import Confirmations
from minisgl_backend.engine.messages import Outputs, Rejected, Stats, Welcome
from minisgl_backend.request import FinishReason, Request

ConfirmedCallback = Callable[["npt.NDArray[np.int64]", "npt.NDArray[np.int32]"], None]


class EngineClient:
    """One front of the engine core of a socket directory.

    The first client of a directory takes its lock, starts the core and restarts it when it dies; the others attach,
    and one of them takes over when the first one goes. All callbacks run on the client's receive thread, one at a
    time and in order; they must return quickly and may call any method except `start`, `stats` and `close`.

    * `on_outputs(outputs)`: one record of a step, merged with later ones where this front was behind.
    * `on_rejected(rejected)`: a request that the core refused; nothing else will come for it.
    * `on_down(reason)`: the core is gone; every request submitted so far is lost and nothing more comes for it.
    * `on_up(welcome)`: a core is ready; also called for the first one, before `start` returns.
    * `on_confirmed(uids, sequence_numbers)`: the detokenizer has handled these (int64 [n], int32 [n]), after
      `confirmations` has counted them.

    Streams that `confirmations` reports as gone are aborted with CANCELLED by the client itself; their last record
    then arrives through `on_outputs` as any other.
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
        on_confirmed: ConfirmedCallback | None = None,
    ) -> None:
        """`front` is unique among the clients of `socket_dir`; 0 to 65534."""
        self.confirmations = Confirmations()  # the responder calls `sent` on it; thread-safe
        raise NotImplementedError

    @property
    def welcome(self) -> Welcome | None:
        """Facts about the core, None while there is none."""
        raise NotImplementedError

    def start(self, timeout_s: float | None = None) -> Welcome:
        """Starts or joins the core and waits until it is ready.

        Raises ConfigError with the core's own words where it cannot start, EngineDeadError where it died or was
        not ready in time.
        """
        raise NotImplementedError

    def new_uid(self, count: int = 1) -> int:
        """The first of `count` consecutive uids that no other request of any front has; thread-safe."""
        raise NotImplementedError

    def submit(self, request: Request) -> None:
        """Sends the request to the core; thread-safe. Raises EngineDeadError while there is no core."""
        raise NotImplementedError

    def abort(self, uids: Iterable[int], reason: FinishReason) -> None:
        """Ends sequences; unknown uids and a dead core are no error; thread-safe."""
        raise NotImplementedError

    def stats(self, timeout_s: float = 1.0) -> Stats:
        """Counters and gauges of the core and `restarts`; thread-safe. Raises EngineDeadError without an answer."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the threads, and the core where this client started it. Safe to call twice."""
        raise NotImplementedError
