"""The sockets between fronts, detokenizer and engine core.

Knows nothing of what the messages mean.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt


def socket_directory(model_repository: str | Path, parent_pid: int | None = None) -> Path:
    """The private directory (mode 0700) of one server's sockets, made where it is missing.

    Its name holds the user, the server's process id (`parent_pid`; default: the parent of this process) and a hash
    of the repository's path, so that every model of one server finds the same one and no other server does.
    """
    raise NotImplementedError


class HandledSender:
    """The detokenizer's side: tells each front what has been handled. Never blocks; used by one thread."""

    def __init__(self, socket_dir: Path) -> None:
        raise NotImplementedError

    def send(self, uids: npt.NDArray[np.int64], sequence_numbers: npt.NDArray[np.int32]) -> None:
        """Splits the pairs by front (the upper bits of the uid) and sends one Handled to each front."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
