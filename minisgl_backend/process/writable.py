"""Whether folders can be written: by trying, since a mode of files says nothing of read-only mounts, /proc or root."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minisgl_backend.errors import ConfigError

# tritonserver's Python backend unpacks its environments there, whatever TMPDIR is, and gives up without.
_TRITONS_FOLDER = Path("/tmp")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class TemporaryFolder:
    """A folder that a server needs. `fault`: why it cannot be used, and `remedy`; "": it can."""

    name: str
    path: str
    fault: str = ""
    remedy: str = ""


def write_error(folder: Path) -> OSError | None:
    """Why nothing can be written in `folder`, or why it cannot be made where it is missing; None: nothing stands
    against it. Leaves nothing behind."""
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        if not nearest.is_dir():
            return NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
        os.rmdir(tempfile.mkdtemp(prefix=".minisgl-", dir=nearest))
    except OSError as error:
        return error
    return None


def is_full(error: OSError) -> bool:
    """Whether it passes as soon as there is space again."""
    return error.errno in _FULL


def check_temporary_folders() -> None:
    """Raises ConfigError naming the folder that a server would miss, and what to do."""
    for folder in temporary_folders():
        if folder.fault:
            raise ConfigError(f"{' '.join(filter(None, (folder.path, folder.fault)))}; {folder.remedy}")


def temporary_folders() -> Iterator[TemporaryFolder]:
    """Those of the server itself and of tritonserver."""
    remedy = "mount one that can: in Docker --tmpfs /tmp, in Kubernetes an emptyDir at /tmp"
    yield _tried("/tmp", _TRITONS_FOLDER, "cannot be written, and Triton's Python backend needs it", remedy)
    name, remedy = "sockets and copies", "TMPDIR=FOLDER chooses another"
    try:
        yield _tried(name, Path(tempfile.gettempdir()), "cannot be written", remedy)
    except OSError as failed:  # none of the folders that Python tries is writable
        yield TemporaryFolder(name, "", str(failed.strerror), remedy)


def _tried(name: str, folder: Path, fault: str, remedy: str) -> TemporaryFolder:
    error = write_error(folder)
    if error is None:
        return TemporaryFolder(name, str(folder))
    return TemporaryFolder(name, str(folder), f"{fault}: {error.strerror}", remedy)
