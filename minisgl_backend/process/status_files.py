"""Files in the socket directory by which the fronts and the server's supervisor exchange their status.

front-<i>           the front's own socket: the front exists
front-<i>.up        it is attached to a core
drain               all fronts: refuse new requests, and at the time in the file end those still running
front-<i>.drained   the front was asked to drain, and nothing is running any more
<model>.lost        a process of that model died, at the time in the file or a little before
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

log = logging.getLogger(__name__)


def up_mark(socket_dir: Path, front: int) -> Path:
    """A file that exists while the front is attached to a core."""
    return socket_dir / f"front-{front}.up"


class UpMark:
    """Keeps the file `up_mark` true, for the server's health."""

    def __init__(self, socket_dir: Path, front: int) -> None:
        self._path = up_mark(socket_dir, front)
        self.shown: bool | None = None  # None: whatever an earlier front has left
        self._problem = ""  # why it could not be written

    def show(self, is_up: bool) -> None:
        """To be called again while `shown` is another state: a write that failed is retried."""
        try:
            if is_up:
                self._path.touch(0o600)
            else:
                self._path.unlink(missing_ok=True)
            self.shown, self._problem = is_up, ""
        except OSError as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.warning("the server's health is told wrongly: %s", error)


def fronts_without_core(socket_dir: Path) -> int:
    """Number of fronts that wait for a core; 0 if there are no fronts."""
    return sum(not front.with_suffix(".up").exists() for front in _front_sockets(socket_dir))


def ask_to_drain(socket_dir: Path, deadline: float) -> None:
    """Tells every front to refuse new requests, and to end those still running at `deadline` (time.monotonic())."""
    _write_time(socket_dir / "drain", deadline)


def drain_deadline(socket_dir: Path) -> float | None:
    """The deadline given to `ask_to_drain`; None if it was not called."""
    return _read_time(socket_dir / "drain")


def note_lost(socket_dir: Path, model: str) -> None:
    """Tells every front that requests sent to `model` so far get no more responses."""
    _write_time(socket_dir / f"{model}.lost", time.monotonic())


def lost_at(socket_dir: Path, model: str) -> float | None:
    """Time of the last `note_lost` call, time.monotonic(); None if there was none."""
    return _read_time(socket_dir / f"{model}.lost")


def drained_mark(socket_dir: Path, front: int) -> Path:
    """A file that a front creates once it was asked to drain and nothing is running."""
    return socket_dir / f"front-{front}.drained"


def has_fronts(socket_dir: Path) -> bool:
    """Whether there is any engine front."""
    return bool(_front_sockets(socket_dir))


def fronts_not_drained(socket_dir: Path) -> int:
    """Number of fronts that still have running requests."""
    return sum(not front.with_suffix(".drained").exists() for front in _front_sockets(socket_dir))


def _write_time(path: Path, seconds: float) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(repr(seconds), encoding="ascii")
    temporary.rename(path)


def _read_time(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _front_sockets(socket_dir: Path) -> list[Path]:
    return [path for path in socket_dir.glob("front-*") if not path.suffix]
