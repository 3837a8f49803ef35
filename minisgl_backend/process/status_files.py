"""Files in the socket directory by which fronts and the server's supervisor tell each other how they are.

    front-<i>           the front's own socket: there is such a front
front-<i>.up        it is attached to a core
drain               all fronts: refuse new requests, and end what still runs at the time that the file holds
front-<i>.drained   it was asked to drain, and nothing runs any more
<model>.lost        a process of that model died, at the time that the file holds or a little before
"""

from __future__ import annotations

import time
from pathlib import Path


def up_mark(socket_dir: Path, front: int) -> Path:
    """A file that exists while the front is attached to a core."""
    return socket_dir / f"front-{front}.up"


def fronts_without_core(socket_dir: Path) -> int:
    """How many fronts of the directory wait for a core; 0 where there is no front at all."""
    return sum(not front.with_suffix(".up").exists() for front in _front_sockets(socket_dir))


def ask_to_drain(socket_dir: Path, deadline: float) -> None:
    """Tells every front to refuse new requests, and to end what still runs at `deadline` (time.monotonic())."""
    _write_time(socket_dir / "drain", deadline)


def drain_deadline(socket_dir: Path) -> float | None:
    """What `ask_to_drain` said; None where nobody asked."""
    return _read_time(socket_dir / "drain")


def note_lost(socket_dir: Path, model: str) -> None:
    """Tells every front that nothing more comes of what was sent to `model` so far."""
    _write_time(socket_dir / f"{model}.lost", time.monotonic())


def lost_at(socket_dir: Path, model: str) -> float | None:
    """When `note_lost` was called last, time.monotonic(); None if never."""
    return _read_time(socket_dir / f"{model}.lost")


def drained_mark(socket_dir: Path, front: int) -> Path:
    """A file that a front makes when it was asked to drain and nothing runs any more."""
    return socket_dir / f"front-{front}.drained"


def has_fronts(socket_dir: Path) -> bool:
    """Whether there is an engine front at all."""
    return bool(_front_sockets(socket_dir))


def fronts_not_drained(socket_dir: Path) -> int:
    """How many fronts of the directory have still something to do."""
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
